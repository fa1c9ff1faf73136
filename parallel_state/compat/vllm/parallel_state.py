"""vLLM's `distributed.parallel_state`: the names of `parallel_state.compat.vllm`."""

from __future__ import annotations

from typing import Any

from parallel_state.compat import vllm


def __getattr__(name: str) -> Any:
    return getattr(vllm, name)
