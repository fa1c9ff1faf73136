"""The memory of tensors: computes deferred values, views memory as bytes, and rejects dtypes that can't be sent.

torch defers conjugation, negation and zeros: the tensor has a flag, and its memory doesn't contain its values. So code
that uses a tensor's memory calls `dense` or `as_bytes` first. An op that writes to such a tensor computes a new one and
copies it (see `ops`).
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from device_communicators.base.torch_internals import is_zero_tensor

QUANTIZED = frozenset(
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and str(dtype).startswith("torch.q")
)
"""Dtypes whose values need a scale. torch can't create a plain tensor of them to receive into."""
_BITS = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and re.fullmatch(r"torch\.u?int[1-7]", str(dtype))
)
"""Integers of fewer than eight bits. Each takes a byte. torch can copy them only as bytes."""
DEFERRED_KEYS = ("Conjugate", "Negative", "ZeroTensor")
"""torch's dispatch keys of tensors with deferred values."""


def dtype_refusal(dtype: torch.dtype) -> str | None:
    """Returns the reason why tensors of a dtype can't be sent, or None. Senders and receivers both call it."""
    if dtype in QUANTIZED:
        return f"a quantized tensor, {dtype}: send its int_repr(), or the integers of which it is a view"
    return None


def holds_values(x: Tensor) -> bool:
    """Returns True if the memory of `x` contains its values, because torch deferred no computation of them."""
    return not (x.is_conj() or x.is_neg() or is_zero_tensor(x))


def with_values(x: Tensor) -> Tensor:
    """Returns `x` if its memory contains its values, else a copy in which they are computed."""
    return x if holds_values(x) else x.clone()


def is_dense(x: Tensor) -> bool:
    """Returns True if `x` is contiguous and its memory contains its values."""
    return x.is_contiguous() and holds_values(x)


def dense(x: Tensor) -> Tensor:
    """Returns `x` if `is_dense(x)`, else a contiguous copy with computed values."""
    if x.dtype in _BITS:
        return x.view(torch.uint8).contiguous().view(x.dtype)
    return x.contiguous() if holds_values(x) else x.clone(memory_format=torch.contiguous_format)


def copy_values(out: Tensor, x: Tensor) -> Tensor:
    """Copies `x` to `out`, of the same shape and dtype, even if torch's `copy_` lacks the dtype. Returns `out`."""
    if x.dtype in _BITS:
        out.view(torch.uint8).copy_(x.view(torch.uint8))
        return out
    return out.copy_(x)


def as_bytes(x: Tensor) -> Tensor:
    flat = x if x.dim() == 1 else x.view(-1)
    if flat.stride(0) != 1:  # with at most one element any stride is contiguous, but a view as bytes needs stride 1
        flat = flat.as_strided((flat.numel(),), (1,))
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)
