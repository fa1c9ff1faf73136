"""The calls that wait in this process now, and the states that describe them to other ranks."""

from __future__ import annotations

import threading
import zlib

from device_communicators.calls.recorder import Operation
from device_communicators.liveness import stacks
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.states import State

STARTED = ("isend", "irecv_", "iall_reduce_", "iall_gather", "ireduce_scatter", "ibroadcast_")
"""Operations that return before they complete. A record without an end then doesn't mean a failure."""
_TRANSFERS = {
    "irecv_": "irecv",
    "send_message": "send_tensor_dict",
    "recv_message": "recv_tensor_dict",
    "send_list": "send_tensor_dict with a spec",
    "recv_list": "recv_tensor_dict with a spec",
}
"""Operation -> the user's method, for records that don't contain the method."""


def call_in_words(context: GroupContext, operation: Operation) -> str:
    if operation.peer < 0:
        return operation.call
    method = operation.call_text or _TRANSFERS.get(operation.name, operation.name)
    what = f" of {list(operation.shape)} {operation.dtype}" if operation.dtype and not operation.call_text else ""
    side = "dst" if operation.name == "put" or "send" in operation.name else "src"
    return f"{method}({side} global rank {context.ranks[operation.peer]}){what}"


WAITS: dict[int, tuple[GroupContext, Operation]] = {}


class waiting_for:  # noqa: N801  (as contextlib's; a generator would take 1 µs more)
    __slots__ = ("_before", "_thread", "_wait")

    def __init__(self, context: GroupContext, operation: Operation) -> None:
        self._wait = context, operation
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        self._before, WAITS[self._thread] = WAITS.get(self._thread), self._wait

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del WAITS[self._thread]
        else:
            WAITS[self._thread] = self._before


def group_key(context: GroupContext) -> str:
    return f"{zlib.crc32(repr(context.ranks).encode()):x}/{context.label}"


def state_without_call(idle_s: float) -> State:
    frames = stacks.frames_of(threading.main_thread().ident)
    return State(place=stacks.in_words(frames), is_compiling=stacks.is_compiling(frames), idle_s=idle_s)


def state_of(context: GroupContext, operation: Operation, thread: int | None) -> State:
    return state_at(context, operation, stacks.in_words(stacks.frames_of(thread)))


def state_at(context: GroupContext, operation: Operation, place: str) -> State:
    peer = -1 if operation.peer < 0 else context.ranks[operation.peer]
    is_world = context.watcher is not None and context.watcher.is_world(context.ranks)
    ranks = () if is_world or peer >= 0 else context.ranks
    return State(group_key(context), context.name, call_in_words(context, operation), place, peer=peer, ranks=ranks)
