"""Collectives by CUDA kernels on GPU memory that all ranks of a host have mapped."""
