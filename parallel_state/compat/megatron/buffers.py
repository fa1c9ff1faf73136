"""Megatron's global buffers: tensors that are allocated once and reused by name."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch

from parallel_state import state
from parallel_state.compat.errors import InitializedError, NotInitializedError
from parallel_state.compat.megatron.lookup import BUFFERS, required


class GlobalMemoryBuffer:
    """Holds one growing tensor per name and dtype, on the device of the groups."""

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get_tensor(
        self, tensor_shape: Any, dtype: torch.dtype, name: str, mem_alloc_context: Callable[[], Any] | None = None
    ) -> torch.Tensor:
        """Returns an uninitialized tensor. The next call with this name and dtype returns the same memory.

        New memory is allocated within `mem_alloc_context()`.
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
        raise InitializedError(f"the global {name} buffer already exists; call destroy_global_{name}_buffer() first")
    BUFFERS[name] = make()


def _get(name: str) -> Any:
    if name not in BUFFERS:
        raise NotInitializedError(f"the global {name} buffer is not initialized; call set_global_{name}_buffer() first")
    return BUFFERS[name]


def set_global_memory_buffer() -> None:
    _set("memory", GlobalMemoryBuffer)


def set_global_symmetric_memory_buffer() -> None:
    kind = importlib.import_module("megatron.core.utils").GlobalSymmetricMemoryBuffer
    group = required("tp")
    _set("symmetric_memory", lambda: kind(size_in_mb=256, process_group=group))


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    found: GlobalMemoryBuffer = _get("memory")
    return found


def get_global_symmetric_memory_buffer() -> Any:
    return _get("symmetric_memory")


def destroy_global_memory_buffer() -> None:
    BUFFERS.pop("memory", None)


def destroy_global_symmetric_memory_buffer() -> None:
    BUFFERS.pop("symmetric_memory", None)
