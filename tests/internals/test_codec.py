from __future__ import annotations

import collections
import dataclasses
import fractions
import math
import pickle
import struct
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from device_communicators.base.errors import MessageDecodeError, MessageEncodeError
from parallel_state.messages.codec import coding as codec
from parallel_state.messages.codec.coding import MAX_DEPTH, TensorMetadata
from tests.internals.codec_classes import Access, Color, Level, Pair, Record, Request, Span

Ext = msgspec.msgpack.Ext
pack = msgspec.msgpack.encode


def decode(data: bytes, tensors: list[torch.Tensor] | None = None, **kwargs: bool) -> Any:
    message = codec.read(data, **kwargs)
    if tensors is None:
        tensors = [torch.empty(t.shape, dtype=t.dtype) for t in message.tensors if t.nbytes < 1 << 20]
    return message.build(tensors) if len(tensors) == len(message.tensors) else None


def round_trip(value: Any, **kwargs: bool) -> Any:
    encoded = codec.encode(value, **kwargs)
    assert type(encoded.metadata) is bytes
    return decode(encoded.metadata, encoded.tensors, **kwargs)


def fingerprint(value: Any) -> Any:
    """Separates 1 from True, 0.0 from -0.0 and a list from a tuple; NaNs compare equal."""
    cls = type(value)
    if cls is float:
        return cls, struct.pack("<d", value)
    if cls is complex:
        return cls, struct.pack("<dd", value.real, value.imag)
    if cls in (set, frozenset):
        return cls, sorted(map(fingerprint, value), key=repr)
    if isinstance(value, dict):
        return cls, [(fingerprint(key), fingerprint(item)) for key, item in value.items()]
    if dataclasses.is_dataclass(cls):
        return cls, [fingerprint(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, msgspec.Struct):
        return cls, [fingerprint(item) for item in msgspec.structs.astuple(value)]
    if cls is torch.Tensor:
        return cls, id(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return cls, value.dtype.str, value.shape, value.flags.f_contiguous, value.tobytes()
    if isinstance(value, (list, tuple)):
        return cls, [fingerprint(item) for item in value]
    return cls, repr(value)


SAMPLE = {
    "plain": [None, True, False, 0, -1, 2**63, 1.5, "héllo", b"\x00\xff", [], {}],
    "rich": (2**64, -(2**63) - 1, 3 - 4j, bytearray(b"ab"), {1, 2}, frozenset({"a"}), (), ((),)),
    "dicts": [{1: 2, None: 3, 2.5: 4, b"k": 5}, {(1, 2): [3]}, collections.OrderedDict(b=1, a=2)],
    "torch": [torch.bfloat16, torch.device("cuda:1"), torch.device("cpu"), torch.Size([2, 3]), torch.Size([])],
    "numpy": [np.arange(6, dtype=">i2").reshape(2, 3), np.float32(1.5), np.datetime64("2020-01-01"), np.bool_(True)],
    "registered": [Color.BLUE, Access.READ | Access.WRITE, Level.HIGH, Pair(1, (2,)), Span([1], {2: 3}), Record(key=1)],
    "tensors": {"a": torch.arange(6).reshape(2, 3), "b": (torch.zeros(0, 4, dtype=torch.bfloat16),)},
}


HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from([torch.float16, torch.device("cuda:3"), Color.RED, Level.LOW, Access(0), np.int8(3), 1j]),
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3) | st.builds(Span, inner, inner)
    ),
    max_leaves=5,
)
VALUES = st.recursive(
    HASHABLE
    | st.floats()
    | st.complex_numbers()
    | st.binary(max_size=5).map(bytearray)
    | st.lists(st.integers(0, 2**40), max_size=4).map(torch.Size)
    | st.lists(st.integers(-9, 9), max_size=4).map(lambda items: np.array(items, dtype=np.int16)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(HASHABLE, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=3).map(collections.OrderedDict)
        | st.builds(Pair, inner, inner)
        | st.builds(Request, st.text(max_size=3), inner)
        | st.builds(Record, key=inner)
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_every_value_comes_back_as_the_type_it_was(value):
    assert fingerprint(round_trip(value)) == fingerprint(value)


def test_sample_comes_back():
    assert fingerprint(round_trip(SAMPLE)) == fingerprint(SAMPLE)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.0, 5e-324, complex("nan-0j")])
def test_float_bits_are_kept(value):
    assert fingerprint(round_trip([value])) == fingerprint([value])


@pytest.mark.parametrize(
    "value", [2**63 - 1, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**6000, -(256**9)], ids=int.bit_length
)
def test_int_of_any_size(value):
    assert round_trip(value) == value
    assert round_trip([{"ids": [1, value]}, {value: "key"}, (value,)]) == [
        {"ids": [1, value]},
        {value: "key"},
        (value,),
    ]


def test_order_of_dicts_is_kept():
    assert list(round_trip({"b": 1, "a": (2,), "c": 3})) == ["b", "a", "c"]
    assert list(round_trip({(2,): 1, (1,): 2})) == [(2,), (1,)]


def test_message_is_independent_of_the_callers_buffer():
    encoded = codec.encode({"x": torch.ones(2), "y": (b"abc", bytearray(b"abc"), np.ones(3), "text")})
    buffer = bytearray(encoded.metadata)
    message = codec.read(memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    made = message.build(encoded.tensors)
    assert made["y"][:2] == (b"abc", bytearray(b"abc")) and made["y"][2].tolist() == [1, 1, 1]

    data = codec.encode([b"abc", np.ones(3)]).metadata
    buffer = bytearray(data)
    message = codec.read(buffer)
    buffer[:] = bytes(len(buffer))
    assert message.build()[0] == b"abc" and message.build()[1].tolist() == [1, 1, 1]


def test_tensors_stay_out_of_the_metadata():
    a, b = torch.arange(1000), torch.ones(2, 0, 3, dtype=torch.float16).transpose(0, 2)
    encoded = codec.encode({"a": a, "deep": [(b, {"again": a})], (1, 2): torch.tensor(5.0)})
    assert [id(t) for t in encoded.tensors[:2]] == [id(a), id(b)] and len(encoded.tensors) == 3
    assert len(encoded.metadata) < 200
    message = codec.read(encoded.metadata)
    assert message.tensors == [
        TensorMetadata(torch.int64, (1000,), "cpu"),
        TensorMetadata(torch.float16, (3, 0, 2), "cpu"),
        TensorMetadata(torch.float32, (), "cpu"),
    ]
    assert [t.nbytes for t in message.tensors] == [8000, 0, 4]
    received = [torch.empty(t.shape, dtype=t.dtype) for t in message.tensors]
    made = message.build(received)
    assert made["a"] is received[0] and made["deep"][0][0] is received[1] and made[(1, 2)] is received[2]
    assert made["deep"][0][1]["again"] is made["a"]


def test_equal_tensors_are_two_tensors():
    assert len(codec.encode([torch.ones(2), torch.ones(2)]).tensors) == 2


def test_tensors_are_counted_once_where_a_big_int_needs_a_second_walk():
    a, b = torch.ones(1), torch.ones(2)
    encoded = codec.encode([a, b, 2**64, a])
    assert [id(t) for t in encoded.tensors] == [id(a), id(b)]
    made = decode(encoded.metadata, encoded.tensors)
    assert made[0] is a and made[1] is b and made[2] == 2**64 and made[3] is a


def test_parameter_and_grad_come_as_plain_tensors():
    parameter, frozen = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(1), requires_grad=False)
    encoded = codec.encode([parameter, torch.ones(2, requires_grad=True) * 2, parameter, frozen])
    assert [type(t) for t in encoded.tensors] == [torch.Tensor] * 3
    assert not any(t.requires_grad for t in encoded.tensors)
    assert encoded.tensors[0].data_ptr() == parameter.data_ptr()


def test_lazy_conjugate_and_negative_bits_are_made_real():
    x = torch.tensor([1 + 2j])
    conj, neg = codec.encode([x.conj(), x.conj().imag]).tensors
    assert not conj.is_conj() and not neg.is_neg()
    assert conj.tolist() == [1 - 2j] and neg.tolist() == [-2.0]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype="<f4").reshape(3, 4),
        np.arange(12, dtype=">u8").reshape(3, 4, order="F"),
        np.arange(24).reshape(2, 3, 4)[:, ::2, ::-1],
        np.array(7, dtype=np.int8),
        np.zeros((0, 3, 0), dtype=bool),
        np.array(["a", "bcd", ""]),
        np.array([b"a", b"bc\0"]),
        np.array(["2020-01-01", "NaT"], dtype="M8[ns]"),
        np.array([1, -2], dtype="m8[25s]"),
        np.array([1 + 2j, math.nan], dtype=np.complex64),
        np.array([1.5], dtype=np.float16),
        np.array([b"abc"], dtype="V3"),
    ],
    ids=lambda array: array.dtype.str,
)
def test_array_comes_back_equal_and_writable(array):
    made = round_trip({"x": array})["x"]
    assert type(made) is np.ndarray and made.dtype == array.dtype and made.shape == array.shape
    assert made.tobytes() == array.tobytes()
    assert made.flags.writeable and made.flags.aligned and not np.shares_memory(made, array)
    for order in ("C", "F"):
        assert made.flags[order] == array.flags[order] or not array.flags.forc


@pytest.mark.parametrize(
    "scalar",
    [np.float64(-0.0), np.int64(5), np.bool_(True), np.str_("äb"), np.bytes_(b"x"), np.complex64(1j),
     np.datetime64("NaT"), np.timedelta64(3, "h"), np.longdouble(1) / 3, np.void(b"abc")],
    ids=lambda scalar: type(scalar).__name__,
)  # fmt: skip
def test_scalar_comes_back_as_its_type(scalar):
    made = round_trip(scalar)
    assert type(made) is type(scalar) and made.dtype == scalar.dtype and made.tobytes() == scalar.tobytes()


def test_numpy_that_is_not_installed(monkeypatch):
    data = codec.encode(np.ones(2)).metadata
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert round_trip([1, (2,)]) == [1, (2,)]
    with pytest.raises(MessageDecodeError, match="numpy is not installed"):
        codec.read(data)
    with pytest.raises(MessageEncodeError, match="is a function"):
        codec.encode(test_sample_comes_back)


def test_metadata_has_a_limit(monkeypatch):
    data = codec.encode(bytes(200)).metadata
    assert codec.read(data).build() == bytes(200)
    monkeypatch.setenv("PARALLEL_STATE_MAX_METADATA_BYTES", "100")
    with pytest.raises(MessageEncodeError, match=r"at most 100 bytes, but is 2\d\d"):
        codec.encode(bytes(200))
    with pytest.raises(MessageDecodeError, match=r"at most 100 bytes .*, but is 2\d\d"):
        codec.read(data)
    assert round_trip(torch.ones(1000)).sum() == 1000


@pytest.mark.parametrize("value", [bytes(200), ("rich", 2**70, {3, 4})], ids=["plain", "rich"])
def test_the_last_byte_within_the_limit(monkeypatch, value):
    data = codec.encode(value).metadata
    monkeypatch.setenv("PARALLEL_STATE_MAX_METADATA_BYTES", str(len(data)))
    assert codec.encode(value).metadata == data
    assert codec.read(data).build() == value
    monkeypatch.setenv("PARALLEL_STATE_MAX_METADATA_BYTES", str(len(data) - 1))
    with pytest.raises(MessageEncodeError, match="must be at most"):
        codec.encode(value)
    with pytest.raises(MessageDecodeError, match="must be at most"):
        codec.read(data)


NESTINGS = {
    "list": lambda inner: [inner],
    "mixed list": lambda inner: [1, "a", inner],
    "tuple": lambda inner: (inner,),
    "dict": lambda inner: {"k": inner},
    "tuple keys": lambda inner: {(1,): inner},
    "ordered": lambda inner: collections.OrderedDict(k=inner),
    "dataclass": lambda inner: Span(inner, 0),
    "named tuple": lambda inner: Pair(inner),
    "frozenset": lambda inner: frozenset([inner]),
}


def nested(nesting: str, depth: int, inner: Any = ()) -> Any:
    for _ in range(depth):
        inner = NESTINGS[nesting](inner)
    return inner


@pytest.mark.parametrize("nesting", NESTINGS)
def test_depth_up_to_the_limit(nesting):
    value = nested(nesting, MAX_DEPTH - 1)
    assert fingerprint(round_trip(value)) == fingerprint(value)
    with pytest.raises(MessageEncodeError, match=r"^value at .* is nested more than 100 deep; flatten"):
        codec.encode(nested(nesting, MAX_DEPTH))
    with pytest.raises(MessageEncodeError, match="nested more than"):
        codec.encode(nested(nesting, 5000) if nesting != "frozenset" else nested(nesting, 500))


def test_big_int_below_the_deepest_container():
    assert round_trip(nested("tuple", MAX_DEPTH, 2**70)) == nested("tuple", MAX_DEPTH, 2**70)


def test_object_that_holds_itself():
    loop: list[Any] = [1]
    loop.append({"again": (loop,)})
    request = Request("r")
    request.callback = request
    for value in (loop, request, [[loop]]):
        for allow_pickle in (False, True):
            with pytest.raises(MessageEncodeError, match="a container that holds itself") as caught:
                codec.encode(value, allow_pickle=allow_pickle)
            assert len(str(caught.value)) < 400


def test_mixed_keys_are_walked_once():
    value: Any = ()
    for _ in range(60):
        value = {"inner": value, (1,): 0}
    assert fingerprint(round_trip(value)) == fingerprint(value)  # two walks per level would be 2**60


def test_pickle_only_where_both_sides_allow_it():
    value = {"x": fractions.Fraction(1, 3), "t": torch.ones(2), "y": (1, collections.deque([2])), "s": "\ud800"}
    with pytest.raises(MessageEncodeError):
        codec.encode(value)
    encoded = codec.encode(value, allow_pickle=True)
    made = decode(encoded.metadata, encoded.tensors, allow_pickle=True)
    assert made == value and made["t"] is value["t"] and type(made["y"]) is tuple
    message = codec.read(encoded.metadata)
    with pytest.raises(MessageDecodeError, match=r"a pickled value, which is not loaded.*allow_pickle=True"):
        message.build(encoded.tensors)


def test_known_types_are_not_pickled():
    value = {k: v for k, v in SAMPLE.items() if k != "tensors"}
    assert codec.encode(value, allow_pickle=True) == codec.encode(value)


def test_what_can_not_be_pickled():
    with pytest.raises(MessageEncodeError, match=r"value at \[1\] is a function; the value can't be pickled") as caught:
        codec.encode([1, lambda: None], allow_pickle=True)
    assert isinstance(caught.value.__cause__, (pickle.PicklingError, AttributeError))
