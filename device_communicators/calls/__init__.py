"""A call as every transport sees it: its record, its words, its tensors, its arithmetic, and what is left to wait for.

May import `base` only.
"""
