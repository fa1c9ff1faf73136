"""What follows an all-reduce in a transformer's layer, composed of torch's functions: the norm and its quantisation.

Every communicator without a kernel of its own uses these; kernels are tested against the numerics described here.
Nothing here talks to another rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MIN_SCALE = 1.0 / (FP8_MAX * 512.0)
"""The smallest scale of a token, so that a row of zeros has one to divide by. vLLM's bound."""


def add_rms_norm(total: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(y) * weight, y)` of `y = total + residual`, which is rounded; the norm is in float32, rounded once."""
    y = total + residual
    return torch.nn.functional.rms_norm(y, (y.shape[-1],), weight, eps), y


def static_fp8_quant(normed: Tensor, scale: Tensor) -> Tensor:
    """`normed / scale` as float8_e4m3fn, for a `scale` of one element, float32.

    In float32: times the reciprocal, which is rounded, as vLLM's kernels do it. What is beyond ±448 becomes ±448,
    infinities too, whatever torch's own conversion makes of it (it has done both); NaN stays NaN.
    """
    return (normed.float() * scale.reshape(()).reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def dynamic_per_token_fp8_quant(normed: Tensor) -> tuple[Tensor, Tensor]:
    """`(normed / scale as float8_e4m3fn, scale)`: a float32 scale of each row, `max(|row|) / 448`, at least MIN_SCALE.

    In float32; here the division is one, as in vLLM's kernels. A row that holds a NaN has the scale NaN and is NaN, one
    that holds an infinity has the scale infinity, and is NaN there and 0 elsewhere.
    """
    wide = normed.float()
    largest = wide.abs().amax(-1, keepdim=True) if wide.shape[-1] else wide.new_zeros((*wide.shape[:-1], 1))
    scale = (largest / FP8_MAX).clamp(min=MIN_SCALE)
    return (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale
