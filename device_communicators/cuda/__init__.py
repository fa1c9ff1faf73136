"""NCCL through ctypes, and CUDA streams and events, for the packages above."""
