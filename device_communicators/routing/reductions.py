"""Which dtypes and reductions there are, and how those are reduced that no transport knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_NATIVE = frozenset(
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64]
)
UNSIGNED = frozenset([torch.uint32, torch.uint64])
"""NCCL alone reduces these, which torch has few operations for; averages aren't defined."""
_WIDENED = {
    torch.int16: torch.int32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}
_COMPLEX = {torch.complex64, torch.complex128}
_BOOL_OPS = {"sum": "max", "max": "max", "min": "min", "product": "min"}
"""On bytes that are 0 or 1, `or` is max and `and` is min."""


REDUCING = (
    "all_reduce",
    "all_reduce_",
    "iall_reduce_",
    "reduce_scatter",
    "ireduce_scatter",
    "reduce_scatterv",
    "all_reduce_add_rms_norm",
    "all_reduce_add_rms_norm_static_fp8_quant",
    "all_reduce_add_rms_norm_dynamic_per_token_fp8_quant",
)
"""The operations that reduce."""


def reduction_refusal(dtype: torch.dtype, reduce_op: str | None) -> str | None:
    """Why `reduce_op` of `dtype` has no defined result here, or None."""
    if dtype in _NATIVE or dtype in _WIDENED:
        if reduce_op == "avg" and not dtype.is_floating_point:
            return f"avg needs a floating-point dtype, not {dtype}; sum and divide as you mean it"
        return None
    if dtype in _COMPLEX:
        return None if reduce_op in ("sum", "avg") else f"{reduce_op} of {dtype} is not defined"
    if dtype == torch.bool:
        return None if reduce_op in _BOOL_OPS else f"{reduce_op} of {dtype} is not defined"
    return f"{dtype} can't be reduced; reducible are {_names(_NATIVE | _WIDENED.keys() | _COMPLEX | {torch.bool})}"


def is_native(dtype: torch.dtype) -> bool:
    """Whether backends reduce `dtype` as it is (but averages of float16)."""
    return dtype in _NATIVE


def as_bytes(x: Tensor) -> Tensor:
    """A flat view of contiguous `x`."""
    flat = x.view(-1)
    if flat.stride(0) != 1:  # one element, or none, is contiguous whatever its stride, but can't be viewed as bytes
        flat = flat.as_strided((flat.numel(),), (1,))
    return flat.view(torch.uint8)


def reducible(x: Tensor, reduce_op: str) -> tuple[Tensor, str, Tensor | None]:
    """`x` in a dtype that backends reduce, the op to use on it, and where to copy the result if it isn't a view."""
    if x.dtype == torch.float16 and reduce_op == "avg":  # the sum may be too large where the average is not
        return x.float(), reduce_op, x
    if x.dtype in _NATIVE or x.dtype in UNSIGNED:
        return x, reduce_op, None
    if x.dtype == torch.bool:
        return x.view(torch.uint8), _BOOL_OPS[reduce_op], None
    if x.dtype in _COMPLEX:
        return torch.view_as_real(x), reduce_op, None
    return x.to(_WIDENED[x.dtype]), reduce_op, x


def _names(dtypes: Any) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
