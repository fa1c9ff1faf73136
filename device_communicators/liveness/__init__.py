"""Knowledge of other ranks' processes: which have ended, what keeps one from going on, and where its threads are.

May import the package's root only. What a wait does with that knowledge is in `routing.waiting`.
"""
