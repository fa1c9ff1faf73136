"""Copies tensors, also if torch hasn't written their values to memory (lazy conjugates, negatives and zeros)."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from device_communicators.base.torch_internals import is_zero_tensor

QUANTIZED = frozenset(
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and str(dtype).startswith("torch.q")
)
"""torch can't create tensors of these dtypes without quantization parameters."""
_BITS = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and re.fullmatch(r"torch\.u?int[1-7]", str(dtype))
)
"""Dtypes of 1 to 7 bits. Each value takes a byte, and torch can copy them only as bytes."""
DEFERRED_KEYS = ("Conjugate", "Negative", "ZeroTensor")


def dtype_refusal(dtype: torch.dtype) -> str | None:
    if dtype in QUANTIZED:
        return f"a quantized tensor, {dtype}: send its int_repr(), or the integers of which it is a view"
    return None


def holds_values(x: Tensor) -> bool:
    return not (x.is_conj() or x.is_neg() or is_zero_tensor(x))


def with_values(x: Tensor) -> Tensor:
    return x if holds_values(x) else x.clone()


def is_dense(x: Tensor) -> bool:
    return x.is_contiguous() and holds_values(x)


def dense(x: Tensor) -> Tensor:
    if x.dtype in _BITS:
        return x.view(torch.uint8).contiguous().view(x.dtype)
    return x.contiguous() if holds_values(x) else x.clone(memory_format=torch.contiguous_format)


def copy_values(out: Tensor, x: Tensor) -> Tensor:
    if x.dtype in _BITS:
        out.view(torch.uint8).copy_(x.view(torch.uint8))
        return out
    return out.copy_(x)


def as_bytes(x: Tensor) -> Tensor:
    flat = x if x.dim() == 1 else x.view(-1)
    if flat.stride(0) != 1:  # a view as bytes needs stride 1; with at most one element torch allows any
        flat = flat.as_strided((flat.numel(),), (1,))
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)
