"""How the ranks find each other: from an address to the store through which torch makes its process groups.

torch's own `env://` and `tcp://` rendezvous does the same for one world per process. This one also
- prefixes every key with the number of the world this process is in, so that a second one, also on the same port or
  on the store of a launcher that outlives worlds, doesn't read the first one's addresses;
- comes back where it met a server that was just being closed, and waits for a port that is just being given back;
- has one deadline for all of it, and says which address, as it resolved, did not answer.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist

from device_communicators.errors import ConfigMismatchError, InvalidArgumentError, RendezvousError
from parallel_state.environment import ProcessEnvironment

_PORT_RETRY_S = 5.0


def make_store(init_method: str, place: ProcessEnvironment, generation: int, timeout_s: float) -> dist.Store:
    """The store of world number `generation`. Every rank calls it; rank 0 serves unless the launcher does.

    A world of one rank gets a store in memory: no address, no port. Raises RendezvousError, ConfigMismatchError where
    rank 0 has another world size, InvalidArgumentError for a method that nobody knows.
    """
    if place.world_size == 1:
        return dist.HashStore()
    if init_method == "env://":
        if place.master_addr is None or place.master_port is None:
            raise RendezvousError(f"a world of {place.world_size} ranks needs MASTER_ADDR and MASTER_PORT; set both")
        address, by_launcher = (place.master_addr, place.master_port), _launcher_serves()
    elif init_method.startswith("tcp://"):
        address, by_launcher = _tcp_address(init_method), False
    elif "://" in init_method:
        return _torch_rendezvous(init_method, place, generation, timeout_s)
    else:
        raise InvalidArgumentError(
            "distributed_init_method must be 'env://', 'tcp://HOST:PORT' or another of torch's methods with '://', "
            f"but is {init_method!r}"
        )
    return _tcp_store(address, by_launcher, place, generation, timeout_s)


def _launcher_serves() -> bool:
    """torchrun and `launch` host the store themselves; then rank 0 must not."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _tcp_address(init_method: str) -> tuple[str, int]:
    parts = urlsplit(init_method)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None:
        raise InvalidArgumentError(f"distributed_init_method must be 'tcp://HOST:PORT', but is {init_method!r}")
    return host, port


def _torch_rendezvous(init_method: str, place: ProcessEnvironment, generation: int, timeout_s: float) -> dist.Store:
    store, _, _ = next(dist.rendezvous(init_method, place.rank, place.world_size, timeout=timedelta(seconds=timeout_s)))
    return dist.PrefixStore(f"parallel_state/{generation}", store)


def _tcp_store(
    address: tuple[str, int], by_launcher: bool, place: ProcessEnvironment, generation: int, timeout_s: float
) -> dist.Store:
    deadline = time.monotonic() + timeout_s
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if by_launcher else "0"
    prefix = f"parallel_state/{restarts}/{generation}"
    if place.rank == 0 and not by_launcher:
        store = dist.PrefixStore(prefix, _serve(address, place, deadline))
        store.set("world_size", str(place.world_size))
        return _with_timeout(store, timeout_s)
    while True:
        try:
            store = dist.PrefixStore(prefix, _connect(address, place, deadline))
            if place.rank == 0:
                store.set("world_size", str(place.world_size))
            store.wait(["world_size"], timedelta(seconds=max(0.01, deadline - time.monotonic())))
            break
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            # A connection that broke belonged to a server of an earlier world; one that timed out is final.
            if time.monotonic() + 0.05 >= deadline or isinstance(error, dist.DistStoreError):
                raise _unreachable(address, place, timeout_s, "nobody said so") from error
            time.sleep(0.05)
    told = int(store.get("world_size"))
    if told != place.world_size:
        raise ConfigMismatchError(
            f"all ranks must have one world size, but rank 0 has {told} and rank {place.rank} {place.world_size}; "
            "start them alike, and look for ranks of another job on the same address"
        )
    return _with_timeout(store, timeout_s)


def _with_timeout(store: dist.Store, timeout_s: float) -> dist.Store:
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _serve(address: tuple[str, int], place: ProcessEnvironment, deadline: float) -> dist.Store:
    give_up = min(deadline, time.monotonic() + _PORT_RETRY_S)
    while True:
        try:
            return dist.TCPStore(
                *address,
                place.world_size,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())),
            )
        except (dist.DistNetworkError, RuntimeError) as error:
            in_use = os.strerror(errno.EADDRINUSE).lower() in str(error).lower() or "EADDRINUSE" in str(error)
            if in_use and time.monotonic() < give_up:
                time.sleep(0.05)  # an earlier world of this process may be just closing its server
                continue
            what = "is in use by another process" if in_use else f"can't be served: {str(error).splitlines()[0]}"
            raise RendezvousError(
                f"rank 0 must listen on {address[0]}:{address[1]}, but that address {what}; "
                "choose another MASTER_PORT (the same on every rank), or end what listens there"
            ) from error


def _connect(address: tuple[str, int], place: ProcessEnvironment, deadline: float) -> dist.Store:
    remaining = deadline - time.monotonic()
    _resolve(address, place)
    try:
        return dist.TCPStore(
            *address,
            place.world_size,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=max(0.1, remaining)),
        )
    except (dist.DistNetworkError, RuntimeError) as error:
        if isinstance(error, dist.DistNetworkError) and time.monotonic() + 0.05 < deadline:
            raise
        raise _unreachable(address, place, remaining, str(error).splitlines()[0]) from error


def _resolve(address: tuple[str, int], place: ProcessEnvironment) -> list[str]:
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RendezvousError(
            f"rank {place.rank} must reach rank 0 at {address[0]}:{address[1]}, but that name does not resolve "
            f"({error}); set MASTER_ADDR to an address that every host knows"
        ) from error
    return sorted({str(entry[4][0]) for entry in found})


def _unreachable(address: tuple[str, int], place: ProcessEnvironment, timeout_s: float, why: str) -> RendezvousError:
    resolved = ", ".join(_resolve(address, place))
    return RendezvousError(
        f"rank {place.rank} of {place.world_size} must reach rank 0 at {address[0]}:{address[1]} "
        f"(resolved: {resolved}), but no world of that size was there within {timeout_s:.1f} s: {why}. Check that rank 0 "
        "was started, that MASTER_ADDR and MASTER_PORT are equal everywhere, and that no firewall is between",
        rank=place.rank,
        timeout_s=timeout_s,
    )
