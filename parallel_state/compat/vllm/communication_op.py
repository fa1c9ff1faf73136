"""vLLM's `distributed.communication_op` at its own path: names of the package above."""

from parallel_state.compat.vllm.parallel_state import __getattr__ as __getattr__
