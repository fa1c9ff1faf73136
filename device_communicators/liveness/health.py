"""Notes the ranks that have ended: one thread per process watches the others and fills a table that waits look at.

Ranks on this host are watched by `process_ends`, hosts by the heartbeats of `heartbeat`.
Nobody asks here on a fast path: who waits looks at `deaths_of` between two slices of its wait. A rank that left on
purpose (`leave` in its own process) is no death: what it owed the others has been sent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from device_communicators.base import exits
from device_communicators.base.bounded_store import BoundedStore, StoreSilentError
from device_communicators.base.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    HostUnreachableError,
    PeerDiedError,
)
from device_communicators.base.helper_threads import Call, HelperThread
from device_communicators.liveness.condition import condition_of
from device_communicators.liveness.process_ends import CAN_WATCH_PROCESSES, ProcessEnds

logger = logging.getLogger("parallel_state")

NEWS_S = 0.5
"""The time after a transport's own error in which a death may come to be known: a kernel closes the connections of a
process before it tells of its end, and on a busy machine some time lies between."""
NOTICE_S = 0.2
"""The time after a death in which an operation may still be completed by what the dead rank sent before."""

_FAREWELL_S = 0.1
_TOGETHER_S = 0.1
"""Two that are killed together are told together: a machine with little time to spare ends them one after the other."""
_HOST_TOGETHER_S = 0.25
"""The same for ranks of another host, all of which may be ending."""


_PF_EXITING = 4
"""Of the flags in /proc/PID/stat."""


class WakeEvent:
    """Wakes a thread that polls `fileno()`: an eventfd, or a pipe where there is none. Nobody reads it."""

    def __init__(self) -> None:
        try:
            self._reader = self._writer = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except (AttributeError, OSError):  # another system; a sandbox
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)

    def fileno(self) -> int:
        return self._reader

    def set(self) -> None:
        os.write(self._writer, (1).to_bytes(8, sys.byteorder))  # what an eventfd takes

    def close(self) -> None:
        for descriptor in {self._reader, self._writer}:
            os.close(descriptor)


@dataclass(frozen=True)
class Death:
    """The end of a rank that nobody expected."""

    rank: int
    """Global."""
    reason: str
    """As in "global rank 3 {reason}"."""
    certain: bool = True
    """False for one that is only not heard of, or that gave up."""
    unreachable: bool = False
    """True for a rank whose host is not heard of."""
    at_s: float = field(default_factory=time.monotonic, compare=False)
    """On the monotonic clock of this host: since when it is known."""


def describe_deaths(deaths: Iterable[Death]) -> str:
    """Returns the deaths as errors name them: "global rank 3 has ended; global rank 5 has ended"."""
    return "; ".join(f"global rank {death.rank} {death.reason}" for death in deaths)


def kind_of_deaths(deaths: Iterable[Death], otherwise: type[CommunicationError]) -> type[CommunicationError]:
    """Returns the class of the error for a wait that these deaths ended.

    PeerDiedError if one of them is certain, HostUnreachableError if a host doesn't answer, else `otherwise`.
    """
    deaths = list(deaths)
    if any(death.certain for death in deaths):
        return PeerDiedError
    return HostUnreachableError if any(death.unreachable for death in deaths) else otherwise


class FailureDomain:
    """The global ranks whose death fails a group: those of its root, or of the replicas that it touches.

    A rank may wait for a live one that has failed in another group and won't come: so the death of any rank with which
    the group's ranks work together ends its waits.
    """

    def __init__(self, ranks: Iterable[int], root: str = "", *, is_root: bool = False) -> None:
        """`root`: the name of what the ranks belong to, the same on all of them; the world's is empty.

        `is_root`: whether the group is what its root begins with, so that each part of it is a root of its own.
        """
        self.ranks = frozenset(ranks)
        self.root = root
        self.is_root = is_root


def is_ending(pid: int) -> bool:
    """Returns True for a process whose threads all have a SIGKILL to come or are in their exit, which takes a while."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it has ended, or there is no /proc
        return False
    return all(_thread_is_ending(f"/proc/{pid}/task/{thread}/stat") for thread in threads)


def _thread_is_ending(stat: str) -> bool:
    try:
        with open(stat, encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(") ")[2].split()  # those of proc(5) from the third on
    except OSError:
        return True  # it has ended
    flags, pending = int(fields[6]), int(fields[28])
    return bool(flags & _PF_EXITING) or bool(pending >> (signal.SIGKILL - 1) & 1)


def answer_within(limit_s: float, question: Callable[[], Any]) -> Any:
    """Returns what `question()` does, asked by a thread; None if it takes longer, or its store or network fails."""
    call = Call(question)
    if call.wait(time.monotonic() + limit_s, lambda: False):
        with contextlib.suppress(RuntimeError, ValueError, AttributeError):  # no answer; no store
            return call.result()
    return None


class Farewells:
    """Records in the store, over a connection of its own, which ranks leave on purpose."""

    def __init__(self, store: Any) -> None:
        """Binds the store of the farewells, or None."""
        self._store = None if store is None else BoundedStore.of(store)

    def announce(self, rank: int) -> None:
        with contextlib.suppress(RuntimeError):
            if self._store is not None:
                store, key = self._store.within(_FAREWELL_S), f"left/{rank}"
                store.set(key, "1")
                store.check([key])  # a set has no answer; this answer proves that the key is set

    def was_announced(self, rank: int) -> bool:
        """Returns True if the rank announced its end; False if the store, gone with it perhaps, is silent."""
        with contextlib.suppress(RuntimeError):
            return self._store is not None and self._store.within(_FAREWELL_S).check([f"left/{rank}"])
        return False


class Watcher:
    """The ranks of one world, as far as this process can tell that they are gone."""

    def __init__(self) -> None:
        exits.prepare()
        self._deaths: dict[int, Death] = {}
        self._news = threading.Condition()
        self._ends = ProcessEnds()  # by global rank
        self._pids: dict[int, int] = {}  # global rank -> PID
        self._linked: set[int] = set()
        self.linked_apart: list[list[int]] = []
        """The ranks by host where those of several are connected since the start."""
        self.news_s = NEWS_S
        """The time from a transport's own error to the news of a death; more while a world starts."""
        self.bound_s = NEWS_S
        """The time from a broken connection to the news of a death: over hosts, the heartbeats' limit."""
        self.has_left: Callable[[int], bool] = lambda rank: False
        """Returns True if a rank of this host, global, ended on purpose."""
        self._left: set[int] = set()
        self._thread: threading.Thread | None = None
        self._wake: WakeEvent | None = None
        self._pid = os.getpid()
        self.open_store: Callable[[], BoundedStore | None] | None = None
        """Gives a connection of its own to the world's store, for questions after a failure."""
        self.on_death: list[Callable[[], None]] = []
        """Told of each death, in the thread that noticed it: for waits that can't look here."""
        self.stalls: Any = None
        """The record of this process' long waits, for the others."""
        self.connections: WeakKeyDictionary[Any, Sequence[int]] = WeakKeyDictionary()
        """Data connections to other hosts, with `silent_peers`, and the global ranks of their groups."""
        self.on_close: list[Callable[[], None]] = []
        """Other sources of the table, which end with it."""

    @property
    def pids(self) -> dict[int, int]:
        """Returns the PIDs of the other ranks of this host, by global rank."""
        return dict(self._pids)

    def ask_store(self, question: Callable[[Any], Any], limit_s: float) -> Any:
        """Returns `question(store)` over a connection of its own; None without a store, or an answer in time."""
        open_store = self.open_store
        if open_store is None:
            return None

        def ask() -> Any:
            store = open_store()
            return None if store is None else question(store)

        return answer_within(limit_s, ask)

    def watch_processes(self, pids: dict[int, int], has_left: Callable[[int], bool]) -> None:
        """Watches processes of this host, by global rank; once. `has_left` tells who went on purpose."""
        self.has_left = has_left
        self._pids = dict(pids)
        for rank, pid in pids.items():
            try:
                self._ends.add(rank, pid)
            except ProcessLookupError:
                self.report(rank, f"(pid {pid}) has ended")
            except OSError as error:  # no descriptor, or neither pidfds nor /proc: only the deadline
                logger.warning("rank %d can't be watched (%s): its end is noticed at deadlines only", rank, error)
        if self._ends.ranks:
            self._wake = WakeEvent()
            self._thread = HelperThread("health", self._watch)
            self._thread.start()

    def note_left(self, rank: int) -> None:
        """Notes that a rank of another host left its world on purpose."""
        self._left = self._left | {rank}

    def left(self, ranks: Iterable[int]) -> list[int]:
        """Returns the ranks among these global ranks, of any host, that are known to have left on purpose."""
        return [rank for rank in ranks if rank in self._left or self.has_left(rank)]

    def watches(self, ranks: Iterable[int]) -> bool:
        """Returns True if the exit of each of these ranks is detected at once, by its process or by a link."""
        return set(ranks) <= self._ends.ranks | self._linked

    def explain(self, ranks: Iterable[int]) -> str:
        """Returns how the ends of these global ranks are noticed where the system has no pidfds; else nothing."""
        if CAN_WATCH_PROCESSES:
            return ""
        how = "by their connections" if self.watches(ranks) else "by heartbeats"
        return f"ends of ranks are noticed {how}: {sys.platform} has no pidfds"

    def is_neighbour(self, rank: int) -> bool:
        """Returns True for a rank of this host whose process is watched: it is dead only if its process has exited."""
        return rank in self._ends.ranks

    def link(self, rank: int, up: bool) -> None:
        """Notes that a connection to a rank of another host tells of its end, or no longer does."""
        with self._news:
            self._linked = self._linked | {rank} if up else self._linked - {rank}

    def report(self, rank: int, reason: str, certain: bool = True, *, unreachable: bool = False) -> None:
        """Notes a death; the first reason stays, but a certain one replaces a guess."""
        with self._news:
            known = self._deaths.get(rank)
            if known is not None and (known.certain or not certain):
                return
            self._deaths[rank] = Death(rank, reason, certain, unreachable)
            self._news.notify_all()
        for hear in list(self.on_death):
            try:
                hear()
            except Exception:  # the others hear of it all the same, and so do all of the next death
                logger.exception("what hears of the death of rank %d failed", rank)

    def deaths_of(self, ranks: Iterable[int]) -> list[Death]:
        """Returns the deaths of these global ranks, as they became known. Cheap while there are none."""
        if not self._deaths:
            return []
        wanted = ranks if isinstance(ranks, (set, frozenset)) else set(ranks)
        return [death for death in list(self._deaths.values()) if death.rank in wanted]

    def deaths(self) -> list[Death]:
        """Returns the certain deaths of the world, by rank."""
        return [death for _, death in sorted(self._deaths.items()) if death.certain]

    def await_death_of(self, ranks: Iterable[int], timeout_s: float | None = None) -> list[Death]:
        """Waits for a death of these ranks, and others that follow at once; returns `deaths_of` them.

        Left out, `timeout_s` is `news_s`: for a connection that broke.
        """
        ranks = list(ranks)
        timeout_s = self.news_s if timeout_s is None else timeout_s
        with self._news:
            self._news.wait_for(lambda: bool(self.deaths_of(ranks)), timeout_s)
        found = self.deaths_of(ranks)
        if found:
            is_local = all(self.is_neighbour(death.rank) for death in found) and not self._linked.intersection(ranks)
            together_s = _TOGETHER_S if is_local else _HOST_TOGETHER_S
            time.sleep(max(0.0, max(death.at_s for death in found) + together_s - time.monotonic()))
            self._report_ending(set(ranks))
        return self.deaths_of(ranks)

    def _report_ending(self, ranks: set[int]) -> None:
        """Reports what the kernel is ending already: until a large process has ended, seconds may go by.

        And what has ended without the thread having had the time to say so.
        """
        ends = self._ends
        ended = ends.ended()
        if ends is not self._ends:  # closed meanwhile
            return
        for rank, pid in self._pids.items():
            is_late = rank in ranks and rank not in self._deaths and (rank in ended or is_ending(pid))
            if is_late and not self.has_left(rank):
                self.report(rank, "has ended")

    def explain_lost_store(
        self, store: BoundedStore, error: Exception, ranks: Iterable[int]
    ) -> tuple[type[CommunicationError], str, list[int]]:
        """Returns the class, the cause in words and the suspects of the error for a failed `store` operation.

        The cause is a death of `ranks` or of the rank that serves the store, if one is known. A connection can break
        before the exit of its process is detected, so this waits for that exit. It doesn't wait if the store is silent:
        the deadline has passed.
        """
        server = store.served_by
        watched = set(ranks) | ({server} if server is not None else set())
        is_silent = isinstance(error, StoreSilentError)
        deaths = self.await_death_of(watched, 0.0 if is_silent else None)
        if deaths:
            return kind_of_deaths(deaths, CommunicationError), describe_deaths(deaths), [each.rank for each in deaths]
        text = str(error).splitlines()[0]
        if not is_silent:
            text = f"{store} closed the connection or can't be reached ({text})"
        pid = self._pids.get(-1 if server is None else server)
        if pid is not None and (obstacle := condition_of(pid)):
            text += f"; global rank {server} is {obstacle}"
        suspects = [] if server is None else [server]
        return CollectiveTimeoutError if is_silent else CommunicationError, text, suspects

    def close(self) -> None:
        """Ends the thread. Twice is fine."""
        self.open_store = None  # whose server, if it is this process, must be able to go
        with contextlib.ExitStack() as stack:  # whatever one of them raises, the others are done, the last one first
            stack.callback(self._end)
            closing, self.on_close = self.on_close, []
            for call in closing:
                stack.callback(call)

    def _end(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None and self._wake is not None and self._pid == os.getpid():
            self._wake.set()
            thread.join(1.0)
        ends, self._ends = self._ends, ProcessEnds()
        ends.close()
        self._pids = {}
        self.has_left = lambda rank: False
        wake, self._wake = self._wake, None
        if wake is not None:
            wake.close()

    def _watch(self) -> None:
        wake, ends = self._wake, self._ends
        if wake is None:
            return
        left = set(ends.ranks)
        while left and self._thread is not None:  # None: `close` has woken this thread
            for rank in ends.wait(None, [wake.fileno()]):
                left.discard(rank)
                if not self.has_left(rank):
                    self.report(rank, "has ended")
