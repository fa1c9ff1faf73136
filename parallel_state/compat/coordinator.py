"""The base of the engines' coordinators: one of our groups, with the calls that several engines name alike."""

# mypy: disable-error-code="override"
# An engine's names have its own parameters.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel_state import state
from parallel_state.compat.tables import renamed
from parallel_state.groups.coordinator import GroupCoordinator


class GroupView(GroupCoordinator):
    """A group of ours under an engine's names, whose state is the group's own: both objects have one `__dict__`."""

    _made: GroupCoordinator

    @classmethod
    def of(cls, made: GroupCoordinator, *facts: Any) -> Any:
        """Returns an engine's view of one of our groups, always the same; `facts` are those of the engine beside it."""
        kept = f"_view {cls.__module__}"  # in the group, not in a table by group: it holds the group
        found = made.__dict__.get(kept)
        if found is None:
            found = made.__dict__[kept] = object.__new__(cls)
            found._show(made, *facts)
        return found

    @staticmethod
    def _make(lists: list[list[int]], local_rank: int, backend: Any, name: str | None, **options: bool) -> Any:
        """Makes one of our groups from lists that divide the world, and first the world if there is none."""
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

    gather = renamed(GroupCoordinator.gather, "input_ dst dim", "Concatenates on rank `dst`; None on the others.")
    broadcast = renamed(GroupCoordinator.broadcast_, "input_ src", "Fills every rank's tensor with that of `src`.")
    send = renamed(GroupCoordinator.send, "tensor dst", "Sends a tensor to rank `dst`, by default the next.")
    broadcast_object_list = renamed(
        GroupCoordinator.broadcast_object_list,
        "obj_list src group?",
        "Fills every rank's list with the objects of `src`; returns it. `group` has no meaning, as in the engine.",
    )

    def recv(self, size: Any, dtype: torch.dtype, src: int | None = None) -> Tensor:
        """Returns the tensor that rank `src`, by default the previous, sends; `size` may be an int."""
        return super().recv((size,) if isinstance(size, int) else size, dtype, src)

    def broadcast_tensor_dict(
        self,
        tensor_dict: dict[str, Any] | None = None,
        src: int = 0,
        group: Any = None,
        metadata_group: Any = None,
    ) -> dict[str, Any] | None:
        """Returns the dict of `src` on every rank; `group` and `metadata_group` have no meaning, as in the engine."""
        return tensor_dict if self.world_size == 1 else super().broadcast_tensor_dict(tensor_dict, src)
