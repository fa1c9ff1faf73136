"""Starts the watch of a world's ranks with what they have told each other when its memory was attached."""

from __future__ import annotations

from typing import Any

from device_communicators.base.host import gloo_address, is_loopback
from device_communicators.cpu import native
from device_communicators.cpu.host_memory import HostMemory
from device_communicators.liveness.health import LOOPBACK, Watcher, answer_within

_OWN_NAME_S = 2.0
"""For this host's own name to resolve."""


def listen(watcher: Watcher, address: str) -> str:
    """Has `watcher` listen for other ranks' control planes; returns its endpoint as text, "" for none.

    `address`: of this host, as others reach it. Where that is unknown, or leads nowhere else, it is gloo's.
    """
    if not address or is_loopback(address):  # as that of a name which /etc/hosts has for 127.0.1.1
        address = answer_within(_OWN_NAME_S, gloo_address) or LOOPBACK
    try:
        library: Any = native.load()
    except native.NativeUnavailableError as error:
        library = str(error)
    return str(watcher.listen(library, address) or "")


def watch_ranks(memory: HostMemory, watcher: Watcher) -> None:
    """Has `watcher` hear of the ends of a group's ranks; each of them calls it once, after `memory` was attached.

    A start of this library's has watched them since they met.
    """
    ranks = memory.members.ranks
    own = ranks[memory.members.rank]
    pids = {ranks[place]: pid for place, pid in zip(memory.local_ranks, memory.pids, strict=True)}

    def has_left(rank: int) -> bool:
        """Returns True for a rank that said so in shared memory."""
        return rank in pids and memory.collectives is not None and memory.collectives.has_left(ranks.index(rank))

    watcher.know({rank: pid for rank, pid in pids.items() if pid > 0 and rank != own}, has_left)
    if not watcher.has_met and len(ranks) > 1:
        watcher.follow(own, dict(zip(ranks, memory.places, strict=True)))
