"""Computes reductions and fused norms with torch's functions."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_NATIVE = frozenset(
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64]
)
UNSIGNED = frozenset([torch.uint32, torch.uint64])
"""Dtypes that only NCCL can reduce."""
_WIDENED = {torch.int16: torch.int32, torch.float8_e4m3fn: torch.float32, torch.float8_e5m2: torch.float32}
_COMPLEX = {torch.complex64, torch.complex128}
_BOOL_OPS = {"sum": "max", "max": "max", "min": "min", "product": "min", "tree_sum": "max"}
_ONE_THREAD_ELEMENTS = 32_768
"""torch computes larger tensors in several threads (at::internal::GRAIN_SIZE)."""
_STATE_BYTES = 64
"""At least the size of `fenv_t`."""
_DEFAULT = ctypes.c_void_p(-1)
"""FE_DFL_ENV of glibc and musl: the default floating-point state."""
TREE_SUM = "tree_sum"
"""The reduce op of calls with `order="tree"`."""
REDUCING = (
    "all_reduce", "all_reduce_", "iall_reduce_", "reduce_scatter", "ireduce_scatter", "reduce_scatterv",
    "all_reduce_add_rms_norm", "all_reduce_add_rms_norm_static_fp8_quant",
    "all_reduce_add_rms_norm_dynamic_per_token_fp8_quant",
)  # fmt: skip


def reduction_refusal(dtype: torch.dtype, reduce_op: str | None) -> str | None:
    if dtype in _NATIVE or dtype in _WIDENED:
        return None
    if dtype in _COMPLEX:
        return None if reduce_op in ("sum", "avg", TREE_SUM) else f"{reduce_op} of {dtype} is not defined"
    if dtype == torch.bool:
        return None if reduce_op in _BOOL_OPS else f"{reduce_op} of {dtype} is not defined"
    known = sorted(str(each).removeprefix("torch.") for each in (*_NATIVE, *_WIDENED, *_COMPLEX, torch.bool))
    return f"{dtype} can't be reduced; reducible are {', '.join(known)}"


def is_native(dtype: torch.dtype) -> bool:
    return dtype in _NATIVE


def reducible(x: Tensor, reduce_op: str) -> tuple[Tensor, str, Tensor | None]:
    """Converts `x` to a dtype that the transports can reduce. Returns the converted tensor, the reduce op to use for
    it, and `x` if the result must be copied back into `x`, else None.
    """
    if x.dtype == torch.float16 and reduce_op == "avg":  # the sum may overflow when the average does not
        return x.float(), reduce_op, x
    if x.dtype in _NATIVE or x.dtype in UNSIGNED:
        return x, reduce_op, None
    if x.dtype == torch.bool:
        return x.view(torch.uint8), _BOOL_OPS[reduce_op], None
    if x.dtype in _COMPLEX:
        return torch.view_as_real(x), reduce_op, None
    return x.to(_WIDENED[x.dtype]), reduce_op, x


def reducible_by_torch(x: Tensor, reduce_op: str) -> tuple[Tensor, str, Tensor | None]:
    return (x, reduce_op, None) if x.dtype == torch.int16 else reducible(x, reduce_op)


def combine_(total: Tensor, x: Tensor, reduce_op: str) -> None:
    """Reduces `x` into `total`, with the same bits as cpu/csrc/reduce.h. Doesn't use torch's maximum, whose result for
    0.0 and -0.0 depends on the element's address.
    """
    if total.is_cpu and total.numel() > _ONE_THREAD_ELEMENTS and total.is_contiguous() and x.is_contiguous():
        pieces = (each.view(-1).split(_ONE_THREAD_ELEMENTS) for each in (total, x))
        for piece, other in zip(*pieces, strict=True):  # torch's threads have another floating-point state
            combine_(piece, other, reduce_op)
        return
    if reduce_op in ("sum", "avg"):
        total.add_(x)
    elif reduce_op == "product":
        total.mul_(x)
    elif not x.is_floating_point():
        (torch.maximum if reduce_op == "max" else torch.minimum)(total, x, out=total)
    else:
        wins = x > total if reduce_op == "max" else x < total
        zero = total + x if reduce_op == "max" else -(-total - x)  # -0 is less than +0
        chosen = torch.where(wins | x.isnan(), x, total)
        total.copy_(torch.where((x == 0) & (total == 0), zero, chosen))


def divide_(total: Tensor, size: int) -> None:
    """Divides `total` in place by `size`. Quotients of integers are rounded toward zero, as in NCCL."""
    if not (total.dtype.is_floating_point or total.dtype.is_complex):
        total.copy_(total.to(torch.int64).div_(size, rounding_mode="trunc"))  # int8 can't hold a size of 128
        return
    in_pieces = total.is_cpu and total.is_contiguous()  # as in `combine_`
    with default_state(total):
        for piece in total.view(-1).split(_ONE_THREAD_ELEMENTS) if in_pieces else (total,):
            piece.div_(size)


def finish_reduction(wide: Tensor, op: str, narrow: Tensor | None, size: int) -> None:
    if narrow is not None and op == "avg" and not narrow.dtype.is_floating_point:
        narrow.copy_(wide)  # the sum wraps in the tensor's dtype before it is divided
        wide, narrow = narrow, None
    if op == "avg":
        divide_(wide, size)
    if narrow is not None:
        narrow.copy_(wide)


FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MIN_SCALE = 1.0 / (FP8_MAX * 512.0)
"""The smallest scale of dynamic quantization, as in vLLM."""


def add_rms_norm(total: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns `(rms_norm(y) * weight, y)` for `y = total + residual`. The sum and the norm are rounded separately."""
    y = total + residual
    return torch.nn.functional.rms_norm(y, (y.shape[-1],), weight, eps), y


def static_fp8_quant(normed: Tensor, scale: Tensor) -> Tensor:
    """Returns `normed / scale` in float8, bitwise equal to vLLM's. `scale`: one float32 element. Infinities are
    clamped, unlike in torch.
    """
    return (normed.float() * scale.reshape(()).reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def dynamic_per_token_fp8_quant(normed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `(normed / scale, scale)` in float8 with one scale per row, bitwise as vLLM. A NaN makes the whole row
    NaN, an infinity makes the row's finite elements 0.
    """
    wide = normed.float()
    largest = wide.abs().amax(-1, keepdim=True) if wide.shape[-1] else wide.new_zeros((*wide.shape[:-1], 1))
    scale = (largest / FP8_MAX).clamp(min=MIN_SCALE)
    return (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def quantize(normed: Tensor, *scale: Tensor) -> tuple[Tensor, ...]:
    """Quantizes to float8 by one given `scale`. Without `scale`, computes one for each row, and also returns these
    scales.
    """
    return (static_fp8_quant(normed, *scale),) if scale else dynamic_per_token_fp8_quant(normed)


@contextmanager
def default_state(x: Tensor) -> Iterator[None]:
    """Runs the block in the CPU's default floating-point state (rounding, denormals) if `x` is on the CPU, because
    other states give different bits.
    """
    functions = _state_functions() if x.is_cpu else None
    if functions is None:
        yield
        return
    get, put = functions
    state = ctypes.create_string_buffer(_STATE_BYTES)
    get(state)
    put(_DEFAULT)
    try:
        yield
    finally:
        put(state)


@functools.cache
def _state_functions() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    if sys.platform != "linux":
        return None
    try:
        library = ctypes.CDLL("libm.so.6")
    except OSError:  # musl has them in its libc
        library = ctypes.CDLL(None)
    try:
        return library.fegetenv, library.fesetenv
    except AttributeError:
        return None
