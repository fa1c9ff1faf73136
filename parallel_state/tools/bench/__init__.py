"""Measures candidates for the same operation in turns: the command `bench`, and code for `tune` and `benchmarks/`.

A candidate that fails is left out, with its reason. Times of wrong results are never printed.
"""
