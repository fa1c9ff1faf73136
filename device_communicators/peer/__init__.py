"""Collectives by kernels in GPU memory that all ranks of a host have mapped. `csrc/` has the CUDA code."""
