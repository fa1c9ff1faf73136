"""Functions over the groups of `state`: getters, other projects' names, graph capture, traces, recovery, small helpers.

May import `state` and what is below it.
"""
