"""NCCL through ctypes, and streams and events of CUDA, for the rooms above.

May import `routing` and what is below it.
"""
