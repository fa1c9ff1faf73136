"""The watch over a start: each of its waits ends when a rank ends or gives up, and at the latest at its deadline.

Ranks publish their process ids first in a meeting (`rendezvous`). From then on, ranks in the same PID namespace watch
each other's processes. A rank that detects an exit, or gives up itself, publishes that in the store. The world's
`Watcher` collects these reports, and all waits poll it.

What belongs elsewhere: deaths after the start (`device_communicators.liveness.health`, `heartbeat`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch.distributed as dist

from device_communicators.base import exits
from device_communicators.base.bounded_store import LAST_WORD_S, BoundedStore
from device_communicators.base.helper_threads import HelperThread
from device_communicators.liveness.health import NEWS_S, NOTICE_S, WakeEvent, Watcher
from device_communicators.liveness.process_ends import ProcessEnds
from parallel_state.startup.interfaces import Address

T = TypeVar("T")

logger = logging.getLogger("parallel_state")

_LOOK_S = 0.2
"""Between two looks into the store; more in large worlds, whose ranks share one store."""
_LOOKS_PER_S = 1024
_SLICE_S = 0.05
_NEWS_S = 1.0
"""With a look into the store: the time in which the news of a death goes from its host's ranks to those of others."""
_FAILED, _ENDED = "failed", "ended"


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

    def watches(self, rank: int) -> bool:
        return rank in self._ends.ranks and rank not in self._ended

    def ended(self, wait_s: float = 0.0, *wake: int) -> list[int]:
        """Returns all that have ended so far; waits so long for one more, or until a descriptor is readable."""
        self._ended += self._ends.wait(wait_s, wake)
        return sorted(self._ended)

    def close(self) -> None:
        self._ends.close()


class StartWatch:
    """Hears, from the ranks' meeting until the start is over, of ranks that end or give up, and reports them.

    A thread of its own, as the main one may be anywhere, with a connection of its own to the store; where that can't
    give one, this rank hears of processes of its own host only.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        processes: Processes,
        deadline: float,
        served_by: int | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        """`served_by`: the rank that serves the store, if one does. `watcher`: one that listens already."""
        self._own: BoundedStore | None = BoundedStore.of(store)
        self.watcher = watcher or Watcher()
        """The world's, from its beginning."""
        self.deadline = deadline
        self._store: BoundedStore | None = self._own.connect_anew()
        self._rank = rank
        self._world_size = world_size
        self._processes = processes
        self._served_by = served_by
        self._look_s = max(_LOOK_S, world_size / _LOOKS_PER_S)
        self.watcher.news_s = _NEWS_S + self._look_s
        self._stage = 0
        self._reported: set[int] = set()
        self._has_failed = False
        """True once the first failure has been read; further ends of ranks may follow it."""
        self._ends_read = 0
        self._wake = WakeEvent()
        self._closed = False
        self._thread = HelperThread("start", self._run)
        self._thread.start()

    def follow(self, places: Mapping[int, Address]) -> None:
        """Watches the ranks by the control plane from now on, for as long as the world lives."""
        self.watcher.follow(self._rank, {rank: place.for_control for rank, place in places.items()})

    def stage(self, number: int) -> None:
        """Tells how far this rank has come: who is furthest behind at the deadline is who the others waited for."""
        self._stage = number
        with contextlib.suppress(dist.DistError):
            if self._own is not None:
                self._own.within(LAST_WORD_S).set(f"stage/{self._rank}", str(number))

    def give_up(self, error: BaseException) -> None:
        """Tells the others that this rank can't go on, unless it is one of them that it can't go on without."""
        if not self.watcher.deaths_of(range(self._world_size)):
            publish_failure(self._own, self._rank, error)
        if self._rank == self._served_by:
            time.sleep(2 * self._look_s)  # the store goes with this rank: the others are to hear why

    def close(self) -> None:
        """Ends the watch: the start is over. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        self.watcher.news_s = NEWS_S
        self._wake.set()
        self._thread.join(1.0)
        self._store = self._own = None
        if not self._thread.is_alive():  # else a server that doesn't answer holds it, which leaves it as it is
            self._wake.close()
            self._processes.close()

    def _run(self) -> None:
        listening = True
        while not self._closed:
            self._report_ended(self._look_s)
            listening = listening and not self._closed and self._read_failure()
            if time.monotonic() > self.deadline:
                self._report_ranks_behind()
                return

    def _report_ended(self, wait_s: float) -> None:
        """Reports processes that have ended; waits so long for one."""
        for rank in self._processes.ended(wait_s, self._wake.fileno()):
            if rank not in self._reported and not self.watcher.has_left(rank) and not self._closed:
                self.watcher.report(rank, "has ended during the start")
                self._publish({"rank": rank, "reason": "has ended during the start", "ended": True})
            self._reported.add(rank)

    def _publish(self, what: dict[str, Any]) -> None:
        store = self._store
        with contextlib.suppress(dist.DistError):
            if store is not None:
                store = store.within(LAST_WORD_S)
                if store.add(f"{_ENDED}/of/{what['rank']}", 1) == 1:  # one neighbour publishes it
                    store.set(f"{_ENDED}/{store.add(_ENDED, 1)}", json.dumps(what))
                store.compare_set(_FAILED, "", json.dumps(what))

    def _read_failure(self) -> bool:
        """Reads the first failure, and all exits of ranks. Returns False if no more can arrive."""
        if self._store is None:
            return True
        store = self._store.within(self._look_s)  # this thread also watches processes
        try:
            if not self._has_failed:
                if not store.check([_FAILED]):
                    return True
                self._take_in(json.loads(store.get(_FAILED)))
                self._has_failed = True
            for number in range(self._ends_read + 1, store.add(_ENDED, 0) + 1):
                if not store.check([f"{_ENDED}/{number}"]):  # another rank is still writing it
                    break
                self._take_in(json.loads(store.get(f"{_ENDED}/{number}")))
                self._ends_read = number
        except dist.DistNetworkError:
            if not self._has_failed:  # else the server gave up because of that
                self._report_lost_server()
            return False
        except dist.DistError:
            return True
        return True

    def _take_in(self, failure: dict[str, Any]) -> None:
        if failure["rank"] != self._rank:
            self.watcher.report(failure["rank"], failure["reason"], certain=failure.get("ended", False))

    def _report_lost_server(self) -> None:
        """Reports the rank that served the store: by its process, where this thread can watch that, as it ends.

        Without a word on others, whose end can't be heard of any more. One that has left on purpose, right after its
        own start, did so when this rank's was all but over: the time given here is for that, too.
        """
        served_by = self._served_by
        if served_by is None or served_by == self._rank:
            return
        until = time.monotonic() + (NEWS_S if self._processes.watches(served_by) else NOTICE_S)
        while not self._closed and served_by not in self._reported and (left_s := until - time.monotonic()) > 0:
            self._report_ended(left_s)
        if not self._closed and not self.watcher.has_left(served_by):
            self.watcher.report(served_by, "has closed the store of the start, which it serves")

    def _report_ranks_behind(self) -> None:
        if self._store is None:
            return
        store = self._store.within(LAST_WORD_S)
        with contextlib.suppress(dist.DistError):
            keys = {rank: f"stage/{rank}" for rank in range(self._world_size) if rank != self._rank}
            published = [rank for rank, key in keys.items() if store.check([key])]
            stages = dict(zip(published, map(int, store.multi_get([keys[rank] for rank in published])), strict=True))
            for rank in keys:
                if stages.get(rank, -1) < self._stage and not self._closed:
                    self.watcher.report(rank, "did not go on with the start until its deadline", certain=False)


def publish_failure(store: BoundedStore | None, rank: int, error: BaseException) -> None:
    """Tells the watches of other ranks that `rank` gives up its start; the first failure counts."""
    text = str(error).partition("\n")[0]
    failure = {"rank": rank, "reason": f"gave up its start ({type(error).__name__}: {text})"[:500]}
    with contextlib.suppress(dist.DistError):
        if store is not None:
            store.within(LAST_WORD_S).compare_set(_FAILED, "", json.dumps(failure))


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
