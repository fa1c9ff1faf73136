"""GroupCoordinator, and the groups of one layout: the world, `ParallelGroups`, which are current, their device mesh.

May import `messages`, `process_groups`, `layout` and what is below them.
"""
