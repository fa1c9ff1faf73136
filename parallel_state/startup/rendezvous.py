"""Rendezvous: the ranks of a new world find each other through one key of a launcher's store.

Rank 0 publishes the address of its control plane under the key. This control plane serves the world's store. Every
other rank writes an entry into the world's store; the entry vanishes when the rank exits. Rank 0 waits for all entries,
publishes its decision (that the world starts, or an error), and clears the key.

A rank that reaches the launcher's store but not rank 0 writes a complaint into that store. Rank 0 deletes the first
complaint, because rank 0 was perhaps only suspended. If the rank complains again, all ranks raise the same error.

If rank 0 doesn't have the compiled library, the world's store is a part of the launcher's store. Exits of ranks are
then detected only at the deadline.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import os
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from device_communicators.base import settings
from device_communicators.base.bounded_store import LAST_WORD_S, BoundedStore, StoreSilentError
from device_communicators.base.errors import (
    CommunicationError,
    ConfigMismatchError,
    PeerDiedError,
    RendezvousError,
    format_ranks,
)
from device_communicators.base.host import address_towards, is_loopback
from device_communicators.c10d.extension import for_torch
from device_communicators.control.client import ForeignServiceError
from device_communicators.control.plane import Endpoint, Verdict
from device_communicators.control.store import ControlStore
from device_communicators.cpu import native
from device_communicators.cpu.watching import TOGETHER_S, Neighbours, listen
from device_communicators.liveness.condition import condition_of
from device_communicators.liveness.health import Watcher, describe_deaths, kind_of_deaths
from device_communicators.routing.status import Start as WaitAtStart
from device_communicators.routing.status import Status
from parallel_state.startup import binding, environment, interfaces
from parallel_state.startup.environment import ProcessEnvironment
from parallel_state.startup.interfaces import Address
from parallel_state.startup.stores import StoreWay, find_store, looks, within

E = TypeVar("E", bound=CommunicationError)

logger = logging.getLogger("parallel_state")

_OWN_NAME_S = 2.0
_FAREWELL_S = 1.0
_READ_S = 0.6
_LATE_S = 0.6  # part of _FAREWELL_S in which rank 0 also waits for late ranks
_LINGER_S = 3.0  # below stores._PORT_RETRY_S
_SLICE_S, _SLICE_OF_OTHERS_S = 0.1, 0.5  # poll intervals of rank 0, and of the others
_LOOK_S = 1.0  # poll interval for a later round's world
_CONNECT_S = 2.0
_REFUSED_S, _SILENT_S = 1.0, 7.0  # complain after this time refused, or unanswered
_ENDED_S = 0.8  # rank 0 exited if its store refuses an entered rank for this long
_ANSWER_S = 1.2
_DOUBT_S = 1.0, 10.0  # when rank 0 accepts a repeated complaint

_WORLD, _COMPLAINT = "world", "complaint"
"""Keys of the launcher's store. The store also has the keys `_VERDICT` and `_HEARD`, each with the world's name
appended.
"""
_LATE = "late"
_VERDICT, _HEARD, _ROSTER, _GAVE_UP = "verdict", "heard", "roster", "gave up"
_GONE, _NOTHING = "gone/", "?"
"""`_GONE` is put before the key of a rank's entry when the rank exits. `_NOTHING` stands for a missing value."""
_WORLD_BEFORE = "the control plane of the world before"
_NO_WORLD = "rank 0 has not opened a world there"
_COMPLETE, _SIZES, _MISSING, _ENDED = "complete", "sizes", "missing", "ended"
_UNREACHED, _NO_LIBRARY, _DEAF = "unreached", "no library", "deaf"
_LOOPBACK, _SAME, _CORES = "loopback", "same", "cores"
_OBSTACLES: tuple[tuple[str, Callable[[dict[int, Address]], list[str]]], ...] = (
    (_LOOPBACK, interfaces.unreachable), (_SAME, interfaces.shared_address), (_CORES, binding.different_cores),
    (_DEAF, interfaces.without_control_plane),
)  # fmt: skip
_ENDING = (ConnectionRefusedError, ConnectionResetError, PermissionError, ForeignServiceError, ConfigMismatchError)
_LONGEST = 400
_WARN_S = 10.0
_SURVEY_S = 0.2
_LOOKED_AT_PER_S = 1024


class Met(NamedTuple):
    store: BoundedStore
    where: str
    places: dict[int, Address]
    """Address of each rank, as the rank published it."""
    deadline: float
    watcher: Watcher
    group_store: BoundedStore
    """The store that the world's groups use. If a launcher serves this store, the store outlives rank 0."""
    served: list[Any]
    """On rank 0: the store that rank 0 serves at MASTER_PORT, if no launcher does. `served.clear()` closes the port."""

    def address(self, rank: int, towards_store: str) -> str:
        """Returns the address at which other ranks reach this rank, whose number is `rank`.

        `towards_store`: the local address from which this host connects to the store. The method returns it, unless it
        is a loopback address in a world of several hosts; then it returns the rank's address in `places`.
        """
        own = self.places.get(rank, Address())
        several = len({place.network for place in self.places.values()}) > 1
        return own.address if several and is_loopback(towards_store) and own.address else towards_store


_MET: contextvars.ContextVar[Met | None] = contextvars.ContextVar("parallel_state_met", default=None)


@contextlib.contextmanager
def met_before(met: Met | None) -> Iterator[None]:
    token = _MET.set(met)
    try:
        yield
    finally:
        _MET.reset(token)


_LINGERING: dict[int, contextlib.ExitStack] = {}
"""Stores of failed starts that are still open, by PID: a forked child must not close its parent's stores."""


def end_linger() -> None:
    """Closes the stores that this process keeps open after a failed start, which frees MASTER_PORT. Thread-safe."""
    _LINGERING.pop(os.getpid(), contextlib.ExitStack()).close()


def _linger(watcher: Watcher, served: list[Any]) -> None:
    until, watcher.status.start = time.monotonic() + _LINGER_S, None
    _LINGERING[os.getpid()] = stack = contextlib.ExitStack()
    stack.callback(watcher.close)
    stack.callback(served.clear)
    watcher.on_look.append(lambda: end_linger() if time.monotonic() > until else None)


def meet(init_method: str, place: ProcessEnvironment, timeout_s: float, over_gloo: bool = True) -> Met:
    """Finds the other ranks of a new world. Every rank must call this.

    `init_method`: torch's URL, such as `env://`. With `over_gloo`, each rank needs an address that other hosts can
    reach. Raises the errors of init_distributed_environment.
    """
    if (met := _MET.get()) is not None:
        return met
    end_linger()
    watcher = Watcher()
    deadline = time.monotonic() + timeout_s
    if place.world_size == 1:
        alone = BoundedStore(dist.HashStore())
        return Met(alone, "", {}, deadline, watcher, alone, [])
    own_place = _whereabouts(deadline) if over_gloo else interfaces.process()
    way = find_store(init_method, place, timeout_s, deadline)
    address = own_place.address
    if not address or is_loopback(address):
        address = address_towards(environment.store_server(init_method, place) or place.master)
    own_place = _listening(own_place._replace(cores=binding.cores_to_share()), watcher, address)
    meeting = _Meeting(place, own_place, way, timeout_s, deadline)
    watcher.status = Status(watcher, place.rank)
    watcher.status.start = WaitAtStart(way.where, place.world_size, lambda: meeting.awaited)
    watcher.answer_guests()
    try:
        store = meeting.open_world() if place.rank == 0 else meeting.enter_world()
        watcher.status.start = None
        store.set_timeout(timedelta(seconds=timeout_s))
        group_store = BoundedStore(for_torch(store.raw))
        if way.server is None and store.can_hold:
            prefix = f"{way.prefix}/{Endpoint.parse(meeting.places[0].endpoint).proc}"
            group_store = BoundedStore(dist.PrefixStore(prefix, for_torch(way.connect())))
            group_store.set_timeout(timedelta(seconds=timeout_s))
        return Met(BoundedStore(store.raw), way.where, meeting.places, deadline, watcher, group_store, meeting.served)
    except BaseException as error:
        if meeting.served and own_place.endpoint:
            _linger(watcher, meeting.served)
        else:
            meeting.served.clear()
            watcher.close()
        if isinstance(error, dist.DistError):
            meeting.obstacle = str(error).splitlines()[0]
            raise meeting.not_met() from error
        raise


def meet_again(old: Watcher, ranks: Sequence[int], rank: int, own_place: Address, timeout_s: float) -> Met | None:
    """Finds the ranks of the next world over the control plane of the `old` world. Each of `ranks`, the remaining
    ranks, must call this.

    Returns None if the old world has no control plane. `ranks` and `rank` (this rank) are numbers in the old world.
    `own_place`: this rank's Address in it.
    """
    deadline, watcher = time.monotonic() + timeout_s, Watcher()
    host = Endpoint.parse(own_place.endpoint).host if own_place.endpoint else ""
    try:
        entry = _listening(own_place, watcher, host)
        verdict = old.agree("reinitialize", 1, ranks, json.dumps(entry).encode(), timeout_s, ranks)
        if verdict is None:
            watcher.close()
            return None
        if verdict.kind != "agreed":
            raise _not_met_again(old, verdict, rank, timeout_s)
        places = {number: Address.parse(json.loads(value)) for number, value in enumerate(verdict.values)}
        unable = next((number for number, place in places.items() if place.obstacle), None)
        if unable is not None:
            raise _cannot_listen(ranks[unable], places[unable], rank)
        endpoint = Endpoint.parse(places[0].endpoint)
        store = BoundedStore(_store_at(endpoint, timeout_s, _WORLD_BEFORE))
        group_store = BoundedStore(for_torch(store.raw))
        return Met(store, _WORLD_BEFORE, places, deadline, watcher, group_store, [])
    except BaseException:
        watcher.close()
        raise


def _listening(place: Address, watcher: Watcher, address: str) -> Address:
    endpoint, obstacle = listen(watcher, address), ""
    if not endpoint:
        with contextlib.suppress(native.NativeUnavailableError):
            native.load()
            obstacle = watcher.problem[:_LONGEST]
    return place._replace(endpoint=endpoint, obstacle=obstacle)


def _cannot_listen(suspect: int, place: Address, rank: int) -> RendezvousError:
    return RendezvousError(
        f"rank {rank} of the old world calls reinitialize(), but rank {suspect} on {place} can't listen for the next "
        f"world: {place.obstacle}. If {settings.PORTS.name} is set, it must have two ports for each rank of a host: "
        "the old world still uses one",
        operation="rendezvous",
        rank=rank,
        suspect_ranks=[suspect],
    )


def _not_met_again(old: Watcher, verdict: Verdict, rank: int, timeout_s: float) -> CommunicationError:
    missing = [each for each in verdict.ranks if each != rank]
    deaths = old.await_death_of(missing, None if verdict.kind == "ended" else 0.0)
    why = f"ranks {format_ranks(missing)} of the old world did not call reinitialize() within {timeout_s:g} s"
    return kind_of_deaths(deaths, RendezvousError)(
        f"rank {rank} of the old world calls reinitialize(), but {describe_deaths(deaths) or why}. Each remaining rank "
        "must call reinitialize() with the same ranks",
        operation="rendezvous",
        rank=rank,
        suspect_ranks=[death.rank for death in deaths] or missing,
        timeout_s=timeout_s,
    )


@dataclass
class _Meeting:
    """This rank's part of one start. In methods, `name` and `world`: the new world's name and store. `launcher`: the
    launcher's store.
    """

    place: ProcessEnvironment
    own_place: Address
    way: StoreWay
    timeout_s: float
    deadline: float
    obstacle: str = "it was not tried"

    def __post_init__(self) -> None:
        self.places = {self.place.rank: self.own_place}
        self.served: list[Any] = []
        self._sizes: dict[int, int] = {}
        self._doubted_at = float("-inf")
        self._near = Neighbours(self.own_place.processes)
        self._began = self._warned_at = time.monotonic()
        self.awaited = "rank 0" if self.place.rank else "the launcher's store"

    def warn(self, find_missing: Callable[[], Sequence[int]] = tuple) -> None:
        """Logs the ranks that `find_missing` returns: at most every 10 s, on one rank of each host."""
        now, endpoint = time.monotonic(), self.own_place.endpoint
        if now < self._warned_at + _WARN_S:
            return
        self._warned_at = now
        missing: Sequence[int] = ()
        with contextlib.suppress(StoreSilentError):  # rank 0 may be stopped
            missing = find_missing()
        if missing:
            self.awaited = f"rank{'s' * (len(missing) > 1)} {format_ranks(missing)} of {self.place.world_size}"
        # If rank 0 is missing, the next rank of its host logs instead.
        if self.place.local_rank == 0 or (self.awaited == "rank 0" and self.place.local_rank == 1):
            listens = f", listening at {':'.join(map(str, Endpoint.parse(endpoint)[1:3]))}" if endpoint else ""
            logger.warning(
                "%s has waited %.0f s for %s at %s%s; it gives up after %g s (PARALLEL_STATE_START_TIMEOUT_S). Check "
                "that all ranks were started with this address",
                self._name, now - self._began, self.awaited, self.way.where, listens, self.timeout_s,
            )  # fmt: skip

    def _launcher(self) -> BoundedStore:
        return BoundedStore(dist.PrefixStore(self.way.prefix, self.way.connect())).until(self.deadline + LAST_WORD_S)

    def _world(self, name: str, launcher: BoundedStore) -> BoundedStore:
        if not name.startswith("["):
            return launcher.prefixed(name)
        return BoundedStore(_store_at(Endpoint.parse(name), _CONNECT_S, self.way.where)).until(
            self.deadline + LAST_WORD_S
        )

    def open_world(self) -> BoundedStore:
        launcher = self._reach_launcher()
        world, verdict = self._gather(launcher)
        if verdict[0] != _COMPLETE:
            del launcher  # the error's traceback would keep its server and port open
            raise self._failure(verdict)
        self.served.append(launcher)
        return world

    def _gather(self, launcher: BoundedStore) -> tuple[BoundedStore, list[Any]]:
        name = self.own_place.endpoint or secrets.token_hex(8)
        world = self._world(name, launcher)
        self._extend(world)
        self._near.enter(world, 0)
        launcher.set(_WORLD, name)
        verdict, others = self._judge(world, launcher, name)
        if verdict[0] == _COMPLETE:
            world.set(_ROSTER, zlib.compress(json.dumps(self.places).encode()).hex())
        world.set(_VERDICT, json.dumps(verdict))
        if verdict[0] != _COMPLETE:
            launcher.set(_VERDICT + name, json.dumps(verdict))
        # Otherwise some ranks would raise and others wait for them.
        began, late = time.monotonic(), len(self._missing(world)) if verdict[0] not in (_COMPLETE, _MISSING) else 0
        for _ in looks(began + (_READ_S if verdict[0] == _COMPLETE else _FAREWELL_S)):
            awaited = others + late if time.monotonic() < began + _LATE_S else others
            if world.add(_HEARD, 0) + (verdict[0] != _COMPLETE and launcher.add(_HEARD + name, 0)) >= awaited:
                break
        if late and self.way.server is not None:
            self._admit_all(world)
            if missing := self._missing(world):
                launcher.set(_LATE, json.dumps([missing, verdict]))
                self.served.append(launcher)
        launcher.compare_set(_WORLD, name, "")
        return world, verdict

    def _reach_launcher(self) -> BoundedStore:
        for _ in looks(self.deadline):
            self.warn()
            try:
                return self._launcher()
            except (OSError, dist.DistNetworkError) as error:
                self.obstacle = str(error).splitlines()[0]
        raise self.not_met()

    def _judge(self, world: BoundedStore, launcher: BoundedStore, name: str) -> tuple[list[Any], int]:
        """Waits until all ranks have entered the world. Returns rank 0's decision, a start or an error, and the number
        of ranks that should read the decision.
        """
        deadline = self.deadline - min(_FAREWELL_S, self.timeout_s / 8)
        size, surveyed_at = self.place.world_size, time.monotonic()
        survey_s = max(_SURVEY_S, size / _LOOKED_AT_PER_S)
        self.awaited = "other ranks"
        for rank in range(1, size):
            while rank not in self.places:
                if world.wait_for([_key(rank)], _SLICE_S):
                    self._admit(world, rank)
                    continue
                if time.monotonic() > surveyed_at + survey_s:
                    self._admit_all(world)
                    self.warn(lambda: self._missing(world))
                    surveyed_at = time.monotonic()
                complaint = _try_get(launcher, _COMPLAINT + name)
                if complaint and self._is_confirmed(complaint, world, launcher, name):
                    return self._complaints(complaint, world, launcher, name), size - 1
                if self._exited(world):
                    time.sleep(TOGETHER_S)
                    self._admit_all(world)
                    ended, missing = self._exited(world), self._missing(world)
                    # Ranks that exited because their own wait timed out are not the cause.
                    kind, ranks = (_MISSING, missing) if missing and world.check([_GAVE_UP]) else (_ENDED, ended)
                    return [kind, *ranks], size - 1 - len(missing) - len(ended)
                if time.monotonic() > deadline:
                    missing = self._missing(world)
                    return [_MISSING, *missing], size - 1 - len(missing)
            if self._sizes[rank] != size:
                return [_SIZES, size, rank, self._sizes[rank]], max(size, self._sizes[rank]) - 1
        if ended := self._exited(world):
            time.sleep(TOGETHER_S)
            ended = self._exited(world)
            return [_ENDED, *ended], size - 1 - len(ended)
        return self._obstacle() or [_COMPLETE, size], size - 1

    def _obstacle(self) -> list[Any]:
        found = ([kind, *words] for kind, find in _OBSTACLES if (words := find(self.places)))
        return next(found, [])

    def _is_confirmed(self, complaint: str, world: BoundedStore, launcher: BoundedStore, name: str) -> bool:
        """Returns True if the start must fail because of `complaint`, a rank's report of a problem."""
        kind, rank, *_ = json.loads(complaint)
        age_s = time.monotonic() - self._doubted_at
        least_s, most_s = _DOUBT_S
        if kind != _UNREACHED or (least_s <= age_s <= most_s and not world.check([_key(rank)])):
            return True
        launcher.compare_set(_COMPLAINT + name, complaint, "")
        if age_s > most_s:
            self._doubted_at = time.monotonic()
        return False

    def _complaints(self, complaint: str, world: BoundedStore, launcher: BoundedStore, name: str) -> list[Any]:
        time.sleep(3 * TOGETHER_S)
        self._admit_all(world)
        kind, rank, _, why = json.loads(complaint)
        near = [each for each, place in self.places.items() if place[:2] == self.own_place[:2]]
        for each in range(1, self.place.world_size):
            if each not in self.places and (complaint := _try_get(launcher, f"{_COMPLAINT}{each}{name}")):
                self.places[each] = Address.parse(json.loads(complaint)[2])
        obstacle = [] if kind == _NO_LIBRARY else self._obstacle()
        return obstacle or [kind, rank, str(self.places[rank]), why, str(self.own_place), near]

    def _admit(self, world: BoundedStore, rank: int) -> None:
        if entry := _try_get(world, _key(rank)) or _try_get(world, _GONE + _key(rank)):
            self._sizes[rank], *words = json.loads(entry)
            self.places[rank] = Address.parse(words)

    def _admit_all(self, world: BoundedStore) -> None:
        for rank in range(1, self.place.world_size):
            if rank not in self.places:
                self._admit(world, rank)

    def _exited(self, world: BoundedStore) -> list[int]:
        return _without_entry(world, sorted(rank for rank in self.places if rank != 0))

    def _missing(self, world: BoundedStore) -> list[int]:
        return _without_entry(world, [rank for rank in range(1, self.place.world_size) if rank not in self.places])

    def enter_world(self) -> BoundedStore:
        launcher: BoundedStore | None = None
        name, left, tried_at = "", "", time.monotonic()
        for _ in looks(self.deadline, self.place.world_size):
            self.awaited = "rank 0"
            self.warn()
            try:
                if launcher is None:
                    launcher = self._launcher()
                    self.obstacle = _NO_WORLD
                newest = _try_get(launcher, _WORLD)
                if newest == "":
                    self._check_late(launcher)
            except (OSError, dist.DistNetworkError, StoreSilentError) as error:
                # There is no server yet, or an earlier world's server is shutting down.
                launcher = None
                if not name:  # the obstacle of the world that was found explains more
                    prefix = "rank 0 doesn't answer there: " if self.way.server is not None else ""
                    self.obstacle = prefix + str(error).splitlines()[0]
                continue
            if newest not in ("", name):
                name, tried_at = newest, time.monotonic()
            if newest in ("", left):  # in a decided world, the end of its rank 0 would count as a death
                continue
            try:
                world = self._world(name, launcher)
                try:
                    if self._enter(world):
                        if self._is_complete(world, launcher, name):
                            return world
                        left = name
                finally:
                    world.close()  # releases this rank's entry, even if the program keeps the error
            except (dist.DistNetworkError, native.NativeUnavailableError) as error:
                if name.startswith("["):
                    self._complain(launcher, name, error, time.monotonic() - tried_at)
                else:
                    launcher = None
                continue
            except StoreSilentError as error:
                prefix = "rank 0 does not answer: " if name.startswith("[") else ""
                self.obstacle = prefix + str(error).splitlines()[0]
                continue
        raise self.not_met()

    def _check_late(self, launcher: BoundedStore) -> None:
        """Raises, once, the error of a start that failed before this rank took part."""
        late, verdict = json.loads(_try_get(launcher, _LATE) or "[[], []]")
        if self.place.rank in late and launcher.add(f"{_LATE}/{self.place.rank}", 1) == 1:
            raise self._failure(verdict)

    def _extend(self, world: BoundedStore) -> None:
        world.set_timeout(timedelta(seconds=max(LAST_WORD_S, self.deadline - time.monotonic())))

    def _enter(self, world: BoundedStore) -> bool:
        key, entry = _key(self.place.rank), json.dumps([self.place.world_size, *self.own_place])
        found = world.compare_set(key, "", entry).decode()
        if found != entry:
            self.obstacle = "another process with this rank has entered rank 0's world"
            return False
        world.hold(key, entry)
        self._near.enter(world, self.place.rank)
        self._extend(world)
        self.obstacle, self.awaited = "rank 0 gave no verdict", "other ranks"
        return True

    def _is_complete(self, world: BoundedStore, launcher: BoundedStore, name: str) -> bool:
        """Waits for rank 0's decision. Returns True if this process is in the world, or False if another world has
        replaced it.
        """
        refused_at, look_at = None, time.monotonic()
        while True:
            left_s = max(0.0, self.deadline - time.monotonic())
            try:
                with contextlib.suppress(StoreSilentError):
                    self._near.read(world.within(_SLICE_OF_OTHERS_S))
                if world.wait_for([_VERDICT], min(_SLICE_OF_OTHERS_S, left_s)):
                    return self._follow_verdict(world)
                refused_at, self.obstacle = None, "rank 0 gave no verdict"
                self.warn(lambda: _without_entry(world.within(_SLICE_OF_OTHERS_S), range(1, self.place.world_size)))
                if time.monotonic() > look_at:
                    look_at = time.monotonic() + max(_LOOK_S, self.place.world_size / _LOOKED_AT_PER_S)
                    if self._is_superseded(world, launcher, name):
                        return False
            except dist.DistNetworkError as error:
                if not world.can_hold:
                    raise
                if isinstance(error.__cause__, _ENDING):
                    refused_at = refused_at or time.monotonic()
                    self._check_rank_0(launcher, name, refused_at, error)
                else:  # rank 0 is stopped, or the network is down for now
                    refused_at = None
                    self._note_silence(error)
            if time.monotonic() > self.deadline:
                raise self._deadline_error(world)

    def _is_superseded(self, world: BoundedStore, launcher: BoundedStore, name: str) -> bool:
        """Returns True if a later start has replaced the world. Rank 0 is then about to exit."""
        with contextlib.suppress(dist.DistError):
            return _try_get(launcher.within(LAST_WORD_S), _WORLD) not in ("", name) and not world.check([_VERDICT])
        return False

    def _follow_verdict(self, world: BoundedStore) -> bool:
        verdict = json.loads(world.get(_VERDICT))
        if verdict[0] != _COMPLETE:
            with contextlib.suppress(dist.DistError):
                world.add(_HEARD, 1)
            raise self._failure(verdict)
        if verdict[1] != self.place.world_size:
            self.obstacle = f"rank 0 opened a world of {verdict[1]} ranks there"
            return False
        places = json.loads(zlib.decompress(bytes.fromhex(world.get(_ROSTER).decode())))
        self.places = {int(rank): Address.parse(words) for rank, words in places.items()}
        with contextlib.suppress(dist.DistError):
            world.add(_HEARD, 1)
        self.obstacle = "rank 0 opened a world with another process of this rank"
        return self.places.get(self.place.rank) == self.own_place

    def _check_rank_0(self, launcher: BoundedStore, name: str, refused_at: float, error: Exception) -> None:
        """Raises, from `error`, the error that rank 0 published, or PeerDiedError if rank 0 exited: 0.8 s after its
        store first refused a connection, at `refused_at` (monotonic).
        """
        if verdict := self._published_verdict(launcher, name):
            raise self._failure(verdict) from error
        time.sleep(TOGETHER_S)
        ended = self._near.ended()
        if 0 in ended or time.monotonic() > refused_at + _ENDED_S:
            raise self._failure([_ENDED, *sorted({0, *ended})]) from error

    def _note_silence(self, error: Exception) -> None:
        why = str(error.__cause__ or error).splitlines()[0]
        pid, _ = self._near.found.get(0, (0, ""))
        held = condition_of(pid) if pid else ""
        also = f"; it is {held}" if held else ""
        self.obstacle = f"rank 0 serves the world's store, but does not answer ({why}){also}"
        time.sleep(TOGETHER_S)

    def _published_verdict(self, launcher: BoundedStore, name: str) -> list[Any] | None:
        found = ""
        with contextlib.suppress(dist.DistError):
            launcher = launcher.within(LAST_WORD_S)
            if found := _try_get(launcher, _VERDICT + name):
                launcher.add(_HEARD + name, 1)
        return json.loads(found) if found else None

    def _deadline_error(self, world: BoundedStore) -> RendezvousError:
        with contextlib.suppress(dist.DistError):
            world = world.within(LAST_WORD_S)
            world.set(_GAVE_UP, "1")
            if missing := _without_entry(world, range(1, self.place.world_size)):
                return self._failure([_MISSING, *missing])
        return self.not_met()

    def _complain(self, launcher: BoundedStore, name: str, error: Exception, tried_s: float) -> None:
        endpoint, why, kind = Endpoint.parse(name), str(error.__cause__ or error).splitlines()[0], _UNREACHED
        if isinstance(error, native.NativeUnavailableError):
            kind, self.obstacle = _NO_LIBRARY, f"rank 0 uses the compiled library, which this rank doesn't have: {why}"
        else:
            why = f"{why} (port {endpoint.port} of {endpoint.host})"
            self.obstacle = f"rank 0 serves the world's store, which this rank does not reach: {why}"
            is_refused = isinstance(error.__cause__, (ConnectionRefusedError, PermissionError, ConnectionResetError))
            if tried_s < (_REFUSED_S if is_refused else min(_SILENT_S, self.timeout_s / 4)):
                return
        content = json.dumps([kind, self.place.rank, self.own_place, why])
        with contextlib.suppress(dist.DistError):
            for key in (f"{_COMPLAINT}{self.place.rank}{name}", _COMPLAINT + name):
                launcher.compare_set(key, "", content)
            launcher.wait_for([_VERDICT + name], min(_ANSWER_S, max(0.0, self.deadline - time.monotonic())))
        if verdict := self._published_verdict(launcher, name):
            raise self._failure(verdict)

    def not_met(self) -> RendezvousError:
        return self._error(
            f"{self._name} did not meet the other ranks at {self.way.where} within {self.timeout_s:g} s: "
            f"{self.obstacle}. Check that all ranks were started, that MASTER_ADDR and MASTER_PORT are equal "
            "everywhere, and that no firewall blocks them",
            [0] if self.obstacle.startswith("rank 0 ") else (),
        )

    def _failure(self, verdict: Sequence[Any]) -> Any:
        kind, *words = verdict
        if kind == _LOOPBACK:
            text = interfaces.describe_loopback(self.own_place, *words, own_name=self._name)
            return self._error(text, [int(word) for word in words[2:]])
        if kind == _SAME:
            text, suspects = interfaces.describe_shared_address(self.own_place, *words)
            return self._error(f"{self._name} can't start: {text}", suspects)
        if kind == _CORES:
            return ConfigMismatchError(f"{self._name} can't start: {binding.describe_different_cores(*words)}")
        if kind == _NO_LIBRARY:
            rank, where, why, *_ = words
            return self._error(
                f"{self._name} can't start: rank {rank} on {where} doesn't have the compiled library, which rank 0 "
                f"has: {why}. Install it on all hosts, or on none",
                [rank],
            )
        if kind == _DEAF:
            rank, where, why = words
            return self._error(
                f"{self._name} can't start: the control plane of rank {rank} on {where} can't be reached by the other "
                f"ranks: {why}. Every rank needs a control plane",
                [int(rank)],
            )
        if kind == _UNREACHED:
            rank, where, why, of_rank_0, near = words
            return self._error(
                f"{self._name} can't start: ranks {format_ranks(near)} on {of_rank_0} are not reached from rank {rank} "
                f"on {where}: {why}; this rank is on {self.own_place}. The rendezvous was at {self.way.where}. "
                f"{interfaces.firewall_advice()}",
                near,
            )
        if kind == _SIZES:
            wanted, rank, other_size = words
            return ConfigMismatchError(
                f"all ranks must have one world size, but rank 0 has {wanted} and rank {rank} {other_size} (this is "
                f"rank {self.place.rank}, with {self.place.world_size}); start them with one size, and check that no "
                f"other job uses {self.way.where}"
            )
        if kind == _ENDED:
            error = self._error(
                f"{self._name} can't start: global ranks {format_ranks(words)} exited during the rendezvous at "
                f"{self.way.where}; see the logs of these ranks",
                words,
                PeerDiedError,
            )
            error.group = "world"
            return error
        return self._error(
            f"{self._name} waited at {self.way.where}, but ranks {format_ranks(words)} did not come within "
            f"{self.timeout_s:g} s. Check that these ranks were started and did not exit early; for a slow start, "
            "raise PARALLEL_STATE_START_TIMEOUT_S",
            words,
        )

    @property
    def _name(self) -> str:
        return f"rank {self.place.rank} of {self.place.world_size}"

    def _error(self, text: str, suspects: Sequence[int] = (), kind: type[E] = RendezvousError) -> E:  # type: ignore[assignment]
        return kind(
            text, operation="rendezvous", rank=self.place.rank, suspect_ranks=suspects, timeout_s=self.timeout_s
        )


def _store_at(endpoint: Endpoint, timeout_s: float, met_at: str) -> ControlStore:
    address = endpoint.host, endpoint.port
    store = ControlStore(native.load(), address, endpoint.token, timeout_s, "the world's store")
    store.served_by = 0
    store.access = f"a token that the ranks received from {met_at}"
    return store


def _try_get(store: BoundedStore, key: str) -> str:
    found = store.compare_set(key, _NOTHING, _NOTHING).decode()
    return "" if found == _NOTHING else found


def _without_entry(world: BoundedStore, ranks: Sequence[int]) -> list[int]:
    if not ranks or world.check([_key(rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    middle = len(ranks) // 2
    return _without_entry(world, ranks[:middle]) + _without_entry(world, ranks[middle:])


def _key(rank: int) -> str:
    return f"rank/{rank}"


def _whereabouts(deadline: float) -> Address:
    try:
        return within(min(deadline, time.monotonic() + _OWN_NAME_S), interfaces.whereabouts)
    except TimeoutError:  # otherwise this rank would count as a host of its own
        return interfaces.process()._replace(name=socket.gethostname())
