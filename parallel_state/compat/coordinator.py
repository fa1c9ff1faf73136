"""The base class of vLLM's and SGLang's GroupCoordinator: the methods that have the same names in both."""

# mypy: disable-error-code="override"
# The overrides have the engine's parameters.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel_state import state
from parallel_state.compat.tables import renamed
from parallel_state.groups.coordinator import GroupCoordinator


class GroupView(GroupCoordinator):
    """A group with vLLM's or SGLang's method names. Shares the `__dict__` of `_made`, one of this library's groups."""

    _made: GroupCoordinator

    @classmethod
    def of(cls, made: GroupCoordinator, *facts: Any) -> Any:
        """Returns the view of `made`, which the first call creates.

        `facts`: values of attributes that only the engine's class has (see `_show`).
        """
        # Kept in the group: a table would keep the group alive.
        kept = f"_view {cls.__module__}"
        found = made.__dict__.get(kept)
        if found is None:
            found = made.__dict__[kept] = object.__new__(cls)
            found._show(made, *facts)
        return found

    @staticmethod
    def _make(lists: list[list[int]], local_rank: int, backend: Any, name: str | None, **options: bool) -> Any:
        if state.try_get_world_group() is None:
            state.init_distributed_environment(allow_pickle=True)
        return state.init_model_parallel_group(
            lists, local_rank, str(backend), group_name=name or "anonymous", allow_pickle=True, **options
        )

    def _show(self, made: GroupCoordinator) -> None:
        self.__dict__ = made.__dict__
        self._made = made

    first_rank = GroupCoordinator.first_global_rank  # type: ignore[assignment]
    last_rank = GroupCoordinator.last_global_rank  # type: ignore[assignment]
    next_rank = GroupCoordinator.next_global_rank  # type: ignore[assignment]
    prev_rank = GroupCoordinator.prev_global_rank  # type: ignore[assignment]

    gather = renamed(
        GroupCoordinator.gather,
        "input_ dst dim",
        "Concatenates the ranks' tensors along `dim` on rank `dst`; returns None on other ranks.",
    )
    broadcast = renamed(
        GroupCoordinator.broadcast_, "input_ src", "Copies the tensor of rank `src` into every rank's tensor."
    )
    send = renamed(GroupCoordinator.send, "tensor dst", "Sends a tensor to rank `dst` (default: the next).")
    broadcast_object_list = renamed(
        GroupCoordinator.broadcast_object_list,
        "obj_list src group?",
        "Replaces every rank's objects by those of `src`, in place; returns the list. `group` is ignored.",
    )

    def recv(self, size: Any, dtype: torch.dtype, src: int | None = None) -> Tensor:
        """Receives a tensor from group rank `src` (default: the previous). `size` is a shape or an int."""
        return super().recv((size,) if isinstance(size, int) else size, dtype, src)

    def broadcast_tensor_dict(
        self, tensor_dict: dict[str, Any] | None = None, src: int = 0, group: Any = None, metadata_group: Any = None
    ) -> dict[str, Any] | None:
        return tensor_dict if self.world_size == 1 else super().broadcast_tensor_dict(tensor_dict, src)
