"""The meeting of the ranks: from an address to the store through which torch makes its process groups.

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
import errno
import gc
import json
import logging
import os
import secrets
import select
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import torch.distributed as dist

from device_communicators.errors import (
    CommunicationError,
    ConfigMismatchError,
    InvalidArgumentError,
    PeerDiedError,
    RendezvousError,
    format_ranks,
)
from parallel_state.startup import binding, interfaces
from parallel_state.startup.environment import ProcessEnvironment, launcher_serves_store
from parallel_state.startup.interfaces import Address
from parallel_state.startup.reserved import ReservedPort, interface_of, listener_at
from parallel_state.startup.watch import Processes, in_thread
from parallel_state.store.client import JOB_STORE

T = TypeVar("T")
E = TypeVar("E", bound=CommunicationError)

logger = logging.getLogger("parallel_state")

_PORT_RETRY_S = 5.0
_GRACE_S = 0.5
_OWN_NAME_S = 2.0  # for this host's own name to resolve
_RESOLVE_S = 60.0  # for rank 0's: a name server that had none keeps that for up to 30 s
_FAREWELL_S = 1.0  # a rank 0 that gives up, and takes its server with it, stays this long for the others to hear why
_ARRIVAL_S = 1.0  # for a connection that a proxy in front of this host has taken to come here
_PAUSES_S = (0.002, 0.5)  # between two looks: the first, and the longest
_FIRST_LOOKS_PER_S, _LOOKS_PER_S = 20_000, 1024  # of all ranks together

_NAME, _VERDICT, _HEARD, _ROSTER, _ENDED = "world", "verdict", "heard", "roster", "ended"
_GAVE_UP = "gave up"
_COMPLETE, _SIZES, _MISSING, _LOOPBACK, _SAME = "complete", "sizes", "missing", "loopback", "same"
_CORES = "cores"
_ROSTER_S = 0.2  # between two rosters of those who came so far


class Met(NamedTuple):
    """Holds what comes of a meeting: the world's store, its ranks, and those of them that are watched."""

    store: dist.Store
    places: dict[int, Address]
    processes: Processes
    deadline: float
    """Deadline of the whole start."""
    reserved: ReservedPort
    """This process' port for the store of the next world; `places` have those of all ranks."""

    def address(self, rank: int, towards_store: str) -> str:
        """Returns where other hosts reach this process: from where it reaches the store, unless that is its own host.

        There the store's name may lead to loopback; it is then what gloo tells the others.
        """
        own = self.places.get(rank, Address())
        several = len({place.network for place in self.places.values()}) > 1
        return own.address if several and interfaces.is_loopback(towards_store) and own.address else towards_store

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
    deadline = time.monotonic() + timeout_s
    if place.world_size == 1:
        return Met(dist.HashStore(), {}, Processes(Address()), deadline, ReservedPort())
    own_place = _whereabouts(deadline) if over_gloo else interfaces.process()
    own_place = own_place._replace(cores=binding.cores_to_share())
    reserved = ReservedPort()
    if init_method == "env://" or init_method.startswith("tcp://"):
        by_launcher = init_method == "env://" and launcher_serves_store()
        address = _address(init_method, place)
        where = f"{address[0]}:{address[1]} (resolved: {', '.join(_resolve(address, place, deadline))})"
        handed = JOB_STORE.try_get(*address) if by_launcher else None
        if handed is not None:
            where += ", the store of launch, which takes ranks with the job's secret"
            open_store: Callable[..., dist.Store] = _store_of_launch
        else:
            open_store = _serve if place.rank == 0 and not by_launcher else _connect
        logger.info("rank %d of %d meets the others at %s", place.rank, place.world_size, where)
        run = os.environ.get("TORCHELASTIC_RUN_ID", "") if by_launcher else ""  # jobs may share the store of an agent
        connect = partial(open_store, address, place, deadline)
        if not by_launcher:
            reserved = ReservedPort.beside(address, place.rank)
            own_place = own_place._replace(next_store=reserved.where)
        meeting = _Meeting(place, own_place, where, timeout_s, deadline, connect, f"parallel_state/{run or 0}")
    elif "://" in init_method:
        connect = partial(_torch_rendezvous, init_method, place, timeout_s, deadline)
        meeting = _Meeting(place, own_place, init_method, timeout_s, deadline, connect, "parallel_state")
    else:
        raise InvalidArgumentError(
            "distributed_init_method must be 'env://', 'tcp://HOST:PORT' or another of torch's methods with '://', "
            f"but is {init_method!r}"
        )
    try:
        store = meeting.open_world() if place.rank == 0 else meeting.enter_world()
        store.set_timeout(timedelta(seconds=timeout_s))
        return Met(store, meeting.places, meeting.processes, deadline, reserved)
    except BaseException as error:
        meeting.processes.close()
        reserved.close()
        if isinstance(error, dist.DistError):
            meeting.obstacle = str(error).splitlines()[0]
            raise meeting.not_met() from error
        raise


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

    def __post_init__(self) -> None:
        self.places = {self.place.rank: self.own_place}
        self._published: dict[str, int] = {}
        """Number of ranks in each roster."""
        self.processes = Processes(self.own_place)

    def open_world(self) -> dist.Store:
        """Opens a world as rank 0, and returns its store once all ranks came."""
        store = self._reach_store()
        name = secrets.token_hex(8)
        world = dist.PrefixStore(name, store)
        self._publish_roster(world)
        store.set(_NAME, name)
        verdict, others = self._judge(world)
        complete = verdict.startswith(_COMPLETE)
        if complete:
            everyone = json.dumps({str(rank): list(place) for rank, place in self.places.items()})
            world.set(_ROSTER, zlib.compress(everyone.encode()).hex())
        world.set(_VERDICT, verdict)
        if not complete:
            for _ in _looks(time.monotonic() + _FAREWELL_S):
                if world.add(_HEARD, 0) >= others:
                    break
        store.set(_NAME, "")
        if not complete:
            raise self._failure(verdict)
        return world

    def _reach_store(self) -> dist.Store:
        for _ in _looks(self.deadline):
            try:
                return dist.PrefixStore(self.prefix, self.connect())
            except (OSError, dist.DistNetworkError) as error:
                self.obstacle = str(error).splitlines()[0]
        raise self.not_met()

    def _judge(self, world: dist.Store) -> tuple[str, int]:
        """Waits for every rank. Returns the verdict, and how many may be there to hear it."""
        deadline = self.deadline - min(_FAREWELL_S, self.timeout_s / 8)  # what is left is for the others to hear
        size, published, published_at = self.place.world_size, 1, time.monotonic()
        for rank in range(1, size):
            key = _key(rank)
            for _ in _looks(deadline):
                if world.check([key]):
                    break
                if ended := self._ended(world):
                    missing = self._missing(world)
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
        if ended := self._ended(world):
            return f"{_ENDED} {' '.join(map(str, ended))}", size - 1 - len(ended)
        if unreachable := interfaces.unreachable(self.places):
            return f"{_LOOPBACK} {' '.join(unreachable)}", size - 1
        if shared := interfaces.shared_address(self.places):
            return f"{_SAME} {' '.join(shared)}", size - 1
        if different := binding.different_cores(self.places):
            return f"{_CORES} {' '.join(different)}", size - 1
        return f"{_COMPLETE} {size}", size - 1

    def _ended(self, world: dist.Store) -> list[int]:
        """Returns ranks that came and ended: which this one sees, and those of which others tell."""
        by_others = world.get(_ENDED).decode().split() if world.check([_ENDED]) else []
        return sorted({*self.processes.ended(), *map(int, by_others)})

    def _publish_roster(self, world: dist.Store) -> None:
        """Tells the ranks of each host which of them came, where there are new ones: all who can watch each other."""
        rosters: dict[str, dict[str, list[str]]] = {}
        for rank, place in self.places.items():
            rosters.setdefault(place.processes, {})[str(rank)] = list(place)
        for processes, roster in rosters.items():
            if self._published.get(processes) != len(roster):
                self._published[processes] = len(roster)
                world.set(f"{_ROSTER}/{processes}", json.dumps(roster))

    def _read_roster(self, world: dist.Store) -> None:
        key = f"{_ROSTER}/{self.own_place.processes}"
        if world.check([key]):
            self.processes.see(_places(json.loads(world.get(key))))

    def _missing(self, world: dist.Store) -> list[int]:
        return [rank for rank in range(1, self.place.world_size) if not world.check([_key(rank)])]

    def enter_world(self) -> dist.Store:
        """Enters rank 0's world as one of the other ranks, and returns its store once all came."""
        entry = " ".join([str(self.place.world_size), secrets.token_hex(8), *self.own_place])
        store = world = None
        name = b""
        entered = False
        for _ in _looks(self.deadline, self.place.world_size):
            try:
                if store is None:
                    store, name = dist.PrefixStore(self.prefix, self.connect()), b""
                    self.obstacle = "rank 0 has not opened a world there"
                newest = store.get(_NAME) if store.check([_NAME]) else b""
                if newest not in (b"", name):
                    name, world = newest, dist.PrefixStore(newest.decode(), store)
                    self.processes.close()
                    self.processes = Processes(self.own_place)
                    self._read_roster(world)
                    if 0 in self.processes.ended():  # the name was left behind, by a world that never was
                        world, entered, self.obstacle = None, False, "rank 0 has not opened a world there"
                    else:
                        entered = self._enter(world, entry)
                        self.obstacle = (
                            "rank 0 gave no verdict" if entered else "another process came there with this rank"
                        )
                if world is not None and entered and world.check([_VERDICT]):
                    verdict = world.get(_VERDICT).decode()
                    world.add(_HEARD, 1)
                    if verdict == f"{_COMPLETE} {self.place.world_size}":
                        self.places = _places(json.loads(zlib.decompress(bytes.fromhex(world.get(_ROSTER).decode()))))
                        self.processes.see(self.places)
                        return world
                    if not verdict.startswith(_COMPLETE):
                        raise self._failure(verdict)
                    # A smaller world, of some of the ranks, that comes first.
                    entered = False
                    self.obstacle = f"rank 0 opened a world of {verdict.split()[1]} ranks there"
                elif world is not None and entered:
                    self._look_after(world)
            except (OSError, dist.DistNetworkError) as error:
                # Nobody listens yet; or the server, of an earlier world, was just being closed.
                store = None
                if world is None:  # else what was found there says more
                    self.obstacle = str(error).splitlines()[0]
        missing = self._missing(world) if store is not None and world is not None and entered else []
        if world is None or not missing:
            raise self.not_met()
        with contextlib.suppress(dist.DistError):
            world.set(_GAVE_UP, "1")
        raise self._failure(f"{_MISSING} {' '.join(map(str, missing))}")

    def _enter(self, world: dist.Store, entry: str) -> bool:
        """Returns True if this process is its rank in that world: unless another one is, that hasn't ended."""
        key = _key(self.place.rank)
        found = world.compare_set(key, "", entry).decode()
        if found != entry:
            other = Processes(self.own_place)
            other.see({self.place.rank: Address.parse(found.split(" ")[2:])})
            if other.ended():
                found = world.compare_set(key, found, entry).decode()
            other.close()
        return found == entry

    def _look_after(self, world: dist.Store) -> None:
        """Tells rank 0 of processes of this host that have ended; raises where that is rank 0."""
        self._read_roster(world)
        ended = self.processes.ended()
        if 0 in ended:
            raise self._failure(f"{_ENDED} 0")
        if ended:
            world.set(_ENDED, " ".join(map(str, ended)))

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


def _error_of(rank: int, text: str) -> RendezvousError:
    return RendezvousError(f"rank {rank} {text}", operation="rendezvous", rank=rank)


def _key(rank: int) -> str:
    return f"rank/{rank}"


def _looks(deadline: float, ranks: int = 1) -> Iterator[None]:
    """Yields at least one look, and the last one at the deadline; pauses grow, as many ranks look at one server.

    With `ranks`, of all of which one server has to answer the looks, they are longer from the start.
    """
    shortest_s, longest_s = _PAUSES_S
    pause_s, longest_s = max(shortest_s, ranks / _FIRST_LOOKS_PER_S), max(longest_s, ranks / _LOOKS_PER_S)
    while True:
        yield
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return
        time.sleep(min(pause_s, remaining_s))
        pause_s = min(pause_s * 1.3, longest_s)


def _address(init_method: str, place: ProcessEnvironment) -> tuple[str, int]:
    if init_method == "env://":
        if place.master_addr is None or place.master_port is None:
            raise RendezvousError(f"a world of {place.world_size} ranks needs MASTER_ADDR and MASTER_PORT; set both")
        return place.master_addr, place.master_port
    parts = urlsplit(init_method)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None:
        raise InvalidArgumentError(f"distributed_init_method must be 'tcp://HOST:PORT', but is {init_method!r}")
    return host, port


def _torch_rendezvous(init_method: str, place: ProcessEnvironment, timeout_s: float, deadline: float) -> dist.Store:
    parts = urlsplit(init_method)
    folder = os.path.dirname(parts.path)
    if parts.scheme == "file" and not os.path.isdir(folder):  # FileStore would try for ever
        raise InvalidArgumentError(
            f"distributed_init_method must name a file in a directory that exists, but is {init_method!r}"
        )
    start = partial(dist.rendezvous, init_method, place.rank, place.world_size, timeout=timedelta(seconds=timeout_s))
    try:
        return _within(deadline, lambda: next(start())[0])
    except (RuntimeError, ValueError) as error:
        raise InvalidArgumentError(
            f"torch can't use distributed_init_method {init_method!r}: {str(error).splitlines()[0]}"
        ) from error


def _serve(address: tuple[str, int], place: ProcessEnvironment, deadline: float) -> dist.Store:
    give_up = min(deadline, time.monotonic() + _PORT_RETRY_S)
    while True:
        try:
            backlog = place.world_size + 16
            listener = listener_at(address, backlog) or listen_on(interface_of(address[0]), address[1], backlog)
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            if in_use and time.monotonic() + 0.2 < give_up:
                time.sleep(0.05)  # an earlier world of this process may be just closing its server
                gc.collect()  # or a call that failed in another thread meanwhile, and its error, still hold it
                continue
            what = "is in use by another process" if in_use else f"can't be served: {str(error).splitlines()[0]}"
            raise _error_of(
                0,
                f"must listen on {address[0]}:{address[1]}, but that address {what}; choose another MASTER_PORT (the "
                "same on every rank), or end what listens there",
            ) from error
        with listener:
            _check_own(address, listener, deadline)
            try:
                return _within(deadline, partial(_tcp_store, address, place, deadline, listener.detach()), _GRACE_S)
            except (OSError, RuntimeError) as error:
                raise _error_of(
                    0,
                    f"listens on port {address[1]}, but can't serve the store at {address[0]}:{address[1]}: "
                    f"{str(error).splitlines()[0]}. Set MASTER_ADDR, on every rank, to an address of rank 0's host",
                ) from error


def _check_own(address: tuple[str, int], listener: socket.socket, deadline: float) -> None:
    """Finds out whether a connection to `address` comes to `listener`, of this process; RendezvousError if not.

    Before TCPStore tries: it would until the deadline, in a thread that can't be broken off, and that ends the process
    by SIGABRT if it comes back while the interpreter is on its way out.
    """
    why = ""
    for _ in _looks(deadline):  # an address in front of this host may come to lead here only in a while
        try:
            with socket.create_connection(address, timeout=max(0.01, deadline - time.monotonic())):
                poll = select.poll()  # `select` takes no descriptor above 1,023
                poll.register(listener, select.POLLIN)
                came = poll.poll(1000 * max(0.01, min(_ARRIVAL_S, deadline - time.monotonic())))
            if came:
                return
            why = "another host answers there"
        except OSError as error:
            why = str(error)
    raise _error_of(
        0,
        f"must serve the store at {address[0]}:{address[1]}, but that address doesn't lead to its own host, "
        f"{socket.gethostname()}: {why}. Set MASTER_ADDR, on every rank, to an address of the host that runs rank 0, "
        "or start rank 0 on the host that has this address",
    )


def listen_on(host: str | None, port: int, backlog: int) -> socket.socket:
    """Returns a listening socket on `host` alone (None: on all interfaces); OSError if that can't be.

    TCPStore would listen on all interfaces whatever host it is given, unless it is handed a socket.
    """
    if host is None and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    family, _, _, _, where = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where[:2], family=family, backlog=backlog)


def _connect(address: tuple[str, int], place: ProcessEnvironment, deadline: float) -> dist.Store:
    # A look first: while nobody listens, TCPStore would come back late, after pauses of seconds, and fill the log.
    with socket.create_connection(address, timeout=max(0.01, deadline - time.monotonic())):
        pass
    return _within(deadline, partial(_tcp_store, address, place, deadline), _GRACE_S)


def _store_of_launch(address: tuple[str, int], place: ProcessEnvironment, deadline: float) -> dist.Store:
    store = JOB_STORE.try_get(*address)
    if store is None:
        raise RendezvousError(f"rank {place.rank} must come while its launch runs, but that has ended", rank=place.rank)
    store.reach(deadline)
    return store


def _tcp_store(
    address: tuple[str, int], place: ProcessEnvironment, deadline: float, listen_fd: int | None = None
) -> dist.Store:
    timeout = timedelta(seconds=max(0.1, deadline - time.monotonic()))
    is_server = listen_fd is not None
    return dist.TCPStore(
        *address, place.world_size, is_server, timeout, wait_for_workers=False, master_listen_fd=listen_fd
    )


def _within(deadline: float, make: Callable[[], T], grace_s: float = 0.0) -> T:
    """Returns `make()`, given up at the deadline: names resolve late, and TCPStore waits for a silent server."""
    future = in_thread(make, "parallel_state-rendezvous")
    # A native call with this deadline ends a moment later: it must not come back while the interpreter is going.
    if not wait([future], max(0.0, deadline - time.monotonic()) + grace_s).done:
        raise TimeoutError("what is there doesn't answer")
    return future.result()


def _whereabouts(deadline: float) -> Address:
    try:
        return _within(min(deadline, time.monotonic() + _OWN_NAME_S), interfaces.whereabouts)
    except TimeoutError:  # then there is nothing to warn about
        return Address()


def _resolve(address: tuple[str, int], place: ProcessEnvironment, deadline: float) -> list[str]:
    """Returns the addresses of a name, which may come late: a pod's name is there once the pod is."""
    give_up = min(deadline, time.monotonic() + _RESOLVE_S)
    told = False
    for _ in _looks(give_up):
        try:
            found = _within(deadline, partial(socket.getaddrinfo, *address, type=socket.SOCK_STREAM))
            return sorted({str(entry[4][0]) for entry in found})
        except OSError as error:
            problem = error
        if not told:
            told = True
            logger.warning(
                "rank %d must meet the others at %s:%d, but that name does not resolve yet (%s); it is tried again for "
                "%.0f s",
                place.rank,
                *address,
                problem,
                give_up - time.monotonic(),
            )
    raise _error_of(
        place.rank,
        f"must meet the others at {address[0]}:{address[1]}, but that name does not resolve ({problem}); set "
        "MASTER_ADDR to an address that every host knows",
    ) from problem
