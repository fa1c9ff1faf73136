"""Connects ranks of different hosts for sends and receives. csrc/streams.h moves the data."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable

from device_communicators.cpu import native
from device_communicators.cpu.connections import Connections
from device_communicators.cpu.host_memory import HostMemory
from device_communicators.liveness.health import Watcher

STRIPED_BYTES = 256 << 10
"""Message bodies of at least this size are split over several connections."""


def connect_streams(
    memory: HostMemory, gather: Callable[[bytes], list[bytes]], watcher: Watcher | None, watched: Iterable[int]
) -> tuple[int, Connections]:
    """Connects all ranks of the group by TCP; every rank must call this. Returns the address of the C++ object that
    moves the data, and the connections, which the caller closes after `ps_transfers_delete`.

    `gather`: all-gathers bytes. `watched`: global ranks whose death ends the wait.
    """
    members, collectives = memory.members, memory.collectives
    if collectives is None:
        raise members.destroyed()
    others = [rank for rank in range(len(members.ranks)) if rank != members.rank]
    made = memory.connect(gather, watcher, watched, others)
    losses = collectives.library.ps_group_losses(collectives.number)
    try:
        address = open_streams(made, losses, members.rank, len(members.ranks), memory.waiting[0])
    except BaseException:
        made.close()
        raise
    finally:
        collectives.library.ps_liveness_delete(losses)
    collectives.library.ps_transfers_serve(address, collectives.number, 0)  # windows find them
    if watcher is not None:
        watcher.connections[made] = members.ranks
    return address, made


def open_streams(
    made: Connections, losses: int, rank: int, size: int, spin_ns: int, striped_bytes: int = STRIPED_BYTES
) -> int:
    ends = [(peer, each.fileno(), made.early_bytes[peer]) for peer, all_ in made.sockets.items() for each in all_]
    ranks, descriptors, early_bytes = zip(*ends, strict=True)
    numbers = ctypes.c_int * len(ends)
    address: int | None = native.load().ps_streams_new(
        losses, rank, size, numbers(*ranks), numbers(*descriptors), (ctypes.c_uint64 * len(ends))(*early_bytes),
        len(ends), made.granted_bytes, spin_ns, striped_bytes,
    )  # fmt: skip
    if not address:
        raise MemoryError("this process has no memory left for its connections to other hosts")
    return address
