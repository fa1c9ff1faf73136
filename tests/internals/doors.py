"""Calls ops as compiled code does, and simulates a group whose peers answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from device_communicators import Route, register_route
from device_communicators.simulated import SimulatedCommunicator
from parallel_state import GroupCoordinator, simulated_group
from parallel_state.collectives import ops
from parallel_state.collectives.calls import TensorCalls
from parallel_state.messages.calls import MessageCalls
from parallel_state.messages.messenger import Messenger

OP_NAMES = tuple(ops.OP_NAMES)
CALLS_OF_MESSAGES = frozenset(name for name in vars(MessageCalls) if not name.startswith("_"))
CALLS = CALLS_OF_MESSAGES | {name for name in vars(TensorCalls) if not name.startswith("_")}


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
