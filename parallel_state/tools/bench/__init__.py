"""Measures several implementations of an operation in turns: the command `bench`, code for `tune` and `benchmarks/`.

An implementation (*candidate*) that fails is left out, with its reason. Times of wrong results are never printed.
"""
