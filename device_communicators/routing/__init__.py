"""The path of a call: the communicator interface, a group's route over communicators, waits, records and errors."""
