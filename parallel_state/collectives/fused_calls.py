"""The calls of a group that do an all-reduce and what a layer does next in one pass; registered as ops in `fused_ops`.

Common to all, beside what `collectives` says: `x` and `residual` are `[…, hidden]`, `weight` is `[hidden]`, all of one
dtype; `residual` and `weight` are equal on all ranks. With `y = sum(x) + residual`, the sum is rounded to the dtype,
so is `y`, and the norm is computed in float32 of the rounded `y`, weight included, and rounded once (float64 for
float64). Every rank gets the same new tensors. A communicator without a kernel for it composes it, as does a group of
one rank.

Quantised output is torch.float8_e4m3fn of the norm *as it was rounded to the dtype*, so that it is what quantising the
result of `all_reduce_add_rms_norm` gives. In float32; what is beyond ±448 becomes ±448, infinities too; NaN stays NaN.
vLLM's kernels round the norm once more, before they multiply it by the weight, and those with a scale per token take
the norm of the sum before it is rounded: the results differ in last bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from device_communicators.routing.reductions import add_rms_norm, dynamic_per_token_fp8_quant, static_fp8_quant
from parallel_state.collectives import checks, fused_ops
from parallel_state.collectives.tensor_calls import TensorCollectives

_OPS = torch.ops.parallel_state


class FusedCollectives(TensorCollectives):
    """The part of `GroupCoordinator` for collectives with something after them."""

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
    ) -> tuple[Tensor, Tensor]:
        """What follows a row-parallel layer, in one pass: `(rms_norm(y) * weight, y)` of `y = sum(x) + residual`.

        Shapes and numerics: see the module. Differentiable, as its parts are.
        """
        self._check_norm(fused_ops.ADD_RMS_NORM, x, residual, weight)
        if self._ends_here():
            return add_rms_norm(x, residual, weight, eps)
        return _OPS.all_reduce_add_rms_norm(x, self._token, residual, weight, eps, self._key)

    def all_reduce_add_rms_norm_static_fp8_quant(
        self, x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float = 1e-6
    ) -> tuple[Tensor, Tensor]:
        """As all_reduce_add_rms_norm, with the norm quantised: `(norm / scale as float8_e4m3fn, y)`.

        `scale`: one element, float32, positive and finite, on `x`'s device, equal on all ranks. The norm is multiplied
        by its reciprocal, which is rounded to float32. A gradient, which would be lost, is an error.
        """
        self._check_norm(fused_ops.STATIC_FP8, x, residual, weight)
        checks.check_scale(self.context, fused_ops.STATIC_FP8, scale)
        if self._ends_here():
            fused_ops.check_no_gradient(fused_ops.STATIC_FP8, self._key, x, residual, weight, scale)
            normed, y = add_rms_norm(x, residual, weight, eps)
            return static_fp8_quant(normed, scale), y
        return _OPS.all_reduce_add_rms_norm_static_fp8_quant(x, self._token, residual, weight, scale, eps, self._key)

    def all_reduce_add_rms_norm_dynamic_per_token_fp8_quant(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As all_reduce_add_rms_norm, each row of the norm quantised by its own scale: `(norm / scales, scales, y)`.

        `scales`: float32 `[…, 1]`, the row's `max(|norm|) / 448`, at least 1 / (448 · 512): a row of zeros stays zeros.
        A row with a NaN has the scale NaN and is NaN; one with an infinity has the scale infinity, and is NaN there and
        0 elsewhere. A gradient, which would be lost, is an error.
        """
        self._check_norm(fused_ops.PER_TOKEN_FP8, x, residual, weight)
        if self._ends_here():
            fused_ops.check_no_gradient(fused_ops.PER_TOKEN_FP8, self._key, x, residual, weight)
            normed, y = add_rms_norm(x, residual, weight, eps)
            return (*dynamic_per_token_fp8_quant(normed), y)
        return _OPS.all_reduce_add_rms_norm_dynamic_per_token_fp8_quant(
            x, self._token, residual, weight, eps, self._key
        )

    def _check_norm(self, operation: str, x: Tensor, residual: Tensor, weight: Tensor) -> None:
        checks.check_tensor(self.context, operation, x)
        checks.check_norm(self.context, operation, x, residual, weight)
