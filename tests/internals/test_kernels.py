from __future__ import annotations

import ctypes
import hashlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from device_communicators.cpu import native
from tests.internals.kernel_ranks import DTYPES, KernelRank, kernel_rank
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 120.0
_TIMED_OUT, _PEER_DIED, _MISMATCH = 1, 2, 3

try:
    native.load()
except native.NativeUnavailableError as error:
    pytest.skip(f"no compiled library: {error}", allow_module_level=True)


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kernels-") as name:
        yield name


WAYS = ("in place", "symmetric", "private", "private input", "private input, in place")
COUNTS = (1, 7, 100, 2048, 4097, 16384, 65537, 200_003)


def _place(draw: random.Random) -> int:
    return draw.randrange(0, 1 << 20, 16)


def _all_reduce(rank: KernelRank, seed: int, count: int, dtype: torch.dtype, own: random.Random, way: str) -> Tensor:
    inputs = rank.inputs(seed, count, dtype)
    given = torch.empty(count, dtype=dtype) if "private input" in way else rank.at(_place(own), count, dtype)
    given.copy_(inputs[rank.rank])
    out = {
        "in place": given,
        "private input, in place": given,
        "symmetric": rank.at((4 << 20) + _place(own), count, dtype),
    }.get(way)
    if out is None:
        out = torch.empty(count, dtype=dtype)
    assert rank.call("all_reduce", out, given, count, dtype, 0) == 0
    assert torch.equal(out, torch.stack(inputs).sum(0).to(dtype))
    return given


def _all_gather(rank: KernelRank, seed: int, count: int, dtype: torch.dtype, own: random.Random, way: str) -> Tensor:
    count = count // rank.size + 1
    inputs = rank.inputs(seed, count, dtype)
    given = inputs[rank.rank] if way.startswith("private") else rank.at(_place(own), count, dtype)
    given.copy_(inputs[rank.rank])
    out = torch.empty(count * rank.size, dtype=dtype)
    if way != "symmetric":
        out = rank.at((4 << 20) + _place(own), count * rank.size, dtype)
    assert rank.call("all_gather", out, given, 1, given.nbytes) == 0
    assert torch.equal(out, torch.cat(inputs))
    return given


def _reduce_scatter(
    rank: KernelRank, seed: int, count: int, dtype: torch.dtype, own: random.Random, way: str
) -> Tensor:
    each = count // rank.size + 1
    inputs = rank.inputs(seed, each * rank.size, dtype)
    given = torch.empty(each * rank.size, dtype=dtype)
    if not way.startswith("private"):
        given = rank.at(_place(own), each * rank.size, dtype)
    given.copy_(inputs[rank.rank])
    out = torch.empty(each, dtype=dtype)
    assert rank.call("reduce_scatter", out, given, 1, each, dtype, 0) == 0
    assert torch.equal(out, torch.stack(inputs).sum(0).to(dtype).chunk(rank.size)[rank.rank])
    return given


def _broadcast(rank: KernelRank, seed: int, count: int, dtype: torch.dtype, own: random.Random, _: str) -> Tensor:
    src = seed % rank.size
    inputs = rank.inputs(seed, count, dtype)
    data = rank.at(_place(own), count, dtype) if own.random() < 0.7 else torch.empty_like(inputs[0])
    data.copy_(inputs[rank.rank])
    assert rank.call("broadcast", data, data.nbytes, src) == 0
    assert torch.equal(data, inputs[src])
    return data


def _mixed(folder: str, seed: int, calls: int) -> None:
    with kernel_rank(folder) as rank:
        draw, own = random.Random(seed), random.Random(seed * 64 + rank.rank)
        for number in range(calls):
            body = draw.choice((_all_reduce, _all_reduce, _all_gather, _reduce_scatter, _broadcast))
            count, dtype = draw.choice(COUNTS), draw.choice(list(DTYPES))
            which = draw if draw.random() < 0.5 else own
            way = which.choice(WAYS)
            if own.random() < 0.1:
                time.sleep(own.random() * 0.003)
            try:
                body(rank, seed * 1000 + number, count, dtype, own, way).fill_(63)
            except AssertionError as error:
                raise AssertionError(f"call {number}: {body.__name__} of {count} {dtype}, {way}") from error


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_symmetric_tensors_anywhere_in_the_arenas(pools: Pools, folder: str, ranks: int) -> None:
    pools(ranks).run(_mixed, folder, ranks, 100, timeout_s=DEADLINE_S)


def _disagree(folder: str, how: str) -> tuple[int, list[int]]:
    with kernel_rank(folder, timeout_s=5.0) as rank:
        odd = rank.rank == 1
        x = rank.at(0, 100_000, torch.float32)
        private = torch.empty(100_000)
        if how == "size":
            status = rank.call("all_reduce", x, x, 50_000 if odd else 100_000, torch.float32, 0)
        elif how == "operation":
            other = ("all_gather", private, x, 1, 1000) if odd else ("barrier",)
            status = rank.call(*other)
        else:
            status = 0 if odd else rank.call("all_reduce", x, x, 100_000, torch.float32, 0)
        return status, rank.failure()


@pytest.mark.parametrize("how", ["size", "operation"])
def test_ranks_that_disagree_are_told(pools: Pools, folder: str, how: str) -> None:
    found = pools(2).run(_disagree, folder, how, timeout_s=DEADLINE_S)
    assert [status for status, _ in found] == [_MISMATCH, _MISMATCH]


def test_a_rank_that_does_not_come(pools: Pools, folder: str) -> None:
    found = pools(4).run(_disagree, folder, "absent", timeout_s=DEADLINE_S)
    assert [status for status, _ in found] == [_TIMED_OUT, 0, _TIMED_OUT, _TIMED_OUT]
    assert found[0][1][0] == 1


def _norm(folder: str, rows: int, hidden: int, dtype: torch.dtype, way: str) -> str:
    with kernel_rank(folder) as rank:
        count = rows * hidden
        generator = torch.Generator().manual_seed(rows * hidden)
        inputs = [torch.randn(count, generator=generator).to(dtype) for _ in range(rank.size)]
        residual, weight = (torch.randn(size, generator=generator).to(dtype) for size in (count, hidden))
        x = inputs[rank.rank] if way == "slots" else rank.at(32 * rank.rank, count, dtype)
        x.copy_(inputs[rank.rank])
        out = torch.empty(count, dtype=dtype)
        if way.startswith("both"):
            out = x if way == "both, in place" else rank.at((4 << 20) + 64 * rank.rank, count, dtype)
        expected = inputs[0].float()
        for each in inputs[1:]:
            expected = expected + each.float()
        expected = (expected.to(dtype).float() + residual.float()).to(dtype)
        wide = expected.float().view(rows, hidden)
        normed = (wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + 1e-5) * weight.float()).to(dtype).view(-1)
        status = rank.call("all_reduce_add_rms_norm", out, residual, x, residual, weight, rows, hidden, 1e-5, dtype)
        assert status == 0
        assert torch.equal(residual, expected)
        # The squares are summed in another order, so the last bit may differ.
        torch.testing.assert_close(out, normed, rtol=torch.finfo(dtype).eps * 2, atol=1e-6)
        return hashlib.sha256(bytes(out.view(torch.uint8).tolist())).hexdigest()


@pytest.mark.parametrize("way", ["slots", "input", "both", "both, in place"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (3, 100), (4, 1024), (300, 513)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_reduce_add_rms_norm(
    pools: Pools, folder: str, ranks: int, rows: int, hidden: int, dtype: torch.dtype, way: str
) -> None:
    assert len(set(pools(ranks).run(_norm, folder, rows, hidden, dtype, way, timeout_s=DEADLINE_S))) == 1


def _idle(folder: str) -> float:
    with kernel_rank(folder, spin_us=150, yields=0) as rank:
        if rank.rank == 0:
            time.sleep(1.3)
            assert rank.call("barrier") == 0
            return 0.0
        before, started = time.process_time(), time.monotonic()
        assert rank.call("barrier") == 0
        used, waited = time.process_time() - before, time.monotonic() - started
        assert waited > 1.0
        return max(0.0, used - 0.1) / (waited - 0.1)


def test_a_waiting_rank_sleeps(pools: Pools, folder: str) -> None:
    assert max(pools(2).run(_idle, folder, timeout_s=DEADLINE_S)) < 0.02


def _pairs(folder: str, calls: int) -> int:
    """Returns how many waits were slow; a lost wake-up would end at the deadline."""
    with kernel_rank(folder, timeout_s=10.0, spin_us=0, yields=0) as rank:
        own = random.Random(rank.rank)
        slow = 0
        for _ in range(calls):
            for _ in range(own.randrange(200)):
                pass
            started = time.monotonic()
            assert rank.call("barrier") == 0
            slow += time.monotonic() - started > 0.015
        return slow


def test_no_wake_up_is_lost(pools: Pools, folder: str) -> None:
    assert sum(pools(2).run(_pairs, folder, 5_000, timeout_s=DEADLINE_S)) < 20


SPECIAL = (
    0x0000,
    0x8000,
    0x0001,
    0x007F,
    0x0080,
    0x3F80,
    0xBF80,
    0x7F7F,
    0x7F80,
    0xFF80,
    0x7FC1,
    0x0400,
    0x7BFF,
    0x7C00,
)


def _drawn_bits(dtype: torch.dtype, sources: int) -> list[Tensor]:
    bits = [torch.arange(65536 + 13).roll(each * 7919).to(torch.int64) for each in range(sources)]
    bits[0][: len(SPECIAL) * 4] = torch.tensor(SPECIAL * 4)
    if dtype == torch.float32:
        return [(each * 65537 % (1 << 32)).to(torch.uint32).view(torch.float32) for each in bits]
    return [each.to(torch.uint16).view(dtype) for each in bits]


def _by_instruction_set(inputs: list[Tensor], op: int) -> dict[str, Tensor]:
    library, results = native.load(), {}
    for name in ("plain", "avx2", "avx512"):
        outs = [torch.empty_like(inputs[0]) for _ in range(2)]
        status = library.ps_reduce(
            name.encode(), (ctypes.c_void_p * 2)(*(out.data_ptr() for out in outs)), 2,
            (ctypes.c_void_p * len(inputs))(*(each.data_ptr() for each in inputs)), len(inputs), inputs[0].numel(),
            DTYPES[inputs[0].dtype], op,
        )  # fmt: skip
        if status == 0:
            assert torch.equal(outs[0].view(torch.uint8), outs[1].view(torch.uint8))
            results[name] = outs[0]
    assert "plain" in results
    return results


REDUCED = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
@pytest.mark.parametrize("sources", [2, 3, 4])
def test_all_instruction_sets_give_the_same_bits(dtype: torch.dtype, sources: int) -> None:
    inputs = _drawn_bits(dtype, sources)
    results = _by_instruction_set(inputs, 0)
    expected = inputs[0].float()
    for each in inputs[1:]:
        expected = expected + each.float()
    for name, result in results.items():
        torch.testing.assert_close(result, expected.to(dtype), rtol=0, atol=0, equal_nan=True, msg=name)
        assert torch.equal(result.view(torch.uint8), results["plain"].view(torch.uint8)), name


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
@pytest.mark.parametrize("sources", [1, 2, 4, 8, 16])
def test_all_instruction_sets_add_as_a_tree(dtype: torch.dtype, sources: int) -> None:
    inputs = _drawn_bits(dtype, sources)
    level = [each.float() for each in inputs]
    while len(level) > 1:
        level = [one + other for one, other in zip(level[::2], level[1::2], strict=True)]
    expected = level[0].to(dtype)
    for name, result in _by_instruction_set(inputs, 5).items():
        assert torch.equal(result.isnan(), expected.isnan()), name
        numbers = [each.masked_fill(expected.isnan(), 0).view(torch.uint8) for each in (result, expected)]
        assert torch.equal(*numbers), name
