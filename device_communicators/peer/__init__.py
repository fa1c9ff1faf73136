"""Collectives by kernels in GPU memory that all ranks of a host have mapped. `csrc/` has the CUDA code.

May import `machine`, `cuda`, `routing` and the packages below them.
"""
