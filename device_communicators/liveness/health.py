"""Records which ranks of the world died. The control plane reports deaths to a `Watcher`, and waiting calls poll the
`Watcher`.

A rank that left on purpose doesn't count as dead, because it has sent all data that its peers wait for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch

from device_communicators.base import logs, settings
from device_communicators.base.bounded_store import BoundedStore, StoreSilentError
from device_communicators.base.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    HostUnreachableError,
    ParallelStateError,
    PeerDiedError,
    ResourceLimitError,
    format_ranks,
    plain,
)
from device_communicators.base.helper_threads import Call, prepare_exit
from device_communicators.base.host import is_loopback
from device_communicators.base.member import GroupMember
from device_communicators.base.torch_internals import all_gather_base
from device_communicators.control.plane import (
    MOST_VALUE_BYTES,
    Answer,
    Change,
    ControlError,
    Endpoint,
    Member,
    Verdict,
    World,
)
from device_communicators.liveness.condition import condition_of

logger = logging.getLogger("parallel_state")

_DEATH_CONFIRM_S = 0.5
"""After a connection broke, wait this long for the report of the exit: the kernel closes connections first."""
NOTICE_S = 0.2
"""Time to wait after a death, because data that the rank sent before can still complete an operation."""

_TOGETHER_S = 0.1
"""Deaths within this time are reported in one error: on a busy machine, ranks that are killed
together exit one by one.
"""
_HOST_TOGETHER_S = 0.25
"""As `_TOGETHER_S`, for ranks of another host."""
LOOPBACK = "127.0.0.1"
_MOST_ASKED = 2
_BEATS_IN_LIMIT = 4
_ADVICE = "check the network between the hosts"
_WITHOUT_THEM = "Call reinitialize() on the remaining ranks, or restart all"
_OTHER_BRANCH = "Check if a rank failed or took another branch"
_LENGTH = struct.Struct("<I")
_SLICE = timedelta(milliseconds=50)


@dataclass(frozen=True)
class Death:
    rank: int
    """Global rank."""
    reason: str
    """Text that completes "global rank 3 {reason}"."""
    certain: bool = True
    """False if the rank sends nothing but perhaps runs, or if it reported its own failure."""
    unreachable: bool = False
    """True if the rank's host doesn't respond."""
    stopped: bool = False
    """True if the host responds but the rank doesn't run."""
    at_s: float = field(default_factory=time.monotonic, compare=False)


def describe_deaths(deaths: Iterable[Death]) -> str:
    return "; ".join(f"global rank {death.rank} {death.reason}" for death in deaths)


def kind_of_deaths(deaths: Iterable[Death], otherwise: type[CommunicationError]) -> type[CommunicationError]:
    deaths = list(deaths)
    if any(death.certain for death in deaths):
        return PeerDiedError
    if any(death.unreachable for death in deaths):
        return HostUnreachableError
    return CollectiveTimeoutError if any(death.stopped for death in deaths) else otherwise


class FailureDomain:
    """The global ranks whose death makes a group fail.

    Some can be outside of the group: if they die, a member may fail in another group and never make its call in this
    group.
    """

    def __init__(self, ranks: Iterable[int], root: str = "", *, is_root: bool = False) -> None:
        """`ranks`: global. `root`: the domain's name, equal on all its ranks; "" for the whole world. `is_root`: True
        if a sub-group gets a new failure domain; else the sub-group keeps this domain.
        """
        self.ranks = frozenset(ranks)
        self.root = root
        self.is_root = is_root


def answer_within(limit_s: float, question: Callable[[], Any]) -> Any:
    call = Call(question)
    if call.wait(time.monotonic() + limit_s):
        with contextlib.suppress(RuntimeError, ValueError, AttributeError):
            return call.result()
    return None


class Place(NamedTuple):
    """The process and host of a rank. Unknown fields are empty. `began`: the process's start time. `endpoint`: its
    control plane's.

    Processes can connect over loopback if their `network` is equal, and watch each other by PID if their `processes`
    are equal.
    """

    host: str
    network: str
    processes: str
    pid: int
    began: str
    endpoint: Endpoint | None

    @property
    def domain(self) -> str:
        """Returns a text that is equal for processes that can watch each other by PID; "" if none can watch this
        process.

        Processes in different network namespaces get different texts, so that a network failure between them is
        detected.
        """
        return f"{self.processes}/{self.network}" if self.processes else ""


def find_unreachable(places: Mapping[int, Place]) -> tuple[int, str] | None:
    spans_hosts = len({place.network for place in places.values()}) > 1
    for rank, place in sorted(places.items()):
        if place.endpoint is None:
            return rank, "has no control plane"
        if spans_hosts and is_loopback(place.endpoint.host):
            return rank, f"can be reached from its own host only, at {place.endpoint.host}"
    return None


class UnmetError(Exception):
    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.kind)
        self.verdict = verdict


class Watcher:
    def __init__(self) -> None:
        prepare_exit()
        self._deaths: dict[int, Death] = {}
        self._news = threading.Condition()
        self._world: World | None = None
        self._rank = -1
        self._places: dict[int, Place] = {}
        """Includes this rank. Empty before `follow`."""
        self.problem = "the ranks have not met yet"
        """Why there is no control plane. Read this only if there is none."""
        self.limit_s = max(settings.HEARTBEAT_LIMIT_S.get(), _BEATS_IN_LIMIT * settings.HEARTBEAT_S.get())
        """A host that sends nothing for this time counts as unreachable."""
        self.pids: dict[int, int] = {}
        """PIDs of this host's ranks, by global rank. Never changed in place."""
        self._gathered: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.has_left: Callable[[int], bool] = lambda rank: False
        """Returns True if a global rank of this host left on purpose."""
        self._left: set[int] = set()
        self._pid = os.getpid()
        self.answers: dict[str, Callable[[int, bytes], Answer]] = {}
        """Functions that answer questions, by topic. Each gets the asking global rank (-1: a process outside the world)
        and the payload, and must be quick.
        """
        self.on_look: list[Callable[[], None]] = [self._look_at_connections]
        self.on_death: list[Callable[[], None]] = []
        """Called after a death, in the thread that reports it."""
        self.status: Any = None
        self.connections: WeakKeyDictionary[Any, Sequence[int]] = WeakKeyDictionary()
        """Maps data connections to other hosts (with a method `silent_peers`) to their group's global ranks."""
        self.on_close: list[Callable[[], None]] = []
        """Called by `close`, in reverse order."""
        self._stores: dict[int, BoundedStore] = {}
        """Stores by serving rank, because torch's groups don't keep them alive."""
        self._name = ""
        """Set by `join`, else empty."""
        self._all = [self]
        """The watcher that opened the control plane, then those that share it."""

    @property
    def endpoint(self) -> Endpoint | None:
        return None if self._world is None else self._world.endpoint

    def listen(self, library: Any, address: str) -> Endpoint | None:
        """Opens the control plane. Returns its endpoint, or None if that fails. `library`: the compiled library, or a
        text: why it is unavailable. `address`: this host's address, as peers use it.
        """
        if self._world is None:
            try:
                if isinstance(library, str):
                    raise ControlError(library)
                self._world = World(
                    library,
                    address or LOOPBACK,
                    beat_s=settings.HEARTBEAT_S.get(),
                    limit_s=self.limit_s,
                )
            except ControlError as error:
                self.problem = str(error)
        return self.endpoint

    def answer_guests(self) -> None:
        """Starts a thread that answers requests of debugging tools. Call this before `follow`, so that tools can
        examine a rank that still waits for others to start.
        """
        if self._world is not None:
            with contextlib.suppress(ResourceLimitError):  # `follow` raises it and reports it to peers
                self._world.start_thread(self._answer, self._look)

    def follow(self, rank: int, places: Mapping[int, Place]) -> None:
        """Starts to watch all ranks of the world. Each rank calls this once, with its own `rank` and the same `places`,
        by global rank.

        If peers can't reach some rank's control plane, no rank watches, and each host logs a warning.
        """
        world, unreachable = self._world, find_unreachable(places)
        if unreachable or world is None:
            if world is not None and unreachable:
                self.problem = "rank {} {}".format(*unreachable)
            if logs.is_first_of_host():
                logger.warning(
                    "exits of ranks are detected at deadlines, or when a gloo connection breaks: %s", self.problem
                )
            self._leave()
            return
        members = [
            Member(each, place.domain, place.pid, place.began, place.endpoint)
            for each, place in sorted(places.items())
            if place.endpoint is not None
        ]
        self._rank, self._places = rank, dict(places)  # before `meet`, whose callbacks need them
        try:
            world.meet(members, self._take_in, self._answer, self._look)
        except BaseException as error:
            why = str(error).partition("\n")[0]
            self.give_up(f"gave up its start ({type(error).__name__}: {why})")
            self._places = {}
            raise

    def share(self) -> None:
        """Lets groups of the torch.distributed backend use this watcher. Close these groups before this watcher."""
        _SHARED.add(self)

    def join(self, other: Watcher, name: str) -> None:
        """Makes this watcher use the control plane of `other`. This watcher's `give_up` then fails only groups that use
        this watcher. Closing `other` closes this watcher.

        Each rank calls this with the same new `name`, and then `gather`, which waits for all ranks: a rank ignores a
        `give_up` that arrives before its `join`.
        """

        def take_failure(rank: int, text: bytes) -> bytes:
            self.report(rank, text.decode(), certain=False)
            return b""

        self._world, self._rank, self._places, self.problem = other._world, other._rank, other._places, other.problem
        self._name, self._all, self.answers[name] = name, other._all, take_failure
        self._all.append(self)  # from here on it gets changes; the earlier ones follow
        self._left = self._left | other._left
        self._deaths.update((rank, death) for rank, death in other._deaths.items() if rank not in self._deaths)

    @classmethod
    def shared_by(cls, ranks: Iterable[int]) -> Watcher | None:
        return next((each for each in list(_SHARED) if each.watches(ranks)), None)

    def ask(
        self,
        ranks: Iterable[int],
        topic: str,
        payload: bytes,
        timeout_s: float,
    ) -> dict[int, bytes | None]:
        """Sends a question to the global `ranks`. Returns the replies by rank, with None if only a rank's Python code
        doesn't reply, and without ranks whose process doesn't run.

        `topic`: a key of the peers' `answers`, or empty to find out which processes run. `payload`: the question.
        """
        world, places, scope = self._world, self._places, f"{self._name}|" if self._name else ""
        question = f"{scope}{topic}".encode() + b"\0" + payload if topic else b""
        gone = self._left | {rank for rank, death in self._deaths.items() if death.certain or death.unreachable}
        asked = [rank for rank in ranks if rank in places and rank != self._rank and rank not in gone]
        try:
            return {} if world is None else world.ask(asked, question, timeout_s)
        except OSError:  # no memory: as if no process replied
            return {}

    def is_silent(self, rank: int) -> bool:
        """Returns True if the process of the global `rank` sends no reply within 0.5 s: it is probably stopped."""
        return rank in self._places and rank != self._rank and rank not in self.ask([rank], "", b"", _DEATH_CONFIRM_S)

    def _answer(self, rank: int, question: bytes) -> Answer:
        topic, _, payload = question.partition(b"\0")
        name, _, topic = topic.rpartition(b"|")
        scopes = [each for each in self._all if name.decode(errors="replace") in ("", each._name)]
        answer = next(filter(None, (each.answers.get(topic.decode(errors="replace")) for each in scopes)), None)
        return b"" if answer is None else answer(rank, payload)

    def _look(self) -> None:
        for look in [look for each in list(self._all) for look in each.on_look]:
            try:
                look()
            except Exception:  # must not prevent the other callbacks
                logger.exception("a periodic check of the control plane's callback thread failed")

    def _take_in(self, change: Change) -> None:
        for scope in self._all[1:] if not self._name else ():
            scope._take_in(change)
        rank, place, limit_s = change.rank, self._places.get(change.rank), self.limit_s
        if place is None:  # the watcher was closed meanwhile
            return
        host = place.host
        if change.kind == "left":
            with self._news:
                self._left = self._left | {rank}
                self._news.notify_all()
        elif change.kind == "over":
            self.problem, self._places = change.text, {}
            self.report(
                rank,
                f"can't detect exits of other ranks any more: its control plane ended ({change.text})",
                certain=False,
            )
        elif change.kind == "died" and rank == self._rank:
            by = f"global rank {change.by}" if change.by >= 0 else "another rank"
            self.report(rank, f"was reported as exited by {by}, but runs: its port didn't answer ({_ADVICE})")
        elif change.kind == "died":
            self.report(rank, "has ended" if self._is_near(rank) else f"on host {host!r} has ended")
        elif change.kind in ("unreachable", "stopped") and self._is_near(rank):
            self._blame(change)
        elif change.kind == "unreachable":
            silent = f"gave no sign of life for {limit_s:g} s ({_ADVICE})"
            self.report(rank, f"on host {host!r} {change.text or silent}", certain=False, unreachable=True)
        elif change.kind == "stopped":
            text = f"on host {host!r} is stopped: its host responds, but none of its ranks has run for {limit_s:g} s"
            self.report(rank, text, certain=False, stopped=True)
        elif change.kind == "failed":
            self.report(rank, change.text, certain=False)

    def _is_near(self, rank: int) -> bool:
        places = self._places  # another thread may replace the attribute
        return rank in places and self._rank in places and places[rank].domain == places[self._rank].domain != ""

    def _blame(self, change: Change) -> None:
        teller = self._places.get(change.by)
        if teller is None or self._is_near(change.by):
            return
        why = f"declared this host unreachable ({_ADVICE})"
        if change.kind == "stopped":
            why = f"declared this host stopped: none of its ranks ran for {self.limit_s:g} s (find what stopped them)"
        for rank, place in self._places.items():
            if place.domain == teller.domain:
                self.report(rank, f"on host {place.host!r} {why}", certain=False, unreachable=True)

    def _look_at_connections(self) -> None:
        """Reports a host as unreachable if this rank's data connections to it acknowledge nothing for the heartbeat
        limit, even if control-plane messages still arrive.
        """
        world, limit_s = self._world, self.limit_s
        if world is None or not self._places:
            return
        for connections, ranks in list(self.connections.items()):
            silent = {ranks[peer] for peer in connections.silent_peers(limit_s)}
            hosts = {self._places[rank].domain for rank in silent} - {""}
            ended = {*self._left, *list(self._deaths), self._rank}
            near = {each for each, place in self._places.items() if place.domain in hosts}
            if gone := sorted((silent | near) - ended):
                world.report_unreachable(
                    gone,
                    f"acknowledged nothing on a data connection for {limit_s:g} s ({_ADVICE}, and each interface that "
                    "the connections use)",
                )

    def agree(
        self, purpose: str, attempt: int, ranks: Sequence[int], value: bytes, timeout_s: float, watched: Iterable[int]
    ) -> Verdict | None:
        """Exchanges `value` between the global `ranks`; each of them calls this with the same `purpose` and `attempt`.
        Returns all values, or why there is no agreement; see `World.agree`.

        A death among `watched` cancels the exchange. Returns None if there is no control plane.
        """
        world, watched = self._world, frozenset(watched)
        if world is None or not self._places:
            return None
        name, give_up = self._name + purpose, lambda: bool(self.deaths_of(watched))
        return world.agree(name, attempt, ranks, value, timeout_s, give_up)

    def end_waits_of(self, group: int, ranks: Sequence[int], domain: Iterable[int]) -> None:
        if self._world is not None:
            self._world.end_waits_of(group, ranks, list(domain))

    def gather(
        self,
        purpose: str,
        ranks: Sequence[int],
        record: bytes,
        timeout_s: float,
        *,
        watched: Iterable[int] = (),
        what: str = "",
        group: GroupMember | None = None,
        operation: str = "gather",
        gloo: Any = None,
    ) -> list[bytes]:
        """Exchanges records between the global `ranks`, each of which calls this. Returns the records in the order of
        `ranks`.

        The n-th calls with the same `purpose` and `ranks` form one exchange. Unless messages arrive late, all return
        the same records or raise for the same reason:

        - PeerDiedError or HostUnreachableError if a rank of `watched` (default: `ranks`) died;
        - CollectiveTimeoutError if ranks left or haven't called this in time. Its cause is an UnmetError, which has the
          control plane's verdict. Ranks whose messages were only late can have returned the records. Peers don't report
          this rank as failed, so the program can still call `reinitialize`;
        - ControlError if there is neither a control plane nor `gloo`, a gloo group of `ranks`.

        `what` begins an error's text; `group` and `operation` are the error's attributes.
        """
        if len(ranks) == 1:
            return [record]
        started, watched, key = time.monotonic(), frozenset(watched or ranks), (purpose, tuple(ranks))
        with self._news:
            self._gathered[key] = attempt = self._gathered[key] + 1

        def part_of_each(number: int, part: bytes) -> list[bytes]:
            left_s = max(0.0, started + timeout_s - time.monotonic())
            verdict = self.agree(f"{purpose} ({number})", attempt, ranks, part, left_s, watched)
            if verdict is None and gloo is not None:
                return _over_gloo(gloo, part, started + timeout_s, lambda: bool(self.deaths_of(watched)))
            if verdict is None:
                raise ControlError(
                    f"{operation} needs this library's connections between ranks, its control plane, but has none: "
                    f"{self.problem}"
                )
            if verdict.kind != "agreed":
                raise UnmetError(verdict)
            return verdict.values

        try:
            return _in_parts(record, part_of_each)
        except (UnmetError, RuntimeError) as error:
            if isinstance(error, ParallelStateError):
                raise
            kind, why, suspects = self._explain_unmet(error, watched, ranks, started, timeout_s)
            text = f"{what or f'rank {self._rank} gathers {purpose}'}, but {why}"
            facts: dict[str, Any] = {"suspect_ranks": suspects, "timeout_s": timeout_s}
            facts["elapsed_s"] = time.monotonic() - started
            if group is not None:
                raise group.failure(kind, text, operation, **facts) from error
            raise kind(text, group="world", operation=operation, rank=self._rank, **facts) from error

    def _explain_unmet(
        self,
        error: Exception,
        watched: Collection[int],
        ranks: Sequence[int],
        started: float,
        timeout_s: float,
    ) -> tuple[type[CommunicationError], str, list[int]]:
        verdict = error.verdict if isinstance(error, UnmetError) else None
        is_late = time.monotonic() >= started + timeout_s
        # The report of the death that made other ranks give up may be about to arrive.
        if deaths := self.await_death_of(watched, 0.0 if is_late else None):
            text = f"{describe_deaths(deaths)}. {_WITHOUT_THEM}"
            return kind_of_deaths(deaths, CommunicationError), text, [death.rank for death in deaths]
        if verdict is not None:
            return CollectiveTimeoutError, *self._describe_unmet(verdict, timeout_s)
        if is_late:
            text = f"not all of ranks {format_ranks(ranks)} did so within {timeout_s:g} s. {_OTHER_BRANCH}"
            return CollectiveTimeoutError, text, []
        return CommunicationError, f"{plain(error)}. See the log of the first rank that failed", []

    def _describe_unmet(self, verdict: Verdict, timeout_s: float) -> tuple[str, list[int]]:
        others = [rank for rank in verdict.ranks if rank != self._rank]
        named = f"ranks {format_ranks(others)}"
        if verdict.kind == "ended" and others:
            return f"{named} left the world before they did so. {_OTHER_BRANCH}", others
        if verdict.kind == "missing" and self._rank in verdict.ranks:
            also = f", as {named} did" if others else ""
            return (
                f"rank {self._rank} came too late{also}: the other ranks had waited {timeout_s:g} s and given up. "
                "Try again on all ranks, and find what delayed this rank"
            ), others
        if not others:
            return "this process left the world", others
        answer = " or answer" if verdict.kind == "undecided" else ""
        held = "".join(f"; global rank {rank} is {why}" for rank, why in self.conditions(others).items())
        return f"{named} did not come{answer} within {timeout_s:g} s{held}. {_OTHER_BRANCH}", others

    def record(self) -> bytes:
        world = self._world
        return b"" if world is None else world.record()

    def know(self, pids: dict[int, int], has_left: Callable[[int], bool]) -> None:
        """Sets the PIDs of this host's ranks, by global rank, and the function that returns True if a rank left on
        purpose.
        """
        self.has_left = has_left
        self.pids = dict(pids)

    def left(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if rank in self._left or self.has_left(rank)]

    def watches(self, ranks: Iterable[int]) -> bool:
        return set(ranks) <= self._places.keys()

    def is_world(self, ranks: Collection[int]) -> bool:
        return len(ranks) == len(self._places)

    def process_of(self, rank: int) -> tuple[str, int] | None:
        place = self._places.get(rank)
        return None if place is None else (place.host, place.pid)

    def explain(self, ranks: Iterable[int]) -> str:
        if self.watches(ranks):
            return ""
        return f"exits of ranks are detected at deadlines, or when a gloo connection breaks: {self.problem}"

    def neighbours_of(self, rank: int) -> list[int]:
        places = self._places
        domain = places[rank].domain if rank in places else ""
        return [each for each, place in places.items() if place.domain == domain != "" and each != rank]

    def conditions(self, ranks: Iterable[int]) -> dict[int, str]:
        found = {rank: condition_of(self.pids[rank]) for rank in ranks if rank in self.pids}
        return {rank: condition for rank, condition in found.items() if condition}

    def report(
        self, rank: int, reason: str, certain: bool = True, *, unreachable: bool = False, stopped: bool = False
    ) -> None:
        """Records the death of the global `rank` and calls `on_death`. Arguments are fields of `Death`. Ignores later
        reports about the rank, except a `certain` one after an uncertain one.
        """
        with self._news:
            known = self._deaths.get(rank)
            if known is not None and (known.certain or not certain):
                return
            self._deaths[rank] = Death(rank, reason, certain, unreachable, stopped)
            self._news.notify_all()
        for callback in list(self.on_death):
            try:
                callback()
            except Exception:  # must not prevent the other callbacks
                logger.exception("a callback for the death of rank %d failed", rank)

    def give_up(self, text: str) -> None:
        """Reports to peers that this rank failed. `text`: what follows "global rank 3". Does nothing if this rank has
        detected a death, because that death is the cause.
        """
        world = self._world
        if world is not None and self._places and not self._deaths:
            with contextlib.suppress(ControlError):
                if self._name:
                    self.ask(self._places, self._name, text.encode(), _DEATH_CONFIRM_S)
                else:
                    world.report_failed(text)

    def deaths_of(self, ranks: Iterable[int]) -> list[Death]:
        if not self._deaths:
            return []
        wanted = ranks if isinstance(ranks, (set, frozenset)) else set(ranks)
        return [death for death in list(self._deaths.values()) if death.rank in wanted]

    def deaths(self) -> list[Death]:
        return [death for _, death in sorted(self._deaths.items()) if death.certain]

    def await_death_of(
        self, ranks: Iterable[int], timeout_s: float | None = None, *, together_s: float = _TOGETHER_S
    ) -> list[Death]:
        """Waits for a death among the global `ranks`, then briefly for the exits of ranks that were killed at the same
        time. Returns the deaths, [] if there is none.

        `timeout_s`: wait for the first death; default: 0.5 s. `together_s`: wait for further deaths, at least 0.25 s if
        some ranks are on other hosts.
        """
        ranks = list(ranks)
        timeout_s = _DEATH_CONFIRM_S if timeout_s is None else timeout_s
        with self._news:
            self._news.wait_for(lambda: bool(self.deaths_of(ranks)), timeout_s)
        found = self.deaths_of(ranks)
        if found:
            is_local = all(rank in self.pids or rank == self._rank for rank in ranks if rank in self._places)
            together_s = together_s if is_local else max(together_s, _HOST_TOGETHER_S)
            time.sleep(max(0.0, max(death.at_s for death in found) + together_s - time.monotonic()))
            self._report_ending(set(ranks))
        return self.deaths_of(ranks)

    def await_word_of(self, suspects: Iterable[int], ranks: Iterable[int]) -> list[Death]:
        """Waits for a death among the global `ranks`, or until the `suspects`, whose connections broke, prove to run by
        a reply. Returns the deaths of `ranks`.

        If a suspect on another host doesn't reply, waits longer: an unreachable host is reported within the heartbeat
        limit + 2 heartbeats.
        """
        found = self.await_death_of(ranks)
        if found or self._world is None:
            return found
        far = [rank for rank in suspects if rank in self._places and rank not in self._left and not self._is_near(rank)]
        silent = set(far[:_MOST_ASKED]) - self.ask(far[:_MOST_ASKED], "", b"", _DEATH_CONFIRM_S).keys()
        if not silent:
            return found
        ranks, limit_s = list(ranks), self.limit_s + 2 * settings.HEARTBEAT_S.get()
        with self._news:
            self._news.wait_for(lambda: self.deaths_of(ranks) or self._left.intersection(silent), limit_s)
        return self.await_death_of(ranks, 0.0)

    def _report_ending(self, ranks: set[int]) -> None:
        """Reports those of `ranks` as dead that are about to exit on this host: the kernel takes seconds to end a large
        process.
        """
        world = self._world
        for rank, pid in self.pids.items():
            if world is None or rank not in ranks or rank in self._deaths or self.has_left(rank):
                continue
            if world.library.ps_control_is_ending(pid):
                self.report(rank, "has ended")

    def store_of(self, ranks: Iterable[int]) -> BoundedStore | None:
        """Returns a store that the lowest of the global `ranks` serves, or None if there is no control plane."""
        from device_communicators.control.store import ControlStore  # it imports torch's stores

        world, server = self._world, min(ranks)
        place = self._places.get(server)
        if world is None or place is None or place.endpoint is None:
            return None
        if server not in self._stores:
            _, host, port, token, _ = place.endpoint
            store = ControlStore(
                world.library, (host, port), token, settings.START_TIMEOUT_S.get(), f"the store of rank {server}"
            )
            store.served_by = server
            self._stores.setdefault(server, BoundedStore(store))
        return self._stores[server]

    def explain_lost_store(
        self, store: BoundedStore, error: Exception, ranks: Iterable[int]
    ) -> tuple[type[CommunicationError], str, list[int]]:
        """Returns the error class, the cause and the suspected global ranks after an access to `store` failed with
        `error`. `ranks`: ranks whose death can be the cause.

        Unless the access timed out, waits briefly for the exit of the rank that serves the store.
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
        pid = self.pids.get(-1 if server is None else server)
        if pid is not None and (obstacle := condition_of(pid)):
            text += f"; global rank {server} is {obstacle}"
        suspects = [] if server is None else [server]
        return CollectiveTimeoutError if is_silent else CommunicationError, text, suspects

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._end)
            closing, self.on_close = self.on_close, []
            for call in closing:
                stack.callback(call)

    def _leave(self) -> None:
        world, self._world = self._world, None
        if world is not None and not self._name and self._pid == os.getpid():
            world.leave()

    def _end(self) -> None:
        for scope in self._all[1:] if not self._name else ():
            scope.close()
        if self in self._all[1:]:
            self._all.remove(self)
        self._leave()
        self.pids, self._places = {}, {}
        self.has_left = lambda rank: False
        for store in self._stores.values():
            store.close()


_SHARED: WeakSet[Watcher] = WeakSet()


def _in_parts(record: bytes, gather: Callable[[int, bytes], list[bytes]]) -> list[bytes]:
    framed = _LENGTH.pack(len(record)) + record
    found = gather(0, framed[:MOST_VALUE_BYTES])
    ends = [_LENGTH.size + _LENGTH.unpack_from(each)[0] for each in found]
    for number in range(1, -(-max(ends) // MOST_VALUE_BYTES)):
        start = number * MOST_VALUE_BYTES
        more = gather(number, framed[start : start + MOST_VALUE_BYTES])
        found = [before + each for before, each in zip(found, more, strict=True)]
    return [each[_LENGTH.size : end] for each, end in zip(found, ends, strict=True)]


def _over_gloo(cpu_group: Any, part: bytes, deadline: float, ended: Callable[[], bool]) -> list[bytes]:
    """Exchanges `part` over the gloo group `cpu_group`, and returns all ranks' parts. Every rank of the group calls
    this.

    Raises RuntimeError at the deadline, if gloo fails, or within 50 ms after `ended()` becomes true.
    """
    size = cpu_group.size()
    found = bytearray(MOST_VALUE_BYTES * size)
    out, x = (
        torch.frombuffer(each, dtype=torch.uint8) for each in (found, bytearray(part.ljust(MOST_VALUE_BYTES, b"\0")))
    )
    if not wait_in_slices(all_gather_base(cpu_group, out, x), deadline, ended):
        raise RuntimeError("a rank exited during an exchange over gloo; see the logs of the other ranks")
    return [bytes(found[start : start + MOST_VALUE_BYTES]) for start in range(0, len(found), MOST_VALUE_BYTES)]


def wait_in_slices(work: Any, deadline: float, ended: Callable[[], object]) -> bool:
    """Waits for a gloo call, `work`. Returns True, or False within 50 ms after `ended()` becomes true. Raises the
    work's error, or RuntimeError at the deadline.
    """
    while True:
        try:
            work.wait(_SLICE)
            return True
        except RuntimeError:
            if work.is_completed():  # it failed, or completed just after the slice
                work.wait(_SLICE)
                return True
            if time.monotonic() >= deadline:
                raise
        if ended():
            return False
