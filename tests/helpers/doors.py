"""Calls ops as compiled code does, and simulates a group whose peers answer."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import parallel_state as ps
from device_communicators import Route, register_route
from parallel_state.messages.messenger import Messenger

OP_NAMES = frozenset(
    name.removeprefix("parallel_state::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("parallel_state::")
)
MOVE_NO_DATA = {
    "as_process_group", "within", "make_sub_group", "graph_capture", "suspend", "resume", "memory_stats", "explain",
    "traffic", "destroy", "close",
}  # fmt: skip
CALLS = frozenset(
    name
    for name, member in vars(ps.GroupCoordinator).items()
    if inspect.isfunction(member) and not name.startswith("_") and name not in MOVE_NO_DATA
)
CALLS_OF_MESSAGES = frozenset(name for name in CALLS if "object" in name or "tensor_dict" in name or name == "all_sum")


def group_of(ranks: Sequence[Sequence[int]], timeout_s: float, **options: Any) -> ps.GroupCoordinator:
    """Creates a group over its own gloo group for each list of global ranks. All ranks of the world call this."""
    timeout = timedelta(seconds=timeout_s)
    own, _ = dist.new_subgroups_by_enumeration(ranks, timeout, "gloo")
    return ps.GroupCoordinator.from_process_group(own, timeout=timeout, within=ps.get_world_group(), **options)


def destroy(group: ps.GroupCoordinator) -> None:
    own = group.device_group
    group.destroy()
    dist.destroy_process_group(own)


def token_of(group: ps.GroupCoordinator) -> Tensor:
    return group._token


def op_arguments(group: ps.GroupCoordinator) -> tuple[Tensor, str]:
    return token_of(group), group.context.key


def call_op(group: ps.GroupCoordinator, name: str, x: Tensor | Sequence[Tensor] | None, *arguments: Any) -> Any:
    first = () if x is None else (x,)
    return getattr(torch.ops.parallel_state, name)(*first, token_of(group), *arguments, group.context.key)


def schema_of(name: str, space: str = "parallel_state") -> Any:
    return getattr(getattr(torch.ops, space), name).default._schema


def written_by(name: str, space: str = "parallel_state") -> list[str]:
    infos = {each.name: each.alias_info for each in schema_of(name, space).arguments if each.name != "token"}
    return [name for name, info in infos.items() if info is not None and info.is_write]


def answering_group() -> ps.GroupCoordinator:
    group = ps.simulated_group([0, 1], 0)
    simulated: Any = type(group.route.communicators[0])

    class Answering(simulated):  # type: ignore[misc]
        def irecv_(self, out: Tensor, src: int, tag: int) -> Any:
            out.fill_(src)
            return self.isend(out, src, tag)

    group.route = Route(group.context, [Answering(group.context)], {})
    group._messenger = Messenger(group.route)
    register_route(group.route)
    return group
