"""State of other ranks' processes: which have exited, why one doesn't run, and the stacks of its threads."""
