from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from device_communicators.peer.kernels import (
    MAX_BLOCKS,
    MAX_RANKS,
    OPERATIONS,
    REGION_ALIGNMENT,
    REGION_BYTES,
    Call,
    norm_grid,
    read_report,
)
from tests import fp8
from tests.helpers.cuda_on_cpu import CpuKernels, KernelTrappedError

pytestmark = pytest.mark.slow

EPS = 1e-5
DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
PLAIN, STATIC, TOKEN = (
    "all_reduce_add_rms_norm", "all_reduce_add_rms_norm_static_fp8", "all_reduce_add_rms_norm_token_fp8",
)  # fmt: skip
OPS = (PLAIN, STATIC, TOKEN)
SCALE = 0.02


class Ranks:
    def __init__(self, size: int, kernels: CpuKernels, deadline_s: float = 60) -> None:
        self.size, self.kernels, self.deadline_s = size, kernels, deadline_s
        self._memory = [torch.zeros(REGION_BYTES + REGION_ALIGNMENT, dtype=torch.uint8) for _ in range(size)]
        self.regions = [-(-each.data_ptr() // REGION_ALIGNMENT) * REGION_ALIGNMENT for each in self._memory]
        self.words = torch.zeros(size, 2, dtype=torch.int64)

    def control(self, rank: int, first: int, count: int) -> Any:
        return np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(self.regions[rank] + 4 * first))

    def call(self, rank: int, **fields: int | float) -> Call:
        call = Call(rank=rank, size=self.size, deadline_ns=int(self.deadline_s * 1e9), eps=EPS, **fields)
        call.regions[:] = self.regions + [0] * (MAX_RANKS - self.size)
        call.report, call.abort = (self.words[rank, i].data_ptr() for i in (0, 1))
        return call

    def run(self, name: str, calls: list[Call], blocks: int, threads: int) -> None:
        with ThreadPoolExecutor(len(calls)) as pool:
            list(pool.map(lambda call: self.kernels.launch(name, blocks, threads, call), calls))


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return CpuKernels(max_blocks=8, max_threads=8)


def _tensors(size: int, rows: int, hidden: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    torch.manual_seed(rows * hidden + size)
    xs = [torch.randn(rows, hidden).to(dtype) for _ in range(size)]
    return xs, torch.randn(rows, hidden).to(dtype), (torch.randn(hidden) + 1).to(dtype)


def _launch(
    ranks: Ranks,
    operation: str,
    xs: list[Tensor],
    residual: Tensor,
    weight: Tensor,
    blocks: int,
    *,
    in_place: bool = False,
) -> list[tuple[Tensor, ...]]:
    rows, hidden = residual.shape
    calls, results, kept = [], [], []
    scale = torch.tensor([SCALE])
    for rank, x in enumerate(xs):
        x, before = x.clone(), residual.clone()
        out = x if in_place and operation == PLAIN else torch.full_like(x, 7)
        if operation != PLAIN:
            out = torch.full((rows, hidden), 7, dtype=torch.uint8)
        y = before if in_place else torch.full_like(x, 7)
        scales = torch.full((rows, 1), 7.0)
        calls.append(
            ranks.call(
                rank, input=x.data_ptr(), output=out.data_ptr(), residual=before.data_ptr(), residual_out=y.data_ptr(),
                weight=weight.data_ptr(), scale=scale.data_ptr(), scale_out=scales.data_ptr(), rows=rows, hidden=hidden,
            )
        )  # fmt: skip
        kept.append((x, before))
        results.append((out, y, scales))
    ranks.run(f"{operation}_{DTYPES[residual.dtype]}", calls, blocks, ranks.kernels.max_threads)
    return results


def _check(
    operation: str, xs: list[Tensor], residual: Tensor, weight: Tensor, results: list[tuple[Tensor, ...]]
) -> None:
    dtype = residual.dtype
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    y = (total.to(dtype).float() + residual.float()).to(dtype)
    low, high = fp8.norm_bounds(y, weight, EPS)
    for out, found_y, scales in results:
        assert torch.equal(found_y, y)
        if operation == PLAIN:
            assert ((low <= out.double()) & (out.double() <= high)).all()
            continue
        scale: Any = SCALE
        if operation == TOKEN:
            scale = scales.double().numpy()
            largest = ((low + high) / 2).abs().amax(-1, keepdim=True) / 448
            torch.testing.assert_close(scales.double(), largest, rtol=float(torch.finfo(dtype).eps) + 1e-6, atol=0)
        found = fp8.VALUES[out.numpy()]
        least, most = (
            fp8.VALUES[fp8.to_bytes(each.numpy() / scale + sign * np.abs(each.numpy() / scale) * 2.0**-22)]
            for each, sign in ((low, -1), (high, 1))
        )
        assert ((least <= found) & (found <= most)).all()
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            assert torch.equal(one, other), "the same bits on every rank"


SHAPES = ((1, 64), (5, 7), (3, 1), (2, 1037), (3, 2500), (9, 300))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operation", OPS)
def test_norms(kernels: CpuKernels, operation: str, dtype: torch.dtype, size: int) -> None:
    ranks = Ranks(size, kernels)
    for number, (rows, hidden) in enumerate(SHAPES if size < 4 else SHAPES[1:4]):
        tensors = _tensors(size, rows, hidden, dtype)
        blocks, _ = norm_grid(hidden * dtype.itemsize, rows, kernels.max_blocks)
        assert blocks > 0
        _check(operation, *tensors, _launch(ranks, operation, *tensors, blocks, in_place=number % 2 == 1))


def test_calls_that_share_blocks_in_other_ways(kernels: CpuKernels) -> None:
    ranks = Ranks(2, kernels)
    draw = np.random.default_rng(4)
    shapes = ((1, 40), (7, 20), (2, 1500), (1, 2600), (3, 530))
    for step in range(40):
        rows, hidden = shapes[draw.integers(len(shapes))]
        tensors = _tensors(2, rows, hidden, torch.float32)
        operation = OPS[draw.integers(3)]
        blocks, _ = norm_grid(hidden * 4, rows, int(draw.integers(6, 9)))
        _check(operation, *tensors, _launch(ranks, operation, *tensors, blocks))
        if step % 3 == 0:
            xs = [torch.full((700,), float(rank + 1)) for rank in range(2)]
            outs = [torch.empty(700) for _ in xs]
            calls = [
                ranks.call(rank, input=x.data_ptr(), output=out.data_ptr(), numel=700)
                for rank, (x, out) in enumerate(zip(xs, outs, strict=True))
            ]
            ranks.run("all_reduce_push_float32", calls, 3, 4)
            assert all((out == 3).all() for out in outs)
    epochs = ranks.control(0, 0, 8)
    assert len(set(epochs.tolist())) > 2, "the blocks had different numbers"


@pytest.mark.parametrize("start", [2**30 - 3, 2**32 - 4])
def test_epochs_that_come_round(kernels: CpuKernels, start: int) -> None:
    ranks = Ranks(2, kernels)
    for rank in range(2):
        ranks.control(rank, 0, 3)[:] = [start, start - 1, start + 1]
    kernels.disturb(200, 30, 7)
    try:
        tensors = _tensors(2, 9, 1500, torch.float32)
        for operation in (TOKEN, PLAIN, TOKEN):
            _check(operation, *tensors, _launch(ranks, operation, *tensors, 3))
    finally:
        kernels.disturb(0)


def test_delays_and_other_numbers_of_threads() -> None:
    for threads, per_mille in ((1, 100), (3, 100), (32, 20), (40, 20)):
        kernels = CpuKernels(max_blocks=4, max_threads=threads)
        kernels.disturb(per_mille, 20, threads)
        try:
            ranks = Ranks(3, kernels)
            tensors = _tensors(3, 5, 1100, torch.bfloat16)
            for _ in range(2):
                _check(TOKEN, *tensors, _launch(ranks, TOKEN, *tensors, 4))
        finally:
            kernels.disturb(0)


def test_float8_of_every_number(kernels: CpuKernels) -> None:
    ranks = Ranks(2, kernels)
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    every = torch.cat([every[every.isfinite() | every.isnan()], torch.zeros(2, dtype=torch.bfloat16)])
    hidden = 2048
    ones, zeros = torch.ones(1, hidden, dtype=torch.bfloat16), torch.zeros(1, hidden, dtype=torch.bfloat16)
    for start in range(0, len(every) - hidden, 8 * hidden):
        weight = every[start : start + hidden].clone()
        ((normed, _, _), _) = _launch(ranks, PLAIN, [zeros, zeros], ones, weight, 2)
        ((static, _, _), _) = _launch(ranks, STATIC, [zeros, zeros], ones, weight, 2)
        assert np.array_equal(fp8.bytes_of(static.view(torch.float8_e4m3fn)), fp8.static_bytes(normed, SCALE))
        ((token, _, scales), _) = _launch(ranks, TOKEN, [zeros, zeros], ones, weight, 2)
        expected, expected_scales = fp8.per_token_bytes(normed)
        assert np.array_equal(scales.numpy(), expected_scales, equal_nan=True)
        assert np.array_equal(fp8.bytes_of(token.view(torch.float8_e4m3fn)), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_awkward_rows(kernels: CpuKernels, dtype: torch.dtype) -> None:
    ranks = Ranks(2, kernels)
    zeros, residual = torch.zeros(5, 9, dtype=dtype), torch.ones(5, 9, dtype=dtype)
    residual[0], residual[1, 3], residual[2, 8] = 0, float("nan"), float("inf")
    weight = torch.ones(9, dtype=dtype)
    weight[4] = float("inf")
    ((token, _, scales), _) = _launch(ranks, TOKEN, [zeros, zeros], residual, weight, 2)
    wide = token.view(torch.float8_e4m3fn).float()
    assert scales[:3].isnan().all() and (scales[3:] == float("inf")).all()
    assert wide[:3].isnan().all()
    assert wide[3].isnan().tolist() == [i == 4 for i in range(9)]
    weight[4] = 1000
    ((token, _, scales), _) = _launch(ranks, TOKEN, [zeros, zeros], residual, weight, 2)
    assert scales[0].item() == torch.tensor(fp8.MIN_SCALE).item()
    assert not token[0].any()
    ((static, _, _), _) = _launch(ranks, STATIC, [zeros, zeros], residual, weight, 2)
    wide = static.view(torch.float8_e4m3fn).float()
    assert not wide[0].any()
    assert wide[3, 4] == 448.0
    assert wide[2].isnan().tolist() == [i == 8 for i in range(9)]


def test_a_rank_that_does_not_come(kernels: CpuKernels) -> None:
    ranks = Ranks(2, kernels, deadline_s=0.3)
    (xs, residual, weight) = _tensors(2, 2, 1500, torch.float32)
    with pytest.raises(KernelTrappedError):
        _launch(ranks, TOKEN, xs[:1], residual, weight, 6)
    report = read_report(int(ranks.words[0, 0].item()) & (1 << 64) - 1)
    assert report is not None
    assert report.reason == "deadline"
    assert report.kernel == TOKEN + "_float32"
    assert report.peer == 1


def test_an_abort_ends_it_before_anything_is_made_of_garbage(kernels: CpuKernels) -> None:
    ranks = Ranks(2, kernels)
    ranks.words[0, 1] = 1
    (xs, residual, weight) = _tensors(2, 2, 40, torch.float32)
    ((out, _, scales),) = _launch(ranks, TOKEN, xs[:1], residual, weight, 2)
    assert (out == 7).all() and (scales == 7).all()
    assert not ranks.control(0, 0, 2).any()
    report = read_report(int(ranks.words[0, 0].item()))
    assert report is not None and report.reason == "abort" and report.peer == 1


def test_a_grid_that_holds_no_row_is_refused(kernels: CpuKernels) -> None:
    ranks = Ranks(2, kernels)
    with pytest.raises(KernelTrappedError):
        _launch(ranks, PLAIN, *_tensors(2, 1, 1500, torch.float32), 2)


def test_grids() -> None:
    assert norm_grid(8192, 1, 132) == (4, 256)
    assert norm_grid(8192, 3, 132) == (12, 256)
    assert norm_grid(8192, 1000, 132) == (128, 256)
    assert norm_grid(8192, 1000, 11) == (8, 256)
    assert norm_grid(2049, 1, MAX_BLOCKS) == (2, 256)
    for row, rows, limit in ((0, 5, 99), (8192, 0, 99), (8192, 5, 3), (2048 * MAX_BLOCKS + 1, 1, 1000)):
        assert norm_grid(row, rows, limit)[0] == 0
    assert all(f"{operation}_{dtype}" in OPERATIONS for operation in OPS for dtype in DTYPES.values())
