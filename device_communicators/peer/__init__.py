"""Kernels over GPU memory that peers have mapped, their CUDA in `csrc/`, and torch's symmetric memory.

May import `machine`, `cuda`, `routing` and what is below them.
"""
