"""Finds the address at which other hosts reach this process, and sets the network variables of NCCL and gloo."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import NamedTuple

from device_communicators.base import settings
from device_communicators.base.errors import format_ranks
from device_communicators.base.host import (
    INTERFACES_VARIABLE,
    addresses_of,
    gloo_address,
    ipv4_of,
    is_loopback,
    namespace_id,
    process_domain,
    read_text,
    start_time,
)
from device_communicators.control.plane import Endpoint
from device_communicators.liveness.health import Place, find_unreachable
from parallel_state.startup.environment import ProcessEnvironment

logger = logging.getLogger("parallel_state")

VARIABLE = INTERFACES_VARIABLE
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Address(NamedTuple):
    """A rank's host, network address and process, as sent to other ranks. Every field is a string without spaces.

    `name`: host name. `interface`: name of the network interface of `address`. `endpoint`: where the control plane
    listens.
    """

    network: str = ""
    """Identifies the loopback network: processes with equal values can reach each other over it. Empty if unknown."""
    address: str = ""
    name: str = "?"
    interface: str = "?"
    processes: str = ""
    """Identifies the PID namespace: processes with equal values can watch each other by PID. Empty if unknown."""
    pid: str = ""
    born: str = ""
    """Start of the process in clock ticks. Distinguishes two processes that had the same PID."""
    endpoint: str = ""
    cores: str = ""
    """Cores that the ranks of this host divide among themselves, such as `0-3,8`."""
    obstacle: str = ""
    """Reason why this process can't listen for other ranks; empty if it can."""

    @classmethod
    def parse(cls, words: Sequence[str]) -> Address:
        return cls(*words) if len(words) == len(cls._fields) else cls()

    @property
    def for_control(self) -> Place:
        endpoint = Endpoint.parse(self.endpoint) if self.endpoint else None
        return Place(self.name, self.network, self.processes, int(self.pid or 0), self.born, endpoint)

    def __str__(self) -> str:
        return f"host {self.name} (interface {self.interface}, address {self.address or 'unknown'})"


def whereabouts() -> Address:
    """Returns this process's Address with host name, IP address and interface.

    Blocks until the host's name is resolved.
    """
    name = socket.gethostname()
    chosen = os.environ.get(VARIABLE, "").split(",")[0].strip()
    address = gloo_address()
    return process()._replace(address=address, name=name or "?", interface=chosen or _interface_of(address) or "?")


def process() -> Address:
    """Returns this process's Address without the fields that need a look-up of the host's name."""
    pid = os.getpid()
    return Address(namespace_id("net"), processes=process_domain(), pid=str(pid), born=start_time(pid))


def unreachable(places: dict[int, Address]) -> list[str]:
    if len({place.network for place in places.values() if place.network}) < 2:
        return []
    ranks = [rank for rank, place in places.items() if is_loopback(place.address)]
    return [places[ranks[0]].name, places[ranks[0]].address, *map(str, ranks)] if ranks else []


def shared_address(places: dict[int, Address]) -> list[str]:
    """Finds an IP address that two hosts publish. Returns [address, then name, interface and ranks of each host], or
    [].
    """
    ranks: dict[str, dict[str, list[int]]] = {}
    for rank, place in places.items():
        if place.address and place.network:
            ranks.setdefault(place.address, {}).setdefault(place.network, []).append(rank)
    for address, networks in ranks.items():
        if len(networks) > 1:
            hosts = [(places[each[0]], each) for each in list(networks.values())[:2]]
            sides = ((host.name, host.interface, ",".join(map(str, each))) for host, each in hosts)
            return [address, *(word for words in sides for word in words)]
    return []


def without_control_plane(places: dict[int, Address]) -> list[str]:
    """Finds a rank that others can't reach over the control plane. Returns the rank, its Address and the reason; [] if
    none.
    """
    rank = next((rank for rank, place in sorted(places.items()) if place.obstacle), None)
    if rank is not None:
        return [str(rank), str(places[rank]), f"it can't listen for them: {places[rank].obstacle}"]
    if not places[0].endpoint:
        return []
    found = find_unreachable({rank: place.for_control for rank, place in places.items()})
    return [] if found is None else [str(found[0]), str(places[found[0]]), f"it {found[1]}"]


def describe_shared_address(own: Address, address: str, *hosts: str) -> tuple[str, list[int]]:
    both, suspects = [], []
    for name, interface, words in (hosts[:3], hosts[3:]):
        ranks = [int(word) for word in words.split(",")]
        both.append(f"ranks {format_ranks(ranks)} on host {name} (interface {interface})")
        suspects += ranks
    text = f"{' and '.join(both)} announce one address, {address}; this rank is on host {own.name}. {advice()}"
    return text, suspects


def advice() -> str:
    return (
        f"Set {VARIABLE} on each host to the interface that leads to the others (here: {_names()}), or open all TCP "
        "ports between the hosts: gloo connects every two ranks on random ports"
    )


def firewall_advice() -> str:
    ports = settings.PORTS.get()
    chosen = f"{ports[0]}-{ports[1]}" if ports else "unset: any port"
    return f"A firewall may allow that store's port, but not the ports of {settings.PORTS.name} ({chosen}). {advice()}"


def describe_loopback(own: Address, name: str, address: str, *ranks: str, own_name: str) -> str:
    return (
        f"the ranks are on several hosts, but ranks {format_ranks([int(rank) for rank in ranks])} announce a loopback "
        f"address: the name of their host, {name}, resolves to {address} there (this is {own_name}, on "
        f"{own.name}). Set {VARIABLE} on each host to the interface that leads to the others (here: {_names()}), or "
        "correct the name in /etc/hosts"
    )


def first_infiniband() -> str | None:
    with contextlib.suppress(OSError):
        for _, name in sorted(socket.if_nameindex()):
            if name.startswith("ib") and _is_up(name) and ipv4_of(name) is not None:
                return name
    return None


def set_nccl_environment(
    place: ProcessEnvironment,
    environ: MutableMapping[str, str] | None = None,
    find_interface: Callable[[], str | None] = first_infiniband,
    *,
    uses_nccl: bool = True,
) -> dict[str, str]:
    env = os.environ if environ is None else environ
    if uses_nccl and env.get(_ERROR_HANDLING, "").strip() == "0":
        logger.warning(
            "%s=0 is set: if a rank exits or NCCL fails, torch's NCCL groups wait forever; unset the variable",
            _ERROR_HANDLING,
        )
    written: dict[str, str] = {}
    for name, value, why in _nccl_environment(place, find_interface, uses_nccl):
        if env.get(name, "") != "":
            logger.info("%s is set: %s is kept", name, env[name])
            continue
        env[name] = written[name] = value
        logger.info("%s=%s: %s", name, value, why)
    return written


def _nccl_environment(
    place: ProcessEnvironment, find_interface: Callable[[], str | None], uses_nccl: bool
) -> Iterator[tuple[str, str, str]]:
    if not settings.NCCL_ENVIRONMENT.get() or place.world_size in (1, place.local_world_size):
        return
    if place.local_world_size is None:
        logger.info(
            "no network interface is chosen for NCCL and gloo: the number of ranks on this host is unknown, so all %d "
            "ranks may be on one host; set LOCAL_WORLD_SIZE, or %s and NCCL_SOCKET_IFNAME",
            place.world_size,
            VARIABLE,
        )
        return
    interface = find_interface()
    if interface is None:
        return
    why = f"the world has several nodes, and {interface} is this node's first InfiniBand interface that is up"
    yield VARIABLE, interface, why  # gloo takes exact names only
    if uses_nccl:
        yield "NCCL_SOCKET_IFNAME", f"={interface}", why  # without `=` it is a prefix
        yield "NCCL_IB_DISABLE", "0", why
        yield "NCCL_NET_GDR_LEVEL", "PXB", "GPUs and network cards connected by PCIe switches transfer directly"


def _is_up(name: str) -> bool:
    return read_text(f"/sys/class/net/{name}/operstate") == "up"


def _names() -> str:
    with contextlib.suppress(OSError):
        found = [name for _, name in socket.if_nameindex() if name != "lo"]
        return ", ".join(found[:8]) or "none"
    return "unknown"


def _interface_of(address: str) -> str | None:
    with contextlib.suppress(OSError):
        return next((name for _, name in socket.if_nameindex() if address in addresses_of(name)), None)
    return None
