"""Descriptions of a call: as two integers in shared memory, and as text in errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from device_communicators.calls.user_call import UserCall, call_of_arguments, in_words

SHAPES = [
    ((), "[]"), ((0,), "0"), ((7,), "7"), ((3, 4), "[3, 4]"), ((1 << 29, 2), f"[{1 << 29}, 2]"),
    ((2, 0, 3), "[2, 0, 3]"), ((1,) * 6, "[1, 1, 1, 1, 1, 1]"), ((1 << 31, 2), str(1 << 32)), ((1,) * 15, "1"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "shown"), SHAPES)
def test_the_words_of_a_shape(shape: tuple[int, ...], shown: str) -> None:
    call = UserCall("all_gather", torch.float32, shape, dim=1)
    word, packed = (value - (1 << 64) if value >> 63 else value for value in (call.word, call.packed_shape))
    assert in_words(word, packed) == f"all_gather(dim 1) of {shown} × float32"
    if math.prod(shape) < 1 << 32 and len(shape) < 15:
        assert str(call) == in_words(word, packed)


def test_the_words_of_rows_and_of_messages() -> None:
    x = torch.ones(4, 2, 3)
    exchanged = call_of_arguments("all_to_all", x, (x, [1], [1]), None, "", -1)
    assert str(exchanged) == in_words(exchanged.word, exchanged.packed_shape)
    assert str(exchanged) == "all_to_all(rows of [2, 3]) of float32"
    gathered = call_of_arguments("all_gatherv", x, (x, 1, [2, 2]), None, "", -1)
    assert str(gathered) == "all_gatherv(dim 1, rows of [4, 3], sizes [2, 2]) of float32"
    for method in ("broadcast_object", "scatter"):
        frame = torch.ones(4096, dtype=torch.uint8)
        assert str(call_of_arguments("broadcast_", frame, (frame, 1), None, method, -1)) == f"{method}(rank 1)"


def test_shapes_of_as_many_elements_have_other_digests() -> None:
    by_numel: dict[int, list[UserCall]] = {}
    for shape in itertools.chain.from_iterable(itertools.product(range(1, 25), repeat=dims) for dims in (1, 2, 3)):
        by_numel.setdefault(math.prod(shape), []).append(UserCall("all_reduce", shape=shape))
    for calls in by_numel.values():
        assert len({call.digest for call in calls}) == len(calls)
