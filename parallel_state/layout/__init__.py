"""Computes rank lists from sizes: the axes, the layout of given sizes, its groups. Pure arithmetic, without torch."""
