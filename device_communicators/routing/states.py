"""The state of a rank: its call and place in the program, in words. Threads note the calls that they wait for."""

from __future__ import annotations

import threading
import zlib
from typing import TYPE_CHECKING, NamedTuple

from device_communicators.calls.recorder import Operation
from device_communicators.liveness import stacks

if TYPE_CHECKING:
    from device_communicators.routing.communicator import GroupContext

MOST_ASKED = 16
"""An error and the log name the states of at most this many ranks."""
SILENT = "running, but no Python thread answers: native code holds the interpreter lock"
STARTED = ("isend", "irecv_", "iall_reduce_", "iall_gather", "ireduce_scatter", "ibroadcast_")
"""Operations whose end is known when they are waited for."""
_TRANSFERS = {
    "irecv_": "irecv",
    "send_message": "send_tensor_dict",
    "recv_message": "recv_tensor_dict",
    "send_list": "send_tensor_dict with a spec",
    "recv_list": "recv_tensor_dict with a spec",
}
"""Steps by the method that takes them, where the record has none: compiled calls, and what follows a first step."""


def call_in_words(context: GroupContext, operation: Operation) -> str:
    """Returns the call as its method with the rank that it waits for."""
    if operation.peer < 0:
        return operation.call
    method = operation.call_text or _TRANSFERS.get(operation.name, operation.name)
    what = f" of {list(operation.shape)} {operation.dtype}" if operation.dtype and not operation.call_text else ""
    return f"{method}({'dst' if 'send' in operation.name else 'src'} global rank {context.ranks[operation.peer]}){what}"


WAITS: dict[int, tuple[GroupContext, Operation]] = {}
"""By thread: the operation that it waits for, in Python."""


def end_wait(thread: int, before: tuple[GroupContext, Operation] | None) -> None:
    """Ends a thread's wait; it may go on with the one that this was a step of."""
    if before is None:
        del WAITS[thread]
    else:
        WAITS[thread] = before


class waiting_for:  # noqa: N801  (as contextlib's; a generator would take 1 µs more)
    """Notes that this thread waits for `operation` meanwhile."""

    __slots__ = ("_before", "_thread", "_wait")

    def __init__(self, context: GroupContext, operation: Operation) -> None:
        self._wait = context, operation
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        self._before, WAITS[self._thread] = WAITS.get(self._thread), self._wait

    def __exit__(self, *_: object) -> None:
        end_wait(self._thread, self._before)


def group_key(context: GroupContext) -> str:
    """Returns what names a group on all of its ranks alike."""
    return f"{zlib.crc32(repr(context.ranks).encode()):x}/{context.label}"


class State(NamedTuple):
    """The call or the place at which a rank is, as others are told."""

    key: str = ""
    """Of the group in whose call it waits: `group_key`. Empty where it waits in none."""
    group: str = ""
    """The group's name on that rank."""
    call: str = ""
    place: str = ""
    """Its lines of the program, the innermost first."""
    obstacle: str = ""
    """The reason that it can't answer, such as a signal that stopped it; the rest is empty then."""
    is_compiling: bool = False
    idle_s: float = 0.0
    """For how long it has made no call; -1 where it makes calls."""

    def is_in_call_of(self, other: State) -> bool:
        return (self.key, self.call) == (other.key, other.call)

    def in_words(self, group: str = "") -> str:
        """Returns it as in "global rank 3 is {…}"; of a call in the group of that name the group isn't said."""
        if self.obstacle:
            return self.obstacle
        where = f" of group {self.group!r}" if self.group != group else ""
        at = f", at {self.place}" if self.place else ""
        if self.key:
            return f"in {self.call}{where}{at}"
        if self.idle_s >= 0:
            return f"in no call of a group{', compiling' if self.is_compiling else ''}{at}"
        return f"in calls that end, {self.call}{where} the last{at}"


def state_without_call(idle_s: float) -> State:
    """Returns the state of a process in no call: where its main thread is."""
    frames = stacks.frames_of(threading.main_thread().ident)
    return State(place=stacks.in_words(frames), is_compiling=stacks.is_compiling(frames), idle_s=idle_s)


def state_of(context: GroupContext, operation: Operation, thread: int | None) -> State:
    place = stacks.in_words(stacks.frames_of(thread))
    return State(group_key(context), context.name, call_in_words(context, operation), place)


def describe_states(states: dict[int, State], context: GroupContext) -> list[str]:
    ranks_in: dict[str, list[str]] = {}
    for rank, state in states.items():
        ranks_in.setdefault(state.in_words(context.name), []).append(str(rank))
    return [
        f"global rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} {'are' if len(ranks) > 1 else 'is'} {what}"
        for what, ranks in ranks_in.items()
    ]
