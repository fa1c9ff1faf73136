"""NCCL through ctypes, and CUDA streams and events, for the packages above.

May import `routing` and the packages below it.
"""
