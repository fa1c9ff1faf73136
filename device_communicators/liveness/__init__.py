"""Knowledge of which ranks have ended: pidfds on this host, heartbeats and links between hosts.

May import the package's root only. What a wait does with that knowledge is in `routing.waiting`.
"""
