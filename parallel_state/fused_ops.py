"""Registered ops that do a collective and what a layer does next in one pass.

Each is one op on every device: a communicator that has no kernel for it composes it, and so does its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from device_communicators.registry import find_route
from parallel_state import ops

_OPS = torch.ops.parallel_state

ADD_RMS_NORM = "all_reduce_add_rms_norm"


def all_reduce_add_rms_norm(
    x: Tensor, token: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str
) -> tuple[Tensor, Tensor]:
    return find_route(group).run(ADD_RMS_NORM, x, x, residual, weight, eps, reduce_op="sum")


def _fake(x: Tensor, token: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _autograd(
    x: Tensor, token: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str
) -> tuple[Tensor, Tensor]:
    """Where a gradient is wanted, the parts, each of which has one."""
    if torch.is_grad_enabled() and (x.requires_grad or residual.requires_grad or weight.requires_grad):
        total = _OPS.all_reduce(x, token, "sum", group) + residual
        return torch.nn.functional.rms_norm(total, (total.shape[-1],), weight, eps), total
    with torch._C._AutoDispatchBelowAutograd():
        return _OPS.all_reduce_add_rms_norm(x, token, residual, weight, eps, group)


ops.define(
    ADD_RMS_NORM,
    "Tensor x, Tensor(a!) token, Tensor residual, Tensor weight, float eps, str group",
    "(Tensor, Tensor)",
    all_reduce_add_rms_norm,
    _fake,
    _autograd,
)
