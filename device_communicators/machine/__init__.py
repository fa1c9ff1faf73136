"""The machine as NVML tells it: the GPUs' topology, visible devices, peer access, and ranks that share a GPU.

May import `cuda`, `routing` and what is below them.
"""
