"""Measures implementations (*candidates*) of an operation in turns: `bench`, and code for `tune` and `benchmarks/`."""
