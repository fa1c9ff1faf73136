"""vLLM's message queue at its own path."""

from parallel_state.compat.vllm.message_queue import Handle as Handle
from parallel_state.compat.vllm.message_queue import MessageQueue as MessageQueue
