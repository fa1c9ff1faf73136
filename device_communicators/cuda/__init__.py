"""NCCL through ctypes, streams and events of CUDA, and a watch over what runs there, for the rooms above.

May import `routing` and what is below it.
"""
