from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import parallel_state as ps

HIDDEN = 32
EPS = 1e-5
Function = Callable[..., Any]


def group_in_use() -> ps.GroupCoordinator:
    return ps.get_tp_group()


def fused_norm(y: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(y, (HIDDEN,), weight, EPS)


def llama_norm(y: Tensor, weight: Tensor) -> Tensor:
    wide = y.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + EPS)).to(y.dtype)


def plain_norm(y: Tensor, weight: Tensor) -> Tensor:
    wide = y.float()
    return (torch.rsqrt(EPS + torch.mean(wide * wide, dim=y.dim() - 1, keepdim=True)) * wide * weight.float()).to(
        y.dtype
    )


NORMS = (fused_norm, llama_norm, plain_norm)


def quantised(normed: Tensor, scale: Tensor) -> Tensor:
    return (normed.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def quantised_by_reciprocal(normed: Tensor, scale: Tensor) -> Tensor:
    return (normed.to(torch.float32) * scale.reciprocal()).clamp(min=-448.0, max=448.0).to(torch.float8_e4m3fn)


def quantised_by_promotion(normed: Tensor, scale: Tensor) -> Tensor:
    return (normed / scale).clamp(max=448.0).clamp(min=-448.0).to(torch.float8_e4m3fn)


def _with_normed(normed: Tensor, scale: Tensor) -> Any:
    return quantised(normed, scale), normed


def _unclamped(normed: Tensor, scale: Tensor) -> Any:
    return (normed.float() / scale).to(torch.float8_e4m3fn)


def _half_clamped(normed: Tensor, scale: Tensor) -> Any:
    return (normed.float() / scale).clamp(max=448).to(torch.float8_e4m3fn)


def _other_limits(normed: Tensor, scale: Tensor) -> Any:
    return (normed.float() / scale).clamp(-240, 240).to(torch.float8_e4m3fn)


def _per_channel(normed: Tensor, scale: Tensor) -> Any:
    return quantised(normed, scale.expand(HIDDEN).contiguous())


def _multiplied(normed: Tensor, scale: Tensor) -> Any:
    return (normed.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def _other_format(normed: Tensor, scale: Tensor) -> Any:
    return (normed.float() / scale).clamp(-448, 448).to(torch.float8_e5m2).float()


def _wide_scale(normed: Tensor, scale: Tensor) -> Any:
    return (normed.float() / scale.double()).clamp(-448, 448).to(torch.float8_e4m3fn)


def _more_dims(normed: Tensor, scale: Tensor) -> Any:
    return quantised(normed, scale.view(1, 1, 1))


OTHER_QUANTISATIONS = (
    _with_normed, _unclamped, _half_clamped, _other_limits, _per_channel, _multiplied, _other_format, _wide_scale,
    _more_dims,
)  # fmt: skip


def _other_user(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    total = group_in_use().all_reduce(x)
    return fused_norm(total + residual, weight), total


def _unused(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    group_in_use().all_reduce(x)
    return fused_norm(x + residual, weight)


def _max(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return llama_norm(group_in_use().all_reduce(x, "max") + residual, weight)


def _avg(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return llama_norm(group_in_use().all_reduce(x, "avg") + residual, weight)


def _other_dtype(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return llama_norm(group_in_use().all_reduce(x.bfloat16()) + residual, weight)


def _wide_residual(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    y = group_in_use().all_reduce(x.bfloat16()).float() + residual
    return llama_norm(y, weight)


def _no_norm(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return group_in_use().all_reduce(x) + residual


def _no_add(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return fused_norm(group_in_use().all_reduce(x), weight)


def _product(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return fused_norm(group_in_use().all_reduce(x) * residual, weight)


def _alpha(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return llama_norm(torch.add(residual, group_in_use().all_reduce(x), alpha=2), weight)


def _twice_itself(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    total = group_in_use().all_reduce(x)
    return llama_norm(total + total, weight)


def _a_number(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return llama_norm(group_in_use().all_reduce(x) + 1.0, weight)


def _broadcast(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return llama_norm(group_in_use().all_reduce(x) + residual[0], weight)


def _larger_residual(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return llama_norm(group_in_use().all_reduce(x[:1]) + residual, weight)


def _layer_norm(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return functional.layer_norm(group_in_use().all_reduce(x) + residual, (HIDDEN,), weight)


def _no_weight(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return functional.rms_norm(group_in_use().all_reduce(x) + residual, (HIDDEN,), None, EPS)


def _two_dims(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    y = group_in_use().all_reduce(x) + residual
    return functional.rms_norm(y, y.shape, residual, EPS)


def _by_hand(
    y: Tensor, weight: Tensor, dim: Any = -1, power: int = 2, root: Function = torch.rsqrt, eps: Any = EPS
) -> Tensor:
    return weight * (y * root(y.pow(power).mean(dim, keepdim=True) + eps))


def _first_dim(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return _by_hand(group_in_use().all_reduce(x) + residual, weight, 0)


def _all_dims(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return _by_hand(group_in_use().all_reduce(x) + residual, weight, (0, 1))


def _fourth_power(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return _by_hand(group_in_use().all_reduce(x) + residual, weight, power=4)


def _no_root(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return _by_hand(group_in_use().all_reduce(x) + residual, weight, root=torch.reciprocal)


def _eps_tensor(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return _by_hand(group_in_use().all_reduce(x) + residual, weight, eps=scale)


def _of_another(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    y = group_in_use().all_reduce(x) + residual
    return weight * (x * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS))


def _root_used(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    y = group_in_use().all_reduce(x) + residual
    root = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * (y * root), root


def _weight_of_rows(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return _by_hand(group_in_use().all_reduce(x) + residual, residual)


def _weight_of_one(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return _by_hand(group_in_use().all_reduce(x) + residual, scale)


def _wide_weight(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return llama_norm(group_in_use().all_reduce(x.bfloat16()) + residual.bfloat16(), weight)


def _narrow_norm(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return _by_hand(group_in_use().all_reduce(x.bfloat16()) + residual.bfloat16(), weight.bfloat16())


def _residual_after_it(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    total = group_in_use().all_reduce(x)
    return llama_norm(total + group_in_use().all_reduce(residual, "max"), weight)


LEFT = {
    _other_user: "one addition", _unused: "one addition", _max: "not sum", _avg: "not sum",
    _other_dtype: "the same float dtype", _wide_residual: "not by an", _no_norm: "no norm", _no_add: "one addition",
    _product: "not by an", _alpha: "not by an", _twice_itself: "itself", _a_number: "number",
    _broadcast: "another shape", _larger_residual: "another shape", _layer_norm: "no norm", _no_weight: "weight",
    _two_dims: "other dims", _first_dim: "other dims", _all_dims: "other dims", _fourth_power: "no norm",
    _no_root: "no rsqrt", _eps_tensor: "constant", _of_another: "its own input", _root_used: "used elsewhere",
    _weight_of_rows: "the weight of", _weight_of_one: "the weight of", _wide_weight: "", _narrow_norm: "no norm",
    _residual_after_it: "computed from the result",
}  # fmt: skip
"""Layer -> a word of the pass's reason."""
