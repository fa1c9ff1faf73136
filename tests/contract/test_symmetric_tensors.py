from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import parallel_state as ps
from device_communicators.base.errors import InvalidArgumentError
from tests.contract.attempts import environment, world
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 120.0
SIZES = (1, 3, 1000, 40_000, 200_000, 1_000_003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32)


def _filled(group: ps.GroupCoordinator, size: list[int], dtype: torch.dtype, seed: int) -> tuple[Tensor, list[Tensor]]:
    every = [
        (torch.arange(torch.Size(size).numel()) * (seed + rank) % 23).to(dtype).view(size) for rank in range(group.size)
    ]
    mine = group.empty(size, dtype)
    mine.copy_(every[group.rank_in_group])
    return mine, every


def _mapped(x: Tensor) -> bool:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            span, *_, name = line.split()
            start, end = (int(each, 16) for each in span.split("-"))
            if start <= x.data_ptr() < end:
                return "parallel_state-" in name or "deleted" in name
    return False


def _collectives() -> int:
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 0
    cases = 0
    with world(int(os.environ["WORLD_SIZE"])):
        group = ps.get_tp_group()
        size = group.world_size
        for count in SIZES:
            for dtype in DTYPES:
                rows = count // size * size
                mine, every = _filled(group, [count], dtype, count)
                total = torch.stack([each.double() for each in every]).sum(0)
                for _ in range(2):
                    assert torch.equal(group.all_reduce(mine).double(), total), (count, dtype)
                assert torch.equal(mine, every[group.rank_in_group]), "the input must stay unchanged"
                assert torch.equal(group.all_gather(mine, 0), torch.cat(every))
                if rows:
                    part = rows // size
                    scattered = group.reduce_scatter(mine[:rows], 0)
                    start = group.rank_in_group * part
                    assert torch.equal(scattered.double(), total[start : start + part])
                assert torch.equal(group.broadcast(mine, size - 1), every[size - 1])
                group.all_reduce_(mine)
                assert torch.equal(mine.double(), total), (count, dtype)
                group.broadcast_(mine, 0)
                cases += 1
    return cases


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_collectives_of_symmetric_tensors(pools: Pools, ranks: int) -> None:
    assert pools(ranks).run(_collectives, timeout_s=DEADLINE_S) == [len(SIZES) * len(DTYPES)] * ranks


def _memory() -> dict[str, Any]:
    facts: dict[str, Any] = {}
    with world(2):
        group = ps.get_tp_group()
        x = group.empty([4, 5])
        facts["mapped"] = _mapped(x), _mapped(torch.empty(4, 5))
        facts["result"] = _mapped(group.all_reduce(torch.ones(100_000))), _mapped(group.all_reduce(torch.ones(10)))
        address = x.data_ptr()
        view = x[1:]
        del x
        facts["kept"] = group.empty([4, 5]).data_ptr() != address
        del view
        gc.collect()
        facts["again"] = group.empty([4, 5]).data_ptr() == address
        facts["shape"] = tuple(group.empty([0, 3]).shape), group.empty([2], torch.int8).dtype
        if group.rank_in_group == 0:
            facts["alone"] = _mapped(group.empty([1000, 1000]))
        group.barrier()
        outlives = group.empty([3])
        outlives.fill_(7)
    facts["outlives"] = outlives.sum().item()
    return facts


def test_memory_of_symmetric_tensors(pools: Pools) -> None:
    for rank, facts in enumerate(pools(2).run(_memory, timeout_s=DEADLINE_S)):
        assert facts.pop("alone", None) == (True if rank == 0 else None)
        assert facts == {
            "mapped": (True, False),
            "result": (True, False),
            "kept": True,
            "again": True,
            "shape": ((0, 3), torch.int8),
            "outlives": 21.0,
        }


def _sizes_that_vary() -> tuple[int, int]:
    with world(2):
        group = ps.get_tp_group()
        group.barrier()
        before = os.statvfs("/dev/shm").f_bfree
        for size in range(1, 120, 3):  # 790 MB per rank
            group.empty((size << 18,), torch.int8).fill_(1)
            group.empty((size * 70_000,), torch.int8).fill_(1)
        group.barrier()
        used = (before - os.statvfs("/dev/shm").f_bfree) * os.statvfs("/dev/shm").f_frsize
        group.barrier()
        return used >> 20, group.empty((1 << 20,), torch.int8).fill_(3).sum().item()


def test_freed_memory_is_bounded(pools: Pools) -> None:
    for used_mib, total in pools(2).run(_sizes_that_vary, timeout_s=DEADLINE_S):
        assert used_mib <= 2 * 256 + 64, "more freed memory than two ranks may keep"
        assert total == 3 << 20


def _kept_beyond_the_group() -> tuple[int, float]:
    with world(2):
        group = ps.get_tp_group()
        kept = group.empty((40_000,)).fill_(7)
        group.empty((100 << 20,), torch.uint8).fill_(1)
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("RssShmem:")[2].split()[0]) >> 10, float(kept.min())


def test_a_tensor_that_outlives_its_group_keeps_its_own_memory_alone(pools: Pools) -> None:
    for held_mib, least in pools(2).run(_kept_beyond_the_group, timeout_s=DEADLINE_S):
        assert held_mib < 50
        assert least == 7


def _freed_in_a_forked_child() -> float:
    with world(2):
        group = ps.get_tp_group()
        held = [group.empty((300 << 20,), torch.uint8).fill_(1)] if group.rank_in_group == 0 else []
        total = 0.0
        if held:
            child = os.fork()
            if child == 0:
                held.clear()
                os._exit(0)
            os.waitpid(child, 0)
            total = float(held[0][::4096].min())
        group.barrier()
        return total


def test_a_forked_child_frees_nothing_of_its_parent(pools: Pools) -> None:
    assert pools(2).run(_freed_in_a_forked_child, timeout_s=DEADLINE_S) == [1.0, 0.0]


def _used_up() -> tuple[bool, bool, float]:
    with environment(PARALLEL_STATE_SYMMETRIC_BYTES=str(1 << 20)), world(2):
        group = ps.get_tp_group()
        first, second = group.empty([200_000]), group.empty([200_000])
        second.fill_(1)
        return _mapped(first), _mapped(second), group.all_reduce(second).sum().item()


def test_ordinary_tensors_where_the_memory_is_used_up(pools: Pools) -> None:
    assert pools(2).run(_used_up, timeout_s=DEADLINE_S) == [(True, False, 400_000.0)] * 2


def _off() -> tuple[bool, bool, float]:
    with environment(PARALLEL_STATE_SYMMETRIC_BYTES="0"), world(2):
        group = ps.get_tp_group()
        x = group.empty([200_000])
        x.fill_(1)
        return _mapped(x), "shared segment" in group.explain(), group.all_reduce(x).sum().item()


def test_off(pools: Pools) -> None:
    assert pools(2).run(_off, timeout_s=DEADLINE_S) == [(False, True, 400_000.0)] * 2


def test_of_one_rank_and_wrong_arguments() -> None:
    group = ps.simulated_group([0, 1], 0)
    assert group.empty([2, 3]).shape == (2, 3)
    assert ps.simulated_group([0], 0).empty([2]).dtype == torch.get_default_dtype()
    with pytest.raises(InvalidArgumentError, match="size"):
        group.empty([-1])
    with pytest.raises(InvalidArgumentError, match="dtype"):
        group.empty([1], "float")  # type: ignore[arg-type]


NORM_SHAPES = ((1, 64), (3, 7, 128), (33, 1000), (256, 1024))


def _reference(total: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y = total + residual
    wide = y.double()
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()).to(y.dtype), y


def _norms() -> int:
    cases = 0
    with world(int(os.environ["WORLD_SIZE"])):
        group = ps.get_tp_group()
        for shape in NORM_SHAPES:
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                for symmetric in (False, True):
                    torch.manual_seed(5)
                    xs = [torch.randn(shape).to(dtype) for _ in range(group.size)]
                    residual, weight = torch.randn(shape).to(dtype), torch.rand(shape[-1]).to(dtype)
                    x = xs[group.rank_in_group]
                    if symmetric:
                        x = group.empty(shape, dtype).copy_(x)
                    normed, y = group.all_reduce_add_rms_norm(x, residual, weight, 1e-5)
                    total = group.all_reduce(xs[group.rank_in_group])
                    expected, expected_y = _reference(total, residual, weight, 1e-5)
                    assert torch.equal(y, expected_y), (shape, dtype)
                    torch.testing.assert_close(normed, expected)
                    assert torch.equal(group.broadcast(normed, 0), normed), "the same bits on every rank"
                    cases += 1
        x = torch.ones(4, 8, requires_grad=True)
        weight = torch.ones(8, requires_grad=True)
        normed, y = group.all_reduce_add_rms_norm(x, torch.ones(4, 8), weight)
        (normed.sum() + y.sum()).backward()
        assert x.grad is not None and weight.grad is not None
    return cases


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_reduce_add_rms_norm(pools: Pools, ranks: int) -> None:
    assert pools(ranks).run(_norms, timeout_s=DEADLINE_S) == [len(NORM_SHAPES) * 4 * 2] * ranks


def test_wrong_arguments_of_the_norm() -> None:
    group = ps.simulated_group([0, 1], 0)
    x = torch.ones(2, 4)
    for residual, weight in ((torch.ones(2, 3), torch.ones(4)), (x, torch.ones(3)), (x, torch.ones(4).half())):
        with pytest.raises(InvalidArgumentError, match="must be"):
            group.all_reduce_add_rms_norm(x, residual, weight)


def _row_parallel(group: ps.GroupCoordinator, x: Tensor, weight: Tensor) -> Tensor:
    buffer = group.empty([x.shape[0], weight.shape[1]], x.dtype)
    torch.mm(x, weight, out=buffer)
    return group.all_reduce(buffer) * 2


def _compiled() -> list[bool]:
    with world(2):
        group = ps.get_tp_group()
        found = []
        for backend in ("aot_eager", "inductor"):
            torch._dynamo.reset()
            torch.manual_seed(group.rank_in_group)
            x, weight = torch.randn(8, 16), torch.randn(16, 32)
            expected = _row_parallel(group, x, weight)
            compiled = torch.compile(_row_parallel, fullgraph=True, backend=backend)
            found += [torch.allclose(compiled(group, x, weight), expected, atol=1e-5) for _ in range(2)]
        return found


def test_compiled_row_parallel_layer(pools: Pools) -> None:
    assert pools(2).run(_compiled, timeout_s=300.0) == [[True] * 4] * 2
