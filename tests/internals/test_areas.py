"""All-reduce over several simulated areas (NUMA nodes, caches)."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import parallel_state as ps
from device_communicators.base import cores
from device_communicators.base.cores import Area
from device_communicators.cpu import native
from tests.contract.attempts import environment, world
from tests.extent import LONG
from tests.helpers.slot_pages import touched_slots
from tests.internals.kernel_ranks import DTYPES, KernelRank, kernel_rank
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 120.0
NEVER = 1 << 62
OPS = range(6)
COUNTS = (1, 31, 1000, 4097, 65_537, 300_001)
PLACEMENTS = [(4, 2), (4, 1), *([(6, 2), (8, 4), (8, 2), (16, 8)] if LONG else [])]
try:
    LIBRARY = native.load()
except native.NativeUnavailableError as error:
    pytest.skip(f"no compiled library: {error}", allow_module_level=True)


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="areas-") as name:
        yield name


def _reduced(rank: KernelRank, area_ranks: int, from_bytes: int, x: Tensor, op: int, in_place: bool) -> Tensor:
    LIBRARY.ps_group_areas(rank.group, area_ranks, from_bytes)
    given = x.clone()
    out = given if in_place else torch.empty_like(x)
    assert rank.call("all_reduce", out, given, x.numel(), x.dtype, op) == 0
    assert in_place or torch.equal(given, x), "the input is as it was"
    return out


def _with_and_without(folder: str, area_ranks: int, seed: int) -> int:
    with kernel_rank(folder) as rank:
        draw, compared = random.Random(seed), 0
        for dtype in DTYPES:
            for op in OPS:
                for count in draw.sample(COUNTS, 3):
                    generator = torch.Generator().manual_seed(seed * 1000 + compared * 64 + rank.rank)
                    x = (torch.randn(count, generator=generator) * 8).to(dtype)
                    in_place = draw.random() < 0.5
                    flat = _reduced(rank, area_ranks, NEVER, x, op, in_place)
                    chained = _reduced(rank, area_ranks, 0, x, op, in_place)
                    assert torch.equal(chained, flat), f"{count} of {dtype}, op {op}, in place: {in_place}"
                    outs = torch.empty(rank.size * count, dtype=dtype)
                    assert rank.call("all_gather", outs, chained, 1, chained.nbytes) == 0
                    assert all(torch.equal(each, chained) for each in outs.chunk(rank.size)), "equal on all ranks"
                    compared += 1
        return compared


@pytest.mark.parametrize(("ranks", "area_ranks"), PLACEMENTS)
def test_the_bits_are_those_of_the_flat_way(pools: Pools, folder: str, ranks: int, area_ranks: int) -> None:
    found = pools(ranks).run(_with_and_without, folder, area_ranks, ranks + area_ranks, timeout_s=DEADLINE_S)
    assert found == [len(DTYPES) * len(OPS) * 3] * ranks


def _crossed(folder: str, area_ranks: int, dtype: torch.dtype, count: int) -> tuple[list[int], list[float]]:
    with kernel_rank(folder) as rank:
        x = torch.ones(count, dtype=dtype)
        found: list[int] = []
        shares: list[float] = []
        for from_bytes in (0, NEVER):
            before = LIBRARY.ps_group_crossed_bytes(rank.group)
            _reduced(rank, area_ranks, from_bytes, x, 0, in_place=True)
            found.append(LIBRARY.ps_group_crossed_bytes(rank.group) - before)
            shares = shares or touched_slots("/segment", rank.size)[0]
            rank.call("barrier")
        return found, shares


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("ranks", "area_ranks"), [(4, 2), *([(8, 4), (16, 8)] if LONG else [])])
def test_two_sockets(pools: Pools, folder: str, ranks: int, area_ranks: int, dtype: torch.dtype) -> None:
    """Counts bytes that cross between sockets, per element. By areas, the first socket's sum moves to the second (4
    bytes, also for 16-bit floats), and the result back. Without areas, each rank reads its slice of the other
    socket's tensors, then their slices of the result: 2 * ranks of a socket * the dtype's bytes."""
    count = 1 << 20
    found = pools(ranks).run(_crossed, folder, area_ranks, dtype, count, timeout_s=DEADLINE_S)
    chained, flat = (sum(crossed[way] for crossed, _ in found) for way in range(2))
    bound = (max(dtype.itemsize, 4) + dtype.itemsize) * count
    assert bound <= chained <= 1.05 * bound
    assert flat == pytest.approx(2 * (ranks - area_ranks) * dtype.itemsize * count, rel=0.01)
    for rank, (_, shares) in enumerate(found):  # on the other socket, a rank touches only its counterpart's slots
        far = [each for each in range(ranks) if each // area_ranks != rank // area_ranks]
        assert [each for each in far if shares[each] > 0.1] == [(rank + area_ranks) % ranks], shares


def _without(folder: str, absent: int) -> tuple[int, int]:
    with kernel_rank(folder, timeout_s=1.0) as rank:
        LIBRARY.ps_group_areas(rank.group, 2, 0)
        x = torch.ones(1000)
        assert rank.call("all_reduce", x, x, 1000, x.dtype, 0) == 0
        status = 1 if rank.rank == absent else rank.call("all_reduce", x, x, 1000, x.dtype, 0)
        return status, absent if rank.rank == absent else rank.failure()[0]


@pytest.mark.parametrize("absent", [0, 3])
def test_the_rank_that_does_not_come_is_named(pools: Pools, folder: str, absent: int) -> None:
    assert pools(4).run(_without, folder, absent, timeout_s=DEADLINE_S) == [(1, absent)] * 4


def _on_imagined_nodes(order: str, by: str) -> tuple[int, int, bool]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with pytest.MonkeyPatch.context() as patch:
        node = rank // 2 if order == "side by side" else rank % 2
        patch.setattr(cores, "area_of", lambda numbers: Area(node, node))
        with environment(PARALLEL_STATE_AREAS=by), world(size):
            group = ps.get_tp_group()
            memory = group.context.host_memory
            assert memory is not None and memory.collectives is not None
            number = memory.collectives.number
            before, x = LIBRARY.ps_group_crossed_bytes(number), torch.full((1 << 19,), float(rank))
            right = bool((group.all_reduce(x) == sum(range(size))).all())
            small = bool((group.all_reduce(x[:1000]) == sum(range(size))).all())
            return memory.area_ranks, LIBRARY.ps_group_crossed_bytes(number) - before, right and small


def test_a_group_goes_by_the_nodes_that_its_ranks_name(pools: Pools) -> None:
    """The op uses areas only if each node's ranks are contiguous."""
    found = pools(4).run(_on_imagined_nodes, "side by side", "nodes", timeout_s=DEADLINE_S)
    assert [(area_ranks, right) for area_ranks, _, right in found] == [(2, True)] * 4
    small = 2 * 1000 * 4 * 4
    assert sum(crossed for _, crossed, _ in found) == 2 * (1 << 19) * 4 + small
    for order, by in (("in turns", "nodes"), ("side by side", "off")):
        assert pools(4).run(_on_imagined_nodes, order, by, timeout_s=DEADLINE_S) == [(0, 0, True)] * 4
