"""Waits for torch's calls that can't be interrupted, until a rank exits or the start's deadline."""

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

_LOOK_S = 0.2
_SLICE_S = 0.05


class AbandonedError(RuntimeError):
    """A call was left behind, as a rank that it waits for has ended, or at the deadline."""


def run_watched(
    call: Callable[[Callable[[], bool]], T],
    watcher: Watcher,
    ranks: Iterable[int],
    deadline: float,
    has_failed: Callable[[], bool] = lambda: False,
) -> T:
    """Runs `call(is_abandoned)` in a thread, which is left behind when one of `ranks` ends, and at the deadline.

    And where `has_failed`, which is asked now and then, says that another rank has given up. torch's calls that connect
    ranks neither hear of their ends, nor can they be broken off. One that ends after it was left behind asks
    `is_abandoned` and takes back what it did.
    """
    ranks = list(ranks)
    abandoned = threading.Event()
    future = in_thread(lambda: call(abandoned.is_set), "connect")
    asked = time.monotonic()
    while not wait([future], _SLICE_S).done:
        now = time.monotonic()
        late, failure = now > deadline, False
        if now - asked > _LOOK_S:
            asked, failure = now, has_failed()
        if late or failure or watcher.deaths_of(ranks):
            if not wait([future], NOTICE_S).done:
                abandoned.set()
                raise AbandonedError("the deadline of the start has passed" if late else "a rank has ended or failed")
            break
    return future.result()


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Runs `call` in a HelperThread of this name, which nobody waits for at the end of the process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    exits.prepare()
    HelperThread(name, run).start()
    return future
