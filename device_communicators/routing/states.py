"""The call or the place at which a rank is: noted by its threads, read by the others, told in errors."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from device_communicators.base.bounded_store import BoundedStore
from device_communicators.base.errors import CollectiveMismatchError, CommunicationError
from device_communicators.calls.recorder import Operation
from device_communicators.liveness import questions, stacks
from device_communicators.liveness.condition import condition_of
from device_communicators.routing.communicator import GroupContext

SLOW_S = 1.0
"""The length of a wait, or of a time without calls, from which on others may read of it."""
ASK_S = 0.5
_ANSWER_S = 0.3
"""The time for an answer of this host."""
_STEP_S = 0.02
MOST_ASKED = 16
"""Ranks that are asked, and whose waits are read, at a failure."""
SILENT = (
    "without an answer (pid {pid} runs): in native code that holds the interpreter's lock, without time, or leaving"
)
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
    return f"{zlib.crc32(repr(context.ranks).encode()):x}/{context.channel}"


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
    """The reason why it can't tell by itself; the rest is empty then."""
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


def read_states(store: BoundedStore, ranks: Iterable[int]) -> dict[int, State]:
    """Returns what these global ranks have published, and what others of their hosts have of them."""
    states: dict[int, State] = {}
    for rank in ranks:
        published = json.loads(store.get(f"stall/{rank}")) if store.check([f"stall/{rank}"]) else None
        if published is not None:
            states[rank] = State(*published)
        obstacle = store.get(f"obstacle/{rank}").decode() if store.check([f"obstacle/{rank}"]) else ""
        if obstacle:
            states[rank] = State(obstacle=obstacle)
    return states


def states_of_ranks(published: Mapping[int, State], pids: Mapping[int, int], key: str) -> dict[int, State]:
    """Returns what ranks are at: those of this host, by their PIDs, as they say now, the others as `published`.

    A rank of this host that has failed in the group of `key` says in which call.
    """
    found = {rank: State(obstacle=obstacle) for rank, pid in pids.items() if (obstacle := condition_of(pid))}
    asked = {rank: pid for rank, pid in pids.items() if rank not in found}
    answers = questions.ask(asked, f"state {key}", _ANSWER_S)
    found |= {rank: State(*answer) for rank, answer in answers.items() if isinstance(answer, list)}
    silent = {rank: State(obstacle=SILENT.format(pid=pid)) for rank, pid in asked.items()} if questions.IS_THERE else {}
    return {**silent, **published, **found}


def describe_states(states: dict[int, State], context: GroupContext) -> list[str]:
    ranks_in: dict[str, list[str]] = {}
    for rank, state in states.items():
        ranks_in.setdefault(state.in_words(context.name), []).append(str(rank))
    return [
        f"global rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} {'are' if len(ranks) > 1 else 'is'} {what}"
        for what, ranks in ranks_in.items()
    ]


def add_calls(context: GroupContext, operation: Operation | None, failure: CommunicationError) -> None:
    """Adds to a failure of `operation` what the group's ranks are at, its suspects first, as far as they tell.

    To an error that has both calls, the lines from which they were made.
    """
    suspects = [rank for rank in failure.suspect_ranks if rank >= 0]
    ranks = [*suspects, *(rank for rank in context.ranks if rank not in suspects)][:MOST_ASKED]
    watcher = context.watcher
    if watcher is None:
        return
    stalls = watcher.stalls
    place = stacks.in_words(stacks.own_frames())
    own = None
    if stalls is not None and operation is not None:
        own = State(group_key(context), context.name, call_in_words(context, operation), place)
        stalls.keep(own, context.timeout_s)

    is_mismatch = isinstance(failure, CollectiveMismatchError) and " gave up, " not in str(failure.args[0])
    key = group_key(context)
    elsewhere = {rank for rank in suspects if rank not in watcher.pids and rank != context.global_rank}

    def exchange(store: BoundedStore) -> dict[int, State]:
        if own is not None:
            store.set(f"stall/{context.global_rank}", json.dumps(own))
        until = time.monotonic() + _ANSWER_S
        while True:
            found = read_states(store, ranks)
            is_complete = all(found.get(rank, State()).key == key for rank in elsewhere)
            if is_complete or not is_mismatch or time.monotonic() > until:  # who is in another call tells of it now
                return found
            time.sleep(_STEP_S)

    published = watcher.ask_store(exchange, ASK_S) or {}
    states = states_of_ranks(published, {rank: pid for rank, pid in watcher.pids.items() if rank in ranks}, key)
    if is_mismatch and operation is not None and operation.site:  # debug mode, in which the error has them
        return
    if is_mismatch:
        lines = [f"global rank {rank} at {states[rank].place}" for rank in suspects if states.get(rank, State()).place]
        failure.args = (f"{failure.args[0]}. Here at {'; '.join([place, *lines])}",)
    elif states:
        failure.args = (f"{failure.args[0]}. As last told, {'; '.join(describe_states(states, context))}",)
