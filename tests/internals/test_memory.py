from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from device_communicators.calls.memory import (
    QUANTIZED,
    as_bytes,
    copy_values,
    dense,
    dtype_refusal,
    holds_values,
    is_dense,
    with_values,
)
from device_communicators.cpu import native
from parallel_state.compat.stateless import StoreGroup
from parallel_state.compat.vllm import message_queue
from parallel_state.messages import wire
from parallel_state.messages.codec import values as codec_values
from parallel_state.messages.codec.types import DTYPES
from tests.contract import deferred, random_objects
from tests.contract.random_objects import check_arrived

KINDS = {**deferred.REAL, **deferred.COMPLEX}


@pytest.mark.parametrize("kind", KINDS)
def test_deferred_values_become_those_of_the_memory(kind: str) -> None:
    values = torch.arange(6.0).view(2, 3)
    values = values if kind in deferred.REAL else torch.complex(values, values.flip(0))
    x = KINDS[kind](values)
    assert not holds_values(x) and not is_dense(x)
    assert holds_values(with_values(x)) and torch.equal(with_values(x), values)
    assert is_dense(dense(x)) and as_bytes(dense(x)).tolist() == as_bytes(values).tolist()


def test_zeros_without_memory_get_some() -> None:
    x = deferred.zeros(2, 3)
    assert x.data_ptr() == 0 and not holds_values(x)
    assert is_dense(dense(x)) and dense(x).data_ptr() and not as_bytes(dense(x)).any()


def test_what_is_dense_is_not_copied() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert with_values(x) is x and dense(x) is x and with_values(x.t()) is not None
    assert as_bytes(x).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (0,), (0, 3), (2, 0, 3), (1, 4, 1)])
def test_bytes_of_any_stride(shape: tuple[int, ...]) -> None:
    """With at most one element, any strides are contiguous."""
    for dtype in random_objects.DTYPES:
        x = torch.zeros(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8).view(dtype).view(shape)
        for stride in (1, 7) if x.numel() <= 1 else ():
            x = x.as_strided(shape, [stride] * len(shape))
            assert is_dense(x) and as_bytes(x).shape == (x.nbytes,) and as_bytes(x).dtype == torch.uint8
        assert as_bytes(x).shape == (x.nbytes,)


def test_every_dtype_is_copied() -> None:
    for dtype in random_objects.DTYPES:
        x = (torch.arange(48, dtype=torch.uint8) % 2).view(dtype).view(3, -1)[:, ::2]
        flat = dense(x)
        assert is_dense(flat) and random_objects._bytes(flat) == random_objects._bytes(x)
        assert random_objects._bytes(copy_values(torch.empty_like(flat), x)) == random_objects._bytes(x)


def test_a_dtype_is_refused_where_torch_makes_no_plain_tensor_of_it() -> None:
    """A receiver must allocate each dtype as a plain tensor and fill it byte by byte."""
    for dtype in DTYPES.values():
        made = torch.empty(2, dtype=dtype)
        assert (dtype_refusal(dtype) is not None) == made.is_quantized == (dtype in QUANTIZED), dtype
        if not made.is_quantized:
            assert as_bytes(made).copy_(torch.zeros(made.nbytes, dtype=torch.uint8)).numel() == made.nbytes


def _by_store(obj: Any) -> Any:
    store = dist.HashStore()
    StoreGroup(0, 2, store).send_obj(obj, 1)
    return StoreGroup(1, 2, store).recv_obj(0)


def _by_queue(obj: Any) -> Any:
    head, bodies = message_queue._encode(obj)
    left = iter(bodies)
    return message_queue._decode(head, lambda size: bytearray(next(left)))


@pytest.mark.parametrize("carry", [_by_store, _by_queue])
def test_objects_past_the_group(carry: Callable[[Any], Any]) -> None:
    for seed in range(60):
        source = random.Random(seed)
        for only_empty in (False, True):
            tensors = [random_objects.tensor(source, only_empty=only_empty) for _ in range(4)]
            sent = [x.detach() if isinstance(x, Tensor) else x for x in tensors]
            check_arrived(carry(sent), sent, f"seed {seed}")


def test_a_tensor_without_elements_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder's shortcut for objects without tensors must not apply to empty tensors."""
    monkeypatch.setattr(codec_values, "_objects", [])
    try:
        codec_values.use_library()
    except native.NativeUnavailableError as error:
        pytest.skip(f"the shortcut needs the shared-memory library: {error}")
    empty = torch.empty(0, 197, dtype=torch.int16)
    for obj in (empty, [empty, 1], {"e": empty, "i": 1}):
        outgoing = wire.encode(obj, allow_pickle=False)
        assert len(outgoing.tensors) == 1
        assert wire._HEADER.unpack_from(outgoing.whole_head)[3] == 1
