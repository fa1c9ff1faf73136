"""Exchanges the facts of all ranks before any group is created, through the launcher's store or rank 0's store.

Ranks are numbered in the order in which they register. The leader is the rank that serves the store, or else the first
that registered.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from device_communicators.base.bounded_store import BoundedStore
from device_communicators.base.errors import RendezvousError
from device_communicators.base.host import connect_to
from device_communicators.control.client import ForeignServiceError
from parallel_state.startup.stores import JOB_STORE, check_own, join_tcp_store, listen_on, looks, open_tcp_store
from parallel_state.tools.check.facts import Facts, Place

T = TypeVar("T")

PAUSE_S = 0.02
_CONNECT_S = 2.0
_HANDSHAKE_S = 3.0
_OWN_NAME_S = 3.0
_ARRIVAL_S = 1.0
_LATE_S = 1.5
"""If ranks or world sizes conflict, the leader waits this much longer for further ranks."""


class NotMetError(Exception):
    """Raised if this rank can't connect to the job's store, or can't serve it."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        """Code of the finding that reports this error."""


class Plan(msgspec.Struct):
    """The leader's message to all ranks after registration. `links`: rounds of (measuring rank, measured rank)."""

    arrivals: list[Facts]
    """The ranks' facts, in the order of registration."""
    links: list[list[tuple[int, int]]]


class Meeting:
    """Exchanges values between ranks through the job's store. Every method returns by its deadline."""

    def __init__(self, store: Any, prefix: str, leads: bool | None = None) -> None:
        """`prefix`: start of all keys in `store`. `leads`: True if this rank is the leader. None: the first rank that
        registers becomes the leader.
        """
        self._store = BoundedStore(dist.PrefixStore(prefix, store))
        self._kept = store  # PrefixStore doesn't keep a store that is implemented in Python alive
        self.arrival = 0
        self._leads = leads

    @property
    def leads(self) -> bool:
        return self.arrival == 1 if self._leads is None else self._leads

    def arrive(self, facts: Facts) -> None:
        self.arrival = int(self._store.add("arrivals", 1))
        self._store.set(f"arrival/{self.arrival}", msgspec.json.encode(facts).decode())

    def arrivals(self, seen: list[Facts]) -> list[Facts]:
        found = list(seen)
        for number in range(len(seen) + 1, int(self._store.add("arrivals", 0)) + 1):
            content = self.get(f"arrival/{number}", time.monotonic() + _ARRIVAL_S)
            if content is None:  # it exited between both steps of `arrive`
                break
            found.append(msgspec.json.decode(content, type=Facts))
        return found

    def gather(self, world_size: int, deadline: float) -> list[Facts]:
        """Waits until all ranks have registered, or the deadline. Returns the facts of all registered processes, even
        of surplus ones.

        Returns early if enough processes registered but ranks or world sizes conflict.
        """
        found: list[Facts] = []
        late_until = None
        while True:
            found = self.arrivals(found)
            ranks = {each.place.rank for each in found}
            if ranks >= set(range(world_size)):
                return found
            conflict = len(ranks) < len(found) or any(each.place.world_size != world_size for each in found)
            if conflict and len(found) >= world_size and late_until is None:
                late_until = time.monotonic() + _LATE_S
            now = time.monotonic()
            if now >= deadline or (late_until is not None and now >= late_until):
                return found
            time.sleep(PAUSE_S)

    def meet(self, key: str, amount: int, total: int, deadline: float) -> None:
        count = int(self._store.add(key, amount))
        for _ in looks(deadline):
            if count >= total:
                return
            count = int(self._store.add(key, 0))

    def put(self, key: str, value: Any) -> None:
        self._store.set(key, msgspec.json.encode(value).decode())

    def get(self, key: str, deadline: float) -> bytes | None:
        for _ in looks(deadline):
            if self._store.check([key]):
                return bytes(self._store.get(key))
        return None

    def take(self, key: str, kind: type[T], deadline: float) -> T | None:
        content = self.get(key, deadline)
        return None if content is None else msgspec.json.decode(content, type=kind)

    def take_all(self, name: str, count: int, kind: type[T], deadline: float, skip: int) -> dict[int, T]:
        found = {}
        for number in (each for each in range(1, count + 1) if each != skip):
            value = self.take(f"{name}/{number}", kind, deadline)
            if value is not None:
                found[number] = value
        return found


def open_meeting(place: Place, deadline: float) -> Meeting:
    prefix = f"parallel_state/check/{os.environ.get('TORCHELASTIC_RUN_ID', '') or 0}/" + os.environ.get(
        "TORCHELASTIC_RESTART_COUNT", "0"
    )
    if place.world_size == 1 and place.rank == 0:
        return Meeting(dist.HashStore(), prefix)
    if not place.master_addr or not place.master_port:
        raise NotMetError(
            "environment", place.problem or "MASTER_ADDR and MASTER_PORT aren't set, so this rank can't find the others"
        )
    address = place.master_addr, place.master_port
    handed = JOB_STORE.try_get(*address) if place.agent_store else None
    if handed is not None:
        return Meeting(handed, prefix)
    if place.rank == 0 and not place.agent_store:
        store, serves = _serve(address, prefix, deadline)
        return Meeting(store, prefix, leads=serves)
    return Meeting(_connect(address, place, deadline), prefix, leads=None if place.agent_store else False)


def _serve(address: tuple[str, int], prefix: str, deadline: float) -> tuple[dist.Store, bool]:
    try:
        listener = listen_on(None, address[1], 1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return _join_other(address, prefix), False
        raise NotMetError("port-unusable", f"rank 0 can't listen on port {address[1]} of this host: {error}") from error
    with listener:
        try:  # names may resolve late
            check_own(address, listener, min(deadline, time.monotonic() + _OWN_NAME_S))
        except RendezvousError as error:
            is_unknown = isinstance(error.__cause__, socket.gaierror)
            raise NotMetError("master-unresolved" if is_unknown else "master-elsewhere", str(error)) from error
        return open_tcp_store(address, max(deadline, time.monotonic() + 1.0), listener), True


def _join_other(address: tuple[str, int], prefix: str) -> dist.Store:
    port = f"port {address[1]} of {socket.gethostname()}"
    try:
        store = join_tcp_store(address, time.monotonic() + _HANDSHAKE_S)
        if BoundedStore(dist.PrefixStore(prefix, store)).check(["arrivals"]):
            return store
        text = f"{port} is in use by the store of another job"
    except (OSError, RuntimeError, ForeignServiceError) as error:
        text = f"{port} is in use by another program: {error}"
    raise NotMetError("port-taken", text)


def _connect(address: tuple[str, int], place: Place, deadline: float) -> dist.Store:
    where = f"{address[0]}:{address[1]}"
    server = "the launcher's agent" if place.agent_store else "rank 0"
    while True:
        left_s = deadline - time.monotonic()
        try:
            with connect_to(address, max(0.05, min(_CONNECT_S, left_s))):
                pass
            try:
                return join_tcp_store(address, time.monotonic() + max(1.0, min(_HANDSHAKE_S, left_s)))
            except (OSError, RuntimeError, ForeignServiceError) as error:
                text = f"a program listens at {where}, but it isn't the store of a job: {error}"
                kind = "master-stranger"
        except OSError as error:
            kind, text = _unreached(error, where, server)
        if time.monotonic() + 0.2 >= deadline:
            raise NotMetError(kind, text)
        time.sleep(0.1)


def _unreached(error: OSError, where: str, server: str) -> tuple[str, str]:
    if isinstance(error, socket.gaierror):
        return "master-unresolved", f"{where.rpartition(':')[0]} doesn't resolve here: {error.strerror}"
    if isinstance(error, TimeoutError):
        return "master-silent", f"packets to {where} get no answer"
    if isinstance(error, ConnectionRefusedError):
        return "master-refused", f"nobody listens at {where}: {server} wasn't started, or runs on another host"
    return "master-unreachable", f"can't connect to {where}: {error.strerror or error}"
