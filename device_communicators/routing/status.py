"""Asks other ranks which call they are in and which line their program runs, and answers such questions.

A failed rank includes its own state in its question, because it can exit before it is asked. If a process is stopped,
ranks that can watch its PID answer instead.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from device_communicators.base import settings
from device_communicators.base.helper_threads import Call as ThreadCall
from device_communicators.base.helper_threads import HelperThread
from device_communicators.calls.recorder import Operation
from device_communicators.liveness import stacks
from device_communicators.liveness.health import Watcher
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.reports import Call, Report
from device_communicators.routing.states import MOST_ASKED, SILENT, State, describe_states
from device_communicators.routing.waits import (
    STARTED,
    WAITS,
    call_in_words,
    group_key,
    state_at,
    state_of,
    state_without_call,
)

logger = logging.getLogger("parallel_state")

_IDLE_S = 1.0
"""A rank that has made no call for 1 s reports the line of its main thread."""
_KEEP_S = 3.0
"""A rank reports its failed call for the timeout + 3 s, because peers can fail later."""
_ANSWER_S = 0.3
_REPORTS_S = 0.6
"""Peers detect a failure up to 0.2 s apart. A rank whose report doesn't arrive within 0.6 s wasn't in the call."""
_MOST_GROUPS = 64
_LAST_OPERATIONS = 3
_MOST_THREADS = 16
_MOST_SHOWN = 256


class _Failed:
    """The reports and states that other ranks sent about one failed group, by global rank."""

    def __init__(self) -> None:
        self.reports: dict[int, Report] = {}
        self.states: dict[int, State] = {}


class Calls(Protocol):
    """A group whose last and running calls `Status` reports. Implemented by `Route` and by groups of the
    torch.distributed backend.
    """

    @property
    def context(self) -> GroupContext: ...
    def operations(self) -> list[Operation]: ...
    def operations_under_way(self) -> list[Operation]: ...


class Start(NamedTuple):
    where: str
    """Address of the rendezvous."""
    world_size: int
    awaited: Callable[[], str]


class Status:
    def __init__(self, watcher: Watcher, rank: int) -> None:
        self._watcher = watcher
        self.rank = rank
        self._failed_groups: OrderedDict[str, _Failed] = OrderedDict()
        self._changed = threading.Condition(threading.RLock())
        self._failed: State | None = None
        self._failed_at_s = 0.0
        self._keep_until_s = 0.0
        self._waited_at_s = time.monotonic()
        """When this rank was last in a call."""
        self._logged = 0.0, 0.0
        """Start and length of the last wait that was logged."""
        self._began_s = time.monotonic()
        self.start: Start | None = None
        """The event that this rank awaits at start-up; None once start-up is complete."""
        watcher.answers.update(
            state=self._answer_state,
            report=self._answer_report,
            describe=lambda rank, _: json.dumps(self.describe()).encode(),
            elsewhere=lambda rank, _: self._answer_elsewhere,
        )
        watcher.on_look.append(self._look)

    def keep(self, failed: State, timeout_s: float) -> None:
        with self._changed:
            self._of(failed.key).states[self.rank] = failed
        self._failed, self._failed_at_s = failed, time.monotonic()
        self._keep_until_s = self._failed_at_s + timeout_s + _KEEP_S

    def state(self, key: str = "") -> State:
        """Returns the call in which group `key` failed on this rank. If it hasn't failed, returns what this rank is
        doing. Thread-safe.
        """
        if (start := self.start) is not None:
            place = stacks.in_words(stacks.frames_of(threading.main_thread().ident))
            return State(obstacle=f"at start, waiting for {start.awaited()}{f', at {place}' if place else ''}")
        with self._changed:
            failed = self._failed_groups.get(key, _Failed()).states.get(self.rank)
        if failed is not None:
            return failed
        found, now = self._longest_wait(), time.monotonic()
        if found is not None:
            return state_of(*found)
        last, failed = self._last_operation(), self._failed if now < self._keep_until_s else None
        if failed is not None and (last is None or last[1].started_s <= self._failed_at_s):
            return failed
        called_at_s = 0.0 if last is None else last[1].ended_s or last[1].started_s
        idle_s = now - max(called_at_s, self._waited_at_s, self._failed_at_s)
        if last is None or idle_s >= _IDLE_S:
            return state_without_call(idle_s if idle_s >= _IDLE_S else 0.0)
        context, operation = last
        place = stacks.in_words(stacks.frames_of(threading.main_thread().ident))
        # A blocking call without an end or a waiting thread has failed.
        has_failed = operation.ended_s is None and operation.name not in STARTED
        state = state_at(context, operation, place)
        return state if has_failed else state._replace(key="", idle_s=-1)

    def describe(self) -> dict[str, Any]:
        now, start = time.monotonic(), self.start
        waits = {thread: operation for thread, (_, operation) in list(WAITS.items()) if operation.ended_s is None}
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "began_s": self._began_s,
            "state": self.state(),
            "world": self._world_ranks if start is None else list(range(start.world_size)),
            "start": start and start.where,
            "pids": {str(rank): pid for rank, pid in self._watcher.pids.items()},
            "processes": {str(rank): self._watcher.process_of(rank) for rank in self._world_ranks[:_MOST_SHOWN]},
            "groups": [
                {
                    "group": group.context.name,
                    "ranks": group.context.ranks,
                    "last": [
                        {"operation": f"{call_in_words(group.context, each)} number {each.sequence}",
                         "began_s": now - each.started_s,
                         "took_s": None if each.ended_s is None else each.ended_s - each.started_s}
                        for each in group.operations()[-_LAST_OPERATIONS:]
                    ],
                }
                for group in _live_groups()
            ],
            "threads": [
                {"name": thread.name, "waits": str(waits[thread.ident]) if thread.ident in waits else "",
                 "frames": stacks.frames_of(thread.ident)[: stacks.MOST_FRAMES]}
                for thread in threading.enumerate()[:_MOST_THREADS]
                if not thread.name.startswith("parallel_state-")
            ],
        }  # fmt: skip

    def _answer_elsewhere(self, reply: Callable[[bytes], None]) -> None:
        near = {self.rank, *self._watcher.pids}
        far = [rank for rank in self._world_ranks if rank not in near][:_MOST_SHOWN]
        HelperThread("states", lambda: reply(json.dumps(self.ask_states(far)).encode())).start()

    @property
    def _world_ranks(self) -> tuple[int, ...]:
        own = (group.context for group in _live_groups() if group.context.watcher is self._watcher)
        return max((context.ranks for context in own), key=len, default=())

    def _last_operation(self) -> tuple[GroupContext, Operation] | None:
        began = [(group.context, each) for group in _live_groups() for each in group.operations()[-1:]]
        return max(began, key=lambda each: each[1].started_s, default=None)

    def _longest_wait(self) -> tuple[GroupContext, Operation, int | None] | None:
        waits: list[tuple[GroupContext, Operation, int | None]] = [
            (*wait, thread) for thread, wait in list(WAITS.items())
        ]
        for group in _live_groups():
            waits += [(group.context, each, threading.main_thread().ident) for each in group.operations_under_way()]
        waits = [wait for wait in waits if wait[1].ended_s is None]
        return min(waits, key=lambda each: each[1].started_s, default=None)

    def ask_states(self, ranks: Sequence[int], key: str = "", own: State | None = None) -> dict[int, State]:
        """Asks the global `ranks` for their states. Returns those that arrive within 0.3 s, by rank. `own`: what this
        rank was doing when group `key` failed; peers store this.
        """
        with self._changed:
            known = self._of(key).states if key else {}
            states = {rank: known[rank] for rank in ranks if rank in known and rank != self.rank}
        here = {rank: State(obstacle=text) for rank, text in self._watcher.conditions(ranks).items()}
        asked = [rank for rank in ranks if rank not in here]
        question = json.dumps([key, own, asked]).encode()
        replies = self._watcher.ask([*asked, *self._helpers_of(asked)], "state", question, _ANSWER_S)
        for rank, reply in replies.items():
            state, obstacles = _state_in(reply)
            here.update({rank: State(obstacle=text) for rank, text in obstacles.items()})
            if rank in asked and (state is not None or reply is None):
                states[rank] = state or states.get(rank, State(obstacle=SILENT))
        return states | here

    def _helpers_of(self, asked: Sequence[int]) -> list[int]:
        """Returns further ranks to ask: for each rank in `asked`, one that can watch its process by PID. Omits ranks
        that this rank or another of `asked` can watch.
        """
        helpers: list[int] = []
        for rank in asked:
            near = self._watcher.neighbours_of(rank)
            if self.rank not in near and not set(near) & {*asked, *helpers}:
                helpers += near[:1]
        return helpers

    def _answer_state(self, rank: int, question: bytes) -> bytes:
        key, state, asked = json.loads(question)
        if state is not None:
            with self._changed:
                self._of(key).states[rank] = State(*state)
        return json.dumps([self.state(key), self._watcher.conditions(asked)]).encode()

    def exchange(self, key: str, ranks: Sequence[int], own: Report) -> dict[int, Report]:
        """Sends `own`, this rank's report about the failed group `key`, to the global `ranks`. Returns their reports
        that arrive within 0.6 s, by rank.
        """
        until = time.monotonic() + _REPORTS_S
        self.publish(key, ranks, own)
        with self._changed:
            reports = self._of(key).reports
            self._changed.wait_for(lambda: reports.keys() >= set(ranks), until - time.monotonic())
            return {rank: reports[rank] for rank in ranks if rank in reports}

    def publish(self, key: str, ranks: Sequence[int], own: Report) -> None:
        """Sends `own` to the global `ranks` in a helper thread, which takes their reports from the replies."""

        def send() -> None:
            for rank, reply in self._watcher.ask(ranks, "report", _packed(key, own), _REPORTS_S).items():
                self._take_report(rank, reply)

        with self._changed:
            self._of(key).reports[self.rank] = own
        ThreadCall(send)

    def _answer_report(self, rank: int, question: bytes) -> bytes:
        key = self._take_report(rank, question)
        with self._changed:
            own = self._of(key).reports.get(self.rank)
        return b"" if own is None else _packed(key, own)

    def _take_report(self, rank: int, packed: bytes | None) -> str:
        try:
            key, *fields = json.loads(packed or b'[""]')
            report = None
            if fields:
                sequence, call, timed_out, before = fields
                report = Report(sequence, Call(*call), timed_out, before and Call(*before))
        except (TypeError, ValueError):  # another version's, or truncated
            return ""
        if report is None:
            return ""
        with self._changed:
            self._of(str(key)).reports[rank] = report
            self._changed.notify_all()
        return str(key)

    def _of(self, key: str) -> _Failed:
        found = self._failed_groups.setdefault(key, _Failed())
        self._failed_groups.move_to_end(key)
        if len(self._failed_groups) > _MOST_GROUPS:
            self._failed_groups.popitem(last=False)
        return found

    def _look(self) -> None:
        """Logs this rank's longest wait once it exceeds PARALLEL_STATE_SLOW_S. Called every 0.4 s."""
        found, now = self._longest_wait(), time.monotonic()
        if found is None or found[0].watcher is not self._watcher:  # another status logs it
            return
        self._waited_at_s = now
        waited_s = now - found[1].started_s
        is_logged = abs(found[1].started_s - self._logged[0]) < _IDLE_S / 2  # clocks of calls in C++ differ a little
        if waited_s >= (2 * self._logged[1] if is_logged else settings.SLOW_S.get()):
            self._logged = found[1].started_s, waited_s
            self._log(found[0], found[1], waited_s)

    def _log(self, context: GroupContext, operation: Operation, waited_s: float) -> None:
        own = State(group_key(context), call=call_in_words(context, operation))
        others = context.other_ranks if operation.peer < 0 else [context.ranks[operation.peer]]
        text = operation.call_text or str(operation)

        def write() -> None:
            states = self.ask_states(others[:MOST_ASKED], own.key)
            awaited = [rank for rank in others if not states.get(rank, State()).is_in_call_of(own)] or others
            known = describe_states({rank: states[rank] for rank in awaited if rank in states}, context.name)
            silent = [str(rank) for rank in awaited if rank not in states]
            if silent:
                known.append(f"the state of global rank{'s' * (len(silent) > 1)} {', '.join(silent)} is unknown")
            logger.warning(
                "%s of %s has waited for %.1f s (timeout %g s): %s",
                text, context, waited_s, context.timeout_s, "; ".join(known),
            )  # fmt: skip

        HelperThread("states", write).start()


def _state_in(reply: bytes | None) -> tuple[State | None, dict[int, str]]:
    try:
        state, seen = json.loads(reply or b"[null, {}]")
        return None if state is None else State(*state), {int(rank): str(text) for rank, text in seen.items()}
    except (AttributeError, TypeError, ValueError):
        return None, {}


def _packed(key: str, report: Report) -> bytes:
    call, before = (each and (each.text, each.key) for each in (report.call, report.before))
    return json.dumps([key, report.sequence, call, report.timed_out, before]).encode()


def watch(group: Calls) -> None:
    """Includes the calls of `group` in the state that this rank reports to other ranks."""
    context, watcher = group.context, group.context.watcher
    if watcher is None or context.size == 1 or not watcher.watches(context.ranks):
        return
    if watcher.status is None:
        watcher.status = Status(watcher, context.global_rank)
    with _GROUPS_LOCK:
        _GROUPS.add(group)


def _live_groups() -> list[Calls]:
    with _GROUPS_LOCK:
        groups = list(_GROUPS)
    return [
        each for each in groups if each.context.watcher is not None and each.context.watcher.watches(each.context.ranks)
    ]


_GROUPS: weakref.WeakSet[Calls] = weakref.WeakSet()
"""Groups of all worlds, because a rank's call can be in any of them."""
_GROUPS_LOCK = threading.Lock()
