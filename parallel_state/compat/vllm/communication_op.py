"""In place of vLLM's `distributed.communication_op`: has its functions from `parallel_state.compat.vllm`."""

from parallel_state.compat.vllm.parallel_state import __getattr__ as __getattr__
