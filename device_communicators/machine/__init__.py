"""The machine's GPUs as NVML reports them: topology, visible devices, peer access, and ranks that share a GPU."""
