"""Registered ops that do a collective and what a layer does next in one pass.

Each is one op on every device: a communicator that has no kernel for it composes it, and so does its gradient. Those
with a quantised result have none. Their numerics are described in `collectives.fused_calls`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from device_communicators.errors import InvalidArgumentError
from device_communicators.routing.reductions import FP8
from device_communicators.routing.registry import find_route
from parallel_state.collectives import ops

_OPS = torch.ops.parallel_state

ADD_RMS_NORM = "all_reduce_add_rms_norm"
STATIC_FP8 = "all_reduce_add_rms_norm_static_fp8_quant"
PER_TOKEN_FP8 = "all_reduce_add_rms_norm_dynamic_per_token_fp8_quant"

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


def all_reduce_add_rms_norm(x: Tensor, token: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str) -> Pair:
    return find_route(group).run(ADD_RMS_NORM, x, x, residual, weight, eps, reduce_op="sum")


def static_fp8(
    x: Tensor, token: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float, group: str
) -> Pair:
    return find_route(group).run(STATIC_FP8, x, x, residual, weight, scale, eps, reduce_op="sum")


def per_token_fp8(x: Tensor, token: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str) -> Triple:
    return find_route(group).run(PER_TOKEN_FP8, x, x, residual, weight, eps, reduce_op="sum")


# Fake kernels: shapes and dtypes.


def _fake(x: Tensor, token: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str) -> Pair:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _fake_static_fp8(
    x: Tensor, token: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float, group: str
) -> Pair:
    return x.new_empty(x.shape, dtype=FP8), x.new_empty(x.shape)


def _fake_per_token_fp8(x: Tensor, token: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str) -> Triple:
    scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=FP8), scales, x.new_empty(x.shape)


# Gradients.


def _autograd(x: Tensor, token: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str) -> Pair:
    """Where a gradient is wanted, the parts, each of which has one."""
    ops.refuse_tangent(ADD_RMS_NORM, group, x, residual, weight)
    if torch.is_grad_enabled() and (x.requires_grad or residual.requires_grad or weight.requires_grad):
        total = _OPS.all_reduce(x, token, "sum", group) + residual
        return torch.nn.functional.rms_norm(total, (total.shape[-1],), weight, eps), total
    with torch._C._AutoDispatchBelowAutograd():
        return _OPS.all_reduce_add_rms_norm(x, token, residual, weight, eps, group)


def _autograd_static_fp8(
    x: Tensor, token: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float, group: str
) -> Pair:
    check_no_gradient(STATIC_FP8, group, x, residual, weight, scale)
    with torch._C._AutoDispatchBelowAutograd():
        return _OPS.all_reduce_add_rms_norm_static_fp8_quant(x, token, residual, weight, scale, eps, group)


def _autograd_per_token_fp8(
    x: Tensor, token: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str
) -> Triple:
    check_no_gradient(PER_TOKEN_FP8, group, x, residual, weight)
    with torch._C._AutoDispatchBelowAutograd():
        return _OPS.all_reduce_add_rms_norm_dynamic_per_token_fp8_quant(x, token, residual, weight, eps, group)


def check_no_gradient(operation: str, group: str, *inputs: Tensor) -> None:
    """Raises InvalidArgumentError where a gradient of an input would be lost."""
    requires = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
    if requires or ops.has_tangent(*inputs):
        found = "requires one" if requires else "has a tangent"
        raise InvalidArgumentError(
            f"{operation} on {find_route(group).context} has no gradient, but an input {found}; call it under "
            "torch.no_grad(), or quantise the result of all_reduce_add_rms_norm yourself"
        )


_ARGUMENTS = "Tensor x, Tensor(a!) token, Tensor residual, Tensor weight, {scale}float eps, str group"

ops.define(
    ADD_RMS_NORM, _ARGUMENTS.format(scale=""), "(Tensor, Tensor)", all_reduce_add_rms_norm, _fake, _autograd
)  # fmt: skip
ops.define(
    STATIC_FP8, _ARGUMENTS.format(scale="Tensor scale, "), "(Tensor, Tensor)",
    static_fp8, _fake_static_fp8, _autograd_static_fp8,
)  # fmt: skip
ops.define(
    PER_TOKEN_FP8, _ARGUMENTS.format(scale=""), "(Tensor, Tensor, Tensor)",
    per_token_fp8, _fake_per_token_fp8, _autograd_per_token_fp8,
)  # fmt: skip
