"""Finds the ranks that share this host's memory: by a shared segment that they see or don't, not by host names."""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import Any

import torch
import torch.distributed as dist

from device_communicators.base.errors import InvalidArgumentError
from device_communicators.base.host_calls import OUTSIDE, host_call
from device_communicators.cpu.segment import NAME_BYTES, Segment, SegmentError
from parallel_state.groups.coordinator import GroupCoordinator

_SECRET_BYTES = 32


@host_call(OUTSIDE)
def in_the_same_node_as(pg: Any, source_rank: int = 0) -> list[bool]:
    """Returns, by rank of `pg`, a GroupCoordinator or a gloo ProcessGroup, True if it shares the source's memory.

    Every rank of the group calls it. The source writes a secret into a new segment and tells its name; a rank that
    reads the secret back is on the same host. Where the source can't make a segment, only itself counts.
    Raises InvalidArgumentError for a source that is no rank of the group, and for a ProcessGroup of NCCL's.
    """
    group = pg.cpu_group if isinstance(pg, GroupCoordinator) else pg
    if "nccl" in (backend := str(dist.get_backend(group))):
        raise InvalidArgumentError(
            f"in_the_same_node_as needs a group that carries CPU tensors, but the backend of pg is {backend!r}: "
            "pass the GroupCoordinator, or its cpu_group"
        )
    rank, size = group.rank(), group.size()
    if not 0 <= source_rank < size:
        raise InvalidArgumentError(f"source_rank must be a rank in the group, 0 … {size - 1}, but is {source_rank}")
    announced = torch.zeros(NAME_BYTES + _SECRET_BYTES, dtype=torch.uint8, device="cpu")
    with contextlib.ExitStack() as stack:
        if rank == source_rank:
            secret = secrets.token_bytes(_SECRET_BYTES)
            segment = _make_segment(secret, stack)
            if segment is not None:
                announced = torch.tensor(list(segment.name.encode() + secret), dtype=torch.uint8, device="cpu")
        options = dist.BroadcastOptions()
        options.rootRank = source_rank
        group.broadcast([announced], options).wait()
        content = bytes(announced.tolist())
        shares_memory = rank == source_rank or _read_segment(content[:NAME_BYTES]) == content[NAME_BYTES:]
        flags = torch.zeros(size, dtype=torch.int32, device="cpu")
        flags[rank] = int(shares_memory)
        group.allreduce([flags], dist.ReduceOp.SUM).wait()  # ends after every rank has looked
        return [flag == 1 for flag in flags.tolist()]


def nodes_of(world: GroupCoordinator) -> list[list[int]]:
    """Returns the ranks of `world` by host, in the order of the hosts' first ranks. Every rank calls it."""
    nodes: list[list[int]] = []
    waiting = list(range(world.world_size))
    while waiting:
        same = [True] if world.world_size == 1 else in_the_same_node_as(world, waiting[0])
        nodes.append([rank for rank in waiting if same[rank]])
        waiting = [rank for rank in waiting if not same[rank]]
    return nodes


def _make_segment(secret: bytes, stack: contextlib.ExitStack) -> Segment | None:
    """Makes a segment with this content, which goes with the stack; returns None if there can be none."""
    try:
        segment = Segment.make()
    except SegmentError:
        return None
    stack.callback(segment.close)
    stack.callback(segment.unlink)
    try:
        return segment if os.write(segment.descriptor, secret) == len(secret) else None
    except OSError:
        return None


def _read_segment(name: bytes) -> bytes:
    """Returns the segment's content; empty if there is none, or not one of this user's."""
    try:
        segment = Segment.open(name.decode(errors="replace"))
    except SegmentError:
        return b""
    if segment is None:
        return b""
    try:
        return os.pread(segment.descriptor, _SECRET_BYTES, 0)
    finally:
        segment.close()
