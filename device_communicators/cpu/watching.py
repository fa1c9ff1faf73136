"""Starts the liveness checks of a world's ranks: which are watched by what follows from what they share."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from device_communicators.base import settings
from device_communicators.base.bounded_store import BoundedStore
from device_communicators.cpu.host_memory import HostMemory
from device_communicators.liveness.health import Farewells, Watcher
from device_communicators.liveness.heartbeat import Heartbeats
from device_communicators.liveness.links import LinkPort, Links

logger = logging.getLogger("parallel_state")

_READERS_PER_S = 256
"""Larger worlds beat less often: every rank reads each time, and one store serves them all."""
_BEATS_IN_LIMIT = 4
"""A host may miss some before it is given up, however long the interval is."""


def watch_ranks(
    memory: HostMemory, watcher: Watcher, open_store: Callable[[], BoundedStore | None], address: str
) -> None:
    """Has `watcher` hear of the ends of a group's ranks; each of them calls it once, after `memory` was attached.

    `open_store`: gives a connection of its own to the group's store, or None. `address`: where other hosts reach this
    rank's. Ranks of one host in several PID namespaces, as containers have them, hear of each other as hosts do.
    """
    ranks = memory.members.ranks
    own = ranks[memory.members.rank]
    pids = {ranks[place]: pid for place, pid in zip(memory.local_ranks, memory.pids, strict=True)}
    others = {rank: pid for rank, pid in pids.items() if pid > 0 and rank != own}
    farewells = Farewells(open_store()) if memory.collectives is None and others else None
    if farewells is not None:
        watcher.on_close.append(functools.partial(farewells.announce, own))

    def has_left(rank: int) -> bool:
        """Returns True for a rank that said so in shared memory, or else to the store."""
        if farewells is not None:
            return farewells.was_announced(rank)
        return rank in pids and memory.collectives is not None and memory.collectives.has_left(ranks.index(rank))

    watcher.watch_processes(others, has_left)
    apart = [[ranks[place] for place in part] for part in memory.watched_together]
    if len(apart) < 2:
        return
    store = open_store()
    interval_s = settings.HEARTBEAT_S.get() * max(1.0, len(ranks) / _READERS_PER_S)
    limit_s = max(settings.HEARTBEAT_LIMIT_S.get(), _BEATS_IN_LIMIT * interval_s)
    try:
        if store is None:
            raise RuntimeError("it takes no further connection")
        beats = Heartbeats(store, apart, own, watcher, interval_s=interval_s, limit_s=limit_s)
        beats.start()
    except RuntimeError as error:  # it may just have gone with its server, whose end the start will name
        logger.warning("hosts of %s that vanish are noticed late, as its store can't be used for beats: %s",
                       memory.members, str(error).splitlines()[0])  # fmt: skip
        return
    watcher.bound_s = limit_s + 2 * interval_s
    watcher.on_close.append(beats.close)
    if sorted(watcher.linked_apart) == sorted(apart):
        return
    store = open_store()
    try:
        if store is None:
            raise RuntimeError("the store takes no further connection")
        links = Links(apart, own, LinkPort(address), watcher, store=store)
        watcher.on_close.append(links.close)
        links.start()
    except (OSError, RuntimeError) as error:
        logger.warning("rank %d is not connected to the other hosts from %r (%s): its end is noticed there by beats",
                       own, address, str(error).splitlines()[0])  # fmt: skip
