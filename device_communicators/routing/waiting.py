"""Waiting for torch.distributed: with a deadline, and with an ear for ranks of the failure domain that have ended.

gloo tells a rank's end to its direct neighbours only; everyone else would wait until the deadline. So a wait goes in
slices, between which the watcher is asked. A collective survives the time-out of a slice; a gloo point-to-point
transfer does not (the pair is closed), and reduce_scatter's wait takes no limit. A thread waits for those, which is
left behind where somebody died.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch

from device_communicators.errors import CollectiveTimeoutError, CommunicationError, HostUnreachableError, PeerDiedError
from device_communicators.liveness.health import NEWS_S, NOTICE_S, Watcher
from device_communicators.routing.communicator import GroupContext, Work

_SLICE = timedelta(milliseconds=50)
_AT_ONCE = timedelta(milliseconds=1)
_NO_LIMIT = timedelta(days=3650)


class Watched:
    """A collective's work on a CPU group whose wait ends when a rank of the group's failure domain does."""

    def __init__(self, work: Work, context: GroupContext, operation: str, timeout_s: float | None = None) -> None:
        """`timeout_s`: the group's, if none is given."""
        self._work = work
        self._context = context
        self._operation = operation
        self._timeout_s = context.timeout_s if timeout_s is None else timeout_s

    def wait(self) -> None:
        watcher = self._context.watcher
        if watcher is None:
            self._work.wait()
            return
        started = time.monotonic()
        deadline = started + self._timeout_s
        while True:
            try:
                self._work.wait(_SLICE)  # type: ignore[call-arg]
                return
            except RuntimeError:
                if self._work.is_completed():  # by a failure, or just after the slice
                    self._work.wait()
                    return
                if time.monotonic() >= deadline:
                    raise
            if self._context.deaths():
                self._last_chance(started)
                return

    def _last_chance(self, started: float) -> None:
        """What the dead rank sent before may still be on its way."""
        try:
            self._work.wait(timedelta(seconds=NOTICE_S))  # type: ignore[call-arg]
        except RuntimeError as error:
            raise died(self._context, self._operation, started) from error

    def is_completed(self) -> bool:
        return self._work.is_completed()


class TransferError(RuntimeError):
    """What torch raised for a transfer with `peer`, a rank in the group."""

    def __init__(self, text: str, peer: int) -> None:
        super().__init__(text)
        self.peer = peer


class ByThread:
    """A work that a thread sees to its end, from `begin` or the first `wait` on, and which then may be left behind.

    `peer`: of a transfer between two ranks.
    """

    def __init__(self, context: GroupContext, operation: str, peer: int | None = None) -> None:
        self._peer = peer
        self._context = context
        self._operation = operation
        self._lock = threading.Lock()
        self._begun = False
        self._done = threading.Event()
        self._error: BaseException | None = None

    def _run(self) -> None:
        """What the thread does."""
        raise NotImplementedError

    def begin(self) -> None:
        if self._take():
            threading.Thread(target=self._to_the_end, daemon=True, name="parallel_state-gloo").start()

    def run_here(self) -> None:
        """Sees the work to its end in this thread, without a deadline; its error is kept for `wait`."""
        if self._take():
            self._to_the_end()
        self._done.wait()

    def _take(self) -> bool:
        """Returns True to the first caller, whose thread runs the work."""
        with self._lock:
            begun, self._begun = self._begun, True
            return not begun

    def wait(self) -> None:
        self.begin()
        try:
            until(self._ended, self._context, self._operation)
        except RuntimeError as late:
            if self._peer is None or isinstance(late, CommunicationError):
                raise
            raise TransferError(str(late), self._peer) from late
        error = self._error
        if error is None:
            return
        if self._peer is not None and isinstance(error, RuntimeError) and not isinstance(error, CommunicationError):
            raise TransferError(str(error), self._peer) from error
        raise error

    def is_completed(self) -> bool:
        return self._done.is_set()

    def _ended(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def _to_the_end(self) -> None:
        try:
            with torch.inference_mode():  # it writes into the caller's tensors, which may be inference tensors
                self._run()
        except BaseException as error:  # for `wait`, in the caller's thread
            self._error = error
        finally:
            self._done.set()


class WatchedByThread(ByThread):
    """A work whose wait can't be cut into slices: a point-to-point transfer, gloo's reduce_scatter."""

    def __init__(self, work: Work, context: GroupContext, operation: str, peer: int | None = None) -> None:
        super().__init__(context, operation, peer)
        self._work = work
        self._limit: timedelta | None = None

    def run_here(self) -> None:
        self._limit = _NO_LIMIT  # gloo closes the connection where a wait of its own times out
        super().run_here()

    def _run(self) -> None:
        limit = limit_of(self._context) if self._limit is None and self._peer is not None else self._limit
        if limit is None:
            self._work.wait()
        else:
            self._work.wait(limit)  # type: ignore[call-arg]


def limit_of(context: GroupContext) -> timedelta:
    """Returns the deadline of a transfer, which gloo knows none of by itself but that of its connecting."""
    return timedelta(seconds=context.timeout_s)


def until(ended: Callable[[float], bool], context: GroupContext, operation: str) -> None:
    """Waits for `ended(seconds)`, which waits so long at most, or until a rank of the failure domain has ended."""
    started = time.monotonic()
    while not ended(_SLICE.total_seconds()):
        if time.monotonic() - started > context.timeout_s + NOTICE_S:  # it may be several transfers, each with its own
            raise RuntimeError(f"{operation} timed out")
        if context.deaths() and not ended(NOTICE_S):
            raise died(context, operation, started)


def abandon(process_group: Any, peers: Iterable[int], tag: int) -> None:
    """Ends all waits of this rank in a gloo group, and lets its peers know at once that it won't go on.

    gloo closes all connections of a group where a wait has timed out; there is no other way to have it do that. On the
    connection to a peer that is gone already nothing times out, so each is tried.
    """
    for peer in peers:
        with contextlib.suppress(RuntimeError):
            process_group.recv([torch.empty(1, dtype=torch.uint8)], peer, tag).wait(_AT_ONCE)


def died(context: GroupContext, operation: str, started: float) -> CommunicationError:
    """Returns the error for an operation that was given up because ranks of the failure domain have ended."""
    deaths = context.deaths()
    elapsed = time.monotonic() - started
    who = "; ".join(f"global rank {death.rank} {death.reason}" for death in deaths)
    if any(death.certain for death in deaths):
        kind: type[CommunicationError] = PeerDiedError
    else:
        kind = HostUnreachableError if any(death.unreachable for death in deaths) else CollectiveTimeoutError
    return kind(
        f"{operation} of {context} failed after {elapsed:.3f} s: {who}. The group can't be used further; look at that "
        "rank's log",
        group=context.name,
        operation=operation,
        rank=context.rank,
        suspect_ranks=[death.rank for death in deaths],
        elapsed_s=elapsed,
        timeout_s=context.timeout_s,
    )


def all_died(context: GroupContext, operation: str, started: float, failure: CommunicationError) -> CommunicationError:
    """`failure`, which names one dead rank; where others have died with it, the error that names them all."""
    watcher = context.watcher
    if watcher is None:
        return failure
    deaths = watcher.await_death_of(context.failure_ranks, NEWS_S)
    if not deaths and watcher.watches(failure.suspect_ranks):  # else its death may only come to be known
        blame_the_dead(watcher, failure)
    known = len(deaths) <= len(failure.suspect_ranks) and all(death.certain for death in deaths)
    return failure if known else died(context, operation, started)


def blame_the_dead(watcher: Watcher, failure: CommunicationError) -> None:
    """A rank that lives and left the group left it, most likely, because of one that ended in another group."""
    deaths = watcher.deaths()
    if deaths:
        who = "; ".join(f"global rank {death.rank} {death.reason}" for death in deaths)
        failure.args = (f"{failure.args[0]}. Of the world, {who}",)
        failure.suspect_ranks = tuple(death.rank for death in deaths)


def attributed(
    context: GroupContext, operation: str, started: float, failure: CommunicationError
) -> CommunicationError:
    """The error for a connection that broke: by whose death, where that comes to be known in a moment.

    Where all of the group's ranks are watched and none has ended, one of them closed the connection because it gave up.
    """
    watcher = context.watcher
    if watcher is None:
        return failure
    if watcher.await_death_of(context.failure_ranks, NEWS_S):
        return died(context, operation, started)
    others = [rank for rank in context.ranks if rank != context.ranks[context.rank]]
    if not isinstance(failure, PeerDiedError) or not watcher.watches(others):
        return failure
    found = gave_up(context, failure)
    blame_the_dead(watcher, found)
    return found


def gave_up(context: GroupContext, failure: CommunicationError) -> CommunicationError:
    """`failure` by a connection that broke, where nobody has ended."""
    return CommunicationError(
        f"{failure.args[0]}. No rank of the group has ended: one gave up first, at its deadline or by an error of its "
        "own",
        group=context.name,
        operation=failure.operation,
        sequence=failure.sequence,
        rank=context.rank,
        suspect_ranks=failure.suspect_ranks,
        elapsed_s=failure.elapsed_s,
        timeout_s=failure.timeout_s,
    )
