"""Waits of a start: for torch's calls that can't be interrupted, and for ranks of this host while ranks meet.

After the meeting the control plane reports exits (`device_communicators.liveness.health`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from typing import TypeVar

from device_communicators.base import exits
from device_communicators.base.helper_threads import HelperThread
from device_communicators.liveness.health import NOTICE_S, Watcher
from device_communicators.liveness.process_ends import ProcessEnds
from parallel_state.startup.interfaces import Address

T = TypeVar("T")

logger = logging.getLogger("parallel_state")

_LOOK_S = 0.2
_SLICE_S = 0.05


class Processes:
    """The processes of a start that this one can watch, by rank."""

    def __init__(self, own: Address) -> None:
        self._own_place = own
        self._ends = ProcessEnds()
        self._known: set[int] = set()
        self._ended: list[int] = []

    def see(self, places: Mapping[int, Address]) -> None:
        """Watches those of these ranks that aren't watched yet and whose process can be."""
        for rank, place in places.items():
            if rank in self._known or place.pid == self._own_place.pid or not place.pid.isdigit():
                continue
            if place.processes == self._own_place.processes != "":
                self._known.add(rank)
                self._open(rank, int(place.pid), place.born)

    def _open(self, rank: int, pid: int, began: str) -> None:
        try:
            self._ends.add(rank, pid, began)
        except ProcessLookupError:
            self._ended.append(rank)
        except OSError as error:  # no descriptor, or neither pidfds nor /proc: only the deadline
            logger.debug("rank %d can't be watched while it starts: %s", rank, error)

    def ended(self) -> list[int]:
        """Returns all that have ended so far."""
        self._ended += self._ends.wait(0.0)
        return sorted(self._ended)

    def close(self) -> None:
        self._ends.close()


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
