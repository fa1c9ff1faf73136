"""Objects over a group: each arrives as what it was, and one that can't travel raises on every rank and stops nobody."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parallel_state as ps
from device_communicators import settings
from parallel_state import codec, wire
from parallel_state.coordinator import GroupCoordinator, create_group
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
WORLD_SIZES = pytest.mark.parametrize("world_size", [2, 3, 4])
DEADLINE_S = 30.0
AT_ONCE_S = 2.0  # what must not wait for a peer; the machine may be busy
FRAME_TAG = 1


class Custom:
    """Of a type that nobody registered; pickle knows it by name."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


LOADED: list[str] = []


def note_load(text: str) -> str:
    LOADED.append(text)
    return text


class Bomb:
    """Tells when it is unpickled."""

    def __reduce__(self) -> Any:
        return note_load, ("loaded",)


def same(x: object, y: object) -> bool:
    """Equal in value and in type at every depth; tensors also in dtype and shape."""
    if type(x) is not type(y):
        return False
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.dtype == y.dtype and x.device == y.device and torch.equal(x, y)
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(map(same, x, y))  # type: ignore[arg-type]
    if isinstance(x, dict):
        return list(x) == list(y) and all(same(x[key], y[key]) for key in x)  # type: ignore[call-overload, index]
    return x == y


def tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def tensor_zoo(seed: int) -> dict[str, Any]:
    """Tensors of every awkward kind, the same ones for the same seed."""
    base = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    return {
        "nested": {"deep": [{"tensor": base}, (base[0], "text")]},
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "empty last": torch.zeros(2, 0, dtype=torch.int64),
        "transposed": base.t(),
        "strided": base[::2, ::3],
        "expanded": base[:1].expand(5, 4),
        "offset": base[2:],
        "bfloat16": base.bfloat16(),
        "bool": base > 0,
        "float8": base.to(torch.float8_e4m3fn).view(torch.uint8),
        "0-d": torch.tensor(seed),
        "0-d bool": torch.tensor(True),
        "conjugate": torch.view_as_complex(base.view(6, 2, 2)).conj(),
        "grad": base.clone().requires_grad_(),
        "with history": base.clone().requires_grad_() * 2,
        "parameter": nn.Parameter(base[1]),
        "large": torch.arange(70_000, dtype=torch.int32) + seed,
    }


def arrived_zoo(seed: int) -> dict[str, Any]:
    """The zoo as a receiver has it: without gradients, and without Parameter."""
    zoo = tensor_zoo(seed)
    for key in ("grad", "with history", "parameter"):
        zoo[key] = zoo[key].detach()
    return zoo


def plain_zoo(seed: int) -> dict[Any, Any]:
    return {
        "numbers": [None, True, seed, -(2**70), 1.5, 2j, float("inf")],
        "texts": ["é", b"\x00\xff", bytearray(b"ab"), ""],
        "containers": (1, [2, (3,)], {4}, frozenset({5}), OrderedDict(b=1, a=2), [], {}, ()),
        7: {None: 1, (1, 2): 2},
        "torch": [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])],
    }


@contextlib.contextmanager
def own_group(**kwargs: Any) -> Iterator[GroupCoordinator]:
    """A group of the whole world over process groups of its own, to be spoilt; every rank enters it."""
    world = ps.get_world_group()
    assert world.pool is not None
    group = create_group(
        world.pool,
        [world.ranks],
        "own",
        device=world.device,
        local_rank=world.local_rank,
        backend="gloo",
        timeout_s=DEADLINE_S - 5,
        **kwargs,
    )
    assert group.cpu_group is not world.cpu_group
    try:
        yield group
    finally:
        world.barrier()  # nobody leaves while another still uses it
        group.destroy()


@contextlib.contextmanager
def metadata_limit(limit_bytes: int) -> Iterator[None]:
    os.environ[settings.MAX_METADATA_BYTES.name] = str(limit_bytes)
    try:
        yield
    finally:
        del os.environ[settings.MAX_METADATA_BYTES.name]


def check_usable(group: GroupCoordinator) -> None:
    """The group carries every kind of call, and nothing is left over from an earlier one."""
    size, rank = group.world_size, group.rank_in_group
    assert group.all_gather_object(("here", rank)) == [("here", other) for other in range(size)]
    assert group.all_reduce(torch.ones(3)).tolist() == [size] * 3
    incoming = group.irecv_object()
    group.send_object([rank, torch.full((4,), rank)])
    assert same(incoming.wait(), [(rank - 1) % size, torch.full((4,), (rank - 1) % size)])
    assert group.broadcast_object(rank, size - 1) == size - 1


# Broadcast.


def broadcast_every_source() -> None:
    group = ps.get_world_group()
    for src in range(group.world_size):
        is_src = group.rank_in_group == src
        for seed, (make, arrived) in enumerate([(tensor_zoo, arrived_zoo), (plain_zoo, plain_zoo)]):
            mine = make(10 * src + seed) if is_src else "what the others pass is ignored"
            got = group.broadcast_object(mine, src)
            if is_src:
                assert got is mine
            else:
                assert same(got, arrived(10 * src + seed))
                for tensor in tensors_in(got):
                    assert tensor.is_contiguous()
                    assert not tensor.requires_grad


@WORLD_SIZES
def test_broadcast_object_from_every_source(pools: Pools, world_size: int) -> None:
    pools(world_size).run(broadcast_every_source, tp=1, timeout_s=DEADLINE_S)


def broadcast_sizes() -> set[int]:
    """Broadcasts over the frame's boundary, byte by byte; returns how many transfers the messages took."""
    group = ps.get_world_group()
    header_bytes = wire.FRAME_BYTES - len(codec.encode("x" * 4000).metadata) + 4000 - 32
    flags = [torch.tensor(i) for i in range(5)]  # one byte each, at the end of the body: some on either side
    transfers = set()
    for src in range(group.world_size):
        for size in [*range(header_bytes - 3, header_bytes + 4), 1 << 20]:
            before = group.traffic()["ibroadcast_"].calls if "ibroadcast_" in group.traffic() else 0
            assert group.broadcast_object("x" * size, src) == "x" * size
            transfers.add(group.traffic()["ibroadcast_"].calls - before)
        for size in range(header_bytes - 250, header_bytes + 10, 3):
            value = ["y" * size, *flags]
            assert same(group.broadcast_object(value if group.rank_in_group == src else None, src), value)
        bulk = os.urandom(1 << 20) if group.rank_in_group == src else None
        assert len(group.broadcast_object(bulk, src)) == 1 << 20
        assert group.all_gather_object(group.broadcast_object(bulk, src)) == [group.broadcast_object(bulk, src)] * (
            group.world_size
        )
    return transfers


@WORLD_SIZES
def test_broadcast_object_around_the_frame_size(pools: Pools, world_size: int) -> None:
    results = pools(world_size).run(broadcast_sizes, tp=1, timeout_s=DEADLINE_S)
    assert results == [{1, 2}] * world_size, "the sizes must lie on both sides of the frame's boundary"
