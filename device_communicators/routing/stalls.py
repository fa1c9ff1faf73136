"""Long waits, made known while they last: to the other ranks over the store, and from the soft limit on in the log.

Collectives compare themselves; a transfer, or a collective that was started, meets nobody who could tell. So a thread
of each process looks whether it has waited for long, and writes to the store in which call; where it has made no call
for long, it writes where its main thread is. A rank that comes to its deadline, or to the soft limit
(PARALLEL_STATE_SOFT_TIMEOUT_S), reads what the others wrote. Nothing is concluded before: a rank that is waited for may
still come, in another thread, or after a collective that doesn't wait for all ranks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
import traceback
import weakref
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from device_communicators import settings
from device_communicators.errors import CommunicationError
from device_communicators.liveness.health import Watcher
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.recorder import Operation

logger = logging.getLogger("parallel_state")

SLOW_S = 1.0
"""The length of a wait, or of a time without calls, from which on others may read of it."""
_LOOK_S = 0.4
_KEEP_S = 3.0
"""The time for which others may read of a wait that has ended: those that fail with it ask a moment later."""
_ASK_S = 0.5
_MOST_ASKED = 16
"""Ranks whose waits are read at a failure."""
_FRAMES = 4


class Waiting(Protocol):
    """The route of a wait, as far as others may be told of it."""

    @property
    def context(self) -> GroupContext: ...

    def served_operations(self) -> list[Operation]: ...

    def traffic(self) -> dict[str, Any]: ...


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


def group_key(context: GroupContext) -> str:
    """Returns what names a group on all of its ranks alike."""
    return f"{zlib.crc32(repr(context.ranks).encode()):x}/{context.channel}"


class Stalls:
    """Publishes this process' long waits to the others, and logs those that are beyond the soft limit."""

    def __init__(self, watcher: Watcher, rank: int) -> None:
        """`rank`: this process', global."""
        self._watcher = watcher
        self._rank = rank
        self._routes: weakref.WeakSet[Waiting] = weakref.WeakSet()
        self._store: Any = None
        self._published: Any = None
        self._published_at = 0.0
        self._keep_until_s = 0.0
        self._calls = 0
        self._last_call_s = time.monotonic()
        self._logged = 0.0, 0.0
        """The beginning of the wait that the log has, and its length when it was logged last."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, route: Waiting) -> None:
        self._routes.add(route)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="parallel_state-stalls")
            self._thread.start()

    def keep(self, timeout_s: float) -> None:
        """Leaves the last wait where others can read it: it has failed, and who came later to it fails later."""
        self._keep_until_s = time.monotonic() + timeout_s + _KEEP_S

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
        if found is not None:
            self._last_call_s = now
            if now - found[1].started_s >= SLOW_S:
                self._tell(*found, now)
                return
        elif self._has_called():
            self._last_call_s = now
        elif now < self._keep_until_s:
            return
        elif now - self._last_call_s >= SLOW_S:
            self._tell_of_no_call(now)
            return
        if self._published is not None and now - self._published_at > _KEEP_S:
            self._publish(None)

    def _tell(self, route: Waiting, operation: Operation, now: float) -> None:
        context = route.context
        state = [group_key(context), context.name, call_in_words(context, operation)]
        if state != self._published:
            self._publish(state)
        self._published_at = now
        waited_s = now - operation.started_s
        is_logged = abs(operation.started_s - self._logged[0]) < SLOW_S / 2  # clocks of calls in C++ differ a little
        if waited_s >= (2 * self._logged[1] if is_logged else settings.SOFT_TIMEOUT_S.get()):
            self._logged = operation.started_s, waited_s
            self._log(context, operation, state, waited_s)

    def _tell_of_no_call(self, now: float) -> None:
        """Publishes where the main thread is: after a second without calls, and each time that has doubled."""
        idle_s = now - self._last_call_s
        if self._published_at < self._last_call_s or idle_s >= 2 * (self._published_at - self._last_call_s):
            self._publish(["", "", place_of(threading.main_thread().ident)])
            self._published_at = now

    def _has_called(self) -> bool:
        """Returns True if a call began since this was asked last."""
        before, self._calls = (
            self._calls,
            sum(each.calls for route in list(self._routes) for each in route.traffic().values()),
        )
        return self._calls != before

    def _publish(self, state: Any) -> None:
        if self._store is None:
            open_store = self._watcher.open_store
            self._store = None if open_store is None else open_store()
        if self._store is not None:
            self._store.set(f"stall/{self._rank}", json.dumps(state))
            self._published = state

    def _longest_wait(self) -> tuple[Waiting, Operation] | None:
        """Returns what the thread that has waited longest waits for."""
        waits = list(WAITS.values())
        for route in list(self._routes):
            collectives = route.context.collectives
            if collectives is not None and collectives.is_busy:
                under_way = [each for each in route.served_operations() if each.ended_s is None]
                waits += [(route, under_way[-1])] if under_way else []
        waits = [(route, operation) for route, operation in waits if operation.ended_s is None]
        return min(waits, key=lambda each: each[1].started_s, default=None)

    def _log(self, context: GroupContext, operation: Operation, own: list[str], waited_s: float) -> None:
        """Says in the log for whom an operation waits, and what those do."""
        states = _read(self._store, context.ranks[:_MOST_ASKED]) if self._store is not None else {}
        others = [rank for rank in context.ranks if rank != context.ranks[context.rank]]
        if operation.peer >= 0:
            others = [context.ranks[operation.peer]]
        awaited = [rank for rank in others if states.get(rank, [""])[0::2] != own[0::2]] or others
        known = _in_words({rank: states[rank] for rank in awaited if rank in states}, context)
        silent = [str(rank) for rank in awaited if rank not in states]
        if silent:
            known.append(f"nothing is known of global rank{'s' * (len(silent) > 1)} {', '.join(silent)}")
        logger.warning(
            "%s of %s has waited for %.1f s (timeout %g s): %s",
            operation.call_text or operation, context, waited_s, context.timeout_s, "; ".join(known),
        )  # fmt: skip


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


def place_of(thread: int | None) -> str:
    """Returns where a thread of this process is: its innermost frames, each with its line."""
    frame = sys._current_frames().get(thread or 0)
    frames = [f"{os.path.basename(each.f_code.co_filename)}:{line} in {each.f_code.co_name}"
              for each, line in traceback.walk_stack(frame)] if frame is not None else []  # fmt: skip
    return ", called by ".join(frames[:_FRAMES]) or "its end"


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


def _read(store: Any, ranks: Iterable[int]) -> dict[int, list[str]]:
    """Returns what these global ranks have published: group, its name there, and the call, or where the rank is."""
    states = {rank: json.loads(store.get(f"stall/{rank}")) for rank in ranks if store.check([f"stall/{rank}"])}
    return {rank: state for rank, state in states.items() if state is not None}


def _in_words(states: dict[int, list[str]], context: GroupContext) -> list[str]:
    ranks_in: dict[str, list[str]] = {}
    for rank, (_, name, what) in states.items():
        where = "" if name == context.name else f" of group {name!r}"
        ranks_in.setdefault(f"{what}{where}" if name else f"no call of a group, at {what}", []).append(str(rank))
    return [
        f"global rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} {'are' if len(ranks) > 1 else 'is'} in {what}"
        for what, ranks in ranks_in.items()
    ]


def add_calls(context: GroupContext, failure: CommunicationError) -> None:
    """Adds to a failure in which calls the group's ranks wait, its suspects first, as far as they have told."""
    suspects = [rank for rank in failure.suspect_ranks if rank >= 0]
    ranks = [*suspects, *(rank for rank in context.ranks if rank not in suspects)][:_MOST_ASKED]
    watcher = context.watcher
    if watcher is None:
        return
    if watcher.stalls is not None:
        watcher.stalls.keep(context.timeout_s)
    states = watcher.ask_store(lambda store: _read(store, ranks), _ASK_S)
    if states:
        failure.args = (f"{failure.args[0]}. As last told, {'; '.join(_in_words(states, context))}",)
