"""Groups of ranks on several hosts: their connections, and places at which tests have something go wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from device_communicators import GroupContext
from device_communicators.base import limits
from device_communicators.hierarchical import hosts, lanes
from device_communicators.hierarchical.communicator import LEAST_CHUNK_ELEMENTS
from parallel_state import GroupCoordinator

__all__ = ["LEAST_CHUNK_ELEMENTS", "as_without_descriptors", "at_chunk", "connections_of", "is_meshed", "sent_bytes",
           "when_connecting"]  # fmt: skip


def _first(group: GroupCoordinator) -> Any:
    return group.route.communicators[0]


def connections_of(group: GroupCoordinator) -> dict[int, list[Any]]:
    """Returns the sockets by which this rank reaches others, by rank."""
    return {rank: list(each) for rank, each in _first(group).hosts.leaders._streams.sockets.items()}


def sent_bytes(group: GroupCoordinator) -> dict[int, int]:
    """Returns how many bytes were sent to each of those ranks so far."""
    found = _first(group).hosts.leaders._streams
    return {rank: found.facts(rank)[1] for rank in found.sockets}


def is_meshed(group: GroupCoordinator) -> bool:
    """Returns True if each rank has connections to each rank of other hosts."""
    return bool(_first(group).hosts.is_meshed)


@contextmanager
def as_without_descriptors(is_victim: bool) -> Iterator[None]:
    """Two ranks a host want a mesh without asking, and a victim has no descriptor for it."""
    shortage, unasked = limits.descriptor_shortage, hosts.MESHED_UNASKED
    if is_victim:
        limits.descriptor_shortage = lambda needed: "none left"
    hosts.MESHED_UNASKED = 2
    try:
        yield
    finally:
        limits.descriptor_shortage, hosts.MESHED_UNASKED = shortage, unasked


def at_chunk(stage: str, number: int, then: Callable[[], object]) -> None:
    """Has this process call `then` when the chunk of this number, from 0, comes to a stage of a call in lanes."""
    run, calls = getattr(lanes._Chunk, stage), itertools.count()

    def run_or(*args: object) -> object:
        if next(calls) == number:
            then()
        return run(*args)

    setattr(lanes._Chunk, stage, run_or)


@contextmanager
def when_connecting(then: Callable[[], object]) -> Iterator[None]:
    """Calls `then` once the ranks of a group have said where they listen."""
    gather = GroupContext.gather

    def and_then(context: GroupContext, record: bytes, operation: str) -> list[bytes]:
        found = gather(context, record, operation)
        if operation == "connect":
            then()
        return found

    GroupContext.gather = and_then  # type: ignore[method-assign]
    try:
        yield
    finally:
        GroupContext.gather = gather  # type: ignore[method-assign]
