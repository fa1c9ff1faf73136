"""Names, once a wait has failed, the calls in which the group's ranks are: a recv, say, and an all_reduce.

Collectives compare themselves; a transfer, or a collective that was started, meets nobody who could tell. So a thread
of each process looks whether it has waited for long, and writes to the store in which call; a rank that comes to its
deadline reads what the others wrote. Nothing is concluded before: a rank that is waited for may still come, in another
thread, or after a collective that doesn't wait for all ranks.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from device_communicators.errors import CommunicationError
from device_communicators.liveness.health import Watcher
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.recorder import Operation

SLOW_S = 1.0
"""A wait of this length is told to others."""
_LOOK_S = 0.4
_KEEP_S = 3.0
"""How long others may read of a wait that has ended: those that fail with it ask a moment later."""
_ASK_S = 0.5
_MOST_ASKED = 16
"""Ranks whose waits are read at a failure."""
_OURS = "parallel_state-"


class Waiting(Protocol):
    """The route of a wait, as far as others may be told of it."""

    @property
    def context(self) -> GroupContext: ...

    def served_operations(self) -> list[Operation]: ...


WAITS: dict[int, tuple[Waiting, Operation]] = {}
"""By thread: the operation that it waits for, in Python."""


def end_wait(thread: int, before: tuple[Waiting, Operation] | None) -> None:
    """Ends a thread's wait; it may go on with the one that this was a step of."""
    if before is None:
        del WAITS[thread]
    else:
        WAITS[thread] = before


@contextlib.contextmanager
def waiting_for(route: Waiting, operation: Operation) -> Iterator[None]:
    """Notes that this thread waits for `operation` meanwhile."""
    thread = threading.get_ident()
    before, WAITS[thread] = WAITS.get(thread), (route, operation)
    try:
        yield
    finally:
        end_wait(thread, before)


class Stalls:
    """Tells other processes of this one's long waits."""

    def __init__(self, watcher: Watcher, rank: int) -> None:
        """`rank`: this process', global."""
        self._watcher = watcher
        self._rank = rank
        self._routes: weakref.WeakSet[Waiting] = weakref.WeakSet()
        self._store: Any = None
        self._told: Any = None
        self._told_at = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, route: Waiting) -> None:
        self._routes.add(route)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name=f"{_OURS}stalls")
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_ASK_S)

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            with contextlib.suppress(RuntimeError):  # a store that is gone; a set that changed meanwhile
                self._look()
        self._store = None  # whose server, if it is this process, must be able to go

    def _look(self) -> None:
        found, now = self._longest_wait(), time.monotonic()
        if found is None or now - found[1].started_s < SLOW_S:
            if self._told is not None and now - self._told_at > _KEEP_S:
                self._tell(None)
            return
        route, operation = found
        state = [route.context.name, call_in_words(route.context, operation)]
        if state != self._told:
            self._tell(state)
        self._told_at = now

    def _tell(self, state: Any) -> None:
        if self._store is None:
            open_store = self._watcher.open_store
            self._store = None if open_store is None else open_store()
        if self._store is not None:
            self._store.set(f"stall/{self._rank}", json.dumps(state))
            self._told = state

    def _longest_wait(self) -> tuple[Waiting, Operation] | None:
        """Returns what the thread that has waited longest waits for."""
        waits = list(WAITS.values())
        for route in list(self._routes):
            memory = route.context.host_memory
            if memory is not None and memory.collectives is not None and memory.collectives.is_busy:
                under_way = [each for each in route.served_operations() if each.ended_s is None]
                waits += [(route, under_way[-1])] if under_way else []
        waits = [(route, operation) for route, operation in waits if operation.ended_s is None]
        return min(waits, key=lambda each: each[1].started_s, default=None)


def watch(route: Waiting) -> None:
    """Tells of long waits of a group from now on, where its ranks can ask each other."""
    context = route.context
    watcher = context.watcher
    if watcher is None or watcher.open_store is None or context.size == 1 or context.simulated or context.fake:
        return
    found = watcher.stalls
    if found is None:
        found = watcher.stalls = Stalls(watcher, context.ranks[context.rank])
        watcher.on_close.append(found.close)
    found.add(route)


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
    method = operation.told or _TRANSFERS.get(operation.name, operation.name)
    what = f" of {list(operation.shape)} {operation.dtype}" if operation.dtype and not operation.told else ""
    return f"{method}({'dst' if 'send' in operation.name else 'src'} global rank {context.ranks[operation.peer]}){what}"


def add_calls(context: GroupContext, failure: CommunicationError) -> None:
    """Adds to a failure in which calls the group's ranks wait, its suspects first, as far as they have told."""
    suspects = [rank for rank in failure.suspect_ranks if rank >= 0]
    ranks = [*suspects, *(rank for rank in context.ranks if rank not in suspects)][:_MOST_ASKED]

    def read(store: Any) -> dict[str, list[str]]:
        calls: dict[str, list[str]] = {}
        for rank in ranks:
            state = json.loads(store.get(f"stall/{rank}")) if store.check([f"stall/{rank}"]) else None
            if state is not None:
                name, call = state
                where = "" if name == context.name else f" of group {name!r}"
                calls.setdefault(f"{call}{where}", []).append(str(rank))
        return calls

    told: dict[str, list[str]] = _ask(context, read) or {}
    if told:
        words = [
            f"global rank{'s' * (len(who) > 1)} {', '.join(who)} {'are' if len(who) > 1 else 'is'} in {call}"
            for call, who in told.items()
        ]
        failure.args = (f"{failure.args[0]}. As last told, {'; '.join(words)}",)


def _ask(context: GroupContext, question: Callable[[Any], Any]) -> Any:
    """Returns what the store answers within a moment, or None."""
    open_store = None if context.watcher is None else context.watcher.open_store
    if open_store is None:
        return None
    answers: list[Any] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            store = open_store()
            if store is not None:
                answers.append(question(store))

    thread = threading.Thread(target=ask, daemon=True, name=f"{_OURS}ask")
    thread.start()
    thread.join(_ASK_S)
    return answers[0] if answers else None
