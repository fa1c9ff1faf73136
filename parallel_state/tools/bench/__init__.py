"""Measures several ways to do the same, in turns: the command `bench`, and what `tune` and `benchmarks/` share with it.

A candidate that fails is left out alone, with its reason; figures of a wrong answer are never printed.
"""
