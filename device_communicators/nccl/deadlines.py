"""A thread that looks after the streams of one group: what the device can't tell its caller, who is long gone.

A call only puts work on a stream. That a rank has ended, that the library below has failed in the background, that the
device doesn't get on: all of this shows later, and nobody may be asking. Then the thread calls its `abort`, so that the
kernels end and whoever waits for the device goes on; the group's next call raises what was found. Replays of a captured
call aren't seen here, so they have no deadline.
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
"""The time for an orderly end before it becomes an abort, and for an abort."""
_LOOK_S = 0.2
_PAUSE_S = 0.001

Began = tuple[str, float]
"""An operation, and when."""
FindFailure = Callable[[str, float], "CommunicationError | None"]
"""Of the oldest operation that isn't done, and when that began."""


class _Line:
    """The calls that were put on one stream: the oldest one that isn't known to be done, and the last one."""

    def __init__(self, make_marker: Callable[[], Marker]) -> None:
        self._markers = (make_marker(), make_marker())
        self._began: list[Began | None] = [None, None]
        """Of each marker; None: nothing is behind it. The first one stays until it is reached: a host that goes on
        putting work on a device that is stuck doesn't move its deadline."""
        self._oldest = 0
        self._lock = threading.Lock()

    def note(self, stream: int, began: Began) -> None:
        with self._lock:
            at = self._oldest if self._began[self._oldest] is None else 1 - self._oldest
            self._markers[at].record(stream)
            self._began[at] = began

    def oldest(self) -> Began | None:
        """Returns the oldest call that isn't known to be done; None if all are."""
        with self._lock:
            for _ in self._markers:
                began = self._began[self._oldest]
                if began is not None and not self._markers[self._oldest].is_reached():
                    return began
                self._began[self._oldest] = None
                if self._began[1 - self._oldest] is not None:
                    self._oldest = 1 - self._oldest
            return None


class Watch:
    """The thread, from its making until `close`."""

    def __init__(
        self,
        context: GroupContext,
        make_marker: Callable[[], Marker],
        enter_relaxed: Callable[[], bool],
        find_failure: FindFailure = lambda operation, since: None,
        abort: Callable[[], None] = lambda: None,
    ) -> None:
        """`find_failure` looks for errors that came up in the background; `abort` ends the kernels that wait."""
        self.failure: CommunicationError | None = None
        """The failure that was found; `abort` is called then."""
        self._context = context
        self._find_failure, self._abort = find_failure, abort
        self._make_marker = make_marker
        self._lines: dict[int, _Line] = {}
        self._inside: dict[int, Began] = {}
        """By thread."""
        self._enter_relaxed = enter_relaxed
        self._news = threading.Event()
        self._closed = False
        self._started = time.monotonic()
        self._thread = HelperThread("nccl", self._run)
        if context.watcher is not None:
            context.watcher.on_death.append(self._news.set)
        self._thread.start()

    def begin(self, operation: str) -> None:
        """Begins the deadline of a call into NCCL."""
        self._inside[threading.get_ident()] = operation, time.monotonic()

    def end(self, stream: int | None) -> None:
        """Ends a call; its deadline goes on for what it put on `stream`, if it did."""
        began = self._inside.pop(threading.get_ident(), None)
        if stream is not None and began is not None:
            line = self._lines.get(stream)
            if line is None:
                line = self._lines.setdefault(stream, _Line(self._make_marker))
            line.note(stream, began)

    def streams(self) -> list[int]:
        """Returns the streams that calls were put on, outside of captures."""
        return list(self._lines)

    def device_is_done(self) -> bool:
        """Returns True if all that was put on streams has run. False where the device can't be asked any more."""
        try:
            return all(line.oldest() is None for line in list(self._lines.values()))
        except RuntimeError:
            return False

    def drain(self, limit_s: float) -> bool:
        """Waits until all that was put on streams has run: before the end. False where it doesn't, or has failed."""
        deadline = time.monotonic() + min(limit_s, self._context.timeout_s)
        while self.failure is None and not self.device_is_done():
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
        return self.failure is None

    def close(self) -> None:
        """Ends the thread. Twice is fine."""
        self._closed = True
        # The group's methods would keep it, and its process groups, until the collector comes.
        self._find_failure, self._abort = (lambda operation, since: None), (lambda: None)
        self._news.set()
        if self._context.watcher is not None:
            with contextlib.suppress(ValueError):
                self._context.watcher.on_death.remove(self._news.set)
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        may_query = self._enter_relaxed()
        if not may_query:
            logger.warning(
                "%s has no deadline on the device: the CUDA runtime has no cudaThreadExchangeStreamCaptureMode",
                self._context,
            )
        while not self._closed:
            self._news.wait(_LOOK_S)
            self._news.clear()
            if self._closed:
                return
            try:
                failure = self._look(may_query)
            except Exception as error:  # of CUDA, whose context is lost
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
            f"the device of {context} can't be asked how far it is: {str(error).splitlines()[0]}. The group can't be "
            "used further; a kernel before it may have failed: run with CUDA_LAUNCH_BLOCKING=1",
            "nccl",
        )

    def _look(self, may_query: bool) -> CommunicationError | None:
        context = self._context
        operation, since = self._oldest(may_query) or ("nccl", self._started)
        if context.deaths():
            return died(context, operation, since)
        failure = self._find_failure(operation, since)
        if failure is not None:
            return failure
        elapsed_s = time.monotonic() - since
        if operation == "nccl" or elapsed_s < context.timeout_s:
            return None
        return context.failure(
            CollectiveTimeoutError,
            f"{operation} of {context} was not done on the device within {context.timeout_s:g} s. The group "
            "can't be used further; look at the ranks that are not in this call (their logs, `py-spy dump`), or raise "
            "the timeout",
            operation,
            elapsed_s=elapsed_s,
            timeout_s=context.timeout_s,
        )

    def _oldest(self, may_query: bool) -> Began | None:
        """Returns the operation that is under way for longest, in NCCL or on the device, and since when."""
        under_way: list[Began | None] = list(self._inside.values())
        if may_query:
            under_way += [line.oldest() for line in list(self._lines.values())]
        return min((began for began in under_way if began), key=lambda began: began[1], default=None)
