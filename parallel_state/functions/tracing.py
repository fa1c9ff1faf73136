"""Traces all ranks' operations on one clock, for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from device_communicators.routing import observers
from device_communicators.routing.observers import OperationEvent
from device_communicators.routing.registry import on_operation
from parallel_state.groups.coordinator import GroupCoordinator
from parallel_state.state import try_get_world_group

_EXCHANGES = 8


@contextmanager
def trace(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Records each operation of each group in the body, and writes a Chrome trace to `folder/rank-R.json`.

    Every rank of the world must enter the context, with a shared folder or a folder of its own. Times are those of rank
    0's monotonic clock: at the start, each host measures the offset of its own clock. In the trace, an asynchronous
    call lasts until its `wait()` returns. In the body each operation takes some microseconds longer, and also appears
    in torch.profiler.
    """
    world = try_get_world_group()
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    offset_s = 0.0 if world is None else _offset(world)
    events: list[tuple[int, OperationEvent]] = []
    remove = on_operation(lambda event: events.append((threading.get_native_id(), event)))
    observers.IN_PROFILER.append(True)
    try:
        yield
    finally:
        observers.IN_PROFILER.pop()
        remove()
        rank = 0 if world is None else world.rank
        made = target / f"rank-{rank}.part"
        made.write_text(json.dumps(_chrome_trace(rank, offset_s, events)))
        made.rename(target / f"rank-{rank}.json")


def _offset(world: GroupCoordinator) -> float:
    """Returns rank 0's monotonic clock minus this host's, in seconds. Every rank must call this."""
    memory = world.context.host_memory
    hosts = [[rank] for rank in world.ranks] if memory is None else [list(host) for host in memory.hosts]
    if world.world_size == 1 or len(hosts) == 1 or world.context.fake or world.context.simulated:
        return 0.0
    own = next(host for host in hosts if world.rank in host)
    offset = 0.0
    for host in hosts:
        if 0 not in host:
            if world.rank == 0:
                _serve_clock(world, host[0])
            elif world.rank == host[0]:
                offset = _compare_clock(world)
    return float(world.all_gather_object(offset)[own[0]])


def _serve_clock(world: GroupCoordinator, rank: int) -> None:
    for _ in range(_EXCHANGES):
        world.recv((1,), torch.float64, rank, device=torch.device("cpu"))
        world.send(torch.tensor([time.monotonic()], dtype=torch.float64, device="cpu"), rank)


def _compare_clock(world: GroupCoordinator) -> float:
    exchanges = []
    for _ in range(_EXCHANGES):
        asked = time.monotonic()
        world.send(torch.tensor([asked], dtype=torch.float64, device="cpu"), 0)
        theirs = float(world.recv((1,), torch.float64, 0, device=torch.device("cpu")))
        heard = time.monotonic()
        exchanges.append((heard - asked, theirs - (asked + heard) / 2))
    return min(exchanges)[1]


def _chrome_trace(rank: int, offset_s: float, events: list[tuple[int, OperationEvent]]) -> dict[str, object]:
    tracks = {name: at for at, name in enumerate(dict.fromkeys(event.group for _, event in events), 1)}
    shown: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} on {socket.gethostname()}"}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
    ]
    shown += [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": at, "args": {"name": name}}
        for name, at in tracks.items()
    ]
    shown += [
        {
            "ph": "X",
            "name": event.operation,
            "cat": "parallel_state",
            "pid": rank,
            "tid": tracks[event.group],
            "ts": round((event.started_s + offset_s) * 1e6, 3),
            "dur": round((event.ended_s - event.started_s) * 1e6, 3),
            "args": {
                "group": event.group, "ranks": list(event.ranks), "number": event.sequence, "bytes": event.bytes,
                "dtype": event.dtype, "shape": list(event.shape), "peer": event.peer, "thread": thread,
            },
        }
        for thread, event in events
    ]  # fmt: skip
    return {"traceEvents": shown, "displayTimeUnit": "ms", "otherData": {"rank": rank, "offset_s": offset_s}}
