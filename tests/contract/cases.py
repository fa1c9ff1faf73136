"""Awkward tensors, and checks of results. Values come from a seed, so each rank can compute all ranks' tensors.
Reductions use small integers, which are exact in any order (float8: rounded once)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
REDUCIBLE = (*FLOATS, *FLOAT8, *INTEGERS, *COMPLEX, torch.bool)
MOVABLE = (
    *REDUCIBLE, torch.uint16, torch.uint32, torch.uint64, torch.complex32,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
)  # fmt: skip
KEPT = 4096


def is_defined(dtype: torch.dtype, reduce_op: str) -> bool:
    if dtype in FLOATS or dtype in FLOAT8:
        return True
    if dtype in COMPLEX:
        return reduce_op in ("sum", "avg")
    return dtype in REDUCIBLE and (reduce_op != "avg" or dtype != torch.bool)


class Form(NamedTuple):
    shape: tuple[int, ...]
    layout: str = "contiguous"

    @property
    def dims(self) -> range:
        count = max(1, len(self.shape))
        return range(-count, count)

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.layout}"


LAYOUTS = ("contiguous", "offset", "strided", "transposed", "expanded")
SHAPES = ((), (1,), (7,), (5, 3), (3, 1), (1, 4), (2, 3, 5), (0,), (3, 0), (0, 4), (2, 0, 3))


def forms(shapes: Sequence[tuple[int, ...]] = SHAPES) -> Iterator[Form]:
    for shape in shapes:
        yield Form(shape)
        if shape and 0 not in shape:
            yield Form(shape, "offset")
            yield Form(shape, "strided")
            yield Form(shape, "expanded")
            if len(shape) > 1:
                yield Form(shape, "transposed")


def multiplied(shape: tuple[int, ...], dim: int, factor: int) -> tuple[int, ...]:
    return tuple(n * factor if i == dim % len(shape) else n for i, n in enumerate(shape))


def with_dim(shape: tuple[int, ...], dim: int, length: int) -> tuple[int, ...]:
    return tuple(length if i == dim % len(shape) else n for i, n in enumerate(shape))


def any_bytes(form: Form, dtype: torch.dtype, rank: int, salt: int = 0) -> Tensor:
    return laid_out(_any_bytes(_numel(form.shape), dtype, rank, salt).clone().view(form.shape), form.layout)


@functools.lru_cache(maxsize=KEPT)
def _any_bytes(numel: int, dtype: torch.dtype, rank: int, salt: int) -> Tensor:
    generator = _generator(numel, rank, salt)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    return torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


def small_numbers(form: Form, dtype: torch.dtype, rank: int, salt: int = 0) -> Tensor:
    return laid_out(_small_numbers(_numel(form.shape), dtype, rank, salt).clone().view(form.shape), form.layout)


@functools.lru_cache(maxsize=KEPT)
def _small_numbers(numel: int, dtype: torch.dtype, rank: int, salt: int) -> Tensor:
    generator = _generator(numel, rank, salt)
    values = torch.randint(1, 4, (numel,), generator=generator).double()
    if dtype == torch.bool:
        values -= values.clamp(max=2) - torch.randint(0, 2, (numel,), generator=generator)
    elif dtype != torch.uint8:
        values *= torch.randint(0, 2, (numel,), generator=generator) * 2 - 1
    if dtype.is_complex:
        values = torch.complex(values, values.flip(0))
    return (values > 0 if dtype == torch.bool else values).to(dtype)


def real_numbers(form: Form, dtype: torch.dtype, rank: int, salt: int = 0) -> Tensor:
    values = torch.randn(_numel(form.shape), generator=_generator(_numel(form.shape), rank, salt), dtype=torch.float64)
    return laid_out(values.to(dtype).view(form.shape), form.layout)


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "contiguous":
        return x.contiguous()
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "expanded":
        return x.narrow(0, 0, 1).contiguous().expand(x.shape)
    if layout == "offset":
        out = x.new_empty(x.numel() + 3)[3:].view(x.shape)
    else:
        out = x.new_empty((*x.shape[:-1], 2 * x.shape[-1]))[..., ::2]
    return out.copy_(x)


def joined(xs: Sequence[Tensor], dim: int) -> Tensor:
    if xs[0].dim() == 0:
        return torch.cat([bytes_of(x) for x in xs]).view(xs[0].dtype)
    rows = [x.movedim(dim, 0) for x in xs]
    flat = torch.cat([bytes_of(row) for row in rows]).view(xs[0].dtype)
    return flat.view(sum(len(row) for row in rows), *rows[0].shape[1:]).movedim(0, dim)


def sliced(x: Tensor, dim: int, size: int, rank: int) -> Tensor:
    length = x.shape[dim] // size
    return x.narrow(dim, rank * length, length)


def reduced(xs: Sequence[Tensor], reduce_op: str) -> Tensor:
    dtype = xs[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stack = torch.stack([x.to(wide) for x in xs])
    if reduce_op == "max":
        out = stack.amax(0)
    elif reduce_op == "min":
        out = stack.amin(0)
    elif reduce_op == "product":
        out = stack.prod(0)
    else:
        out = stack.sum(0)
    if reduce_op == "avg" and wide == torch.int64:  # as in NCCL: the sum wraps, then is divided toward zero
        out = out.to(dtype).to(wide).div(len(xs), rounding_mode="trunc")
    elif reduce_op == "avg":
        out = out / len(xs)
    return out.to(dtype)


def tree(xs: Sequence[Tensor]) -> Tensor:
    if len(xs) == 1:
        return xs[0]
    half = len(xs) // 2
    return tree(xs[:half]) + tree(xs[half:])


def in_tree_order(xs: Sequence[Tensor]) -> Tensor:
    dtype = xs[0].dtype
    return tree([x.float() if dtype.itemsize < 4 else x for x in xs]).to(dtype)


class Unchanged:
    def __init__(self, *tensors: Tensor) -> None:
        self._before = [(x, x._version, bytes_of(x)) for x in tensors]

    def check(self) -> None:
        for x, version, before in self._before:
            assert x._version == version, "an input was written to"
            assert torch.equal(bytes_of(x), before), "an input was changed"


class InPlace:
    """Checks an in-place call. Without its report of the write, autograd's saved tensors give wrong gradients."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._place = (x.shape, x.stride(), x.data_ptr())
        self._version = x._version

    def check(self, returned: object, alone: bool) -> None:
        x = self._x
        assert returned is x, "an in-place call must return its tensor"
        assert (x.shape, x.stride(), x.data_ptr()) == self._place, "an in-place call must leave the tensor where it is"
        assert alone or x._version > self._version, "autograd was not told that the tensor was written to"


def check_moved(found: Tensor, expected: Tensor, *inputs: Tensor, alone: bool = False) -> None:
    check_new(found, expected, *inputs, alone=alone)
    assert torch.equal(bytes_of(found), bytes_of(expected)), f"found {found.tolist()}, expected {expected.tolist()}"


def check_reduced(found: Tensor, expected: Tensor, *inputs: Tensor, reduce_op: str, alone: bool = False) -> None:
    check_new(found, expected, *inputs, alone=alone)
    is_rounded = reduce_op == "avg" and (found.dtype.is_floating_point or found.dtype.is_complex)
    check_close(found, expected, rtol=torch.finfo(found.dtype).eps if is_rounded else 0.0)


def check_new(found: Tensor, expected: Tensor, *inputs: Tensor, alone: bool = False) -> None:
    assert found.dtype == expected.dtype, f"dtype is {found.dtype}, not {expected.dtype}"
    assert found.shape == expected.shape, f"shape is {list(found.shape)}, not {list(expected.shape)}"
    assert found.device == expected.device
    if alone:
        return
    assert found.is_contiguous(), f"strides are {found.stride()} for shape {list(found.shape)}"
    for x in inputs:
        if x.numel():
            assert found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), "result shares input's memory"


def check_close(found: Tensor, expected: Tensor, rtol: float) -> None:
    """torch.testing's first use imports sympy and DTensor: seconds on every rank."""
    wide = torch.complex128 if found.dtype.is_complex else torch.float64
    difference = (found.to(wide) - expected.to(wide)).abs()
    if not bool((difference <= rtol * expected.to(wide).abs()).all()):
        raise AssertionError(f"found {found.tolist()}, expected {expected.tolist()}")


def bytes_of(x: Tensor) -> Tensor:
    """Clones, because one element of any stride counts as contiguous but can't be viewed as bytes."""
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for n in shape:
        numel *= n
    return numel


def _generator(numel: int, rank: int, salt: int) -> torch.Generator:
    return torch.Generator().manual_seed(1 + rank + 100 * salt + 10_000 * numel)
