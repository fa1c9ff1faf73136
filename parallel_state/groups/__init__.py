"""GroupCoordinator, the groups of a layout, and device meshes."""
