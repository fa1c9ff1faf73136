"""Runs a thread that detects failures of a group's NCCL calls.

A call only enqueues work, so no thread of the program is waiting when the work fails. The thread aborts the kernels,
and the next call raises the failure. Replays of a captured call have no deadline.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from device_communicators.base.errors import CollectiveTimeoutError, CommunicationError
from device_communicators.base.helper_threads import HelperThread
from device_communicators.cuda.streams import Marker
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import died

logger = logging.getLogger("parallel_state")

GOODBYE_S = 10.0
"""A communicator that isn't closed within this time is aborted. The abort has the same timeout."""
_POLL_S = 0.2
_PAUSE_S = 0.001

PendingCall = tuple[str, float]
FindFailure = Callable[[str, float], "CommunicationError | None"]


def not_done(context: GroupContext, operation: str, started: float, where: str = "") -> CollectiveTimeoutError:
    text = (
        f"{operation} of {context} was not done{where} within {context.timeout_s:g} s. This group is unusable now; "
        "check the ranks that are missing from this call (their logs, NCCL_DEBUG=INFO, `py-spy dump`), or raise the "
        "timeout"
    )
    return context.failure(CollectiveTimeoutError, text, operation, started=started)


class _StreamCalls:
    def __init__(self, make_marker: Callable[[], Marker]) -> None:
        self._markers = (make_marker(), make_marker())
        self._pending: list[PendingCall | None] = [None, None]
        """The oldest and the latest of the calls that perhaps aren't done. A new call replaces only the latest, so that
        the deadline of the oldest isn't extended.
        """
        self._oldest = 0
        self._lock = threading.Lock()

    def add(self, stream: int, call: PendingCall) -> None:
        with self._lock:
            at = self._oldest if self._pending[self._oldest] is None else 1 - self._oldest
            self._markers[at].record(stream)
            self._pending[at] = call

    def oldest(self) -> PendingCall | None:
        with self._lock:
            for _ in self._markers:
                call = self._pending[self._oldest]
                if call is not None and not self._markers[self._oldest].is_reached():
                    return call
                self._pending[self._oldest] = None
                if self._pending[1 - self._oldest] is not None:
                    self._oldest = 1 - self._oldest
            return None


class Watch:
    def __init__(
        self,
        context: GroupContext,
        make_marker: Callable[[], Marker],
        enter_relaxed: Callable[[], bool],
        find_failure: FindFailure = lambda operation, since: None,
        abort: Callable[[], None] = lambda: None,
    ) -> None:
        self.failure: CommunicationError | None = None
        """The failure that the thread detected, set before the thread calls `abort`."""
        self._context = context
        self._find_failure, self._abort = find_failure, abort
        self._make_marker = make_marker
        self._streams: dict[int, _StreamCalls] = {}
        self._in_nccl: dict[int, PendingCall] = {}
        """Calls that haven't returned from NCCL, by thread."""
        self._enter_relaxed = enter_relaxed
        self._wake = threading.Event()
        self._closed = False
        self._started = time.monotonic()
        self._thread = HelperThread("nccl", self._run)
        if context.watcher is not None:
            context.watcher.on_death.append(self._wake.set)
        self._thread.start()

    def begin(self, operation: str) -> None:
        self._in_nccl[threading.get_ident()] = operation, time.monotonic()

    def end(self, stream: int | None) -> None:
        """Records that this thread's NCCL call returned. The deadline still applies to the call's work on `stream`;
        None: it enqueued no work.
        """
        call = self._in_nccl.pop(threading.get_ident(), None)
        if stream is not None and call is not None:
            calls = self._streams.get(stream)
            if calls is None:
                calls = self._streams.setdefault(stream, _StreamCalls(self._make_marker))
            calls.add(stream, call)

    def streams(self) -> list[int]:
        return list(self._streams)

    def device_is_done(self) -> bool:
        try:
            return all(calls.oldest() is None for calls in list(self._streams.values()))
        except RuntimeError:
            return False

    def drain(self, limit_s: float) -> bool:
        """Waits until the device has finished all calls. Returns True, or False after a failure, after `limit_s` or
        after the group's timeout.
        """
        deadline = time.monotonic() + min(limit_s, self._context.timeout_s)
        while self.failure is None and not self.device_is_done():
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
        return self.failure is None

    def close(self) -> None:
        self._closed = True
        # The methods would keep the group and its process groups alive until a garbage collection.
        self._find_failure, self._abort = (lambda operation, since: None), (lambda: None)
        self._wake.set()
        if self._context.watcher is not None:
            with contextlib.suppress(ValueError):
                self._context.watcher.on_death.remove(self._wake.set)
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        may_query = self._enter_relaxed()
        if not may_query:
            logger.warning(
                "%s has no deadline for work on the device: the CUDA runtime lacks cudaThreadExchangeStreamCaptureMode",
                self._context,
            )
        while not self._closed:
            self._wake.wait(_POLL_S)
            self._wake.clear()
            if self._closed:
                return
            try:
                failure = self._poll(may_query)
            except Exception as error:  # CUDA's context is lost
                failure = self._lost(error)
            if failure is not None:
                self.failure = failure
                logger.error("%s", failure)
                self._abort()
                return

    def _lost(self, error: Exception) -> CommunicationError:
        context = self._context
        return context.failure(
            CommunicationError,
            f"CUDA failed on the device of {context}: {str(error).splitlines()[0]}. This group is unusable now; an "
            "earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1",
            "nccl",
        )

    def _poll(self, may_query: bool) -> CommunicationError | None:
        context = self._context
        operation, since = self._oldest(may_query) or ("nccl", self._started)
        if context.deaths():
            return died(context, operation, since)
        failure = self._find_failure(operation, since)
        if failure is not None:
            return failure
        if operation == "nccl" or time.monotonic() - since < context.timeout_s:
            return None
        return not_done(context, operation, since, " on the device")

    def _oldest(self, may_query: bool) -> PendingCall | None:
        pending: list[PendingCall | None] = list(self._in_nccl.values())
        if may_query:
            pending += [calls.oldest() for calls in list(self._streams.values())]
        return min((call for call in pending if call), key=lambda call: call[1], default=None)
