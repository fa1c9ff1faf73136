from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from device_communicators.calls.memory import dtype_refusal
from tests.contract import deferred

DTYPES = sorted(
    {each for each in vars(torch).values() if isinstance(each, torch.dtype) and dtype_refusal(each) is None}, key=str
)
EMPTY = ((0,), (0, 197), (2, 0), (2, 0, 3))
SHAPES = ((), (1,), (1, 1), (1, 1, 1), (7,), (1, 4), (4, 1), (3, 5), (2, 3, 4), *EMPTY)
_DEPTH = 3


def _plain(source: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.tensor([source.random() < 0.5 for _ in range(count)], dtype=dtype).view(shape)
    data = bytearray(source.randbytes(count * dtype.itemsize))
    return (
        torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
    )


def _of_any_stride(source: random.Random, x: Tensor) -> Tensor:
    """Zero or one element with random strides, as `x[:, -1]` of a batch of one has."""
    return x.as_strided(x.shape, [source.randrange(8) for _ in x.shape])


def _strided(x: Tensor) -> Tensor:
    room = torch.zeros(*x.shape[:-1], 3 * x.shape[-1], dtype=torch.uint8 if x.itemsize == 1 else x.dtype)
    found = (room.view(x.dtype) if x.itemsize == 1 else room)[..., ::3]
    (found.view(torch.uint8) if x.itemsize == 1 else found).copy_(x.view(torch.uint8) if x.itemsize == 1 else x)
    return found


def tensor(source: random.Random, *, only_empty: bool = False) -> Tensor:
    shape, dtype = source.choice(EMPTY if only_empty else SHAPES), source.choice(DTYPES)
    kind = source.choice(
        ["", "", "stride", "stride", "strided", "transposed", "expanded", "offset", "deferred", "zeros"]
    )
    if kind == "deferred" and not only_empty:
        is_complex = source.random() < 0.5
        numbers = torch.randn(shape or (1,), generator=torch.Generator().manual_seed(source.randrange(1 << 30)))
        make = source.choice([*(deferred.COMPLEX if is_complex else deferred.REAL).values()])
        x = make(torch.complex(numbers, numbers.flip(0)) if is_complex else numbers)
        return x if shape else x[0]
    if kind == "zeros":
        return deferred.zeros(*shape)
    x = _plain(source, shape, dtype)
    if kind == "stride" and x.numel() <= 1:
        x = _of_any_stride(source, x)
    elif kind == "strided" and x.numel() and shape:
        x = _strided(x)
    elif kind == "transposed" and len(shape) > 1:
        x = x.transpose(0, -1)
    elif kind == "expanded" and shape and shape[0]:
        x = x[:1].expand(3, *shape[1:])
    elif kind == "offset" and shape:
        x = x[shape[0] // 2 :]
    if dtype.is_floating_point and dtype.itemsize >= 2 and source.random() < 0.2:
        return nn.Parameter(x) if source.random() < 0.5 else x.requires_grad_()
    return x


def value(
    source: random.Random, depth: int = _DEPTH, *, only_empty: bool = False, seen: list[Tensor] | None = None
) -> Any:
    seen = [] if seen is None else seen

    def inner() -> Any:
        return value(source, depth - 1, only_empty=only_empty, seen=seen)

    containers: list[Callable[[int], Any]] = [
        lambda count: [inner() for _ in range(count)],
        lambda count: tuple(inner() for _ in range(count)),
        lambda count: {f"key {at}": inner() for at in range(count)},
        lambda count: {at if at % 2 else (at, "x"): inner() for at in range(count)},
        lambda count: OrderedDict((f"key {at}", inner()) for at in range(count)),
    ]
    if depth > 0 and source.random() < 0.6:
        return source.choice(containers)(source.randrange(4))
    if source.random() < 0.6:
        if seen and source.random() < 0.2:
            return source.choice(seen)
        seen.append(tensor(source, only_empty=only_empty))
        return seen[-1]
    return source.choice([None, True, source.randrange(1 << 70), -1, 0.5, float("inf"), 2j, "é", "", b"\0", {1, 2}, ()])


def tensors(source: random.Random, *, only_empty: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {f"t{at}": tensor(source, only_empty=only_empty) for at in range(source.randrange(1, 5))}
    return {**found, "step": source.randrange(100), "name": "layer"}


def check_arrived(found: Any, sent: Any, path: str = "") -> None:
    if isinstance(sent, Tensor):
        assert type(found) is Tensor and not found.requires_grad, f"{path}: {type(found)}"
        assert (found.dtype, found.shape) == (sent.dtype, sent.shape), f"{path}: {found.dtype} {found.shape}"
        assert _bytes(found) == _bytes(sent), f"{path}: {found} for {sent}"
        return
    assert type(found) is type(sent), f"{path}: {type(found)} for {type(sent)}"
    if isinstance(sent, dict):
        assert list(found) == list(sent), path
        for key in sent:
            check_arrived(found[key], sent[key], f"{path}[{key!r}]")
    elif isinstance(sent, (list, tuple)):
        assert len(found) == len(sent), path
        for at, (one, other) in enumerate(zip(found, sent, strict=True)):
            check_arrived(one, other, f"{path}[{at}]")
    else:
        assert found == sent, f"{path}: {found!r} for {sent!r}"


def _bytes(x: Tensor) -> list[int]:
    x = x.detach()
    if x._is_zerotensor():
        x = torch.zeros(x.shape, dtype=x.dtype)
    x = x.resolve_conj().resolve_neg()
    if x.numel() == 0:
        return []
    # torch can't copy every dtype, but integers of equal size.
    by_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if x.itemsize == 16:
        return [each for part in (x.real, x.imag) for each in _bytes(part.clone())]
    return x.view(by_size[x.itemsize]).flatten().tolist()
