"""The groups of one layout: their division, `ParallelGroups`, which of them are current, the device mesh over them.

May import `coordinator` and what is below it.
"""
