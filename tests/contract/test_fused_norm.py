"""all_reduce + add + rms_norm with a quantized result, against a float64 reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import parallel_state as ps
from device_communicators.base.errors import InvalidArgumentError
from tests import fp8
from tests.contract.carriers import Carrier, Member
from tests.contract.cases import FLOATS

EPS = 1e-5
SHAPES = ((7, 64), (1, 1), (2, 3, 33), (0, 8), (5,))
SCALE = 0.013


def _of_rank(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank + 17)
    return (torch.randint(-64, 65, shape, generator=generator) / 16).to(dtype)


def _inputs(member: Member, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    xs = member.of_ranks(lambda rank: _of_rank(shape, dtype, rank))
    residual, weight = _of_rank(shape, dtype, 90), _of_rank(shape[-1:], dtype, 91)
    total = torch.stack([each.double() for each in xs]).sum(0).to(dtype)
    if len(shape) == 2 and shape[0] > 2:
        residual[0] = -total[0]
        residual[1] = -total[1] + torch.finfo(dtype).tiny
    return xs[member.rank], residual, weight, total


def _check_quantised(quantised: Tensor, scale: Tensor | float, low: Tensor, high: Tensor) -> None:
    assert quantised.dtype == torch.float8_e4m3fn
    assert quantised.is_contiguous()
    divisor = torch.as_tensor(scale).double()
    found = fp8.VALUES[fp8.bytes_of(quantised)]
    # Division, or reciprocal and product, round to float32.
    least = fp8.VALUES[fp8.to_bytes((low / divisor - (low / divisor).abs() * 2.0**-22).numpy())]
    most = fp8.VALUES[fp8.to_bytes((high / divisor + (high / divisor).abs() * 2.0**-22).numpy())]
    assert (least <= found).all()
    assert (found <= most).all()


def _body(member: Member) -> list[bytes]:
    results = []
    for dtype in FLOATS:
        for shape in SHAPES:
            x, residual, weight, total = _inputs(member, shape, dtype)
            y = total + residual
            low, high = fp8.norm_bounds(y, weight, EPS)
            with member.case(f"a static scale, {list(shape)} {dtype}"):
                before = x.clone()
                quantised, found_y = member.group.all_reduce_add_rms_norm_static_fp8_quant(
                    x, residual, weight, torch.tensor([SCALE]), EPS
                )
                assert torch.equal(x, before)
                assert torch.equal(found_y, y)
                _check_quantised(quantised, SCALE, low, high)
                results.append(quantised.view(torch.uint8))
            with member.case(f"a scale per token, {list(shape)} {dtype}"):
                quantised, scales, found_y = member.group.all_reduce_add_rms_norm_dynamic_per_token_fp8_quant(
                    x, residual, weight, EPS
                )
                assert torch.equal(found_y, y)
                assert scales.dtype == torch.float32
                assert scales.shape == (*shape[:-1], 1)
                expected = ((low + high) / 2).abs().amax(-1, keepdim=True) / 448
                torch.testing.assert_close(
                    scales.double(),
                    expected.clamp(min=fp8.MIN_SCALE),
                    rtol=float(torch.finfo(dtype).eps) + 1e-6,
                    atol=0,
                )
                _check_quantised(quantised, scales, low, high)
                results += [quantised.view(torch.uint8), scales.contiguous().view(torch.uint8)]
    return [bytes(each.flatten().tolist()) for each in results]


def test_quantised_norms(carrier: Carrier) -> None:
    answers = carrier.run(_body)
    assert carrier.simulated or all(each == answers[0] for each in answers)


def _awkward_body(member: Member) -> None:
    for dtype in FLOATS:
        with member.case(str(dtype)):
            x, residual = torch.zeros(4, 8, dtype=dtype), torch.ones(4, 8, dtype=dtype)
            residual[1, 3], residual[2, 2] = float("nan"), float("inf")
            weight = torch.ones(8, dtype=dtype)
            weight[5] = 1e4
            group = member.group
            quantised, y = group.all_reduce_add_rms_norm_static_fp8_quant(x, residual, weight, torch.tensor(1.0), EPS)
            assert np.array_equal(y.double().numpy(), residual.double().numpy(), equal_nan=True)
            wide = quantised.float()
            assert wide[[0, 3]].tolist() == [[1.0] * 5 + [448.0] + [1.0] * 2] * 2
            assert wide[1].isnan().all()
            assert wide[2].isnan().tolist() == [i == 2 for i in range(8)]
            assert not wide[2].nan_to_num(0).any()
            quantised, scales, _ = group.all_reduce_add_rms_norm_dynamic_per_token_fp8_quant(x, residual, weight, EPS)
            wide = quantised.float()
            assert scales.flatten().isnan().tolist() == [False, True, True, False]
            assert wide[1:3].isnan().all()
            assert wide[0].tolist() == wide[3].tolist()
            assert wide[0, 5] == 448.0


def test_infinities_and_nans(carrier: Carrier) -> None:
    carrier.run(_awkward_body)


def test_what_quantising_the_norm_gives() -> None:
    group = ps.simulated_group([0, 1], 0)
    for dtype in FLOATS:
        x, residual, weight = (_of_rank(shape, dtype, 3) for shape in ((9, 40), (9, 40), (40,)))
        normed, _ = group.all_reduce_add_rms_norm(x, residual, weight, EPS)
        quantised, _ = group.all_reduce_add_rms_norm_static_fp8_quant(x, residual, weight, torch.tensor(SCALE), EPS)
        assert np.array_equal(fp8.bytes_of(quantised), fp8.static_bytes(normed, SCALE))
        quantised, scales, _ = group.all_reduce_add_rms_norm_dynamic_per_token_fp8_quant(x, residual, weight, EPS)
        expected, expected_scales = fp8.per_token_bytes(normed)
        assert np.array_equal(fp8.bytes_of(quantised), expected)
        assert np.array_equal(scales.numpy(), expected_scales)


@pytest.mark.parametrize("size", [1, 2])
def test_wrong_arguments(size: int) -> None:
    group = ps.simulated_group(list(range(size)), 0)
    x, weight = torch.ones(2, 4), torch.ones(4)
    for scale in (torch.ones(2), torch.ones(1).half(), 0.5, torch.ones(0)):
        with pytest.raises(InvalidArgumentError, match=r"scale of .* must be a torch.float32 tensor of one element"):
            group.all_reduce_add_rms_norm_static_fp8_quant(x, x, weight, scale)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="weight of all_reduce_add_rms_norm_static_fp8_quant"):
        group.all_reduce_add_rms_norm_static_fp8_quant(x, x, weight.half(), torch.ones(1))
    with pytest.raises(InvalidArgumentError, match="residual of all_reduce_add_rms_norm_dynamic_per_token_fp8_quant"):
        group.all_reduce_add_rms_norm_dynamic_per_token_fp8_quant(x, x[:1], weight)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("which", range(4))
def test_a_lost_gradient_is_an_error(size: int, which: int) -> None:
    group = ps.simulated_group(list(range(size)), 0)
    inputs = [torch.ones(2, 4), torch.ones(2, 4), torch.ones(4), torch.ones(1)]
    inputs[which].requires_grad_()
    with pytest.raises(InvalidArgumentError, match="isn't differentiable, but an input requires a gradient"):
        group.all_reduce_add_rms_norm_static_fp8_quant(*inputs)
    if which < 3:
        with pytest.raises(InvalidArgumentError, match="isn't differentiable, but an input requires a gradient"):
            group.all_reduce_add_rms_norm_dynamic_per_token_fp8_quant(*inputs[:3])
    with torch.no_grad():
        group.all_reduce_add_rms_norm_static_fp8_quant(*inputs)
    with forward_ad.dual_level():
        inputs[which] = forward_ad.make_dual(inputs[which].detach(), torch.ones_like(inputs[which]))
        with pytest.raises(InvalidArgumentError, match="isn't differentiable, but an input has a tangent"):
            group.all_reduce_add_rms_norm_static_fp8_quant(*inputs)
