"""The path of a call: the communicator interface, a group's route over communicators, records, waits and failures.

May import `cpu`, `calls`, `liveness` and `base`. The communicators are in the packages above.
"""
