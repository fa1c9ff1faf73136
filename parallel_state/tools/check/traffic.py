"""Sends traffic through all groups of the layout. Checks the results, then measures.

All groups of a kind, such as tp, work at the same time. Values are small integers, whose float32 sums are exact.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import parallel_state as ps
from device_communicators.base.errors import ParallelStateError
from device_communicators.routing.communicator import Request
from parallel_state.layout.resolution import made_at_start
from parallel_state.tools.bench.collectives import answer, given, ours_by_method
from parallel_state.tools.bench.devices import Clock
from parallel_state.tools.bench.rounds import OPERATIONS
from parallel_state.tools.check.facts import GroupTraffic, Traffic
from parallel_state.tools.check.system import run_cpu

SIZES = (256, 1 << 14, 1 << 18, 1 << 20)
"""Numbers of elements, below and above the sizes at which another communicator is used."""
QUICK_SIZES = (256, 1 << 17)
_LARGE = 1 << 21
_QUICK_LARGE = 1 << 19


def run(
    sizes: Mapping[str, int], order: str | None, left_s: float, quick: bool, note: Callable[[str], None]
) -> Traffic:
    """Creates the groups, and calls `note` with each stage's name.

    All ranks must call this with the same time limit `left_s`. `sizes`, `order`: of the axes. `quick`: fewer and
    smaller calls.
    """
    found = Traffic()

    def enter(stage: str) -> None:
        found.stage = stage
        note(stage)

    started = time.monotonic()
    deadline = started + left_s
    try:
        enter("init_distributed_environment")
        ps.init_distributed_environment(timeout=left_s)
        enter("initialize_model_parallel")
        ps.initialize_model_parallel(order=order, **dict[str, Any](sizes))
        found.start_s = time.monotonic() - started
        for kind, group in groups_of(sizes):
            enter(f"traffic in {kind}")
            if not _all_have_time(deadline):
                break
            found.groups.append(_measure(kind, group, quick))
        enter("load")
        ps.get_world_group().barrier()
        found.cpu_ms.append(run_cpu())
        enter("end")
        ps.destroy_model_parallel()
        ps.destroy_distributed_environment()
        found.stage = ""
    except (ParallelStateError, RuntimeError, OSError) as error:
        found.problem = f"{type(error).__name__}: {str(error).strip()}"
    return found


def groups_of(sizes: Mapping[str, int]) -> Iterator[tuple[str, ps.GroupCoordinator]]:
    """Yields (kind, group), such as ("tp", group), for this rank's existing groups, in the same order on all ranks."""
    groups = ps.get_parallel_groups()
    for name in ("world", *made_at_start(groups.layout, sizes)):
        group = ps.get_world_group() if name == "world" else groups.try_get(name)
        if group is not None and group.size > 1:
            yield name, group


def _all_have_time(deadline: float) -> bool:
    world = ps.get_world_group()
    left_s = torch.tensor([deadline - time.monotonic()], device=world.device)
    return bool(world.all_reduce(left_s, "min").item() > 2.0)


def _measure(kind: str, group: ps.GroupCoordinator, quick: bool) -> GroupTraffic:
    found = GroupTraffic(kind, list(group.ranks), "")
    sizes = QUICK_SIZES if quick else SIZES
    carriers: list[str] = []
    for numel in sizes:
        for what, works in _checks(group, numel):
            found.checks += 1
            if not works:
                found.wrong.append(f"{what} of {numel} elements")
        if group.route.communicators:
            request = Request("all_reduce", torch.float32, group.device.type, numel, "sum")
            carriers.append(group.route.pick(request).name)
    found.route = ", ".join(dict.fromkeys(carriers))
    small, large = (torch.ones(numel, device=group.device) for numel in (16, _QUICK_LARGE if quick else _LARGE))
    samples = _timed(group, small, 30 if quick else 100)
    found.latency_us = statistics.median(samples)
    found.latency_mad_us = statistics.median(abs(sample - found.latency_us) for sample in samples)
    slow_us = statistics.median(_timed(group, large, 3 if quick else 8))
    moved = large.numel() * 4 * 2 * (group.size - 1) / group.size
    found.bytes_per_s = moved / (slow_us * 1e-6)
    return found


def _timed(group: ps.GroupCoordinator, x: Tensor, repeats: int) -> list[float]:
    clock = Clock(group.device)
    return [clock.seconds(lambda: group.all_reduce(x)) * 1e6 for _ in range(repeats + 1)][1:]


def _checks(group: ps.GroupCoordinator, numel: int) -> Iterator[tuple[str, bool]]:
    rank, size, kind = group.rank_in_group, group.size, (torch.float32, group.device)
    numel -= numel % size
    for name in OPERATIONS:
        call, _ = ours_by_method(group, name)
        yield name, _same(call(given(numel, rank, *kind)), answer(name, numel, rank, size, *kind))
    yield "send and recv", _ring(group, given(numel, rank, *kind), given(numel, (rank - 1) % size, *kind))
    received = group.broadcast_object({"src": 0, "values": [numel, "é"]} if rank == 0 else None, 0)
    yield "broadcast_object", received == {"src": 0, "values": [numel, "é"]}


def _ring(group: ps.GroupCoordinator, mine: Tensor, expected: Tensor) -> bool:
    rank, size = group.rank_in_group, group.size
    # Odd ranks receive first, so that ranks can't deadlock.
    sends_first = rank % 2 == 0 and rank != size - 1
    if sends_first:
        group.send(mine)
    received = group.recv(mine.shape, mine.dtype)
    if not sends_first:
        group.send(mine)
    return _same(received, expected)


def _same(found: Tensor, expected: Tensor) -> bool:
    return bool(torch.equal(found.reshape(-1), expected.reshape(-1)))
