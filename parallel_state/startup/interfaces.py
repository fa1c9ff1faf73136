"""Where other hosts will look for this process: the address that gloo tells them, found before gloo does.

gloo takes that of the interfaces in GLOO_SOCKET_IFNAME; else the first of this host's own name that is this host's,
and loopback where there is none. On many hosts the own name is an entry for 127.0.1.1 in /etc/hosts.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from device_communicators.errors import format_ranks
from device_communicators.host import namespace_id, start_time

VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


class Whereabouts(NamedTuple):
    """Of one rank, in words without spaces."""

    network: str = ""
    """Equal for processes that can reach each other over loopback; empty where that can't be told."""
    address: str = ""
    """What gloo tells the others; empty where that isn't known."""
    name: str = "?"
    """The host's."""
    interface: str = "?"
    """The one that has the address."""
    processes: str = ""
    """Equal for processes that can watch each other by pid; empty where that can't be told."""
    pid: str = ""
    born: str = ""
    """When the process began, as the kernel counts: another one may have its pid later."""

    @classmethod
    def told(cls, words: Sequence[str]) -> Whereabouts:
        """As another rank has told them; nowhere if it has told something else."""
        return cls(*words) if len(words) == len(cls._fields) else cls()

    @property
    def is_loopback(self) -> bool:
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.address.partition("%")[0]).is_loopback
        return False


def whereabouts() -> Whereabouts:
    """This process'. May take as long as the host's name takes to resolve."""
    name = socket.gethostname()
    chosen = os.environ.get(VARIABLE, "").split(",")[0].strip()
    address = (_ipv4_of(chosen) or "") if chosen else _address_of(name)
    return process()._replace(address=address, name=name or "?", interface=chosen or _interface_of(address) or "?")


def process() -> Whereabouts:
    """As `whereabouts`, without what takes a look-up of names."""
    pid = os.getpid()
    return Whereabouts(namespace_id("net"), processes=namespace_id("pid"), pid=str(pid), born=start_time(pid))


def unreachable(places: dict[int, Whereabouts]) -> list[str]:
    """The ranks that others can't reach, as all are on several hosts and these on loopback: host, address, ranks."""
    if len({place.network for place in places.values() if place.network}) < 2:
        return []
    ranks = [rank for rank, place in places.items() if place.is_loopback]
    return [places[ranks[0]].name, places[ranks[0]].address, *map(str, ranks)] if ranks else []


def shared_address(places: dict[int, Whereabouts]) -> list[str]:
    """The address that two hosts announce, and of each host name, interface and ranks; empty where there is none."""
    ranks: dict[str, dict[str, list[int]]] = {}
    for rank, place in places.items():
        if place.address and place.network:
            ranks.setdefault(place.address, {}).setdefault(place.network, []).append(rank)
    for address, networks in ranks.items():
        if len(networks) > 1:
            hosts = [(places[each[0]], each) for each in list(networks.values())[:2]]
            return [address, *(word for host, each in hosts for word in (host.name, host.interface, _joined(each)))]
    return []


def same_address(here: Whereabouts, address: str, *hosts: str) -> tuple[str, list[int]]:
    """The message for what `shared_address` has found, and the ranks that it is about."""
    first, second = (
        (name, interface, list(map(int, ranks.split(",")))) for name, interface, ranks in (hosts[:3], hosts[3:])
    )
    both = " and ".join(
        f"ranks {format_ranks(ranks)} on host {name} (interface {interface})"
        for name, interface, ranks in (first, second)
    )
    return f"{both} announce one address, {address}, to be reached at; this is host {here.name}. {advice()}", [
        *first[2],
        *second[2],
    ]


def _joined(ranks: list[int]) -> str:
    return ",".join(map(str, ranks))


def in_words(place: Whereabouts) -> str:
    """A place as messages name it."""
    return f"host {place.name} (interface {place.interface}, address {place.address or 'unknown'})"


def advice() -> str:
    """What to do about an address that others can't reach."""
    return (
        f"Set {VARIABLE} on each host to the interface that leads to the others (here: {_names()}), or open all TCP "
        "ports between the hosts: gloo connects every two ranks, on ports of its own"
    )


def not_reachable(here: Whereabouts, name: str, address: str, *ranks: str, who: str) -> str:
    """The message for what `unreachable` has found, for a rank that is `who`."""
    return (
        f"the ranks are on several hosts, but ranks {format_ranks([int(rank) for rank in ranks])} would be looked for "
        f"on the loopback interface: the name of their host, {name}, resolves to {address} there (this is {who}, on "
        f"{here.name}). Set {VARIABLE} on each host to the interface that leads to the others (here: {_names()}), or "
        "mend the name in /etc/hosts"
    )


def first_infiniband() -> str | None:
    """The first InfiniBand interface that is up and has an IPv4 address; None where none is, or nobody can tell."""
    with contextlib.suppress(OSError):
        for _, name in sorted(socket.if_nameindex()):
            if name.startswith("ib") and _is_up(name) and _ipv4_of(name) is not None:
                return name
    return None


def _is_up(name: str) -> bool:
    with contextlib.suppress(OSError), open(f"/sys/class/net/{name}/operstate") as file:
        return file.read().strip() == "up"
    return False


def _ipv4_of(name: str) -> str | None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, name.encode()[:15].ljust(256, b"\0"))
        return socket.inet_ntoa(answer[20:24])
    return None


def _names() -> str:
    """The interfaces beside loopback."""
    with contextlib.suppress(OSError):
        found = [name for _, name in socket.if_nameindex() if name != "lo"]
        return ", ".join(found[:8]) or "none"
    return "unknown"


def _interface_of(address: str) -> str | None:
    with contextlib.suppress(OSError):
        return next((name for _, name in socket.if_nameindex() if _ipv4_of(name) == address), None)
    return None


def _address_of(name: str) -> str:
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, where in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
                return str(where[0])
    return "127.0.0.1"
