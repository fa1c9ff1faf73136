"""Describes what a rank is doing, as text for errors: its call and program line, or why it can't answer."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from device_communicators.calls.recorder import Operation
from device_communicators.liveness import stacks

MOST_ASKED = 16
SILENT = "running, but no Python thread answers: native code holds the interpreter lock"
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


def call_in_words(context: Any, operation: Operation) -> str:
    if operation.peer < 0:
        return operation.call
    method = operation.call_text or _TRANSFERS.get(operation.name, operation.name)
    what = f" of {list(operation.shape)} {operation.dtype}" if operation.dtype and not operation.call_text else ""
    side = "dst" if operation.name == "put" or "send" in operation.name else "src"
    return f"{method}({side} global rank {context.ranks[operation.peer]}){what}"


WAITS: dict[int, tuple[Any, Operation]] = {}


class waiting_for:  # noqa: N801  (as contextlib's; a generator would take 1 µs more)
    __slots__ = ("_before", "_thread", "_wait")

    def __init__(self, context: Any, operation: Operation) -> None:
        self._wait = context, operation
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        self._before, WAITS[self._thread] = WAITS.get(self._thread), self._wait

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del WAITS[self._thread]
        else:
            WAITS[self._thread] = self._before


def group_key(context: Any) -> str:
    return f"{zlib.crc32(repr(context.ranks).encode()):x}/{context.label}"


class State(NamedTuple):
    key: str = ""
    """The `group_key` of the call's group; empty outside of calls."""
    group: str = ""
    call: str = ""
    place: str = ""
    """Source lines of the user's program on the stack, innermost first."""
    obstacle: str = ""
    """Why the rank can't answer. The other fields are then empty."""
    is_compiling: bool = False
    idle_s: float = 0.0
    """Seconds since the rank's last call, or -1 if the rank makes calls one after another."""
    peer: int = -1
    """Global rank of the peer in a transfer, else -1."""
    ranks: Sequence[int] = ()
    """Global ranks of the call's group; empty for all ranks of the world."""

    def is_in_call_of(self, other: State) -> bool:
        return (self.key, self.call) == (other.key, other.call)

    def in_words(self, group: str = "") -> str:
        """Returns text that follows "global rank 3 is ". The text omits the name of the group `group`."""
        if self.obstacle:
            return self.obstacle
        where = f" of group {self.group!r}" if self.group != group else ""
        at = f", at {self.place}" if self.place else ""
        if self.key:
            return f"in {self.call}{where}{at}"
        if self.idle_s >= 0:
            return f"in no call of a group{', compiling' if self.is_compiling else ''}{at}"
        return f"making calls that complete, most recently {self.call}{where}{at}"


def state_without_call(idle_s: float) -> State:
    frames = stacks.frames_of(threading.main_thread().ident)
    return State(place=stacks.in_words(frames), is_compiling=stacks.is_compiling(frames), idle_s=idle_s)


def state_of(context: Any, operation: Operation, thread: int | None) -> State:
    return state_at(context, operation, stacks.in_words(stacks.frames_of(thread)))


def state_at(context: Any, operation: Operation, place: str) -> State:
    peer = -1 if operation.peer < 0 else context.ranks[operation.peer]
    is_world = context.watcher is not None and context.watcher.is_world(context.ranks)
    ranks = () if is_world or peer >= 0 else context.ranks
    return State(group_key(context), context.name, call_in_words(context, operation), place, peer=peer, ranks=ranks)


def describe_states(states: dict[int, State], context: Any) -> list[str]:
    ranks_in: dict[str, list[str]] = {}
    for rank, state in states.items():
        ranks_in.setdefault(state.in_words(context.name), []).append(str(rank))
    return [
        f"global rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} {'are' if len(ranks) > 1 else 'is'} {what}"
        for what, ranks in ranks_in.items()
    ]


def pack_answer(value: Any) -> bytes:
    """Returns `value` as compressed JSON, because a receiver cuts replies at 64 KiB."""
    return zlib.compress(json.dumps(value).encode())


def unpack_answer(packed: bytes) -> Any:
    try:
        return json.loads(zlib.decompress(packed))
    except zlib.error as error:
        raise ValueError(f"not an answer of this version: {error}") from error
