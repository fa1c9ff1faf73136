from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from device_communicators.calls.reductions import (
    FP8,
    MIN_SCALE,
    add_rms_norm,
    dynamic_per_token_fp8_quant,
    static_fp8_quant,
)
from tests import fp8

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def every(dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    if dtype.itemsize == 2:
        return patterns.view(dtype)
    marks = torch.from_numpy(np.sort(fp8.VALUES[:127])).float()
    marks = torch.cat([marks, (marks[1:] + marks[:-1]) / 2, torch.tensor([456.0, 464.0, 465.0, 480.0, 3e38])]) * scale
    marks = torch.cat([marks, torch.nextafter(marks, torch.tensor(INF)), torch.nextafter(marks, torch.tensor(-INF))])
    return torch.cat([patterns.view(torch.bfloat16).to(dtype), marks.to(dtype), -marks.to(dtype)])


def test_the_reference_knows_its_dtype() -> None:
    every_byte = torch.arange(256, dtype=torch.uint8)
    assert np.array_equal(every_byte.view(FP8).double().numpy(), fp8.VALUES, equal_nan=True)
    assert np.array_equal(fp8.to_bytes(fp8.VALUES), fp8.bytes_of(every_byte.view(FP8)))
    assert fp8.to_bytes([464.0, INF, -INF, -1e9, 2.0**-10, 1.01 * 2.0**-10, 3 * 2.0**-10]).tolist() == [
        126, 126, 254, 254, 0, 1, 2
    ]  # fmt: skip


@pytest.mark.parametrize("scale", [1.0, 0.125, 0.1, 7.3, 1e-12, 1e12])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_static_scale(dtype: torch.dtype, scale: float) -> None:
    x = every(dtype, scale)
    for shape in ((), (1,), (1, 1)):
        found = static_fp8_quant(x, torch.full(shape, scale))
        assert found.dtype == FP8
        assert found.shape == x.shape
        assert np.array_equal(fp8.bytes_of(found), fp8.static_bytes(x, scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales_of_rows(dtype: torch.dtype) -> None:
    x = every(dtype)
    x = x[x.isfinite()]
    x = x[: len(x) // 6 * 6].view(-1, 6)
    found, scales = dynamic_per_token_fp8_quant(x)
    expected, expected_scales = fp8.per_token_bytes(x)
    assert scales.dtype == torch.float32
    assert scales.shape == (len(x), 1)
    assert np.array_equal(scales.numpy(), expected_scales)
    assert np.array_equal(fp8.bytes_of(found), expected)


def test_awkward_rows() -> None:
    x = torch.tensor([[0.0, -0.0, 0.0], [1e-30, -1e-38, 1e-45], [1.0, NAN, INF], [1.0, -INF, 2.0], [3e38, 1.0, -3e38]])
    found, scales = dynamic_per_token_fp8_quant(x)
    assert scales.flatten()[:2].tolist() == [torch.tensor(MIN_SCALE).item()] * 2
    assert scales[2].isnan().all()
    assert scales[3].item() == INF
    wide = found.float()
    assert wide[0].tolist() == [0.0] * 3
    assert wide[1].tolist() == [0.0] * 3
    assert wide[2].isnan().all()
    assert wide[3].isnan().tolist() == [False, True, False]
    assert wide[3, ::2].tolist() == [0.0, 0.0]
    assert wide[4].tolist() == [448.0, 0.0, -448.0]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (4,), (2, 3, 4)])
def test_shapes(shape: tuple[int, ...]) -> None:
    found, scales = dynamic_per_token_fp8_quant(torch.ones(shape))
    assert found.shape == shape
    assert scales.shape == (*shape[:-1], 1)
    assert static_fp8_quant(torch.ones(shape), torch.ones(1, 1)).shape == shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_is_of_the_rounded_sum_and_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    total, residual = (torch.randn(16, 96, dtype=torch.float64).to(dtype) for _ in range(2))
    weight = torch.randn(96, dtype=torch.float64).to(dtype)
    normed, y = add_rms_norm(total, residual, weight, 1e-5)
    assert torch.equal(y, (total.double() + residual.double()).to(dtype))
    low, high = fp8.norm_bounds(y, weight, 1e-5)
    assert ((low <= normed.double()) & (normed.double() <= high)).all()
