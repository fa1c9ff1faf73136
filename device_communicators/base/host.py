"""Identifies this host and processes, and finds the host's addresses. Unknown values are empty or 0."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INTERFACES_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
_LINK_LOCAL = "20"


def read_text(path: str | Path) -> str:
    """Returns a file's text, stripped of white space at both ends; "" if the file can't be read."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read().strip()
    return ""


@functools.cache
def boot_id() -> str:
    return read_text("/proc/sys/kernel/random/boot_id")


def local_namespace(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


def namespace_id(kind: str) -> str:
    boot, number = boot_id(), local_namespace(kind)
    return f"{boot}/{number}" if boot and number else ""


def process_domain() -> str:
    """Identifies the PID namespace: equal for processes that can watch each other by PID; "" if unknown."""
    processes = namespace_id("pid")
    # `start_time` uses the clock of the reader's time namespace.
    return f"{processes}/{local_namespace('time')}" if processes else ""


def start_time(pid: int) -> str:
    """Returns when the process started, in clock ticks since boot. Distinguishes processes that had the same PID."""
    return _stat(pid, 19)


def parent_of(pid: int) -> int:
    return int(_stat(pid, 1) or 0)


def _stat(pid: int, field: int) -> str:
    return next(iter(read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[field:]), "")


def resolve(host: str | None, port: int | None = None, kind: int = socket.SOCK_STREAM) -> list[tuple[Any, ...]]:
    """Returns getaddrinfo's result. Raises OSError instead of Python's UnicodeError for an invalid name."""
    try:
        return list(socket.getaddrinfo(host, port, type=kind))
    except UnicodeError as error:
        reason = error.__cause__ or error
        raise socket.gaierror(socket.EAI_NONAME, f"{host!r} can't be a host name: {reason}") from error


def connect_to(address: tuple[str, int], timeout_s: float) -> socket.socket:
    try:
        return socket.create_connection(address, timeout=timeout_s)
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, f"{address[0]!r} can't be a host name: {error}") from error


def address_towards(server: tuple[str, int] | None) -> str:
    if server is None:
        return ""
    try:
        family, kind, _, _, where = resolve(*server, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # UDP sends nothing here
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def interface_ioctl(interface: str, request: int) -> bytes:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return fcntl.ioctl(probe.fileno(), request, interface.encode()[:15].ljust(256, b"\0"))[16:]
    return b""


def ipv4_of(interface: str) -> str | None:
    answer = interface_ioctl(interface, _SIOCGIFADDR)
    return socket.inet_ntoa(answer[4:8]) if answer else None


def networks_of(interface: str) -> Iterator[str]:
    """Yields the addresses of a network interface with prefix lengths, such as `10.0.0.7/16`. IPv4, which gloo uses, is
    first.
    """
    ipv4, mask = ipv4_of(interface), interface_ioctl(interface, _SIOCGIFNETMASK)
    if ipv4 is not None:
        yield f"{ipv4}/{int.from_bytes(mask[4:8], 'big').bit_count()}"
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="utf-8") as file:
        for digits, _, length, scope, _, owner in map(str.split, file):
            if owner == interface and scope != _LINK_LOCAL:
                yield f"{ipaddress.IPv6Address(int(digits, 16))}/{int(length, 16)}"


def addresses_of(interface: str) -> Iterator[str]:
    return (network.partition("/")[0] for network in networks_of(interface))


@functools.lru_cache(maxsize=1)
def _address_of(name: str) -> str:
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, where in resolve(name):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
                return str(where[0])
    return "127.0.0.1"


def is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return address == "localhost"


def is_numeric(address: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(address.partition("%")[0])
        return True
    return False


def gloo_address() -> str:
    """Returns gloo's first listening address on this host. Can block on a DNS query."""
    return gloo_addresses()[0]


def gloo_addresses() -> list[str]:
    """Returns the addresses for gloo: that of each interface in GLOO_SOCKET_IFNAME ("" for an interface without
    addresses). If the variable is unset, returns only the address of the host's name, or 127.0.0.1.
    """
    chosen = [name.strip() for name in os.environ.get(INTERFACES_VARIABLE, "").split(",")]
    return [next(addresses_of(name), "") for name in chosen] if chosen[0] else [_address_of(socket.gethostname())]
