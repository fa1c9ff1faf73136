"""Describes the machine's GPUs by NVML: topology, visible devices, peer access, and ranks that share a GPU."""
