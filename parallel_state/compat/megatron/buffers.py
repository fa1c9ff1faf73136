"""Megatron's global buffers, which it keeps with its groups."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch

from parallel_state import state
from parallel_state.compat.megatron.errors import InitializedError
from parallel_state.compat.megatron.lookup import BUFFERS, group_of, or_raise


class GlobalMemoryBuffer:
    """Keeps one tensor of each name and dtype, which grows; on the device of the groups, which may be the CPU."""

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get_tensor(
        self, tensor_shape: Any, dtype: torch.dtype, name: str, mem_alloc_context: Callable[[], Any] | None = None
    ) -> torch.Tensor:
        """Returns a tensor of this shape, uninitialised; the next call with this name and dtype has the same memory.

        A larger one is allocated within `mem_alloc_context()`.
        """
        shape = torch.Size(tensor_shape)
        found = self.buffer.get((name, dtype))
        if found is None or found.numel() < shape.numel():
            world = state.try_get_world_group()
            device = torch.device("cpu") if world is None else world.device
            with (mem_alloc_context or contextlib.nullcontext)():
                found = self.buffer[name, dtype] = torch.empty(shape.numel(), dtype=dtype, device=device)
        return found[: shape.numel()].view(shape)


def _set(name: str, make: Callable[[], Any]) -> None:
    if name in BUFFERS:
        raise InitializedError(f"there is a global {name} buffer already; destroy_global_{name}_buffer() ends it")
    BUFFERS[name] = make()


def set_global_memory_buffer() -> None:
    _set("memory", GlobalMemoryBuffer)


def set_global_symmetric_memory_buffer() -> None:
    kind = importlib.import_module("megatron.core.utils").GlobalSymmetricMemoryBuffer
    group = or_raise(group_of("tp"), "tensor model parallel")
    _set("symmetric_memory", lambda: kind(size_in_mb=256, process_group=group))


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Returns the buffer that initialize_model_parallel made; NotInitializedError without."""
    found: GlobalMemoryBuffer = or_raise(BUFFERS.get("memory"), "global memory buffer's")
    return found


def get_global_symmetric_memory_buffer() -> Any:
    """Returns Megatron's own GlobalSymmetricMemoryBuffer, if it was set; NotInitializedError without."""
    return or_raise(BUFFERS.get("symmetric_memory"), "global symmetric memory buffer's")


def destroy_global_memory_buffer() -> None:
    """Forgets the global memory buffer."""
    BUFFERS.pop("memory", None)


def destroy_global_symmetric_memory_buffer() -> None:
    """Forgets the global symmetric memory buffer."""
    BUFFERS.pop("symmetric_memory", None)
