"""State of other ranks' processes: which have exited, what blocks one, and the stacks of its threads.

May import `base` and `control`. How waits use this state is in `routing.waiting`.
"""
