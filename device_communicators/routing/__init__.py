"""The way of one call: what a communicator is, a group's route over several, its records, and how its waits end.

May import `cpu`, `calls`, `liveness` and `base`. The communicators lie in the rooms above.
"""
