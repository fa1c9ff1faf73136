"""Measures several implementations (*candidates*) of an operation in turns, for `bench`, `tune` and `benchmarks/`."""
