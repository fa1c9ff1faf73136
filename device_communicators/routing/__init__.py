"""The path of a call: the communicator interface, a group's route over communicators, waits, records and errors.

May import `cpu`, `calls`, `liveness` and `base`. The communicators are in the packages above.
"""
