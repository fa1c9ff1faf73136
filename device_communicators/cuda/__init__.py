"""Calls NCCL through ctypes, and wraps CUDA streams and events."""
