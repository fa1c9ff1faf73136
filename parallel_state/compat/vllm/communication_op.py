"""vLLM's `distributed.communication_op`: functions of `parallel_state.compat.vllm`."""

from parallel_state.compat.vllm.parallel_state import __getattr__ as __getattr__
