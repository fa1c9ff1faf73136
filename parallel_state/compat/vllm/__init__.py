"""vLLM's shapes, and what runs its CPU engine on this library: `plugin`, which PARALLEL_STATE_PLUGIN=vllm asks for.

`message_queue` needs no vLLM; `plugin`, `platform` and `communicator` import it.
"""
