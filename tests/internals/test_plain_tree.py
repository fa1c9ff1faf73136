"""C++ code encodes and decodes messages as Python code does, and leaves some values to Python."""

from __future__ import annotations

import collections
import ctypes
import enum
import random
import sys
from typing import Any

import pytest
import torch

from device_communicators.cpu import native
from parallel_state.messages import wire
from parallel_state.messages.codec import coding as codec
from parallel_state.messages.codec import values as codec_values
from parallel_state.messages.codec.values import MAX_DEPTH

try:
    native.load()
except native.NativeUnavailableError as error:
    pytest.skip(f"no compiled library: {error}", allow_module_level=True)


@pytest.fixture(autouse=True)
def _with_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_values, "_objects", [])
    codec_values.use_library().free()


class Text(str):
    pass


class Number(int):
    pass


class Row(list):  # type: ignore[type-arg]
    pass


class Color(enum.IntEnum):
    RED = 1


def nested(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = [value] if number % 2 else {"k": value}
    return value


X = torch.arange(3)
LIMIT = 1 << 26
PLAIN: list[Any] = [
    None, 1, -1.5, "text", b"bytes", True, [], {}, [1, "a", None], {"a": {"b": [1.5, {1: None}]}, 2: [False]},
    [2**63, 2**64 - 1, -(2**63)], {"x": X, "deep": [{"again": X, "other": X + 1}]}, X, nested(MAX_DEPTH),
]  # fmt: skip
OTHER: list[Any] = [
    (1,), [(1,)], {(1,): 2}, {1}, 1j, bytearray(b"x"), collections.OrderedDict(a=1), [2**64], {"deep": [X, (X,)]},
    torch.float32, {"x": torch.nn.Parameter(torch.ones(2)), "y": X.to(torch.complex64).conj()},
]  # fmt: skip


def slowly(value: Any) -> codec.Encoded:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec_values, "_objects", [])
        return codec.encode(value)


@pytest.mark.parametrize("value", [*PLAIN, *OTHER], ids=lambda value: str(value)[:30])
def test_both_ways_give_the_same(value: Any) -> None:
    fast, slow = codec.encode(value), slowly(value)
    assert fast.metadata == slow.metadata
    assert all(map(torch.equal, fast.tensors, slow.tensors))
    assert len(fast.tensors) == len(slow.tensors)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ([Text("a")], r"value at \[0\] is .*Text, which is not sent as its base str"),
        ({"k": Color.RED}, r"value at \['k'\] is .*Color"),
        ({"k": [X, len]}, r"value at \['k'\]\[1\] is a builtin"),
        ({"k": X.to_sparse()}, r"value at \['k'\] is a tensor of layout"),
        (["\ud800"], "lone surrogate"),
        (nested(MAX_DEPTH + 1), "nested more than 100 deep"),
    ],
)
def test_what_does_not_travel_is_told_with_its_path(value: Any, match: str) -> None:
    with pytest.raises(codec.MessageEncodeError, match=match):
        codec.encode(value)
    assert not codec_values.use_library().takes_apart(value, LIMIT)


def message(value: Any) -> tuple[bytes, list[tuple[int, int]]] | None:
    objects = codec_values.use_library()
    objects.free()
    if not objects.takes_apart(value, LIMIT):
        return None
    pieces, heads, _ = objects.pieces()
    return b"".join([ctypes.string_at(*piece) for piece in pieces[:heads]]), pieces[heads:]


def message_of_python(value: Any) -> tuple[bytes, list[tuple[int, int]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec_values, "_objects", [])
        outgoing = wire.encode(value, allow_pickle=False)
    assert outgoing.error is None
    return outgoing.whole_head, [(x.data_ptr(), x.nbytes) for x in outgoing.tensors if x.nbytes]


INTS = [
    sign * (1 << bits) + step for bits in (5, 7, 8, 15, 16, 31, 32, 62) for sign in (1, -1) for step in (-1, 0, 1)
]  # fmt: skip
SIZES = (0, 1, 15, 16, 31, 32, 255, 256)
DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn, torch.uint64]


def drawn(draw: random.Random, depth: int) -> Any:
    kind = draw.randrange(8 if depth else 6)
    if kind == 0:
        return draw.choice([*INTS, 0, 2**63 - 1, -(2**63)])
    if kind == 1:
        return "".join(draw.choices("aé漢😀", k=draw.choice(SIZES))) * draw.choice((1, 1, 1, 100))
    if kind == 2:
        return draw.choice([0.0, -0.0, 1.5, float("inf"), float("nan"), -1e300, None, True, False])
    if kind == 3:
        return bytes(draw.choice((*SIZES, 4096, 4097, 70_000)))
    if kind in (4, 5):
        return torch.zeros([draw.choice((0, 1, 3, 200)) for _ in range(draw.randrange(4))], dtype=draw.choice(DTYPES))
    count = draw.choice((0, 1, 3, 3, 15, 16))
    if kind == 6:
        return [drawn(draw, depth - 1) for _ in range(count)]
    keys: list[Any] = [*(f"key {i}" for i in range(count)), 7, 1.5, None, b"x"]
    return {key: drawn(draw, depth - 1) for key in draw.sample(keys, count)}


def test_a_message_is_the_same_by_either_way() -> None:
    draw = random.Random(0)
    made = 0
    for _ in range(400):
        value = drawn(draw, 3)
        packed = message(value)
        made += packed is not None
        assert packed is None or packed == message_of_python(value), value
    assert made > 300


@pytest.mark.parametrize("count", [15, 16, 63, 64])
def test_many_tensors_are_in_one_message(count: int) -> None:
    value = {f"x{i}": torch.ones(i) for i in range(count)}
    assert message(value) == message_of_python(value)


def test_messages_that_python_packs() -> None:
    x = torch.ones(4, 2)
    others: list[Any] = [
        {"x": x.t()}, {"x": x, "y": x}, {"x": x.to(torch.complex64).conj()}, {"x": x.to_sparse()}, {"x": (x,)},
        {"x": torch.ones(2, device="meta")}, {f"x{i}": torch.ones(1) for i in range(65)}, {"n": 2**64},
        [bytes(5000)] * 65,
        {"x": torch._to_functional_tensor(x)}, {"x": torch._neg_view(x)}, ["\ud800"], Row(), *OTHER,
    ]  # fmt: skip
    for value in others:
        assert message(value) is None, value


@pytest.mark.parametrize("value", [b"x" * 5000, "é" * 3000, ["a" * 4096, b"b" * 70_000, 1], {"c": b"c" * 9000, "x": X}])
def test_long_texts_are_sent_from_where_they_are(value: Any) -> None:
    found, whole = message(value), message_of_python(value)
    assert found == whole
    objects = codec_values.use_library()
    objects.free()
    assert objects.takes_apart(value, LIMIT) and objects.pieces()[1] > 2, "pieces before, of and behind a long text"
    objects.free()
    packed = objects.pack(value, LIMIT)
    assert packed is not None and b"".join((packed.start, *packed.more.views())) == whole[0]


def test_long_texts_live_until_they_are_sent() -> None:
    objects = codec_values.use_library()
    text = bytes(9000)
    value = [text, text]
    before = sys.getrefcount(text)
    assert objects.takes_apart(value, LIMIT)
    assert sys.getrefcount(text) == before + 2
    packed = objects.packed()
    assert packed is not None
    assert sys.getrefcount(text) == before + 2, "held by what was packed, not by the library"
    del packed
    assert sys.getrefcount(text) == before
    assert objects.takes_apart(value, LIMIT)
    assert not objects.takes_apart([], LIMIT), "it isn't read yet: this is a handler of signals"
    objects.free()
    assert objects.takes_apart([], LIMIT)
    assert sys.getrefcount(text) == before, "let go by the next message"


@pytest.mark.parametrize("value", [bytes(200), bytes(5000), {"x": X, "n": 1}], ids=["plain", "long", "with a tensor"])
def test_a_message_of_just_the_limit(value: Any) -> None:
    head, _ = message_of_python(value)
    objects = codec_values.use_library()
    assert objects.takes_apart(value, len(head) - wire.HEADER_BYTES)
    assert not objects.takes_apart(value, len(head) - wire.HEADER_BYTES - 1)
