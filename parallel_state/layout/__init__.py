"""Sizes to ranks: the axes, their resolution, and the rank lists of a layout. Pure arithmetic, without torch.

May import nothing of the package.
"""
