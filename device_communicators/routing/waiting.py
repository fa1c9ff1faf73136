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

from device_communicators.base.errors import CommunicationError
from device_communicators.base.helper_threads import run_in_thread
from device_communicators.calls.work import TransferError, Work
from device_communicators.liveness.health import NOTICE_S
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import died

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
        try:
            self._wait()
        except Exception:
            raise
        except BaseException:  # Ctrl-C, or of a signal's handler
            self._leave_behind()
            raise

    def _leave_behind(self) -> None:
        """Has a thread see to the end of it: who lets go of a process group last waits for what is under way there."""
        work, cpu_group = self._work, self._context.cpu_group

        def see_to_its_end(_: object = cpu_group) -> None:
            with contextlib.suppress(RuntimeError):
                work.wait(_NO_LIMIT)  # type: ignore[call-arg]

        run_in_thread(see_to_its_end)

    def _wait(self) -> None:
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
        """Waits a moment more: what the dead rank sent before may still be on its way."""
        try:
            self._work.wait(timedelta(seconds=NOTICE_S))  # type: ignore[call-arg]
        except RuntimeError as error:
            raise died(self._context, self._operation, started) from error

    def is_completed(self) -> bool:
        return self._work.is_completed()


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
        """Runs in the thread."""
        raise NotImplementedError

    def begin(self) -> None:
        if self._take():
            run_in_thread(self._run_to_end)

    def run_in_this_thread(self) -> None:
        """Sees the work to its end in this thread, without a deadline; its error is kept for `wait`."""
        if self._take():
            self._run_to_end()
        self._done.wait()

    def _take(self) -> bool:
        """Returns True to the first caller, whose thread runs the work."""
        with self._lock:
            begun, self._begun = self._begun, True
            return not begun

    def wait(self) -> None:
        self.begin()
        try:
            until(self._done.wait, self._context, self._operation)
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

    def _run_to_end(self) -> None:
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

    def run_in_this_thread(self) -> None:
        self._limit = _NO_LIMIT  # gloo closes the connection where a wait of its own times out
        super().run_in_this_thread()

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
            process_group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, tag).wait(_AT_ONCE)
