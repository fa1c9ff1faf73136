"""A hostile peer's bytes become an object or a MessageDecodeError, and allocate no more than was sent."""

from __future__ import annotations

import collections
import pickle
import random
import struct
import sys
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from device_communicators.base.errors import MessageDecodeError
from device_communicators.cpu import native
from parallel_state.messages.codec import coding as codec
from parallel_state.messages.codec import values as codec_values
from parallel_state.messages.codec.coding import MAX_DEPTH
from tests.internals.codec_classes import Access, Color, Pair, Record, Span
from tests.internals.plain_keys import has_plain_keys

Ext = msgspec.msgpack.Ext
pack = msgspec.msgpack.encode


HEADER = struct.pack("<BI", 1, 0)


SAMPLE = {
    "plain": [None, True, -1, 2**63, 1.5, "héllo", b"\x00\xff", {}],
    "rich": (2**64, 3 - 4j, bytearray(b"ab"), {1, 2}, frozenset({"a"}), ()),
    "dicts": [{1: 2, None: 3}, {(1, 2): [3]}, collections.OrderedDict(b=1, a=2)],
    "torch": [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])],
    "numpy": [np.arange(6, dtype=">i2").reshape(2, 3), np.float32(1.5)],
    "registered": [Color.BLUE, Access.READ | Access.WRITE, Pair(1, (2,)), Span([1], {2: 3}), Record(key=1)],
    "tensors": {"a": torch.arange(6).reshape(2, 3), "b": (torch.zeros(0, 4, dtype=torch.bfloat16),)},
}


def message_of(value: Any) -> bytes:
    return HEADER + pack(value)


def decode(data: bytes, tensors: list[torch.Tensor] | None = None, **kwargs: bool) -> Any:
    message = codec.read(data, **kwargs)
    if tensors is None:
        tensors = [torch.empty(t.shape, dtype=t.dtype) for t in message.tensors if t.nbytes < 1 << 20]
    return message.build(tensors) if len(tensors) == len(message.tensors) else None


def tensor_message(*rows: Any, body: Any = None) -> bytes:
    table = pack(list(rows))
    return struct.pack("<BI", 1, len(table)) + table + pack(body)


def frame(code: int, payload: bytes) -> bytes:
    return b"\xc9" + struct.pack(">Ib", len(payload), code) + payload


def test_other_format_version():
    data = codec.encode([1]).metadata
    assert data[0] == codec.FORMAT_VERSION == 1
    for version in (0, 2, 255):
        with pytest.raises(MessageDecodeError, match=f"format version 1, but begins with {version}; every rank"):
            codec.read(bytes([version]) + data[1:])


def test_truncated_at_every_byte():
    encoded = codec.encode(SAMPLE)
    data = encoded.metadata
    assert decode(data, encoded.tensors).keys() == SAMPLE.keys()
    for end in range(len(data)):
        with pytest.raises(MessageDecodeError):
            decode(data[:end], encoded.tensors)


def test_trailing_bytes():
    encoded = codec.encode(SAMPLE)
    for tail in (b"\0", b"\xc0", b"\xc1", encoded.metadata):
        with pytest.raises(MessageDecodeError):
            decode(encoded.metadata + tail, encoded.tensors)


def decodes_or_raises(data: bytes) -> bool:
    try:
        decode(data)
    except MessageDecodeError:
        return False
    return True


def test_every_flipped_bit_decodes_or_raises():
    data = codec.encode(SAMPLE).metadata
    outcomes = collections.Counter()
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            outcomes[decodes_or_raises(bytes(flipped))] += 1
    assert outcomes[False] > 500 and outcomes[True] > 500


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes(data):
    decodes_or_raises(data)
    decodes_or_raises(HEADER + data)


LEAVES = [
    None,
    True,
    0,
    3,
    -1,
    2**40,
    0.5,
    "",
    "left",
    "right",
    "key",
    "<f4",
    "C",
    "float32",
    "cuda",
    b"",
    bytes(4),
    bytes(16),
]
LEAVES += [f"test.{cls.__name__}" for cls in (Color, Access, Pair, Span, Record)]


def random_msgpack(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(5) if depth else 0
    if kind == 0:
        return rng.choice(LEAVES)
    count = rng.randrange(4)
    if kind == 1:
        return [random_msgpack(rng, depth - 1) for _ in range(count)]
    if kind == 2:
        return {rng.choice(LEAVES): random_msgpack(rng, depth - 1) for _ in range(count)}
    return Ext(rng.randrange(18), pack(random_msgpack(rng, depth - 1)) if kind == 3 else rng.randbytes(count))


def test_random_well_formed_msgpack():
    rng = random.Random(0)
    outcomes = collections.Counter(decodes_or_raises(message_of(random_msgpack(rng, 5))) for _ in range(5000))
    assert outcomes[False] > 500 and outcomes[True] > 500


@pytest.mark.parametrize("code", range(-2, 20))
def test_every_code_with_odd_payloads(code):
    odd = [None, 0, -1, 2**63, 0.5, "", "cpu", b"", b"x" * 16, [], [1, 1], [[], []], [1, [2]], [1, 2, 3], {}, {"a": 1}]
    payloads = [b"", b"\xc1", b"\xff" * 8, b"\0" * 16, *map(pack, odd), *(pack([[o, o], o, {"a": o}]) for o in odd)]
    refused = sum(not decodes_or_raises(HEADER + frame(code, payload)) for payload in payloads)
    assert refused > 0 if code not in (6, 8) else refused == 0
    if code not in range(-1, 17) or code == 0:
        assert refused == len(payloads)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Ext(0, b""), "unknown extension code 0"),
        (Ext(17, b""), "unknown extension code 17"),
        (Ext(-2, b""), "unknown extension code -2"),
        (Ext(3, pack([1, 2, 1])), "set with duplicates"),
        (Ext(4, pack([1, True])), "set with duplicates"),
        (Ext(3, pack([[1]])), "unhashable"),
        (Ext(2, pack([1, 2, 1, 3])), "duplicate keys"),
        (Ext(2, pack([1, 2, 3])), "zip"),
        (Ext(2, pack([[1], 2])), "unhashable"),
        (Ext(5, pack([1, 2, 1, 3])), "duplicate keys"),
        (Ext(1, pack({"a": 1})), "must be a list, but are a dict"),
        (Ext(1, pack("abc")), "must be a list, but are a str"),
        (Ext(7, bytes(15)), "16 bytes"),
        (Ext(10, b"vars"), "vars"),
        (Ext(10, b"\xff"), "ascii"),
        (Ext(11, b"abacus"), "abacus"),
        (Ext(11, b"cpu:999999"), "is not a device"),
        (Ext(12, pack([1.0])), "other values than ints"),
        (Ext(12, pack([True])), "other values than ints"),
        (Ext(12, pack([None])), "other values than ints"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_values(value, text):
    for wrapped in (value, {"a": [1, value]}):
        with pytest.raises(MessageDecodeError, match=text):
            codec.read(message_of(wrapped))


@pytest.mark.parametrize(
    "data",
    [
        b"\x81\x90\xc0"[:2],
        b"\x81\x80\xc0",
        b"\x81" + frame(3, b"\x91\x01") + b"\xc0",
        b"\xa2\xff\xff",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\x81\xdd\xff\xff\xff\xff",
        frame(1, b"\xdd\xff\xff\xff\xff"),
        frame(3, b"\xdd\xff\xff\xff\xff\x01"),
        frame(13, pack(["<f8", [2**40], "C"])[:-1]),
    ],
    ids=lambda data: data.hex(),
)
def test_lengths_are_checked_before_memory_is_taken(data):
    tracemalloc.start()
    try:
        with pytest.raises(MessageDecodeError):
            codec.read(HEADER + data)
        with pytest.raises(MessageDecodeError):
            codec.read(struct.pack("<BI", 1, len(data)) + data + b"\xc0")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "5 bytes or more, but is 0"),
        (b"\1\0\0\0", "5 bytes or more, but is 4"),
        (HEADER, "not a message"),
        (b"\1\xff\xff\xff\xff\xc0", "is 6 bytes, but its table of tensors 4294967295"),
        (b"\1\1\0\0\0\xc0\xc0", "tensor table of a message is malformed"),
    ],
)
def test_broken_header(data, text):
    with pytest.raises(MessageDecodeError, match=text):
        codec.read(data)


@pytest.mark.parametrize(
    "row",
    [
        ["float32", [-1], "cpu"],
        ["float32", [2**62], "cpu"],
        ["float32", [2**31, 2**31], "cpu"],
        ["float32", [0, 2**40, 2**40], "cpu"],
        ["float32", [1] * 65, "cpu"],
        ["float32", [1.0], "cpu"],
        ["float32", [True], "cpu"],
        ["float32", 3, "cpu"],
        ["float33", [1], "cpu"],
        ["qint8", [1], "cpu"],
        ["float32", [1], "meta"],
        ["float32", [1], "cuda:1"],
        ["float32", [1], "abacus"],
        ["float32", [1], ""],
        ["float32", [1]],
        ["float32", [1], "cpu", 1],
        [1, [1], "cpu"],
        {},
    ],
    ids=repr,
)
def test_tensor_table_claims_nothing_odd(row):
    assert len(codec.read(tensor_message(["float32", [1], "cpu"])).tensors) == 1
    with pytest.raises(MessageDecodeError):
        codec.read(tensor_message(row))


def test_tensors_together_claim_no_more_than_the_limit():
    row = ["uint8", [2**47], "cpu"]
    assert codec.read(tensor_message(row)).tensors[0].nbytes == 2**47
    with pytest.raises(MessageDecodeError, match="bytes"):
        codec.read(tensor_message(row, row))


@pytest.mark.parametrize("index", [b"\x01\0\0\0", b"\xff" * 4, b"\xff" * 100])
def test_index_of_a_tensor_must_be_in_the_table(index):
    message = codec.read(tensor_message(["float32", [1], "cpu"], body=Ext(9, index)))
    with pytest.raises(MessageDecodeError, match="refers to tensor number"):
        message.build([torch.ones(1)])
    with pytest.raises(MessageDecodeError, match="refers to tensor number"):
        codec.read(tensor_message(body=Ext(9, index)))


@pytest.mark.parametrize(
    "parts",
    [
        ["<f4", [3], "C", b"\0" * 8],
        ["<f4", [3], "C", b"\0" * 16],
        ["<f4", [-1], "C", b""],
        ["<f4", [-1, -3], "C", b"\0" * 12],
        ["<f4", [2**62, 4], "C", b""],
        ["<f4", [2**32, 2**32], "C", b""],
        ["<U0", [2**40], "C", b""],
        ["<f4", [0, 2**40, 2**40], "C", b""],
        ["<f4", [True], "C", b"\0" * 4],
        ["<f4", [1] * 65, "C", b"\0" * 4],
        ["<f4", [1], "A", b"\0" * 4],
        ["<f4", [1], "C", "\0" * 4],
        ["<f4", [4], "C", [0] * 16],
        ["<f4", 1, "C", b"\0" * 4],
        ["|O", [1], "C", b"\0" * 8],
        ["O", [1], "C", b"\0" * 8],
        ["i4,i4", [1], "C", b"\0" * 8],
        ["(2,)i4", [1], "C", b"\0" * 8],
        ["<f3", [1], "C", b"\0" * 3],
        ["<U999999999", [1], "C", b"\0" * 8],
        ["<M8[lightyears]", [1], "C", b"\0" * 8],
        [8, [1], "C", b"\0" * 8],
        ["<f4", [1], "C"],
        {},
    ],
    ids=repr,
)
def test_array_parts_must_fit(parts):
    for code in (13, 14):
        with pytest.raises(MessageDecodeError):
            codec.read(message_of(Ext(code, pack(parts))))
    with pytest.raises(MessageDecodeError, match="malformed shape"):
        codec.read(message_of(Ext(13, pack(["<f4", [2**40] * 10**5, "C", b""]))))
    with pytest.raises(MessageDecodeError, match="scalar with a shape"):
        codec.read(message_of(Ext(14, pack(["<f4", [1], "C", b"\0" * 4]))))


def test_fields_must_be_those_of_this_rank():
    for fields in ({"start": 1}, {"start": 1, "stop": 2, "step": 3}, {"start": 1, "stopp": 2}, [1, 2], None):
        with pytest.raises(MessageDecodeError, match=r"fields of 'test.Span' must be \['start', 'stop'\]"):
            codec.read(message_of(Ext(15, pack(["test.Span", fields]))))


@pytest.mark.parametrize(
    "parts",
    [["test.Color", {"name": "GREEN"}], ["test.Color", {"name": []}], ["test.Access", {"value": 64}],
     ["test.Access", {"value": "x"}], ["test.Color"], ["test.Color", {"name": "RED"}, 1], 5],
    ids=repr,
)  # fmt: skip
def test_registered_parts_must_fit(parts):
    with pytest.raises(MessageDecodeError):
        codec.read(message_of(Ext(15, pack(parts))))


@pytest.mark.parametrize("name", ["os.system", "builtins.dict", "", None, [1], "x" * 10**6])
def test_unknown_name(name):
    with pytest.raises(MessageDecodeError, match="not registered on this rank") as caught:
        codec.read(message_of(Ext(15, pack([name, {}]))))
    assert "test.Span" in str(caught.value) and len(str(caught.value)) < 1500


@pytest.mark.parametrize("depth", [10**4, 10**6])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa0", b"\x81", b"\xdd\0\0\0\1", b"\x92\xc0"])
def test_deep_lists_and_dicts(opening, depth):
    with pytest.raises(MessageDecodeError):
        codec.read(HEADER + opening * depth + b"\xc0")


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 15])
@pytest.mark.parametrize("depth", [MAX_DEPTH + 2, 2000])
def test_deep_extensions(code, depth):
    payload = b"\xc0"
    for _ in range(depth):
        prefix = {2: b"\x92\xc0", 5: b"\x92\xc0", 15: b"\x92\xa9test.Pair\x82\xa4left\xc0\xa5right"}.get(code, b"\x91")
        payload = frame(code, prefix + payload)
    with pytest.raises(MessageDecodeError, match="nested more than 100 deep"):
        codec.read(HEADER + payload)


@pytest.mark.parametrize("code", [1, 2, 4, 5])
def test_extensions_as_deep_as_a_sender_nests_them(code):
    payload = frame(6, b"\x05")
    for _ in range(MAX_DEPTH):
        payload = frame(code, (b"\x92\xc0" if code in (2, 5) else b"\x91") + payload)
    value = codec.read(HEADER + payload).build()
    for _ in range(MAX_DEPTH):
        (value,) = value.values() if code in (2, 5) else value
    assert value == 5


class Boom:
    def __reduce__(self) -> Any:
        return _ran.append, (1,)


_ran: list[int] = []


def test_bytes_of_a_pickle_do_nothing():
    for protocol in range(2, 6):
        data = pickle.dumps(Boom(), protocol=protocol)
        with pytest.raises(MessageDecodeError, match="begins with 128, as a pickle does"):
            codec.read(data, allow_pickle=True)
        with pytest.raises(MessageDecodeError, match="pickled value"):
            codec.read(message_of(Ext(16, data)))
    assert _ran == []


def test_broken_pickle():
    for data in (b"", b"\x80\x05", b"garbage", pickle.dumps(5)[:-1], b"cnot_there\nnot_there\n."):
        with pytest.raises(MessageDecodeError):
            codec.read(message_of(Ext(16, data)), allow_pickle=True)


# A peer can send colliding numbers: decoding time is bounded, too.

WAYS = ["python", "library"]


def take_way(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_values, "_objects", [])
    if way == "library":
        try:
            native.load()
        except native.NativeUnavailableError as error:
            pytest.skip(f"no compiled library: {error}")
        codec_values.use_library()


HASH_MODULUS = sys.hash_info.modulus


def colliding(count: int) -> list[Ext]:
    return [Ext(codec_values._INT, (i * HASH_MODULUS).to_bytes(12, "little", signed=True)) for i in range(count)]


def colliding_list(number: int) -> list[int]:
    return [HASH_MODULUS if number >> bit & 1 else 0 for bit in range(14)]


def native_map(keys: list[Any]) -> bytes:
    return b"\xdf" + struct.pack(">I", len(keys)) + b"".join(pack(key) + b"\x00" for key in keys)


COLLIDING = {
    "set": pack(Ext(codec_values._SET, pack(colliding(20_000)))),
    "frozenset in a list": pack([1, Ext(codec_values._FROZENSET, pack(colliding(20_000)))]),
    "dict": pack(Ext(codec_values._DICT, pack([x for key in colliding(20_000) for x in (key, 0)]))),
    "msgpack's dict of extensions": native_map(colliding(2000)),
    "msgpack's dict of lists": native_map([colliding_list(i) for i in range(8000)]),
    "msgpack's dict in an extension": frame(
        codec_values._TUPLE, b"\x91" + native_map([colliding_list(i) for i in range(8000)])
    ),
    "msgpack's dict of many numbers": native_map(list(range(1 << 33, (1 << 33) + 6000))),
}


@pytest.mark.parametrize("name", COLLIDING)
@pytest.mark.parametrize("way", WAYS)
def test_colliding_keys_are_refused_before_they_take_long(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_way("library" if name.startswith("msgpack") else way, monkeypatch)
    with pytest.raises(MessageDecodeError, match=r"that collide|an unsupported type"):
        decode(HEADER + COLLIDING[name])


LARGE: list[Any] = [
    list(range(40_000)), {i: i for i in range(9000)}, {str(i): [i] for i in range(9000)}, frozenset(range(20_000)),
    {(i, str(i)): None for i in range(5000)}, {2**i for i in range(1500)}, [{1: "a", None: {True: 1.5}}] * 4000,
    {i / 7: b"x" for i in range(9000)}, ["é" * 300, -1, 2**40] * 100, (("x" * 70_000,),), {b"x": {"y": b"z" * 70_000}},
]  # fmt: skip


@pytest.mark.parametrize("value", LARGE, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("way", WAYS)
def test_large_values_are_not_taken_for_colliding_ones(value: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_way(way, monkeypatch)
    assert decode(codec.encode(value).metadata) == value


def test_without_the_library_keys_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable() -> Any:
        raise native.NativeUnavailableError("no compiler")

    monkeypatch.setattr(native, "load", unavailable)
    monkeypatch.setattr(codec_values, "_key_check", codec_values._key_check.__wrapped__)
    value = {f"key {number}": [number] for number in range(3000)}
    assert decode(codec.encode(value).metadata) == value


@pytest.mark.slow
@given(value=st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner),
), end=st.integers(0, 200), change=st.tuples(st.integers(0, 200), st.integers(0, 255)))  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_both_looks_at_keys_agree(value: Any, end: int, change: tuple[int, int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        take_way("library", patch)
    check = codec_values._key_check()
    try:
        body = codec.encode(value).metadata[len(HEADER) :]
    except codec.MessageEncodeError:
        return
    assert check(body)
    assert has_plain_keys(body)
    changed = bytearray(body[: end or None])
    if changed:
        changed[change[0] % len(changed)] = change[1]
    assert check(bytes(changed)) == has_plain_keys(bytes(changed)), bytes(changed)
