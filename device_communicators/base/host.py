"""Identity of this host and of processes on it, as the kernel tells, and its address; empty, or 0, where it doesn't."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import os
import socket
from collections.abc import Iterator
from typing import Any

INTERFACES_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_LINK_LOCAL = "20"  # the scope of an address, in /proc/net/if_inet6


def boot_id() -> str:
    """Returns the id of the running system, which no other host or boot has."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def local_namespace(kind: str) -> int:
    """Returns the number of one of this process' namespaces (`net`, `pid`) among those of this host; 0 if unknown."""
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


def namespace_id(kind: str) -> str:
    """Returns the id of one of this process' namespaces, which no other one of any host has."""
    boot, number = boot_id(), local_namespace(kind)
    return f"{boot}/{number}" if boot and number else ""


def process_domain() -> str:
    """Returns an id that is equal for processes that can watch each other by PID; empty where that can't be told."""
    processes = namespace_id("pid")
    return f"{processes}/{local_namespace('time')}" if processes else ""  # `start_time` is by the clock of who asks


def start_time(pid: int) -> str:
    """Returns when a process of this PID namespace began; empty where there is none. Tells reused pids apart."""
    return _stat(pid, 19)


def parent_of(pid: int) -> int:
    """Returns the PID of a process's parent; 0 if the process or its parent isn't in this PID namespace."""
    return int(_stat(pid, 1) or 0)


def _stat(pid: int, field: int) -> str:
    """Returns a field of /proc/PID/stat, counted from the state, which follows the name."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[field]
    except (OSError, IndexError):
        return ""


def resolve(host: str | None, port: int | None = None, kind: int = socket.SOCK_STREAM) -> list[tuple[Any, ...]]:
    """Returns the result of `socket.getaddrinfo`. All look-ups of names use this function.

    Raises OSError also for an impossible name: Python raises UnicodeError for an empty label, or one of 64 letters.
    """
    try:
        return list(socket.getaddrinfo(host, port, type=kind))
    except UnicodeError as error:
        reason = error.__cause__ or error
        raise socket.gaierror(socket.EAI_NONAME, f"{host!r} can't be a host name: {reason}") from error


def connect_to(address: tuple[str, int], timeout_s: float) -> socket.socket:
    """Returns a connection to a name or an address. Raises OSError, also for an impossible name."""
    try:
        return socket.create_connection(address, timeout=timeout_s)
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, f"{address[0]!r} can't be a host name: {error}") from error


def address_towards(server: tuple[str, int] | None) -> str:
    """Returns the address from which this process reaches the store, and at which hosts reach it; "" if unknown."""
    if server is None:
        return ""
    try:
        family, kind, _, _, where = resolve(*server, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing: it picks the interface
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def ipv4_of(interface: str) -> str | None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, interface.encode()[:15].ljust(256, b"\0"))
        return socket.inet_ntoa(answer[20:24])
    return None


def addresses_of(interface: str) -> Iterator[str]:
    """Yields an interface's addresses that other hosts can reach: that of IPv4 first, as gloo takes it."""
    ipv4 = ipv4_of(interface)
    if ipv4 is not None:
        yield ipv4
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="utf-8") as file:
        for digits, _, _, scope, _, owner in map(str.split, file):
            if owner == interface and scope != _LINK_LOCAL:
                yield str(ipaddress.IPv6Address(int(digits, 16)))


@functools.lru_cache(maxsize=1)
def _address_of(name: str) -> str:
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, where in resolve(name):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
                return str(where[0])
    return "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Returns True for an address at which no other host reaches this one, and for `localhost`."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return address == "localhost"


def is_numeric(address: str) -> bool:
    """Returns True for an address that needs no look-up."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(address.partition("%")[0])
        return True
    return False


def gloo_address() -> str:
    """Returns the address that gloo tells others; "" if the interface that it is given has none.

    That of the first interface in GLOO_SOCKET_IFNAME; else the first of this host's own name that is this host's, and
    loopback where there is none. May take as long as the host's name takes to resolve.
    """
    return gloo_addresses()[0]


def gloo_addresses() -> list[str]:
    """Returns an address of each interface in GLOO_SOCKET_IFNAME; where it isn't set, as `gloo_address`."""
    chosen = [name.strip() for name in os.environ.get(INTERFACES_VARIABLE, "").split(",")]
    return [next(addresses_of(name), "") for name in chosen] if chosen[0] else [_address_of(socket.gethostname())]
