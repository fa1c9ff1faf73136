"""How the ranks find each other: from an address to the store through which torch makes its process groups.

torch's own `env://` and `tcp://` rendezvous does the same for one world per process. This one also
- has one deadline for all of it, after which every rank says who did not come, or which address, as it resolved, did
  not answer; where world sizes differ, every rank is told;
- keeps apart the worlds that follow each other on one port or on the store of a launcher, whoever was in them: no rank
  reads the addresses of an earlier one;
- tells every rank where one of them would be looked for on its own host's loopback interface by ranks of others;
- comes back where it met a server that was just being closed, and waits for a port that is just being given back.

How they meet: rank 0 opens a world under a random name, and writes the name to a fixed key. Each other rank enters
that world with its rank, world size and whereabouts, and waits there for rank 0's verdict. Then rank 0 takes the name
away again. A rank that gets no verdict, as that world's rank 0 was killed, or that of a smaller world, watches the key
for the next.
"""

from __future__ import annotations

import errno
import gc
import ipaddress
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

import torch.distributed as dist

from device_communicators.errors import ConfigMismatchError, InvalidArgumentError, RendezvousError, format_ranks
from parallel_state import interfaces
from parallel_state.control_store import HANDED
from parallel_state.environment import ProcessEnvironment
from parallel_state.interfaces import Whereabouts

T = TypeVar("T")

logger = logging.getLogger("parallel_state")

_PORT_RETRY_S = 5.0
_OWN_NAME_S = 2.0  # for this host's own name to resolve
_FAREWELL_S = 1.0  # a rank 0 that gives up, and takes its server with it, stays this long for the others to hear why
_PAUSES_S = (0.002, 0.5)  # between two looks: the first, and the longest

_NAME, _VERDICT, _HEARD = "world", "verdict", "heard"
_COMPLETE, _SIZES, _MISSING, _LOOPBACK = "complete", "sizes", "missing", "loopback"


def make_store(init_method: str, place: ProcessEnvironment, timeout_s: float, over_gloo: bool = True) -> dist.Store:
    """The store of a new world. Every rank calls it; rank 0 serves unless the launcher does.

    `over_gloo`: the ranks will be connected by gloo, and must be where others can reach them.

    A world of one rank gets a store in memory: no address, no port. Raises RendezvousError, ConfigMismatchError where
    ranks have different world sizes, InvalidArgumentError for a method that nobody knows.
    """
    if place.world_size == 1:
        return dist.HashStore()
    deadline = time.monotonic() + timeout_s
    here = _whereabouts(deadline) if over_gloo else Whereabouts()
    if init_method == "env://" or init_method.startswith("tcp://"):
        by_launcher = init_method == "env://" and _launcher_serves()
        address = _address(init_method, place)
        where = f"{address[0]}:{address[1]} (resolved: {', '.join(_resolve(address, place, deadline))})"
        handed = HANDED.try_get(*address) if by_launcher else None
        if handed is not None:
            where += ", the store of launch, which takes ranks with the job's secret"
            open_store: Callable[..., dist.Store] = _handed_over
        else:
            open_store = _serve if place.rank == 0 and not by_launcher else _connect
        logger.info("rank %d of %d meets the others at %s", place.rank, place.world_size, where)
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if by_launcher else "0"
        connect = partial(open_store, address, place, deadline)
        meeting = _Meeting(place, here, where, timeout_s, deadline, connect, f"parallel_state/{restart}")
    elif "://" in init_method:
        connect = partial(_torch_rendezvous, init_method, place, timeout_s, deadline)
        meeting = _Meeting(place, here, init_method, timeout_s, deadline, connect, "parallel_state")
    else:
        raise InvalidArgumentError(
            "distributed_init_method must be 'env://', 'tcp://HOST:PORT' or another of torch's methods with '://', "
            f"but is {init_method!r}"
        )
    try:
        store = meeting.open_world() if place.rank == 0 else meeting.enter_world()
        store.set_timeout(timedelta(seconds=timeout_s))
    except dist.DistError as error:
        meeting.obstacle = str(error).splitlines()[0]
        raise meeting.not_met() from error
    return store


@dataclass
class _Meeting:
    """One attempt of this rank to meet the others."""

    place: ProcessEnvironment
    here: Whereabouts
    where: str
    timeout_s: float
    deadline: float
    connect: Callable[[], dist.Store]
    """A new connection; raises OSError or DistNetworkError where it may be tried again."""
    prefix: str
    obstacle: str = "it was not tried"

    def open_world(self) -> dist.Store:
        """Rank 0's part."""
        store = self._reach_store()
        name = secrets.token_hex(8)
        world = dist.PrefixStore(name, store)
        store.set(_NAME, name)
        verdict, others = self._judge(world)
        world.set(_VERDICT, verdict)
        complete = verdict.startswith(_COMPLETE)
        if not complete:
            farewell = time.monotonic() + _FAREWELL_S
            for _ in _looks(farewell):
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
        """Waits for every rank. The verdict, and how many may be there to hear it."""
        size = self.place.world_size
        places = {0: self.here}
        for rank in range(1, size):
            key = _key(rank)
            if not any(world.check([key]) for _ in _looks(self.deadline)):
                missing = self._missing(world)
                return f"{_MISSING} {' '.join(map(str, missing))}", size - 1 - len(missing)
            words = world.get(key).decode().split(" ")
            theirs = int(words[0])
            if theirs != size:
                return f"{_SIZES} {size} {rank} {theirs}", max(size, theirs) - 1
            places[rank] = Whereabouts.told(words[2:])
        if unreachable := interfaces.unreachable(places):
            return f"{_LOOPBACK} {' '.join(unreachable)}", size - 1
        return f"{_COMPLETE} {size}", size - 1

    def _missing(self, world: dist.Store) -> list[int]:
        return [rank for rank in range(1, self.place.world_size) if not world.check([_key(rank)])]

    def enter_world(self) -> dist.Store:
        """The other ranks' part."""
        entry = " ".join([str(self.place.world_size), secrets.token_hex(8), *self.here])
        store = world = None
        name = b""
        entered = False
        for _ in _looks(self.deadline):
            try:
                if store is None:
                    store, name = dist.PrefixStore(self.prefix, self.connect()), b""
                    self.obstacle = "rank 0 has not opened a world there"
                newest = store.get(_NAME) if store.check([_NAME]) else b""
                if newest not in (b"", name):
                    name, world = newest, dist.PrefixStore(newest.decode(), store)
                    entered = world.compare_set(_key(self.place.rank), "", entry).decode() == entry
                    self.obstacle = "rank 0 gave no verdict" if entered else "another process came there with this rank"
                if world is not None and entered and world.check([_VERDICT]):
                    verdict = world.get(_VERDICT).decode()
                    world.add(_HEARD, 1)
                    if verdict == f"{_COMPLETE} {self.place.world_size}":
                        return world
                    if not verdict.startswith(_COMPLETE):
                        raise self._failure(verdict)
                    # A smaller world, of some of the ranks, that comes first.
                    entered = False
                    self.obstacle = f"rank 0 opened a world of {verdict.split()[1]} ranks there"
            except (OSError, dist.DistNetworkError) as error:
                # Nobody listens yet; or the server, of an earlier world, was just being closed.
                store = None
                if world is None:  # else what was found there says more
                    self.obstacle = str(error).splitlines()[0]
        missing = self._missing(world) if store is not None and world is not None and entered else []
        raise self._failure(f"{_MISSING} {' '.join(map(str, missing))}") if missing else self.not_met()

    def not_met(self) -> RendezvousError:
        return RendezvousError(
            f"rank {self.place.rank} of {self.place.world_size} must meet the others at {self.where}, but did not "
            f"within {self.timeout_s:g} s: {self.obstacle}. Check that all ranks were started, that MASTER_ADDR and "
            "MASTER_PORT are equal everywhere, and that no firewall is between",
            operation="rendezvous",
            rank=self.place.rank,
            timeout_s=self.timeout_s,
        )

    def _failure(self, verdict: str) -> Exception:
        kind, *words = verdict.split()
        if kind == _LOOPBACK:
            return RendezvousError(
                interfaces.not_reachable(self.here, *words, who=f"rank {self.place.rank} of {self.place.world_size}"),
                operation="rendezvous",
                rank=self.place.rank,
                suspect_ranks=[int(word) for word in words[2:]],
            )
        numbers = [int(word) for word in words]
        if kind == _SIZES:
            told, rank, theirs = numbers
            return ConfigMismatchError(
                f"all ranks must have one world size, but rank 0 has {told} and rank {rank} {theirs} (this is rank "
                f"{self.place.rank}, with {self.place.world_size}); start them alike, and look for ranks of another "
                f"job at {self.where}"
            )
        return RendezvousError(
            f"rank {self.place.rank} of {self.place.world_size} was at {self.where}, but ranks {format_ranks(numbers)} "
            f"did not come within {self.timeout_s:g} s. Look for ranks that were not started or ended early; for a "
            "slow start, raise PARALLEL_STATE_START_TIMEOUT_S",
            operation="rendezvous",
            rank=self.place.rank,
            suspect_ranks=numbers,
            timeout_s=self.timeout_s,
        )


def _key(rank: int) -> str:
    return f"rank/{rank}"


def _looks(deadline: float) -> Iterator[None]:
    """At least one look, and the last one at the deadline; pauses grow, as many ranks look at one server."""
    pause_s, longest_s = _PAUSES_S
    while True:
        yield
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return
        time.sleep(min(pause_s, remaining_s))
        pause_s = min(pause_s * 1.3, longest_s)


def _launcher_serves() -> bool:
    """torchrun and `launch` host the store themselves; then rank 0 must not."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


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
            listener = listen_on(_interface(address[0]), address[1], place.world_size + 16)
            return _within(deadline, partial(_tcp_store, address, place, deadline, listener.detach()))
        except (OSError, RuntimeError) as error:
            in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            if in_use and time.monotonic() + 0.2 < give_up:
                time.sleep(0.05)  # an earlier world of this process may be just closing its server
                gc.collect()  # or a call that failed in another thread meanwhile, and its error, still hold it
                continue
            what = "is in use by another process" if in_use else f"can't be served: {str(error).splitlines()[0]}"
            raise RendezvousError(
                f"rank 0 must listen on {address[0]}:{address[1]}, but that address {what}; "
                "choose another MASTER_PORT (the same on every rank), or end what listens there",
                operation="rendezvous",
                rank=0,
            ) from error


def _interface(host: str) -> str | None:
    """Where to listen: on loopback and on a literal address that is this host's, on these alone; else on all.

    A name may resolve to 127.0.1.1 on its own host, and an address may be a service's in front of it.
    """
    if host == "localhost":
        return host
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((str(ipaddress.ip_address(host)), 0))
    except (OSError, ValueError):
        return None
    return host


def listen_on(host: str | None, port: int, backlog: int) -> socket.socket:
    """A listening socket on `host` alone (None: on all interfaces); OSError if that can't be.

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
    return _within(deadline, partial(_tcp_store, address, place, deadline))


def _handed_over(address: tuple[str, int], place: ProcessEnvironment, deadline: float) -> dist.Store:
    store = HANDED.try_get(*address)
    if store is None:
        raise RendezvousError(f"rank {place.rank} must come while its launch runs, but that has ended", rank=place.rank)
    store.reach(deadline)
    return store


def _tcp_store(
    address: tuple[str, int], place: ProcessEnvironment, deadline: float, listen_fd: int | None = None
) -> dist.Store:
    timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    is_server = listen_fd is not None
    return dist.TCPStore(
        *address, place.world_size, is_server, timeout, wait_for_workers=False, master_listen_fd=listen_fd
    )


def _within(deadline: float, make: Callable[[], T]) -> T:
    """`make()`, given up at the deadline: names resolve late, and TCPStore has no limit for a server that is silent."""
    made: list[T] = []
    failed: list[BaseException] = []

    def call() -> None:
        try:
            made.append(make())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=call, daemon=True, name="parallel_state-rendezvous")
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if made:
        return made[0]
    raise failed[0] if failed else TimeoutError("what is there doesn't answer")


def _whereabouts(deadline: float) -> Whereabouts:
    try:
        return _within(min(deadline, time.monotonic() + _OWN_NAME_S), interfaces.whereabouts)
    except TimeoutError:  # then there is nothing to warn about
        return Whereabouts()


def _resolve(address: tuple[str, int], place: ProcessEnvironment, deadline: float) -> list[str]:
    try:
        found = _within(deadline, partial(socket.getaddrinfo, *address, type=socket.SOCK_STREAM))
    except OSError as error:
        raise RendezvousError(
            f"rank {place.rank} must meet the others at {address[0]}:{address[1]}, but that name does not resolve "
            f"({error}); set MASTER_ADDR to an address that every host knows",
            operation="rendezvous",
            rank=place.rank,
        ) from error
    return sorted({str(entry[4][0]) for entry in found})
