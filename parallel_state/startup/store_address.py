"""The address of a world's store: where rank 0 serves it, how hosts reach this process, where the next world meets."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from device_communicators.errors import InvalidArgumentError
from parallel_state.startup.environment import ProcessEnvironment


@dataclass(frozen=True)
class Start:
    """How this process joined its world."""

    init_method: str
    backend: str
    local_rank: int
    timeout_s: float
    allow_pickle: bool
    bind_device: bool
    served_by: int | None
    """The rank that serves the store; None where a launcher, or the file system, does."""
    server: tuple[str, int] | None
    """Host and port of the store, where a rank serves it."""
    high_priority_stream: bool = False
    generation: int = 0
    """How many worlds this process was in before by `reinitialize`."""


_FIRST_PORT = 1024
"""Below, only root may listen; after the last one come these."""


def server_of(init_method: str, place: ProcessEnvironment) -> tuple[str, int] | None:
    """Where rank 0 serves the store of a world; None where it doesn't."""
    if place.world_size == 1:
        return None
    if init_method.startswith("tcp://"):
        parts = urlsplit(init_method)
        return (parts.hostname, parts.port) if parts.hostname and parts.port else None
    if init_method != "env://" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return (place.master_addr, place.master_port) if place.master_addr and place.master_port else None


def own_address(server: tuple[str, int] | None) -> str:
    """Under which address the hosts of this world reach this process; empty where that doesn't matter."""
    if server is None:
        return ""
    try:
        family, kind, _, _, where = socket.getaddrinfo(*server, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing: it picks the interface
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def meeting_place(start: Start, ranks: Sequence[int], addresses: Sequence[str]) -> str:
    """The init method of the next world, of the old one's `ranks`; the same on all of them."""
    if start.served_by is None or start.server is None:
        return start.init_method
    host, port = start.server
    if start.served_by in ranks:
        # It serves the next world too, for it is the lowest; its port is its own to give back.
        return f"tcp://{_bracketed(host)}:{port}"
    host = addresses[ranks[0]] if addresses else ""
    if not host:
        raise InvalidArgumentError(
            f"rank {start.served_by} served the store, and where rank {ranks[0]} can be reached isn't known; call "
            "destroy_distributed_environment() and init_distributed_environment(...) with an address"
        )
    # Not the old port: the rank that held it may only have been given up, and still hold it.
    next_port = _FIRST_PORT + (port + 1 + start.generation - _FIRST_PORT) % (65_536 - _FIRST_PORT)
    return f"tcp://{_bracketed(host)}:{next_port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
