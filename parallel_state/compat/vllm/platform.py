"""vLLM's CPU platform with this library's communicator."""

from __future__ import annotations

from typing import Any

from vllm import platforms
from vllm.utils.import_utils import resolve_obj_by_qualname

_Base: Any = resolve_obj_by_qualname(platforms.builtin_platform_plugins["cpu"]())


class ParallelStateCpuPlatform(_Base):
    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "parallel_state.compat.vllm.communicator.Communicator"
