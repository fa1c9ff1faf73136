"""NVIDIA's libraries as the rooms above call them: NCCL and the driver through ctypes, NVRTC, streams and events.

May import `routing` and what is below it.
"""
