"""The modules of vLLM's `distributed.device_communicators` that other programs import."""
