"""The meeting of the ranks: through a store, at which torch makes its process groups then.

torch's own `env://` and `tcp://` rendezvous does the same for one world per process. This one also
- has one deadline for all of it, after which every rank says who did not come, or which address, as it resolved, did
  not answer; where world sizes differ, every rank is told;
- keeps apart the worlds that follow each other on one port or on the store of a launcher, whoever was in them: no rank
  reads the addresses of an earlier one;
- tells every rank where one of them would be looked for on its own host's loopback interface by ranks of others, or
  under an address that another host announces, too;
- tells every rank which one ended while they waited for others;
- comes back where it met a server that was just being closed, and waits for a port that is just being given back.

How they meet: rank 0 opens a world under a random name, and writes the name to a fixed key. Each other rank enters
that world with its rank, world size, process and whereabouts, and waits there for rank 0's verdict. Meanwhile rank 0
keeps a roster of those who came from each host, so that they can watch each other's processes, rank 0's among them; of
all ranks there is one at the end, which each reads once. Then rank 0 takes the name away again. A rank that gets no
verdict, as that world's rank 0 was killed before, or that of a smaller world, watches the key for the next.

Where an agent of torchrun serves the store, the key is the same in each of its rounds: agents count restarts
differently, one for a failure, the other for a change of members. What is left of an earlier round is a name that
nobody keeps, and entries of processes that have ended, which those that come after them may replace.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from device_communicators.base.bounded_store import LAST_WORD_S, BoundedStore, StoreSilentError
from device_communicators.base.errors import (
    CommunicationError,
    ConfigMismatchError,
    PeerDiedError,
    RendezvousError,
    format_ranks,
)
from device_communicators.base.host import address_towards, is_loopback
from device_communicators.cpu.watching import listen
from device_communicators.liveness.health import Watcher
from parallel_state.startup import binding, environment, interfaces
from parallel_state.startup.environment import ProcessEnvironment
from parallel_state.startup.interfaces import Address
from parallel_state.startup.reserved import ReservedPort
from parallel_state.startup.stores import find_store, looks, within
from parallel_state.startup.watch import Processes

E = TypeVar("E", bound=CommunicationError)

logger = logging.getLogger("parallel_state")

_OWN_NAME_S = 2.0  # for this host's own name to resolve
_FAREWELL_S = 1.0  # a rank 0 that gives up keeps its server for this long, so that the others read why
_LATE_S = 0.6  # part of _FAREWELL_S in which it also waits for late ranks
_TOGETHER_S = 0.1  # ranks that exit within this time are named together
_REFUSED_S = 1.0  # rank 0 has exited if its port refuses connections for this long

_NAME, _VERDICT, _HEARD, _ROSTER, _ENDED = "world", "verdict", "heard", "roster", "ended"
_GAVE_UP = "gave up"
_NO_WORLD = "rank 0 has not opened a world there"
_COMPLETE, _SIZES, _MISSING, _LOOPBACK, _SAME = "complete", "sizes", "missing", "loopback", "same"
_CORES = "cores"
_OBSTACLES: tuple[tuple[str, Callable[[dict[int, Address]], list[str]]], ...] = (
    (_LOOPBACK, interfaces.unreachable), (_SAME, interfaces.shared_address), (_CORES, binding.different_cores),
)  # fmt: skip
_ROSTER_S = 0.2  # between two rosters of those who came so far
_LOOKED_AT_PER_S = 1024  # ranks per second that rank 0 looks for beyond the first missing one


class Met(NamedTuple):
    """The result of a meeting."""

    store: BoundedStore
    where: str
    """The store, as messages name it."""
    places: dict[int, Address]
    deadline: float
    """Deadline of the whole start."""
    reserved: ReservedPort
    """This process' port for the store of the next world; `places` have those of all ranks."""
    watcher: Watcher
    """The world's, from its beginning."""

    def address(self, rank: int, towards_store: str) -> str:
        """Returns where other hosts reach this process: from where it reaches the store, unless that is its own host.

        There the store's name may lead to loopback; it is then what gloo tells the others.
        """
        own = self.places.get(rank, Address())
        several = len({place.network for place in self.places.values()}) > 1
        return own.address if several and is_loopback(towards_store) and own.address else towards_store

    @property
    def next_stores(self) -> tuple[str, ...]:
        """Returns each rank's place for the next world's store; empty where a launcher, or a file, serves it."""
        found = tuple(self.places[rank].next_store for rank in sorted(self.places))
        return found if any(found) else ()


def meet(init_method: str, place: ProcessEnvironment, timeout_s: float, over_gloo: bool = True) -> Met:
    """Meets the other ranks of a new world. Every rank calls it; rank 0 serves unless the launcher does.

    `over_gloo`: the ranks will be connected by gloo, and must be where others can reach them.

    A world of one rank gets a store in memory: no address, no port. Raises RendezvousError, PeerDiedError with a rank
    that ended meanwhile, ConfigMismatchError where ranks have different world sizes, InvalidArgumentError for a method
    that nobody knows.
    """
    watcher = Watcher()
    deadline = time.monotonic() + timeout_s
    if place.world_size == 1:
        return Met(BoundedStore(dist.HashStore()), "", {}, deadline, ReservedPort(), watcher)
    own_place = _whereabouts(deadline) if over_gloo else interfaces.process()
    way = find_store(init_method, place, timeout_s, deadline)
    reserved = ReservedPort() if way.server is None else ReservedPort.beside(way.server, place.rank)
    address = own_place.address or address_towards(environment.store_server(init_method, place) or place.master)
    try:
        endpoint = listen(watcher, address)
    except BaseException:
        reserved.close()
        raise
    own_place = own_place._replace(cores=binding.cores_to_share(), next_store=reserved.where, endpoint=endpoint)
    meeting = _Meeting(
        place, own_place, way.where, timeout_s, deadline, way.connect, way.prefix, rank_0_serves=way.server is not None
    )
    try:
        store = meeting.open_world() if place.rank == 0 else meeting.enter_world()
        store.set_timeout(timedelta(seconds=timeout_s))
        return Met(BoundedStore(store.raw), meeting.where, meeting.places, deadline, reserved, watcher)
    except BaseException as error:
        reserved.close()
        watcher.close()
        if isinstance(error, dist.DistError):
            meeting.obstacle = str(error).splitlines()[0]
            raise meeting.not_met() from error
        raise
    finally:
        meeting.processes.close()


@dataclass
class _Meeting:
    """One attempt of this rank to meet the others."""

    place: ProcessEnvironment
    own_place: Address
    where: str
    timeout_s: float
    deadline: float
    connect: Callable[[], dist.Store]
    """A new connection; raises OSError or DistNetworkError where it may be tried again."""
    prefix: str
    obstacle: str = "it was not tried"
    rank_0_serves: bool = False

    def __post_init__(self) -> None:
        self.places = {self.place.rank: self.own_place}
        self._published: dict[str, int] = {}
        """Number of ranks in each roster."""
        self.processes = Processes(self.own_place)

    def _bounded(self, store: dist.Store) -> BoundedStore:
        """Returns this job's part of a store, whose operations end at the deadline of the start."""
        return BoundedStore(dist.PrefixStore(self.prefix, store)).until(self.deadline + LAST_WORD_S)

    def open_world(self) -> BoundedStore:
        """Opens a world as rank 0, and returns its store once all ranks came."""
        store = self._reach_store()
        name = secrets.token_hex(8)
        world = store.prefixed(name)
        self._publish_roster(world)
        store.set(_NAME, name)
        verdict, others = self._judge(world)
        complete = verdict.startswith(_COMPLETE)
        if complete:
            everyone = json.dumps({str(rank): list(place) for rank, place in self.places.items()})
            world.set(_ROSTER, zlib.compress(everyone.encode()).hex())
        world.set(_VERDICT, verdict)
        if not complete:
            began, late = time.monotonic(), 0 if verdict.startswith(_MISSING) else len(self._missing(world))
            for _ in looks(began + _FAREWELL_S):
                awaited = others + late if time.monotonic() < began + _LATE_S else others
                if world.add(_HEARD, 0) >= awaited:
                    break
        store.set(_NAME, "")
        if not complete:
            raise self._failure(verdict)
        return world

    def _reach_store(self) -> BoundedStore:
        for _ in looks(self.deadline):
            try:
                return self._bounded(self.connect())
            except (OSError, dist.DistNetworkError) as error:
                self.obstacle = str(error).splitlines()[0]
        raise self.not_met()

    def _judge(self, world: BoundedStore) -> tuple[str, int]:
        """Waits for every rank. Returns the verdict, and how many may be there to hear it."""
        deadline = self.deadline - min(_FAREWELL_S, self.timeout_s / 8)  # what is left is for the others to hear
        size, published, published_at = self.place.world_size, 1, time.monotonic()
        surveyed_at, survey_s = published_at, max(_ROSTER_S, size / _LOOKED_AT_PER_S)
        for rank in range(1, size):
            key = _key(rank)
            for _ in looks(deadline):
                if world.check([key]):
                    break
                if time.monotonic() > surveyed_at + survey_s:
                    self._survey(world)
                    surveyed_at = time.monotonic()
                if self._ended(world):
                    time.sleep(_TOGETHER_S)
                    self._survey(world)
                    ended, missing = self._ended(world), self._missing(world)
                    # A rank that ended as it waited for others in vain isn't the cause.
                    kind, ranks = (_MISSING, missing) if missing and world.check([_GAVE_UP]) else (_ENDED, ended)
                    return f"{kind} {' '.join(map(str, ranks))}", size - 1 - len(missing) - len(ended)
                if len(self.places) > published and time.monotonic() > published_at + _ROSTER_S:
                    self._publish_roster(world)
                    published, published_at = len(self.places), time.monotonic()
            else:
                missing = self._missing(world)
                return f"{_MISSING} {' '.join(map(str, missing))}", size - 1 - len(missing)
            words = world.get(key).decode().split(" ")
            other_size = int(words[0])
            if other_size != size:
                return f"{_SIZES} {size} {rank} {other_size}", max(size, other_size) - 1
            self.places[rank] = Address.parse(words[2:])
            self.processes.see({rank: self.places[rank]})
        if self._ended(world):
            time.sleep(_TOGETHER_S)
            ended = self._ended(world)
            return f"{_ENDED} {' '.join(map(str, ended))}", size - 1 - len(ended)
        for kind, find in _OBSTACLES:
            if words := find(self.places):
                return f"{kind} {' '.join(words)}", size - 1
        return f"{_COMPLETE} {size}", size - 1

    def _survey(self, world: BoundedStore) -> None:
        """Watches the processes of all ranks that have arrived, also of ranks above a missing one."""
        for rank in range(1, self.place.world_size):
            if rank not in self.places and world.check([_key(rank)]):
                self.places[rank] = Address.parse(world.get(_key(rank)).decode().split(" ")[2:])
                self.processes.see({rank: self.places[rank]})

    def _ended(self, world: BoundedStore) -> list[int]:
        """Returns ranks that came and ended: which this one sees, and those of which others tell."""
        by_others = world.get(_ENDED).decode().split() if world.check([_ENDED]) else []
        return sorted({*self.processes.ended(), *map(int, by_others)})

    def _publish_roster(self, world: BoundedStore) -> None:
        """Tells the ranks of each host which of them came, where there are new ones: all who can watch each other."""
        rosters: dict[str, dict[str, list[str]]] = {}
        for rank, place in self.places.items():
            rosters.setdefault(place.processes, {})[str(rank)] = list(place)
        for processes, roster in rosters.items():
            if self._published.get(processes) != len(roster):
                self._published[processes] = len(roster)
                world.set(f"{_ROSTER}/{processes}", json.dumps(roster))

    def _read_roster(self, world: BoundedStore) -> None:
        key = f"{_ROSTER}/{self.own_place.processes}"
        if world.check([key]):
            self.processes.see(_places(json.loads(world.get(key))))

    def _missing(self, world: BoundedStore) -> list[int]:
        return [rank for rank in range(1, self.place.world_size) if not world.check([_key(rank)])]

    def enter_world(self) -> BoundedStore:
        """Enters rank 0's world as one of the other ranks, and returns its store once all came."""
        entry = " ".join([str(self.place.world_size), secrets.token_hex(8), *self.own_place])
        store = world = None
        name, refused_at = b"", 0.0
        entered = False
        for _ in looks(self.deadline, self.place.world_size):
            try:
                if store is None:
                    store, name, refused_at = self._bounded(self.connect()), b"", 0.0
                    self.obstacle = _NO_WORLD
                newest = store.get(_NAME) if store.check([_NAME]) else b""
                # First the verdict of the world that this rank is in, if there is one by now: where the others' start
                # failed at once and rank 0 is back, this rank's fails with them, and all come to the next together.
                is_decided = entered and world is not None and world.check([_VERDICT])
                if newest not in (b"", name) and not is_decided:
                    name, world = newest, store.prefixed(newest.decode())
                    if self._is_left_behind(world):
                        world, entered = None, False
                    else:
                        entered = self._enter(world, entry)
                if world is None or not entered:
                    continue
                if not is_decided:
                    self._look_after(world)
                elif self._is_complete(world):
                    return world
                else:
                    entered = False
            except (OSError, dist.DistNetworkError, StoreSilentError) as error:
                # Nobody listens yet; or the server, of an earlier world, was just being closed.
                store = None
                if entered and self.rank_0_serves and isinstance(error, ConnectionRefusedError):
                    refused_at = refused_at or time.monotonic()
                    if time.monotonic() > refused_at + _REFUSED_S:
                        ended = sorted({0, *self.processes.ended()})
                        raise self._failure(f"{_ENDED} {' '.join(map(str, ended))}") from error
                if world is None:  # else what was found there says more
                    who = "rank 0 doesn't answer there: " if self.rank_0_serves else ""
                    self.obstacle = who + str(error).splitlines()[0]
        missing = []
        if store is not None and world is not None and entered:
            with contextlib.suppress(dist.DistError):
                missing = self._missing(world.within(LAST_WORD_S))
        if world is None or not missing:
            raise self.not_met()
        with contextlib.suppress(dist.DistError):
            world.within(LAST_WORD_S).set(_GAVE_UP, "1")
        raise self._failure(f"{_MISSING} {' '.join(map(str, missing))}")

    def _is_left_behind(self, world: BoundedStore) -> bool:
        """Returns True for a world whose rank 0 has ended before it gave a verdict; else watches who came there."""
        self.processes.close()
        self.processes = Processes(self.own_place)
        self._read_roster(world)
        if 0 not in self.processes.ended():
            return False
        self.obstacle = _NO_WORLD
        return True

    def _enter(self, world: BoundedStore, entry: str) -> bool:
        """Returns True if this process is its rank in that world: unless another one is, that hasn't ended."""
        key = _key(self.place.rank)
        found = world.compare_set(key, "", entry).decode()
        if found != entry:
            other = Processes(self.own_place)
            other.see({self.place.rank: Address.parse(found.split(" ")[2:])})
            if other.ended():
                found = world.compare_set(key, found, entry).decode()
            other.close()
        self.obstacle = "rank 0 gave no verdict" if found == entry else "another process came there with this rank"
        return found == entry

    def _is_complete(self, world: BoundedStore) -> bool:
        """Returns True if the verdict is that all ranks came, False for a smaller world, of some, that goes first.

        Raises the error for any other verdict.
        """
        verdict = world.get(_VERDICT).decode()
        world.add(_HEARD, 1)
        if verdict == f"{_COMPLETE} {self.place.world_size}":
            self.places = _places(json.loads(zlib.decompress(bytes.fromhex(world.get(_ROSTER).decode()))))
            return True
        if not verdict.startswith(_COMPLETE):
            raise self._failure(verdict)
        self.obstacle = f"rank 0 opened a world of {verdict.split()[1]} ranks there"
        return False

    def _look_after(self, world: BoundedStore) -> None:
        """Tells rank 0 of processes of this host that have ended; raises where that is rank 0."""
        self._read_roster(world)
        ended = self.processes.ended()
        if 0 in ended:
            time.sleep(_TOGETHER_S)
            raise self._failure(f"{_ENDED} {' '.join(map(str, self.processes.ended()))}")
        if ended:  # ranks of other hosts may publish theirs
            told = world.get(_ENDED).decode().split() if world.check([_ENDED]) else []
            if not set(ended) <= set(map(int, told)):
                world.set(_ENDED, " ".join(map(str, sorted({*ended, *map(int, told)}))))

    def not_met(self) -> RendezvousError:
        """Returns the error for a rank that met nobody."""
        return self._error(
            f"{self._name} must meet the others at {self.where}, but did not within {self.timeout_s:g} s: "
            f"{self.obstacle}. Check that all ranks were started, that MASTER_ADDR and MASTER_PORT are equal "
            "everywhere, and that no firewall is between",
            [0] if self.obstacle.startswith("rank 0 ") else (),
        )

    def _failure(self, verdict: str) -> Exception:
        """Returns the error for a verdict of rank 0's."""
        kind, *words = verdict.split()
        if kind == _LOOPBACK:
            text = interfaces.not_reachable(self.own_place, *words, who=self._name)
            return self._error(text, [int(word) for word in words[2:]])
        if kind == _SAME:
            text, suspects = interfaces.same_address(self.own_place, *words)
            return self._error(f"{self._name} can't start: {text}", suspects)
        if kind == _CORES:
            return ConfigMismatchError(f"{self._name} can't start: {binding.not_shared(*words)}")
        numbers = [int(word) for word in words]
        if kind == _SIZES:
            wanted, rank, other_size = numbers
            return ConfigMismatchError(
                f"all ranks must have one world size, but rank 0 has {wanted} and rank {rank} {other_size} (this is "
                f"rank {self.place.rank}, with {self.place.world_size}); start them alike, and look for ranks of "
                f"another job at {self.where}"
            )
        if kind == _ENDED:
            error = self._error(
                f"{self._name} met the others at {self.where}, but global ranks {format_ranks(numbers)} ended while "
                "they waited there; look at the logs of these ranks",
                numbers,
                PeerDiedError,
            )
            error.group = "world"
            return error
        return self._error(
            f"{self._name} was at {self.where}, but ranks {format_ranks(numbers)} did not come within "
            f"{self.timeout_s:g} s. Look for ranks that were not started or ended early; for a slow start, raise "
            "PARALLEL_STATE_START_TIMEOUT_S",
            numbers,
        )

    @property
    def _name(self) -> str:
        return f"rank {self.place.rank} of {self.place.world_size}"

    def _error(self, text: str, suspects: Sequence[int] = (), kind: type[E] = RendezvousError) -> E:  # type: ignore[assignment]
        return kind(
            text, operation="rendezvous", rank=self.place.rank, suspect_ranks=suspects, timeout_s=self.timeout_s
        )


def _places(roster: dict[str, list[str]]) -> dict[int, Address]:
    return {int(rank): Address.parse(words) for rank, words in roster.items()}


def _key(rank: int) -> str:
    return f"rank/{rank}"


def _whereabouts(deadline: float) -> Address:
    try:
        return within(min(deadline, time.monotonic() + _OWN_NAME_S), interfaces.whereabouts)
    except TimeoutError:  # then there is nothing to warn about
        return Address()
