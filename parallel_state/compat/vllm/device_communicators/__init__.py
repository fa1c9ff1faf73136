"""The part of vLLM's `distributed.device_communicators` that programs other than vLLM import."""
