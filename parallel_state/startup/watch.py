"""Runs torch calls in threads, because the calls can't be interrupted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import TypeVar

from device_communicators.base import exits
from device_communicators.base.helper_threads import HelperThread
from device_communicators.liveness.health import NOTICE_S, Watcher

T = TypeVar("T")

_POLL_S = 0.2
_SLICE_S = 0.05


class AbandonedError(RuntimeError): ...


def run_watched(
    call: Callable[[Callable[[], bool]], T],
    watcher: Watcher,
    ranks: Iterable[int],
    deadline: float,
    has_failed: Callable[[], bool] = lambda: False,
) -> T:
    """Runs `call(is_abandoned)` in a thread and returns its result.

    Raises AbandonedError if one of `ranks` exits, `has_failed()` returns True, or the deadline passes. `call` then
    continues in its thread, and must undo its work once `is_abandoned()` returns True.
    """
    ranks = list(ranks)
    abandoned = threading.Event()
    future = in_thread(lambda: call(abandoned.is_set), "connect")
    polled_at = time.monotonic()
    while not wait([future], _SLICE_S).done:
        now = time.monotonic()
        late, failure = now > deadline, False
        if now - polled_at > _POLL_S:
            polled_at, failure = now, has_failed()
        if late or failure or watcher.deaths_of(ranks):
            if not wait([future], NOTICE_S).done:
                abandoned.set()
                raise AbandonedError(
                    "the start's deadline passed" if late else "a rank exited or failed during the start"
                )
            break
    return future.result()


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Runs `call` in a thread that doesn't delay the exit of the process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    exits.prepare()
    HelperThread(name, run).start()
    return future
