"""Which ranks share this host's memory: by a shared segment that they find or don't find, not by host names."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from typing import Any

import torch
import torch.distributed as dist

from device_communicators.errors import InvalidArgumentError
from parallel_state.coordinator import GroupCoordinator

_DIRECTORY = "/dev/shm"
_NAME_BYTES = 24
_SECRET_BYTES = 32


def in_the_same_node_as(pg: Any, source_rank: int = 0) -> list[bool]:
    """For each rank of `pg`, a GroupCoordinator or a gloo ProcessGroup: does it share memory with `source_rank`?

    Every rank of the group calls it. The source writes a secret into a new segment and tells its name; a rank that
    reads the secret back is on the same host. Where the source can't make a segment, only itself counts.
    Raises InvalidArgumentError for a source that is no rank of the group.
    """
    group = pg.cpu_group if isinstance(pg, GroupCoordinator) else pg
    rank, size = group.rank(), group.size()
    if not 0 <= source_rank < size:
        raise InvalidArgumentError(f"source_rank must be a rank in the group, 0 … {size - 1}, but is {source_rank}")
    path = None
    told = torch.zeros(_NAME_BYTES + _SECRET_BYTES, dtype=torch.uint8)
    try:
        if rank == source_rank:
            name, secret = secrets.token_hex(_NAME_BYTES // 2), secrets.token_bytes(_SECRET_BYTES)
            path = _write_segment(name, secret)
            if path is not None:
                told = torch.tensor(list(name.encode() + secret), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = source_rank
        group.broadcast([told], options).wait()
        content = bytes(told.tolist())
        here = rank == source_rank or _read_segment(content[:_NAME_BYTES]) == content[_NAME_BYTES:]
        flags = torch.zeros(size, dtype=torch.int32)
        flags[rank] = int(here)
        group.allreduce([flags], dist.ReduceOp.SUM).wait()  # ends after every rank has looked
        return [flag == 1 for flag in flags.tolist()]
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)


def nodes_of(world: GroupCoordinator) -> list[list[int]]:
    """The ranks of `world` by host, in the order of the hosts' first ranks. Every rank calls it."""
    nodes: list[list[int]] = []
    waiting = list(range(world.world_size))
    while waiting:
        same = [True] if world.world_size == 1 else in_the_same_node_as(world, waiting[0])
        nodes.append([rank for rank in waiting if same[rank]])
        waiting = [rank for rank in waiting if not same[rank]]
    return nodes


def _write_segment(name: str, secret: bytes) -> str | None:
    path = os.path.join(_DIRECTORY, f"parallel_state-{name}")
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        if os.write(descriptor, secret) == len(secret):
            return path
    except OSError:
        pass
    finally:
        os.close(descriptor)
    with contextlib.suppress(OSError):
        os.unlink(path)
    return None


def _read_segment(name: bytes) -> bytes:
    """The segment's content; empty where there is none, or not one of this user's."""
    if not name.isalnum():
        return b""
    try:
        descriptor = os.open(
            os.path.join(_DIRECTORY, f"parallel_state-{name.decode()}"), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        )
    except (OSError, UnicodeDecodeError):
        return b""
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            return b""
        return os.read(descriptor, _SECRET_BYTES)
    finally:
        os.close(descriptor)
