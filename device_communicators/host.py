"""Identity of this host and of processes on it, as the kernel tells, and its address; empty, or 0, where it doesn't."""

from __future__ import annotations

import os
import socket


def boot_id() -> str:
    """Returns the id of the running system, which no other host or boot has."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
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


def start_time(pid: int) -> str:
    """Returns when a process of this PID namespace began; empty where there is none. Tells reused pids apart."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def address_towards(server: tuple[str, int] | None) -> str:
    """Returns the address from which this process reaches the store, and at which hosts reach it; "" if unknown."""
    if server is None:
        return ""
    try:
        family, kind, _, _, where = socket.getaddrinfo(*server, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing: it picks the interface
            return str(probe.getsockname()[0])
    except OSError:
        return ""
