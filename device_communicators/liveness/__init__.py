"""State of other ranks' processes: which have exited, why one doesn't run, and the stacks of its threads.

May import `base` and `control`. `routing.waiting` uses this state to end waits.
"""
