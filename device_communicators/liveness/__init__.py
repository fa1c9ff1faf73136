"""Knowledge of other ranks' processes: which have ended, what keeps one from going on, and where its threads are.

May import `base` only. What a wait does with that knowledge is in `routing.waiting`.
"""
