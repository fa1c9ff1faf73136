"""Kernels over GPU memory that peers have mapped, and torch's symmetric memory; the kernels' CUDA in `csrc/`.

May import `machine`, `cuda`, `routing` and what is below them.
"""
