from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from device_communicators.base import limits
from device_communicators.cpu import host_memory
from device_communicators.cpu.host_memory import HostMemory
from parallel_state import GroupCoordinator

_BYTES = struct.Struct("=120x8xQ64xQ")
"""tcpi_bytes_received and tcpi_bytes_sent in Linux's tcp_info."""


def _memory(group: GroupCoordinator) -> HostMemory:
    memory = group.context.host_memory
    assert memory is not None
    return memory


def connections_of(group: GroupCoordinator) -> dict[int, list[Any]]:
    collectives = _memory(group).collectives
    assert collectives is not None
    return {rank: list(each) for rank, each in collectives.connections.sockets.items()}


def transfer_socket(group: GroupCoordinator, rank: int) -> socket.socket:
    carrier: Any = group.route.communicators[0]
    return carrier._connections.sockets[rank][0]  # type: ignore[no-any-return]


def _moved(connection: socket.socket) -> tuple[int, int]:
    """Returns received and sent bytes. Retransmitted bytes count twice."""
    with contextlib.suppress(OSError):
        received, sent = _BYTES.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES.size))
        return received, sent
    return 0, 0


def sent_bytes(group: GroupCoordinator) -> dict[int, int]:
    return {rank: sum(_moved(each)[1] for each in sockets) for rank, sockets in connections_of(group).items()}


def moved_bytes(group: GroupCoordinator) -> int:
    return sum(sum(_moved(each)) for sockets in connections_of(group).values() for each in sockets)


def is_meshed(group: GroupCoordinator) -> bool:
    return _memory(group).is_meshed


@contextmanager
def as_without_descriptors(is_victim: bool) -> Iterator[None]:
    shortage, unasked = limits.descriptor_shortage, host_memory.MESHED_UNASKED
    if is_victim:
        limits.descriptor_shortage = lambda needed: "none left"
    host_memory.MESHED_UNASKED = 2
    try:
        yield
    finally:
        limits.descriptor_shortage, host_memory.MESHED_UNASKED = shortage, unasked


@contextmanager
def as_too_many_to_mesh() -> Iterator[None]:
    """Groups connect only one rank (lead) of each host, as groups of more than 256 ranks do."""
    most, host_memory.MOST_MESHED = host_memory.MOST_MESHED, 1
    try:
        yield
    finally:
        host_memory.MOST_MESHED = most


def when_moved(group: GroupCoordinator, size_bytes: float, then: Callable[[], object]) -> None:
    def wait() -> None:
        while moved_bytes(group) < size_bytes:
            time.sleep(0)
        then()

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def when_connecting(then: Callable[[], object]) -> Iterator[None]:
    connect = host_memory.connect

    def connect_and_then(meeting: Any, *args: Any) -> Any:
        def gather(record: bytes) -> list[bytes]:
            found = meeting.gather(record)
            then()
            return found

        return connect(meeting._replace(gather=gather), *args)

    host_memory.connect = connect_and_then
    try:
        yield
    finally:
        host_memory.connect = connect
