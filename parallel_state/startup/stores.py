"""The way to the store of a world: served by rank 0 or by a launcher at an address, or made by torch.

What the ranks do there is in `rendezvous`.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from datetime import timedelta
from functools import partial
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import torch.distributed as dist

from device_communicators.base.errors import InvalidArgumentError, RendezvousError
from device_communicators.base.host import connect_to, resolve
from device_communicators.control.client import ForeignServiceError
from parallel_state.startup.answers import ask_for_store
from parallel_state.startup.environment import ProcessEnvironment, launcher_serves_store
from parallel_state.startup.job_store import JOB_STORE
from parallel_state.startup.watch import in_thread

T = TypeVar("T")

logger = logging.getLogger("parallel_state")

_PORT_RETRY_S = 5.0
_GRACE_S = 0.5
_RESOLVE_S = 60.0  # for rank 0's: a name server that had none keeps that for up to 30 s
_STRANGER_S = 0.2  # for the service on rank 0's port to identify itself
_ARRIVAL_S = 1.0  # for a connection that a proxy in front of this host has taken to come here
_PAUSES_S = (0.002, 0.5)  # between two looks: the first, and the longest
_FIRST_LOOKS_PER_S, _LOOKS_PER_S = 20_000, 1024  # of all ranks together


class StoreWay(NamedTuple):
    """The way to the store of a world."""

    where: str
    """As messages name it."""
    connect: Callable[[], dist.Store]
    """Makes a new connection; raises OSError or DistNetworkError where it may be tried again."""
    prefix: str = "parallel_state"
    server: tuple[str, int] | None = None
    """The address at which rank 0 serves it; None where a launcher does, or torch makes it."""


def find_store(init_method: str, place: ProcessEnvironment, timeout_s: float, deadline: float) -> StoreWay:
    """Returns the way to the store of an init method; waits until rank 0's name resolves.

    Raises InvalidArgumentError for a method that nobody knows, RendezvousError without an address, or for a name that
    doesn't resolve.
    """
    if init_method != "env://" and not init_method.startswith("tcp://"):
        scheme = init_method.partition("://")[0]
        if "://" not in init_method or (scheme != scheme.lower() and scheme.lower() in ("env", "tcp", "file")):
            raise InvalidArgumentError(
                "distributed_init_method must be 'env://', 'tcp://HOST:PORT' or another of torch's methods with '://', "
                f"but is {init_method!r}{_method_advice(init_method)}"
            )
        return StoreWay(init_method, partial(_torch_rendezvous, init_method, place, timeout_s, deadline))
    address = _address(init_method, place)
    by_launcher = init_method == "env://" and launcher_serves_store(address)
    where = f"{address[0]}:{address[1]} (resolved: {', '.join(_resolve(address, place, deadline))})"
    if by_launcher and JOB_STORE.try_get(*address) is not None:
        where += ", the store of launch, which takes ranks with the job's secret"
        open_store: Callable[..., dist.Store] = _store_of_launch
    else:
        open_store = _serve if place.rank == 0 and not by_launcher else _connect
    logger.info("rank %d of %d meets the others at %s", place.rank, place.world_size, where)
    run = os.environ.get("TORCHELASTIC_RUN_ID", "") if by_launcher else ""  # jobs may share the store of an agent
    connect = partial(open_store, address, place, deadline)
    return StoreWay(where, connect, f"parallel_state/{run or 0}", None if by_launcher else address)


def _method_advice(init_method: str) -> str:
    """Returns the advice to write a method with '://', for an address, a file, or a method's name; else ""."""
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


def _error_of(rank: int, text: str) -> RendezvousError:
    return RendezvousError(f"rank {rank} {text}", operation="rendezvous", rank=rank)


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
    if not host or not port:
        why = "; give a port that all ranks know: no other rank could find one that the system picks"
        raise InvalidArgumentError(
            f"distributed_init_method must be 'tcp://HOST:PORT', but is {init_method!r}{why if port == 0 else ''}"
        )
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
                time.sleep(0.05)  # an earlier world may be just closing its server
                continue
            what = f"is in use by another process{stranger}"
            if not in_use:
                what = f"can't be served: {str(error).splitlines()[0]}"
            raise _error_of(
                0,
                f"must listen on {address[0]}:{address[1]}, but that address {what}; choose another MASTER_PORT (the "
                "same on every rank), or end what listens there",
            ) from error
        with listener:
            _check_own(address, listener, deadline)
            make = partial(tcp_store, address, deadline, listener.detach())
            try:
                return within(deadline, make, _GRACE_S)
            except (OSError, RuntimeError) as error:
                raise _error_of(
                    0,
                    f"listens on port {address[1]}, but can't serve the store at {address[0]}:{address[1]}: "
                    f"{str(error).splitlines()[0]}. Set MASTER_ADDR, on every rank, to an address of rank 0's host",
                ) from error


def _stranger_at(address: tuple[str, int]) -> str:
    """Describes the service at an address in use; "" if it is a store that is shutting down."""
    try:
        ask_for_store(address, time.monotonic() + _STRANGER_S)
    except ForeignServiceError as error:
        return f" ({error})"
    except OSError:
        pass
    return ""


def _check_own(address: tuple[str, int], listener: socket.socket, deadline: float) -> None:
    """Finds out whether a connection to `address` comes to `listener`, of this process; RendezvousError if not.

    Before TCPStore tries: it would until the deadline, in a thread that can't be broken off, and that ends the process
    by SIGABRT if it comes back while the interpreter is on its way out.
    """
    why = ""
    for _ in looks(deadline):  # an address in front of this host may come to lead here only in a while
        try:
            with connect_to(address, max(0.01, deadline - time.monotonic())):
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


def interface_of(host: str) -> str | None:
    """Returns where to listen: on loopback and on a literal address that is this host's, on these alone; else on all.

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
    """Returns a listening socket on `host` alone (None: on all interfaces); OSError if that can't be.

    TCPStore would listen on all interfaces whatever host it is given, unless it is handed a socket.
    """
    if host is None and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    family, _, _, _, where = resolve(host or "0.0.0.0", port)[0]
    return socket.create_server(where[:2], family=family, backlog=backlog)


def _connect(address: tuple[str, int], place: ProcessEnvironment, deadline: float) -> dist.Store:
    # Ask first: while the port has no listener, TCPStore pauses for seconds, returns late and fills the log.
    try:
        ask_for_store(address, deadline)
    except ForeignServiceError as error:
        where = f"{address[0]}:{address[1]}"
        raise _error_of(
            place.rank,
            f"of {place.world_size} must meet the others at {where}, but {error}. Otherwise choose another MASTER_PORT "
            "(the same on every rank)",
        ) from error
    return within(deadline, partial(tcp_store, address, deadline), _GRACE_S)


def _store_of_launch(address: tuple[str, int], place: ProcessEnvironment, deadline: float) -> dist.Store:
    store = JOB_STORE.try_get(*address)
    if store is None:
        raise RendezvousError(f"rank {place.rank} must come while its launch runs, but that has ended", rank=place.rank)
    store.reach(deadline)
    return store


def tcp_store(address: tuple[str, int], deadline: float, listen_fd: int | None = None) -> dist.Store:
    """Returns a client of torch's store; with a listening socket its server, too. Use `within`: it may be late."""
    timeout, is_server = timedelta(seconds=max(0.1, deadline - time.monotonic())), listen_fd is not None
    return dist.TCPStore(*address, None, is_server, timeout, wait_for_workers=False, master_listen_fd=listen_fd)


def within(deadline: float, make: Callable[[], T], grace_s: float = 0.0) -> T:
    """Returns `make()`, given up at the deadline: names resolve late, and TCPStore waits for a silent server."""
    future = in_thread(make, "rendezvous")
    # A native call with this deadline ends a moment later: it must not come back while the interpreter is going.
    if not wait([future], max(0.0, deadline - time.monotonic()) + grace_s).done:
        raise TimeoutError("what is there doesn't answer")
    return future.result()


def _resolve(address: tuple[str, int], place: ProcessEnvironment, deadline: float) -> list[str]:
    """Returns the addresses of a name, which may come late: a pod's name is there once the pod is."""
    give_up = min(deadline, time.monotonic() + _RESOLVE_S)
    told = False
    for _ in looks(give_up):
        try:
            found = within(deadline, partial(resolve, *address))
            return sorted({str(entry[4][0]) for entry in found})
        except OSError as error:
            problem = error
            if isinstance(error.__cause__, UnicodeError):  # an impossible name
                break
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
