"""What the ranks of a group tell each other of their calls over the store, once a wait is long or has failed.

gloo says neither who is missing nor that ranks are in different calls. When its wait has timed out on one rank it
closes the connections, so all others that wait fail as well. Each rank that fails then writes to the store in which
operation it was, and reads what the others wrote: who writes nothing isn't in a call of this group. It costs nothing
before that.

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
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from device_communicators.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    PeerDiedError,
)
from device_communicators.liveness.health import NEWS_S, Watcher
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import died, gave_up
from device_communicators.routing.recorder import Operation

SLOW_S = 1.0
"""The length of a wait from which on others may read of it."""
_LOOK_S = 0.4
_KEEP_S = 3.0
"""How long others may read of a wait that has ended: those that fail with it ask a moment later."""
_ASK_S = 0.5
_MOST_ASKED = 16
"""Ranks whose waits are read at a failure."""
_PATIENCE_S = 0.6
"""How long a rank waits for the others' reports: they come within the 0.2 s in which a death might come to be known."""
_LIMIT_S = 1.0
"""A store beyond reach answers after minutes."""
_STEP_S = 0.02


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
    """Publishes this process' long waits to the others."""

    def __init__(self, watcher: Watcher, rank: int) -> None:
        """`rank`: this process', global."""
        self._watcher = watcher
        self._rank = rank
        self._routes: weakref.WeakSet[Waiting] = weakref.WeakSet()
        self._store: Any = None
        self._published: Any = None
        self._published_at = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, route: Waiting) -> None:
        self._routes.add(route)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="parallel_state-stalls")
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
            if self._published is not None and now - self._published_at > _KEEP_S:
                self._publish(None)
            return
        route, operation = found
        state = [route.context.name, call_in_words(route.context, operation)]
        if state != self._published:
            self._publish(state)
        self._published_at = now

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

    watcher = context.watcher
    calls_found: dict[str, list[str]] = (watcher.ask_store(read, _ASK_S) if watcher is not None else None) or {}
    if calls_found:
        words = [
            f"global rank{'s' * (len(who) > 1)} {', '.join(who)} {'are' if len(who) > 1 else 'is'} in {call}"
            for call, who in calls_found.items()
        ]
        failure.args = (f"{failure.args[0]}. As last told, {'; '.join(words)}",)


@dataclass(frozen=True)
class Report:
    """The call of a rank in which the group failed there."""

    sequence: int
    call: str
    timed_out: bool = field(default=False, compare=False)
    """Whether it failed at its deadline: then who is missing may be slow, and need not have ended."""


def explained(context: GroupContext, operation: Operation, failure: CommunicationError) -> CommunicationError:
    """Returns `failure` of the group's `operation`, or the error that says who is missing or in another call."""
    watcher = context.watcher
    if watcher is None or watcher.open_store is None:
        return failure
    own = Report(operation.sequence, operation.call, isinstance(failure, CollectiveTimeoutError))
    reports = watcher.ask_store(lambda store: _exchange(store, context, own), _LIMIT_S)
    if reports is not None:
        return _verdict(context, own, reports, failure)
    return _by_the_watcher(context, failure, [rank for rank in context.ranks if rank != context.ranks[context.rank]])


def publish(context: GroupContext, operation: Operation) -> None:
    """Tells ranks that ask later in which operation this rank found another call, without waiting for the store."""
    if context.watcher is not None:
        own = Report(operation.sequence, operation.call)
        context.watcher.ask_store(lambda store: _write(store, context, own), 0)


def _prefix(context: GroupContext) -> str:
    return f"report/{zlib.crc32(repr(context.ranks).encode()):x}/{context.channel}"


def _write(store: Any, context: GroupContext, own: Report) -> None:
    store.set(f"{_prefix(context)}/{context.rank}", json.dumps([own.sequence, own.call, own.timed_out]))


def _by_the_watcher(context: GroupContext, failure: CommunicationError, missing: Sequence[int]) -> CommunicationError:
    """Returns `failure` of a connection, or the error with the ranks that the watcher comes to know as dead.

    A broken connection overtakes what tells of a host's end: where one of the `missing` can't be watched at once, that
    may take as long as the heartbeats do.
    """
    watcher = context.watcher
    if watcher is None or isinstance(failure, CollectiveTimeoutError):
        return failure
    started = time.monotonic() - (failure.elapsed_s or 0)
    patience_s = NEWS_S if watcher.watches(missing) else watcher.bound_s
    if watcher.await_death_of(context.failure_ranks, patience_s):
        return died(context, failure.operation or "an operation", started)
    return failure


def _exchange(store: Any, context: GroupContext, own: Report) -> dict[int, Report]:
    """Writes this rank's report, and returns those that came within the patience, by rank."""
    reports: dict[int, Report] = {context.rank: own}
    until = time.monotonic() + _PATIENCE_S
    _write(store, context, own)
    while len(reports) < context.size and time.monotonic() < until:
        for rank in range(context.size):
            key = f"{_prefix(context)}/{rank}"
            if rank not in reports and store.check([key]):
                reports[rank] = Report(*json.loads(store.get(key)))
        time.sleep(_STEP_S)
    return reports


def _verdict(
    context: GroupContext, own: Report, reports: dict[int, Report], failure: CommunicationError
) -> CommunicationError:
    facts: dict[str, Any] = {
        "group": context.name,
        "operation": failure.operation,
        "sequence": own.sequence,
        "rank": context.rank,
        "elapsed_s": failure.elapsed_s,
        "timeout_s": failure.timeout_s,
    }
    missing = [context.ranks[rank] for rank in range(context.size) if rank not in reports]
    if missing:  # the watcher's word goes before the reports: who hears of a death writes none
        found = _by_the_watcher(context, failure, missing)
        if found is not failure:
            return found
    others = {report for rank, report in reports.items() if rank != context.rank}
    if not missing and len(others) == 1 and (ahead := others.pop()).sequence > own.sequence:
        # They may have got through this operation with this rank's help, and given it up in the next one.
        ours = f"{own.call} number {own.sequence}"
        theirs = f"All others are in {ahead.call} number {ahead.sequence} already"
        found = gave_up(context, failure) if isinstance(failure, PeerDiedError) else failure
        found.args = (f"{found.args[0]}. {theirs}: this rank, in {ours}, was late, or made fewer calls",)
        return found
    # Where a rank is missing, some may have got through an operation of which others still lack the end.
    different = [
        rank
        for rank, report in sorted(reports.items())
        if report != own and (report.sequence == own.sequence or not missing)
    ]
    if different:
        suspects = [context.ranks[rank] for rank in different]
        there = reports[different[0]]
        return context.mismatch(
            failure.operation or own.call,
            f"this rank is in {own.call} number {own.sequence}, global rank {suspects[0]} in {there.call} number "
            f"{there.sequence}",
            suspects,
            sequence=own.sequence,
            elapsed_s=failure.elapsed_s,
            timeout_s=failure.timeout_s,
        )
    if not missing:
        return gave_up(context, failure) if isinstance(failure, PeerDiedError) else failure
    if isinstance(failure, PeerDiedError) and context.watcher is not None:
        # Who would be known to have ended has not: it gave up, or knows of what this rank will hear.
        missing = [rank for rank in missing if not context.watcher.watches([rank])]
        if not missing:
            return gave_up(context, failure)
    who = ", ".join(f"global rank {rank}" for rank in missing)
    has = "has" if len(missing) == 1 else "have"
    began = f"{failure.operation} of {context} failed after {failure.elapsed_s or 0:.3f} s"
    advice = "The group can't be used further; look at that rank (its log, `py-spy dump`)"
    if isinstance(failure, PeerDiedError) and not any(report.timed_out for report in reports.values()):
        return PeerDiedError(
            f"{began}: a connection broke, and {who} {has} not been heard of since. {advice}",
            **facts,
            suspect_ranks=missing,
        )
    return CollectiveTimeoutError(
        f"{began}: {who} {has} not come to {own.call} number {own.sequence}, or stopped in it. {advice}, or raise the "
        "timeout",
        **facts,
        suspect_ranks=missing,
    )
