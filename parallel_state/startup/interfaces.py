"""Network interfaces: the address at which other hosts reach this process, and what NCCL and gloo are told of them.

gloo announces that of the interfaces in GLOO_SOCKET_IFNAME; else the first of this host's own name that is this host's,
and loopback where there is none. On many hosts the own name is an entry for 127.0.1.1 in /etc/hosts. The address is
found here before gloo does. Variables of NCCL and torch that somebody has set stay as they are, and nothing is set for
a world on one node: NCCL finds its way there by itself.
"""

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
    start_time,
)
from device_communicators.control.plane import Endpoint
from device_communicators.liveness.health import Place, find_unreachable
from parallel_state.startup.environment import ProcessEnvironment

logger = logging.getLogger("parallel_state")

VARIABLE = INTERFACES_VARIABLE
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Address(NamedTuple):
    """The place of one rank's process, in words without spaces."""

    network: str = ""
    """Equal for processes that can reach each other over loopback; empty where that can't be told."""
    address: str = ""
    """The one that gloo tells the others; empty where that isn't known."""
    name: str = "?"
    """The host's."""
    interface: str = "?"
    """The one that has the address."""
    processes: str = ""
    """Equal for processes that can watch each other by pid; empty where that can't be told."""
    pid: str = ""
    born: str = ""
    """Start time of the process, as the kernel counts: another one may have its pid later."""
    endpoint: str = ""
    """Of its control plane; empty if it has none."""
    cores: str = ""
    """The cores that it shares with the ranks of its host, as `0-3,8`; empty where it doesn't."""
    obstacle: str = ""
    """The reason that it can't listen for the other ranks; empty if it can, or doesn't have the compiled library."""

    @classmethod
    def parse(cls, words: Sequence[str]) -> Address:
        """Returns a place as another rank has told it; nowhere if it has told something else."""
        return cls(*words) if len(words) == len(cls._fields) else cls()

    @property
    def for_control(self) -> Place:
        endpoint = Endpoint.parse(self.endpoint) if self.endpoint else None
        return Place(self.name, self.network, self.processes, int(self.pid or 0), self.born, endpoint)

    def __str__(self) -> str:
        return f"host {self.name} (interface {self.interface}, address {self.address or 'unknown'})"


def whereabouts() -> Address:
    """Returns this process' place. May take as long as the host's name takes to resolve."""
    name = socket.gethostname()
    chosen = os.environ.get(VARIABLE, "").split(",")[0].strip()
    address = gloo_address()
    return process()._replace(address=address, name=name or "?", interface=chosen or _interface_of(address) or "?")


def process() -> Address:
    """Returns this process' place, without what takes a look-up of names."""
    pid = os.getpid()
    return Address(namespace_id("net"), processes=process_domain(), pid=str(pid), born=start_time(pid))


def unreachable(places: dict[int, Address]) -> list[str]:
    """Returns host, address and ranks that others can't reach, as all are on several hosts and these on loopback."""
    if len({place.network for place in places.values() if place.network}) < 2:
        return []
    ranks = [rank for rank, place in places.items() if is_loopback(place.address)]
    return [places[ranks[0]].name, places[ranks[0]].address, *map(str, ranks)] if ranks else []


def shared_address(places: dict[int, Address]) -> list[str]:
    """Returns the address that two hosts announce, and name, interface and ranks of each; empty if there is none."""
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
    """Returns a rank that the control plane can't reach, its place and the reason; empty if there is none.

    If rank 0 doesn't have the compiled library, the world has no control plane: exits are then noticed at deadlines.
    """
    deaf = next((rank for rank, place in sorted(places.items()) if place.obstacle), None)
    if deaf is not None:
        return [str(deaf), str(places[deaf]), f"it can't listen for them: {places[deaf].obstacle}"]
    if not places[0].endpoint:
        return []
    found = find_unreachable({rank: place.for_control for rank, place in places.items()})
    return [] if found is None else [str(found[0]), str(places[found[0]]), f"it {found[1]}"]


def same_address(own: Address, address: str, *hosts: str) -> tuple[str, list[int]]:
    """Returns the message for what `shared_address` has found, and the ranks that it is about."""
    both, suspects = [], []
    for name, interface, words in (hosts[:3], hosts[3:]):
        ranks = [int(word) for word in words.split(",")]
        both.append(f"ranks {format_ranks(ranks)} on host {name} (interface {interface})")
        suspects += ranks
    text = (
        f"{' and '.join(both)} announce one address, {address}, to be reached at; this is host {own.name}. {advice()}"
    )
    return text, suspects


def advice() -> str:
    """Returns what to do about an address that others can't reach."""
    return (
        f"Set {VARIABLE} on each host to the interface that leads to the others (here: {_names()}), or open all TCP "
        "ports between the hosts: gloo connects every two ranks, on ports of its own"
    )


def firewall_advice() -> str:
    """Returns what to do if ranks reached the store where they met, but not each other."""
    ports = settings.PORTS.get()
    chosen = f"{ports[0]}-{ports[1]}" if ports else "unset: any port"
    return f"A firewall may open that store's port only, and not those of {settings.PORTS.name} ({chosen}). {advice()}"


def not_reachable(own: Address, name: str, address: str, *ranks: str, who: str) -> str:
    """Returns the message for what `unreachable` has found, for a rank that is `who`."""
    return (
        f"the ranks are on several hosts, but ranks {format_ranks([int(rank) for rank in ranks])} would be looked for "
        f"on the loopback interface: the name of their host, {name}, resolves to {address} there (this is {who}, on "
        f"{own.name}). Set {VARIABLE} on each host to the interface that leads to the others (here: {_names()}), or "
        "mend the name in /etc/hosts"
    )


def first_infiniband() -> str | None:
    """Returns the first InfiniBand interface that is up and has an IPv4 address; None if there is none."""
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
    """Sets what NCCL and gloo read and nobody has set, logs it with the reason, and returns it."""
    env = os.environ if environ is None else environ
    if uses_nccl and env.get(_ERROR_HANDLING, "").strip() == "0":
        logger.warning(
            "%s=0 stays as it was set: where a rank ends or NCCL fails, torch's NCCL groups wait for ever; unset it",
            _ERROR_HANDLING,
        )
    written: dict[str, str] = {}
    for name, value, why in _nccl_environment(place, find_interface, uses_nccl):
        if env.get(name, "") != "":
            logger.info("%s stays %s, as it was set", name, env[name])
            continue
        env[name] = written[name] = value
        logger.info("%s=%s: %s", name, value, why)
    return written


def _nccl_environment(
    place: ProcessEnvironment, find_interface: Callable[[], str | None], uses_nccl: bool
) -> Iterator[tuple[str, str, str]]:
    """Yields variables for a world of several nodes, each with its value and the reason; gloo's alone without NCCL."""
    if not settings.NCCL_ENVIRONMENT.get() or place.world_size in (1, place.local_world_size):
        return
    if place.local_world_size is None:
        logger.info(
            "no network interface is chosen for NCCL and gloo: the launcher doesn't tell how many ranks are on this "
            "host, so the world of %d may be on one; set LOCAL_WORLD_SIZE, or %s and NCCL_SOCKET_IFNAME",
            place.world_size,
            VARIABLE,
        )
        return
    interface = find_interface()
    if interface is None:
        return
    why = f"the world has several nodes, and {interface} is this node's first InfiniBand interface that is up"
    yield VARIABLE, interface, why  # gloo knows names only
    if uses_nccl:
        yield "NCCL_SOCKET_IFNAME", f"={interface}", why  # `=`: this one, not all that begin so
        yield "NCCL_IB_DISABLE", "0", why
        yield "NCCL_NET_GDR_LEVEL", "PXB", "GPUs and network cards below one PCIe switch or several talk directly"


def _is_up(name: str) -> bool:
    with contextlib.suppress(OSError), open(f"/sys/class/net/{name}/operstate", encoding="utf-8") as file:
        return file.read().strip() == "up"
    return False


def _names() -> str:
    """Returns the interfaces beside loopback."""
    with contextlib.suppress(OSError):
        found = [name for _, name in socket.if_nameindex() if name != "lo"]
        return ", ".join(found[:8]) or "none"
    return "unknown"


def _interface_of(address: str) -> str | None:
    with contextlib.suppress(OSError):
        return next((name for _, name in socket.if_nameindex() if address in addresses_of(name)), None)
    return None
