"""Chooses the communicator that runs a call, waits for the call, records it, and turns its failure into an error."""
