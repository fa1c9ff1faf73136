"""GroupCoordinator and the groups of a layout: the world, `ParallelGroups`, the current groups, device meshes.

May import `messages`, `process_groups`, `layout` and what is below them.
"""
