"""Calls ops as compiled code does, and simulates a group whose peers answer."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from device_communicators import Route, register_route
from device_communicators.simulated import SimulatedCommunicator
from parallel_state import GroupCoordinator, GroupOptions, get_world_group, simulated_group
from parallel_state.collectives import ops
from parallel_state.groups.creation import Traits, create_group
from parallel_state.messages.messenger import Messenger

OP_NAMES = tuple(ops.OP_NAMES)
MOVE_NO_DATA = {
    "as_process_group", "within", "make_sub_group", "graph_capture", "suspend", "resume", "memory_stats", "explain",
    "traffic", "destroy", "close",
}  # fmt: skip
CALLS = frozenset(
    name
    for name, member in vars(GroupCoordinator).items()
    if inspect.isfunction(member) and not name.startswith("_") and name not in MOVE_NO_DATA
)
CALLS_OF_MESSAGES = frozenset(name for name in CALLS if "object" in name or "tensor_dict" in name or name == "all_sum")


def group_of(ranks: Sequence[int], options: GroupOptions, **traits: Any) -> GroupCoordinator:
    """Creates a group of global ranks with process groups of its own options. Each of the ranks must call this."""
    world = get_world_group()
    assert world.pool is not None
    own = Traits(world.device, world.local_rank, options, **traits)
    return create_group(GroupCoordinator, world.pool, ranks, "own", own)


def token_of(group: GroupCoordinator) -> Tensor:
    return group._token


def op_arguments(group: GroupCoordinator) -> tuple[Tensor, str]:
    return group._token, group._key


def call_op(group: GroupCoordinator, name: str, x: Tensor | Sequence[Tensor] | None, *arguments: Any) -> Any:
    first = () if x is None else (x,)
    return getattr(torch.ops.parallel_state, name)(*first, group._token, *arguments, group._key)


def written_by(name: str, space: str = "parallel_state") -> list[str]:
    schema = getattr(getattr(torch.ops, space), name).default._schema
    infos = {each.name: each.alias_info for each in schema.arguments if each.name != "token"}
    return [name for name, info in infos.items() if info is not None and info.is_write]


def forget_tokens(monkeypatch: Any) -> None:
    monkeypatch.setattr(ops, "_TOKENS", {})


class _Answering(SimulatedCommunicator):
    def irecv_(self, out: Tensor, src: int, tag: int) -> Any:
        out.fill_(src)
        return self.isend(out, src, tag)


def answering_group() -> GroupCoordinator:
    group = simulated_group([0, 1], 0)
    group.route = Route(group.context, [_Answering(group.context)], {})
    group._messenger = Messenger(group.route)
    register_route(group.route)
    return group
