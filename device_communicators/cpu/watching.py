"""Has a `Watcher` meet the ranks of a process group: over a store, as they have no connection to each other yet."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from device_communicators.base import settings
from device_communicators.base.bounded_store import LAST_WORD_S, BoundedStore
from device_communicators.base.errors import CommunicationError, PeerDiedError, RendezvousError, format_ranks
from device_communicators.base.host import gloo_address, is_loopback, namespace_id, process_domain, start_time
from device_communicators.control.plane import Endpoint
from device_communicators.cpu import native
from device_communicators.cpu.host_memory import HostMemory
from device_communicators.liveness.health import LOOPBACK, Place, Watcher, answer_within

_OWN_NAME_S = 2.0
"""For this host's own name to resolve."""
_READERS = "process/readers"


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


def meet(
    store: BoundedStore,
    rank: int,
    ranks: Sequence[int],
    watcher: Watcher,
    address: str,
    caller: str,
    *,
    note: str = "",
    limit_s: float = float("inf"),
) -> list[str]:
    """Starts to watch `ranks` (global, this `rank` among them). Each of them calls it. Returns the note of each.

    `store`: a prefix that is used for this only. `address`: of this host, as others reach it. `caller`: the function
    that each rank must call. `limit_s`: a timeout below that of the start. Raises RendezvousError with the missing
    ranks, and PeerDiedError if the store of a rank closed. If a rank has a note, the ranks are not watched.
    """
    limit_s, pid = min(limit_s, settings.START_TIMEOUT_S.get()), os.getpid()
    own = Place(socket.gethostname(), namespace_id("net"), process_domain(), pid, start_time(pid), None)
    entry = [*own[:-1], listen(watcher, address), note]
    keys = [f"process/{each}" for each in ranks]
    bounded, started = store.until(time.monotonic() + limit_s + LAST_WORD_S), time.monotonic()

    def not_met(kind: type[CommunicationError], why: str, suspects: Sequence[int]) -> CommunicationError:
        return kind(
            f"{caller}() on rank {rank} of {len(ranks)} failed: {why}. Each of the group's ranks must call {caller}()",
            operation=caller,
            rank=rank,
            suspect_ranks=suspects,
            elapsed_s=time.monotonic() - started,
            timeout_s=limit_s,
        )

    try:
        bounded.set(f"process/{rank}", json.dumps(entry))
        came = bounded.wait_for(keys, limit_s)
        missing = [] if came else [each for each, key in zip(ranks, keys, strict=True) if not bounded.check([key])]
        entries = [json.loads(each) for each in bounded.multi_get(keys)] if came else []
    except dist.DistError as error:
        kind, why, suspects = watcher.explain_lost_store(store, error, ranks)
        if kind is CommunicationError:  # the process of the server ended, or ends
            kind = RendezvousError if store.served_by is None else PeerDiedError
        raise not_met(kind, why, suspects) from error
    if missing:
        why = f"ranks {format_ranks(missing)} did not call {caller}() within {limit_s:g} s"
        raise not_met(RendezvousError, why, missing)
    with contextlib.suppress(dist.DistError, NotImplementedError):  # not every store can delete
        if bounded.add(_READERS, 1) == len(ranks):
            for key in (*keys, _READERS):
                bounded.delete_key(key)
    places, notes = {}, []
    for each, (*place, endpoint, its_note) in zip(ranks, entries, strict=True):
        places[each] = Place._make([*place, Endpoint.parse(endpoint) if endpoint else None])
        notes.append(its_note)
    if not any(notes):
        watcher.follow(rank, places)
    return notes


def know_neighbours(memory: HostMemory, watcher: Watcher) -> None:
    """Gives `watcher` the PIDs of a group's ranks on this host. Call it after `memory` was attached."""
    ranks = memory.members.ranks
    own = ranks[memory.members.rank]
    pids = {ranks[place]: pid for place, pid in zip(memory.local_ranks, memory.pids, strict=True)}

    def has_left(rank: int) -> bool:
        """Returns True for a rank that said so in shared memory."""
        return rank in pids and memory.collectives is not None and memory.collectives.has_left(ranks.index(rank))

    watcher.know({rank: pid for rank, pid in pids.items() if pid > 0 and rank != own}, has_left)
