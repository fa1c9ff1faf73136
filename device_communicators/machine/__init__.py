"""What this machine is: NVML, the GPUs' topology, visible devices, peer access, and who shares a GPU.

May import `cuda`, `routing` and what is below them.
"""
