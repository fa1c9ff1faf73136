"""Opens the store through which the ranks of a new world find each other."""

from __future__ import annotations

import contextlib
import errno
import gc
import ipaddress
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import torch.distributed as dist

from device_communicators.base.errors import InvalidArgumentError, RendezvousError
from device_communicators.base.helper_threads import Call
from device_communicators.base.host import connect_to, resolve
from device_communicators.base.torch_internals import default_store
from device_communicators.control.client import ForeignServiceError, in_words
from device_communicators.control.store import ControlStore
from parallel_state.startup.environment import ProcessEnvironment, launcher_serves_store

T = TypeVar("T")

logger = logging.getLogger("parallel_state")

_PORT_RETRY_S = 5.0
_GRACE_S = 0.5
_RESOLVE_S = 60.0  # name servers cache a missing name for up to 30 s
_STRANGER_S = 0.2  # for a service to identify itself
_ARRIVAL_S = 1.0  # for a connection that a proxy accepted to arrive here
_PAUSES_S = (0.002, 0.5)
_FIRST_LOOKS_PER_S, _LOOKS_PER_S = 20_000, 1024  # by all ranks together: at first, and later


class JobStore:
    """Holds the store that `launch` passed to this process, because torch's C++ code keeps no reference to a Python
    store.
    """

    def __init__(self) -> None:
        self._store: ControlStore | None = None
        self._all: list[ControlStore] = []

    def put(self, store: ControlStore | None) -> None:
        """Replaces the held store by `store`. Closes the previous one, but keeps its object alive, because torch can
        still call it.
        """
        before, self._store = self._store, store
        if before is not None:
            before.close()
        if store is not None:
            self._all.append(store)

    def try_get(self, host: str, port: int) -> ControlStore | None:
        store = self._store
        return store if store is not None and store.address == (host, port) else None


JOB_STORE = JobStore()


class StoreWay(NamedTuple):
    where: str
    connect: Callable[[], dist.Store]
    """Opens the store. The caller can retry after OSError or DistNetworkError."""
    prefix: str = "parallel_state"
    server: tuple[str, int] | None = None
    """Address at which rank 0 serves the store; None if a launcher or torch does."""


def find_store(init_method: str, place: ProcessEnvironment, timeout_s: float, deadline: float) -> StoreWay:
    """Finds the store that `init_method`, torch's URL, names. Waits up to 60 s until the name of rank 0's host
    resolves.

    `deadline` limits this call and the result's `connect`; `timeout_s` is passed to torch's rendezvous.
    """
    if init_method != "env://" and not init_method.startswith("tcp://"):
        scheme = init_method.partition("://")[0]
        if "://" not in init_method or (scheme != scheme.lower() and scheme.lower() in ("env", "tcp", "file")):
            raise InvalidArgumentError(
                "distributed_init_method must be 'env://', 'tcp://HOST:PORT' or another method of torch with '://', "
                f"but is {init_method!r}{_method_advice(init_method)}"
            )
        return StoreWay(init_method, partial(_torch_rendezvous, init_method, place, timeout_s, deadline))
    address = _address(init_method, place)
    by_launcher = init_method == "env://" and launcher_serves_store(address)
    where = f"{address[0]}:{address[1]} (resolved: {', '.join(_resolve(address, place, deadline))})"
    if by_launcher and JOB_STORE.try_get(*address) is not None:
        where += ", the store of launch, which requires the job's secret"
        open_store: Callable[..., dist.Store] = _store_of_launch
    else:
        open_store = _serve if place.rank == 0 and not by_launcher else _connect
    logger.info("rank %d of %d starts the rendezvous at %s", place.rank, place.world_size, where)
    run = os.environ.get("TORCHELASTIC_RUN_ID", "") if by_launcher else ""  # jobs can share an agent's store
    connect = partial(open_store, address, place, deadline)
    return StoreWay(where, connect, f"parallel_state/{run or 0}", None if by_launcher else address)


def _method_advice(init_method: str) -> str:
    scheme, _, rest = init_method.partition(":")
    _, _, port = init_method.rpartition(":")
    if init_method.rstrip(":/").lower() == "env":
        form = "env://"
    elif scheme.lower() == "tcp" and rest:
        form = f"tcp://{rest.lstrip('/')}"
    elif scheme.lower() == "file" and rest:
        form = f"file://{os.path.abspath(rest)}"
    elif "/" in init_method:
        form = f"file://{os.path.abspath(init_method)}"
    elif port.isdecimal() and ":" in init_method:
        form = f"tcp://{init_method}"
    else:
        return ""
    return f"; write {form!r}"


def looks(deadline: float, ranks: int = 1) -> Iterator[None]:
    """Yields once for each poll of a server: at least once, and a last time at the deadline. Sleeps between polls,
    longer if more `ranks` poll.
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


def _error_of(rank: int, text: str) -> RendezvousError:
    return RendezvousError(text, operation="rendezvous", rank=rank)


def _address(init_method: str, place: ProcessEnvironment) -> tuple[str, int]:
    if init_method == "env://":
        if place.master_addr is None or place.master_port is None:
            raise RendezvousError(f"a world of {place.world_size} ranks needs MASTER_ADDR and MASTER_PORT: set both")
        return place.master_addr, place.master_port
    parts = urlsplit(init_method)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        why = "; pass a fixed port: other ranks can't find one that the system picks"
        raise InvalidArgumentError(
            f"distributed_init_method must be 'tcp://HOST:PORT', but is {init_method!r}{why if port == 0 else ''}"
        )
    return host, port


def _torch_rendezvous(init_method: str, place: ProcessEnvironment, timeout_s: float, deadline: float) -> dist.Store:
    parts = urlsplit(init_method)
    folder = os.path.dirname(parts.path)
    if parts.scheme == "file" and not os.path.isdir(folder):  # FileStore would retry forever
        raise InvalidArgumentError(
            f"distributed_init_method must name a file in a directory that exists, but is {init_method!r}"
        )
    start = partial(dist.rendezvous, init_method, place.rank, place.world_size, timeout=timedelta(seconds=timeout_s))
    try:
        return within(deadline, lambda: next(start())[0])
    except (RuntimeError, ValueError) as error:
        raise InvalidArgumentError(
            f"torch can't use distributed_init_method {init_method!r}: {str(error).splitlines()[0]}"
        ) from error


def _serve(address: tuple[str, int], place: ProcessEnvironment, deadline: float) -> dist.Store:
    give_up = min(deadline, time.monotonic() + _PORT_RETRY_S)
    while True:
        try:
            backlog = place.world_size + 16
            listener = listen_on(interface_of(address[0]), address[1], backlog)
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            stranger = _stranger_at(address) if in_use else ""
            if in_use and not stranger and time.monotonic() + 0.2 < give_up:
                gc.collect()  # an earlier world's store, which a reference cycle can keep, closes its server when freed
                time.sleep(0.05)
                continue
            what = f"is in use by another process{stranger}"
            if not in_use:
                what = f"can't be served: {str(error).splitlines()[0]}"
            raise _error_of(
                0,
                f"rank 0 must listen on {address[0]}:{address[1]}, but that address {what}; choose another MASTER_PORT "
                "(the same on every rank), or stop the process that listens on that address",
            ) from error
        with listener:
            check_own(address, listener, deadline)
            try:
                return open_tcp_store(address, deadline, listener)
            except (OSError, RuntimeError) as error:
                raise _error_of(
                    0,
                    f"rank 0 listens on port {address[1]}, but can't serve the store at {address[0]}:{address[1]}: "
                    f"{str(error).splitlines()[0]}. Set MASTER_ADDR, on every rank, to an address of rank 0's host",
                ) from error


def _stranger_at(address: tuple[str, int]) -> str:
    try:
        ask_for_store(address, time.monotonic() + _STRANGER_S)
    except ForeignServiceError as error:
        return f" ({error})"
    except OSError:
        pass
    return ""


def check_own(address: tuple[str, int], listener: socket.socket, deadline: float) -> None:
    """Raises RendezvousError if a connection to `address`, this host's store, doesn't arrive at `listener`.

    Call this before creating a TCPStore, which can't be interrupted.
    """
    cause: OSError | None = None
    for _ in looks(deadline):  # a proxy in front of this host may forward connections only later
        try:
            with connect_to(address, max(0.01, deadline - time.monotonic())):
                poll = select.poll()  # `select` supports no descriptor above 1,023
                poll.register(listener, select.POLLIN)
                arrived = poll.poll(1000 * max(0.01, min(_ARRIVAL_S, deadline - time.monotonic())))
            if arrived:
                return
            cause = None
        except OSError as error:
            cause = error
    why = cause or "another host answers at that address"
    raise _error_of(
        0,
        f"rank 0 must serve the store at {address[0]}:{address[1]}, but that address doesn't lead to its own host, "
        f"{socket.gethostname()}: {why}. Set MASTER_ADDR, on every rank, to an address of the host that runs rank 0, "
        "or start rank 0 on the host with this address",
    ) from cause


def interface_of(host: str) -> str | None:
    """Returns the address on which a server for `host` must listen: `host`, if that is "localhost" or an IP address of
    this machine, else None (all interfaces), because other hosts can resolve a name differently.
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
    if host is None and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    family, _, _, _, where = resolve(host or "0.0.0.0", port)[0]
    return socket.create_server(where[:2], family=family, backlog=backlog)


def _connect(address: tuple[str, int], place: ProcessEnvironment, deadline: float) -> dist.Store:
    try:
        return join_tcp_store(address, deadline)
    except ForeignServiceError as error:
        where = f"{address[0]}:{address[1]}"
        raise _error_of(
            place.rank,
            f"rank {place.rank} of {place.world_size} must connect to the store at {where}, but {error}. Stop that "
            "service, or choose another MASTER_PORT (the same on every rank)",
        ) from error


def join_tcp_store(address: tuple[str, int], deadline: float) -> dist.Store:
    # While the port has no listener, TCPStore retries with second-long pauses and logs each attempt.
    ask_for_store(address, deadline)
    return open_tcp_store(address, deadline)


def _store_of_launch(address: tuple[str, int], place: ProcessEnvironment, deadline: float) -> dist.Store:
    store = JOB_STORE.try_get(*address)
    if store is None:
        raise RendezvousError(
            f"rank {place.rank} needs the store of its launch(), but the process that called launch() has ended; start "
            "the job again",
            rank=place.rank,
        )
    store.reach(deadline)
    return store


def open_tcp_store(address: tuple[str, int], deadline: float, listener: socket.socket | None = None) -> dist.Store:
    timeout, is_server = timedelta(seconds=max(0.1, deadline - time.monotonic())), listener is not None
    make = partial(dist.TCPStore, *address, None, is_server, timeout, wait_for_workers=False)
    return within(deadline, partial(make, master_listen_fd=listener.detach() if listener else None), _GRACE_S)


def within(deadline: float, make: Callable[[], T], grace_s: float = 0.0) -> T:
    """Runs `make` in a thread and returns its result. Raises TimeoutError if it isn't done `grace_s` after the
    deadline.
    """
    call = Call(make)
    # A native call with this deadline returns slightly later; it must not return while the interpreter exits.
    if not call.wait(max(deadline, time.monotonic()) + grace_s):
        raise TimeoutError("the store, or the name server that resolves its address, doesn't answer")
    return call.result()


def _resolve(address: tuple[str, int], place: ProcessEnvironment, deadline: float) -> list[str]:
    """Returns the IP addresses of the host in `address`. Retries for 60 s, because a pod's name exists only once the
    pod runs.
    """
    give_up = min(deadline, time.monotonic() + _RESOLVE_S)
    is_logged = False
    for _ in looks(give_up):
        try:
            found = within(deadline, partial(resolve, *address))
            return sorted({str(entry[4][0]) for entry in found})
        except OSError as error:
            problem = error
            if isinstance(error.__cause__, UnicodeError):  # an impossible name
                break
        if not is_logged:
            is_logged = True
            logger.warning(
                "rank %d needs the store at %s:%d, but that name does not resolve yet (%s); it retries for %.0f s",
                place.rank,
                *address,
                problem,
                give_up - time.monotonic(),
            )
    raise _error_of(
        place.rank,
        f"rank {place.rank} needs the store at {address[0]}:{address[1]}, but that name does not resolve ({problem}); "
        "set MASTER_ADDR to a name or address that every host resolves",
    ) from problem


_VALIDATE, _MAGIC_NUMBER, _PING = 0, 0x3C85F7CE, 13
_NONCE_BYTES = 4
_LINES = b"\r\n\r\n"
"""Bytes that make a line-based service answer. A TCPStore reads these bytes as part of a PING."""
_QUIET_S = 1.0
_REST_S = 0.1
_LEAST_S = 0.3
"""Shortest wait for an answer: on two busy cores an answer took over 0.1 s."""
_SHOWN_BYTES = 48


def ask_for_store(address: tuple[str, int], deadline: float) -> None:
    """Waits until a TCPStore answers at `address`. Without this check, torch's client would block in C++ for its whole
    timeout.

    Sends a PING with a random number, which a store returns (torch 2.3 to 2.15). Raises ForeignServiceError if another
    service answers, and OSError if nothing answers.
    """
    nonce = os.urandom(_NONCE_BYTES)
    deadline = max(deadline, time.monotonic() + _LEAST_S)
    with connect_to(address, deadline - time.monotonic()) as connection:
        with contextlib.suppress(ConnectionError):  # if it was closed before, the receive raises
            connection.sendall(struct.pack("<BIB", _VALIDATE, _MAGIC_NUMBER, _PING) + nonce)
        answer = _receive(connection, _NONCE_BYTES, min(deadline, time.monotonic() + _QUIET_S))
        if not answer and time.monotonic() < deadline:
            connection.sendall(_LINES)
            answer = _receive(connection, _NONCE_BYTES, deadline)
        if answer == nonce:
            return
        if not answer:
            raise TimeoutError(
                f"the service that listens at the store's address, {address[0]}:{address[1]}, doesn't answer; choose "
                "another port"
            )
        answer += _receive(connection, _SHOWN_BYTES, time.monotonic() + _REST_S, closed=b"")
    raise ForeignServiceError(in_words(answer))


def _receive(connection: socket.socket, count: int, until: float, closed: bytes | None = None) -> bytes:
    received = b""
    while len(received) < count and (left_s := until - time.monotonic()) > 0:
        connection.settimeout(left_s)
        try:
            data = connection.recv(count - len(received))
        except TimeoutError:
            break
        except ConnectionError:
            data = b""
        if not data:
            if not received and closed is None:
                raise ConnectionResetError(
                    "the service that listens at the store's address closes each connection without an answer; another "
                    "service may use this port"
                )
            break
        received += data
    return received


def store_in_words() -> str:
    if not dist.is_initialized():
        return "none: torch.distributed has no default group"
    store: Any = default_store().raw
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if access := getattr(store, "access", ""):
        return f"{store}, which requires {access}"
    if isinstance(store, dist.TCPStore):
        return f"TCPStore at {store.host}:{store.port}, which accepts every process that reaches it"
    return type(store).__name__
