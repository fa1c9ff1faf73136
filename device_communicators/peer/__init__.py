"""Kernels over GPU memory that peers have mapped, and their CUDA in `csrc/`.

May import `machine`, `cuda`, `routing` and what is below them.
"""
