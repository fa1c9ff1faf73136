"""The state of a rank, as text for errors: its call, its line of the program, or the reason why it doesn't run.

Threads record here which call they wait for.
"""

from __future__ import annotations

import threading
import zlib
from typing import TYPE_CHECKING, NamedTuple

from device_communicators.calls.recorder import Operation
from device_communicators.liveness import stacks

if TYPE_CHECKING:
    from device_communicators.routing.communicator import GroupContext

MOST_ASKED = 16
"""Errors and the log contain the states of at most this many ranks."""
SILENT = "running, but no Python thread answers: native code holds the interpreter lock"
STARTED = ("isend", "irecv_", "iall_reduce_", "iall_gather", "ireduce_scatter", "ibroadcast_")
"""Started operations. Their end is detected only when they are waited for."""
_TRANSFERS = {
    "irecv_": "irecv",
    "send_message": "send_tensor_dict",
    "recv_message": "recv_tensor_dict",
    "send_list": "send_tensor_dict with a spec",
    "recv_list": "recv_tensor_dict with a spec",
}
"""Step -> method, for records without the method: native calls, and later steps of a call."""


def call_in_words(context: GroupContext, operation: Operation) -> str:
    """Returns the text of a call: its method, and for a transfer its peer."""
    if operation.peer < 0:
        return operation.call
    method = operation.call_text or _TRANSFERS.get(operation.name, operation.name)
    what = f" of {list(operation.shape)} {operation.dtype}" if operation.dtype and not operation.call_text else ""
    return f"{method}({'dst' if 'send' in operation.name else 'src'} global rank {context.ranks[operation.peer]}){what}"


WAITS: dict[int, tuple[GroupContext, Operation]] = {}
"""Thread id -> the operation that the thread waits for in Python."""


def end_wait(thread: int, before: tuple[GroupContext, Operation] | None) -> None:
    """Removes a thread's record of a wait. `before`: the record to restore, of the wait that contains it."""
    if before is None:
        del WAITS[thread]
    else:
        WAITS[thread] = before


class waiting_for:  # noqa: N801  (as contextlib's; a generator would take 1 µs more)
    """Records in a block that this thread waits for `operation`."""

    __slots__ = ("_before", "_thread", "_wait")

    def __init__(self, context: GroupContext, operation: Operation) -> None:
        self._wait = context, operation
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        self._before, WAITS[self._thread] = WAITS.get(self._thread), self._wait

    def __exit__(self, *_: object) -> None:
        end_wait(self._thread, self._before)


def group_key(context: GroupContext) -> str:
    """Returns a text that identifies the group and is equal on all its ranks."""
    return f"{zlib.crc32(repr(context.ranks).encode()):x}/{context.label}"


class State(NamedTuple):
    """The state of a rank, as sent to its peers: its call and its line of the program."""

    key: str = ""
    """`group_key` of the group whose call it waits in; empty if it waits in none."""
    group: str = ""
    """The group's name on that rank."""
    call: str = ""
    place: str = ""
    """Lines of the program in the rank's stack, innermost first."""
    obstacle: str = ""
    """The reason why the rank can't answer, such as a signal that stopped it; other fields are then empty."""
    is_compiling: bool = False
    idle_s: float = 0.0
    """Seconds since its last call; -1 while it makes calls."""
    peer: int = -1
    """Global rank of the peer, if the call is a transfer with one."""

    def is_in_call_of(self, other: State) -> bool:
        return (self.key, self.call) == (other.key, other.call)

    def in_words(self, group: str = "") -> str:
        """Returns the state as text that follows "global rank 3 is ". A call of `group` isn't said to be of it."""
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
    """Returns the state of this process if it is in no call: the line of its main thread."""
    frames = stacks.frames_of(threading.main_thread().ident)
    return State(place=stacks.in_words(frames), is_compiling=stacks.is_compiling(frames), idle_s=idle_s)


def state_of(context: GroupContext, operation: Operation, thread: int | None) -> State:
    place = stacks.in_words(stacks.frames_of(thread))
    peer = -1 if operation.peer < 0 else context.ranks[operation.peer]
    return State(group_key(context), context.name, call_in_words(context, operation), place, peer=peer)


def describe_states(states: dict[int, State], context: GroupContext) -> list[str]:
    ranks_in: dict[str, list[str]] = {}
    for rank, state in states.items():
        ranks_in.setdefault(state.in_words(context.name), []).append(str(rank))
    return [
        f"global rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} {'are' if len(ranks) > 1 else 'is'} {what}"
        for what, ranks in ranks_in.items()
    ]
