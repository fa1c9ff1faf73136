"""Finds the ranks that share memory, by opening the same shared-memory segment in all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from device_communicators.base.errors import InvalidArgumentError
from device_communicators.base.host_calls import OUTSIDE, host_call
from device_communicators.cpu.segment import NAME_BYTES, Segment, SegmentError
from parallel_state.groups.coordinator import GroupCoordinator


@host_call(OUTSIDE)
def in_the_same_node_as(pg: Any, source_rank: int = 0) -> list[bool]:
    """Returns, for each rank of `pg`, True if it shares memory with group rank `source_rank`.

    `pg`: a GroupCoordinator, or a ProcessGroup for CPU tensors. Each of its ranks must call this function. If
    `source_rank` can't create a segment, the result is True for that rank only. Raises InvalidArgumentError for a wrong
    `source_rank`, and for an NCCL ProcessGroup.
    """
    group = pg.cpu_group if isinstance(pg, GroupCoordinator) else pg
    if "nccl" in (backend := str(dist.get_backend(group))):
        raise InvalidArgumentError(
            f"in_the_same_node_as needs a group for CPU tensors, but the backend of pg is {backend!r}: "
            "pass the GroupCoordinator, or its cpu_group"
        )
    rank, size = group.rank(), group.size()
    if not 0 <= source_rank < size:
        raise InvalidArgumentError(f"source_rank must be a rank in the group, 0 … {size - 1}, but is {source_rank}")

    def broadcast(name: str) -> str:
        sent = torch.tensor(list(name.encode().ljust(NAME_BYTES, b"\0")), dtype=torch.uint8, device="cpu")
        options = dist.BroadcastOptions()
        options.rootRank = source_rank
        group.broadcast([sent], options).wait()
        return bytes(sent.tolist()).decode(errors="replace")

    def gather(found: bool) -> list[bool]:
        flags = torch.zeros(size, dtype=torch.int32, device="cpu")
        flags[rank] = int(found)
        group.allreduce([flags], dist.ReduceOp.SUM).wait()
        return [flag == 1 for flag in flags.tolist()]

    return find_sharers(rank == source_rank, broadcast, gather)


def find_sharers(is_source: bool, broadcast: Callable[[str], str], gather: Callable[[bool], list[bool]]) -> list[bool]:
    made = None
    if is_source:
        with contextlib.suppress(SegmentError):
            made = Segment.make()
    opened = None
    try:
        name = broadcast("" if made is None else made.name)
        with contextlib.suppress(SegmentError):
            opened = None if is_source else Segment.open(name)
        return gather(is_source or opened is not None)  # returns after every rank has tried
    finally:
        if made is not None:
            made.unlink()
        for segment in (made, opened):
            if segment is not None:
                segment.close()


def nodes_of(pg: Any, find: Callable[[Any, int], list[bool]] = in_the_same_node_as) -> list[list[int]]:
    """Returns the ranks of each node. Every rank of `pg` must call this. `find`: works as in_the_same_node_as."""
    size = pg.size() if isinstance(pg, dist.ProcessGroup) else pg.world_size
    nodes: list[list[int]] = []
    waiting = list(range(size))
    while waiting:
        same = [True] if size == 1 else find(pg, waiting[0])
        nodes.append([rank for rank in waiting if same[rank]])
        waiting = [rank for rank in waiting if not same[rank]]
    return nodes
