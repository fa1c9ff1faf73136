"""torch's process groups: made once for equal ranks and options, shared, and agreed on by all ranks before.

May import `startup` and what is below it.
"""
