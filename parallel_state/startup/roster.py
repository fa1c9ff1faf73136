"""Exchanges control-plane endpoints over the store of an existing process group."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence

import torch.distributed as dist

from device_communicators.base import settings
from device_communicators.base.bounded_store import LAST_WORD_S, BoundedStore
from device_communicators.base.errors import RendezvousError, format_ranks, plain
from device_communicators.cpu.watching import listen
from device_communicators.liveness.health import Watcher
from parallel_state.startup import interfaces
from parallel_state.startup.interfaces import Address

_READERS = "process/readers"


def exchange_places(
    store: BoundedStore, rank: int, ranks: Sequence[int], watcher: Watcher, address: str, caller: str
) -> dict[int, Address]:
    """Starts `watcher` at `address` and returns the places of all `ranks`. Each rank calls it.

    `store`: a prefix that is used for this only. `caller`: the function that each rank must call. Raises
    RendezvousError with the missing ranks.
    """
    limit_s = settings.START_TIMEOUT_S.get()
    own = interfaces.process()._replace(endpoint=listen(watcher, address))
    keys = [f"process/{each}" for each in ranks]
    bounded = store.until(time.monotonic() + limit_s + LAST_WORD_S)
    try:
        bounded.set(f"process/{rank}", json.dumps(own))
        came = bounded.wait_for(keys, limit_s)
        missing = [] if came else [each for each, key in zip(ranks, keys, strict=True) if not bounded.check([key])]
        entries = bounded.multi_get(keys) if came else []
    except dist.DistError as error:
        suspects = [] if store.served_by is None else [store.served_by]
        raise _not_joined(rank, ranks, plain(error), suspects, limit_s, caller) from error
    if missing:
        text = f"ranks {format_ranks(missing)} did not call {caller}() within {limit_s:g} s"
        raise _not_joined(rank, ranks, text, missing, limit_s, caller)
    with contextlib.suppress(dist.DistError, NotImplementedError):  # not every store can delete
        if bounded.add(_READERS, 1) == len(ranks):
            for key in (*keys, _READERS):
                bounded.delete_key(key)
    return {each: Address.parse(json.loads(entry)) for each, entry in zip(ranks, entries, strict=True)}


def _not_joined(
    rank: int, ranks: Sequence[int], what: str, suspects: Sequence[int], limit_s: float, caller: str
) -> RendezvousError:
    """Returns the error for ranks that didn't join."""
    return RendezvousError(
        f"{caller}() on rank {rank} of {len(ranks)} failed: {what}. Each of the group's ranks must call {caller}()",
        operation=caller,
        rank=rank,
        suspect_ranks=suspects,
        timeout_s=limit_s,
    )
