"""vLLM's `distributed.device_communicators.shm_broadcast`: the message queue."""

from parallel_state.compat.vllm.message_queue import Handle as Handle
from parallel_state.compat.vllm.message_queue import MessageQueue as MessageQueue
