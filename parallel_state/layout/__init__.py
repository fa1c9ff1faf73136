"""Computes the ranks of each group from the sizes of the parallel axes. Doesn't import torch."""
