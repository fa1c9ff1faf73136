"""Long waits, made known while they last: to the other ranks, and from the soft limit on in the log.

Collectives compare themselves; a transfer, or a collective that was started, meets nobody who could tell. So a thread
of each process looks whether it has waited for long, and writes to the store in which call, and from which line; where
it has made no call for long, it writes where its main thread is. A rank that comes to its deadline, or to the soft
limit (PARALLEL_STATE_SLOW_S), reads what the others wrote, and asks those of its own host, whose answers are newer
(`liveness.questions`). A process that is stopped can't tell; those that wait on its host do, by what the kernel says of
it. Nothing is concluded before: a rank that is waited for may still come, in another thread, or after a collective that
doesn't wait for all.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import weakref
from typing import Any

from device_communicators.base import settings
from device_communicators.base.bounded_store import BoundedStore
from device_communicators.base.helper_threads import HelperThread
from device_communicators.calls.recorder import Operation
from device_communicators.liveness import questions, stacks
from device_communicators.liveness.condition import condition_of
from device_communicators.liveness.health import Watcher
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.route import Route
from device_communicators.routing.states import (
    ASK_S,
    MOST_ASKED,
    SLOW_S,
    STARTED,
    WAITS,
    State,
    call_in_words,
    describe_states,
    group_key,
    read_states,
    state_of,
    state_without_call,
    states_of_ranks,
)

logger = logging.getLogger("parallel_state")

_LOOK_S = 0.4
_KEEP_S = 3.0
"""The time for which others may read of a wait that has ended: those that fail with it ask a moment later."""
_MOVED_S = 1.0
"""How often a rank without calls tells that it has moved on, in worlds of up to so many ranks: one store serves all."""
_TELLERS_PER_S = 256
_LAST_OPERATIONS = 3
_MOST_THREADS = 16


class Stalls:
    """Publishes this process' long waits to the others, and logs those that are beyond the soft limit."""

    def __init__(self, watcher: Watcher, rank: int) -> None:
        """`rank`: this process', global."""
        self._watcher = watcher
        self.rank = rank
        self._routes: weakref.WeakSet[Route] = weakref.WeakSet()
        self._store: BoundedStore | None = None
        self._published: State | None = None
        self._published_at = 0.0
        self._moved_s = _MOVED_S
        self._failed: State | None = None
        self._keep_until_s = 0.0
        self._failed_at_s = 0.0
        self._calls = 0
        self._last_call_s = time.monotonic()
        self._logged = 0.0, 0.0
        """The beginning of the wait that the log has, and its length when it was logged last."""
        self._obstacles: dict[int, str] = {}
        """Told by this process of ranks of its host, which can't tell by themselves."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, route: Route) -> None:
        self._routes.add(route)
        self._moved_s = max(self._moved_s, route.context.size / _TELLERS_PER_S)
        if self._thread is None:
            self._thread = HelperThread("stalls", self._run)
            self._thread.start()
            _PROCESS.add(self)

    def keep(self, failed: State, timeout_s: float) -> None:
        """Leaves a wait that has failed, and is published, as it is: who came later to it fails later."""
        self._failed = self._published = failed
        self._failed_at_s = time.monotonic()
        self._keep_until_s = self._failed_at_s + timeout_s + _KEEP_S

    def close(self) -> None:
        _PROCESS.remove(self)
        self._stop.set()
        if self._thread is not None:
            self._thread.join(ASK_S)

    def state(self, key: str = "") -> State:
        """Returns what this rank is at now, or the wait that has failed in the group of `key`. From any thread."""
        found, now = self._longest_wait(), time.monotonic()
        failed = self._failed if now < self._keep_until_s else None
        if failed is not None and failed.key == key:
            return failed
        if found is not None:
            return state_of(*found)
        last = self._last_operation()
        if failed is not None and not self._has_gone_on(last):
            return failed
        idle_s = now - self._last_call_s
        is_idle = idle_s >= SLOW_S and self._calls == self._calls_so_far()
        if last is None or is_idle:
            return state_without_call(idle_s if is_idle else 0.0)
        context, operation = last
        place = stacks.in_words(stacks.frames_of(threading.main_thread().ident))
        # One that has no end, and that no thread waits for: it has failed, and its thread is making the error.
        has_failed = operation.ended_s is None and operation.name not in STARTED
        key = group_key(context) if has_failed else ""
        return State(key, context.name, call_in_words(context, operation), place, idle_s=-1)

    def describe(self) -> dict[str, Any]:
        """Returns `state`, and all else that may be asked of this rank, as JSON can hold it."""
        now = time.monotonic()
        waits = {thread: operation for thread, (_, operation) in list(WAITS.items()) if operation.ended_s is None}
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "state": self.state(),
            "world": self._world_ranks,
            "pids": {str(rank): pid for rank, pid in self._watcher.pids.items()},
            "groups": [
                {
                    "group": route.context.name,
                    "ranks": route.context.ranks,
                    "last": [
                        {"operation": f"{call_in_words(route.context, each)} number {each.sequence}",
                         "began_s": now - each.started_s,
                         "took_s": None if each.ended_s is None else each.ended_s - each.started_s}
                        for each in route.operations()[-_LAST_OPERATIONS:]
                    ],
                }
                for route in list(self._routes)
            ],
            "threads": [
                {"name": thread.name, "waits": str(waits[thread.ident]) if thread.ident in waits else "",
                 "frames": stacks.frames_of(thread.ident)[: stacks.MOST_FRAMES]}
                for thread in threading.enumerate()[:_MOST_THREADS]
                if not thread.name.startswith("parallel_state-")
            ],
        }  # fmt: skip

    def published(self) -> dict[int, State]:
        """Returns what the ranks of this world have published."""
        return self._watcher.ask_store(lambda store: read_states(store, self._world_ranks), ASK_S) or {}

    @property
    def _world_ranks(self) -> tuple[int, ...]:
        return max((route.context.ranks for route in list(self._routes)), key=len, default=())

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            with contextlib.suppress(RuntimeError):  # a store that is gone; a set that changed meanwhile
                self._look()
        self._store = None  # whose server, if it is this process, must be able to go

    def _look(self) -> None:
        found, now = self._longest_wait(), time.monotonic()
        if self._obstacles and found is None:
            self._publish_obstacles()
        if found is not None:
            self._last_call_s = now
            if now - found[1].started_s >= SLOW_S:
                self._publish_wait(*found, now)
                return
        elif self._has_called():
            self._last_call_s = now
        elif now < self._keep_until_s and not self._has_gone_on(self._last_operation()):
            return
        elif now - self._last_call_s >= SLOW_S:
            self._publish_idleness(now)
            return
        if self._published is not None and now - self._published_at > _KEEP_S:
            self._publish(None)

    def _publish_wait(self, context: GroupContext, operation: Operation, thread: int | None, now: float) -> None:
        if self._published is None or not self._published.is_in_call_of(
            State(group_key(context), call=call_in_words(context, operation))
        ):
            self._publish(state_of(context, operation, thread))
        self._published_at = now
        self._publish_obstacles()
        waited_s = now - operation.started_s
        is_logged = abs(operation.started_s - self._logged[0]) < SLOW_S / 2  # clocks of calls in C++ differ a little
        if waited_s >= (2 * self._logged[1] if is_logged else settings.SLOW_S.get()):
            self._logged = operation.started_s, waited_s
            self._log(context, operation, waited_s)

    def _publish_obstacles(self) -> None:
        """Publishes what keeps ranks of this host from telling by themselves, and takes it back when it is over."""
        found = {rank: condition_of(pid) for rank, pid in self._watcher.pids.items()}
        for rank, obstacle in found.items():
            if obstacle != self._obstacles.get(rank, ""):
                self._set(f"obstacle/{rank}", obstacle)
        self._obstacles = {rank: obstacle for rank, obstacle in found.items() if obstacle}

    def _publish_idleness(self, now: float) -> None:
        """Publishes where the main thread is, after a second without calls, and later where it has moved on."""
        idle_s = now - self._last_call_s
        is_first = self._published_at < self._last_call_s
        if is_first or now - self._published_at >= self._moved_s:
            state = state_without_call(idle_s)
            if self._published is None or is_first or state[:-1] != self._published[:-1]:
                self._publish(state)
            self._published_at = now

    def _has_called(self) -> bool:
        """Returns True if a call began since this was asked last."""
        before, self._calls = self._calls, self._calls_so_far()
        return self._calls != before

    def _calls_so_far(self) -> int:
        return sum(each.calls for route in list(self._routes) for each in route.traffic().values())

    def _last_operation(self) -> tuple[GroupContext, Operation] | None:
        """Returns the operation that began last, of those whose group is there still."""
        began = [(route.context, each) for route in list(self._routes) for each in route.operations()[-1:]]
        return max(began, key=lambda each: each[1].started_s, default=None)

    def _has_gone_on(self, last: tuple[GroupContext, Operation] | None) -> bool:
        """Returns True if an operation began after the wait that has failed."""
        return last is not None and last[1].started_s > self._failed_at_s

    def _publish(self, state: State | None) -> None:
        if self._set(f"stall/{self.rank}", json.dumps(state)):
            self._published = state

    def _set(self, key: str, value: str) -> bool:
        """Writes to the store, from the thread of this object."""
        if self._store is None:
            open_store = self._watcher.open_store
            self._store = None if open_store is None else open_store()
        if self._store is not None:
            self._store.set(key, value)
        return self._store is not None

    def _longest_wait(self) -> tuple[GroupContext, Operation, int | None] | None:
        """Returns what the thread that has waited longest waits for, and the thread."""
        waits: list[tuple[GroupContext, Operation, int | None]] = [
            (*wait, thread) for thread, wait in list(WAITS.items())
        ]
        for route in list(self._routes):
            waits += [(route.context, each, threading.main_thread().ident) for each in route.operations_under_way()]
        waits = [wait for wait in waits if wait[1].ended_s is None]
        return min(waits, key=lambda each: each[1].started_s, default=None)

    def _log(self, context: GroupContext, operation: Operation, waited_s: float) -> None:
        """Says in the log for whom an operation waits, and what those do."""
        own = State(group_key(context), call=call_in_words(context, operation))
        asked = context.ranks[:MOST_ASKED]
        published = {} if self._store is None else read_states(self._store, asked)
        states = states_of_ranks(
            published, {rank: pid for rank, pid in self._watcher.pids.items() if rank in asked}, own.key
        )
        others = context.other_ranks
        if operation.peer >= 0:
            others = [context.ranks[operation.peer]]
        awaited = [rank for rank in others if not states.get(rank, State()).is_in_call_of(own)] or others
        known = describe_states({rank: states[rank] for rank in awaited if rank in states}, context)
        silent = [str(rank) for rank in awaited if rank not in states]
        if silent:
            known.append(f"nothing is known of global rank{'s' * (len(silent) > 1)} {', '.join(silent)}")
        logger.warning(
            "%s of %s has waited for %.1f s (timeout %g s): %s",
            operation.call_text or operation, context, waited_s, context.timeout_s, "; ".join(known),
        )  # fmt: skip


class _Process:
    """The worlds of this process, and the thread that answers for them."""

    def __init__(self) -> None:
        self._worlds: list[Stalls] = []
        self._answers: questions.AnswerThread | None = None
        self._lock = threading.Lock()

    def add(self, world: Stalls) -> None:
        with self._lock:
            self._worlds.append(world)
            if self._answers is None:
                self._answers = questions.AnswerThread(self._answer)

    def remove(self, world: Stalls) -> None:
        with self._lock:
            self._worlds = [each for each in self._worlds if each is not world]
            answers = None if self._worlds else self._answers
            if answers is not None:
                self._answers = None
        if answers is not None:
            answers.close()

    def _answer(self, question: str) -> Any:
        """Answers `state KEY`, `describe` or `published` for the newest world."""
        worlds, (what, _, key) = self._worlds, question.partition(" ")
        if not worlds:
            return None
        if what == "state":
            return worlds[-1].state(key)
        asked = {"describe": worlds[-1].describe, "published": worlds[-1].published}
        return asked[what]() if what in asked else None


_PROCESS = _Process()


def watch(route: Route) -> None:
    """Tells of long waits of a group from now on, where its ranks can ask each other."""
    context = route.context
    watcher = context.watcher
    if watcher is None or watcher.open_store is None or context.size == 1 or context.simulated or context.fake:
        return
    found = watcher.stalls
    if found is None:
        found = watcher.stalls = Stalls(watcher, context.global_rank)
        watcher.on_close.append(found.close)
    found.add(route)
