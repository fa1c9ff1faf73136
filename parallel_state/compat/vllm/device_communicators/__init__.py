"""vLLM's `distributed.device_communicators`, as far as programs beside vLLM import it."""
