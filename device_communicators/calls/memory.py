"""Makes a tensor's memory hold its values, views it as bytes, and refuses dtypes that can't be sent.

torch defers conjugation, negation and zeros: the tensor has a mark, and its memory holds other numbers or none. Code
that passes memory on gets its tensors from `dense` and its bytes from `as_bytes`. Ops are called through torch's
dispatcher, which computes deferred values first. An op copies its outputs back itself: see `ops`.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from device_communicators.base.torch_internals import is_zero_tensor

QUANTIZED = frozenset(
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and str(dtype).startswith("torch.q")
)
"""Dtypes whose values mean nothing without a scale. torch can't make a plain tensor of them to receive into."""
_BITS = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and re.fullmatch(r"torch\.u?int[1-7]", str(dtype))
)
"""Integers of fewer than eight bits. Each takes a byte, and torch can copy them only as bytes."""
DEFERRED_KEYS = ("Conjugate", "Negative", "ZeroTensor")
"""torch's dispatch keys of tensors whose memory doesn't hold their values."""


def dtype_refusal(dtype: torch.dtype) -> str | None:
    """Describes tensors of a dtype that can't be sent; None if they can. Senders and receivers both call it."""
    if dtype in QUANTIZED:
        return f"a quantized tensor, {dtype}: send its int_repr(), or the integers that it was viewed from"
    return None


def holds_values(x: Tensor) -> bool:
    """Returns True if the memory of `x` holds its values."""
    return not (x.is_conj() or x.is_neg() or is_zero_tensor(x))


def with_values(x: Tensor) -> Tensor:
    """Returns `x`, or a copy whose memory holds its values."""
    return x if holds_values(x) else x.clone()


def is_dense(x: Tensor) -> bool:
    """Returns True if the values of `x` are in its memory, one after the other."""
    return x.is_contiguous() and holds_values(x)


def dense(x: Tensor) -> Tensor:
    """Returns `x` if it `is_dense`, else a copy that is."""
    if x.dtype in _BITS:
        return x.view(torch.uint8).contiguous().view(x.dtype)
    return x.contiguous() if holds_values(x) else x.clone(memory_format=torch.contiguous_format)


def copy_values(out: Tensor, x: Tensor) -> Tensor:
    """Copies `x` to `out`, of its shape and dtype, also for dtypes that torch's `copy_` lacks. Returns `out`."""
    if x.dtype in _BITS:
        out.view(torch.uint8).copy_(x.view(torch.uint8))
        return out
    return out.copy_(x)


def as_bytes(x: Tensor) -> Tensor:
    """Returns the bytes of dense `x` as a flat view of it."""
    flat = x if x.dim() == 1 else x.view(-1)
    if flat.stride(0) != 1:  # one element, or none, is contiguous whatever its stride, but can't be viewed as bytes
        flat = flat.as_strided((flat.numel(),), (1,))
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)
