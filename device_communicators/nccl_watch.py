"""A thread that looks after the NCCL communicators of one group: what NCCL can't tell its caller, who is long gone.

A call only puts work on a stream. That a rank has ended, that NCCL has failed in the background, that the device
doesn't get on: all of this shows later, and nobody may be asking. Then the thread aborts the communicators, so that the
kernels end and whoever waits for the device goes on; the group's next call raises what was found. Replays of a captured
call aren't seen here, so they have no deadline.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from device_communicators.base import GroupContext
from device_communicators.errors import CollectiveTimeoutError, CommunicationError
from device_communicators.nccl_handle import Handle
from device_communicators.nccl_library import IN_PROGRESS, SUCCESS
from device_communicators.waiting import died

logger = logging.getLogger("parallel_state")

_LOOK_S = 0.2


class Progress(Protocol):
    """How far the device has come."""

    def record(self, stream: int) -> None:
        """From now on: behind what is on the stream."""

    def is_reached(self) -> bool: ...


class Watch:
    """The thread, from its making until `close`."""

    def __init__(
        self,
        context: GroupContext,
        handles: Callable[[], Sequence[Handle]],
        make_marker: Callable[[], Progress],
        allow_queries: Callable[[], bool],
    ) -> None:
        self.failure: CommunicationError | None = None
        """What was found; the communicators are aborted then."""
        self._context = context
        self._handles = handles
        self._make_marker = make_marker
        self._markers: dict[int, Progress] = {}
        self._inside: tuple[str, float] | None = None
        self._noted: dict[int, tuple[str, float]] = {}
        self._allow_queries = allow_queries
        self._news = threading.Event()
        self._closed = False
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True, name="parallel_state-nccl")
        if context.watcher is not None:
            context.watcher.on_death.append(self._news.set)
        self._thread.start()

    def begin(self, operation: str) -> None:
        """A call goes into NCCL: its deadline begins."""
        self._inside = operation, time.monotonic()

    def end(self, stream: int | None) -> None:
        """It has come back, and has put an operation on `stream`, for which the deadline goes on; None: on none."""
        began, self._inside = self._inside, None
        if stream is not None and began is not None:
            marker = self._markers.get(stream)
            if marker is None:
                marker = self._markers[stream] = self._make_marker()
            marker.record(stream)
            self._noted[stream] = began

    def device_is_done(self) -> bool:
        """Whether all that was put on streams has run."""
        return all(marker.is_reached() for marker in list(self._markers.values()))

    def close(self) -> None:
        """Ends the thread. Twice is fine."""
        self._closed = True
        self._news.set()
        if self._context.watcher is not None:
            with contextlib.suppress(ValueError):
                self._context.watcher.on_death.remove(self._news.set)
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        may_query = self._allow_queries()
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
            failure = self._look(may_query)
            if failure is not None:
                self.failure = failure
                logger.error("%s", failure)
                for handle in self._handles():
                    handle.abort()
                return

    def _look(self, may_query: bool) -> CommunicationError | None:
        context = self._context
        operation, since = self._oldest(may_query) or ("nccl", self._started)
        if context.watcher is not None and context.watcher.deaths_of(context.ranks):
            return died(context, operation, since)
        for handle in self._handles():
            state = handle.state()
            if state not in (SUCCESS, IN_PROGRESS):
                return handle.error(operation, state, since)
        elapsed_s = time.monotonic() - since
        if operation == "nccl" or elapsed_s < context.timeout_s:
            return None
        return CollectiveTimeoutError(
            f"{operation} of {context} was not done on the device within {context.timeout_s:g} s. The group "
            "can't be used further; look at the ranks that are not in this call (their logs, `py-spy dump`), or raise "
            "the timeout",
            group=context.name,
            operation=operation,
            rank=context.rank,
            elapsed_s=elapsed_s,
            timeout_s=context.timeout_s,
        )

    def _oldest(self, may_query: bool) -> tuple[str, float] | None:
        """The operation that is under way for longest, in NCCL or on the device, and since when."""
        under_way = [] if self._inside is None else [self._inside]
        if may_query:
            noted = list(self._noted.items())
            under_way += [began for stream, began in noted if not self._markers[stream].is_reached()]
        return min(under_way, key=lambda began: began[1], default=None)
