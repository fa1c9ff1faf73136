"""Tensors whose memory doesn't hold their values, because torch deferred an operation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _negative(values: Tensor) -> Tensor:
    return torch._neg_view(values.neg())


def _conjugate(values: Tensor) -> Tensor:
    return values.conj().resolve_conj().conj()


def _negative_strided(values: Tensor) -> Tensor:
    return torch.complex(torch.ones_like(values), values.neg()).conj().imag


def _conjugate_strided(values: Tensor) -> Tensor:
    return _conjugate(values.repeat_interleave(2, -1))[..., ::2]


REAL: dict[str, Callable[[Tensor], Tensor]] = {"negative": _negative, "negative, strided": _negative_strided}
COMPLEX: dict[str, Callable[[Tensor], Tensor]] = {
    "conjugate": _conjugate,
    "negative conjugate": lambda values: _negative(_conjugate(values)),
    "conjugate, strided": _conjugate_strided,
}


def zeros(*shape: int) -> Tensor:
    return torch._efficientzerotensor(shape)
