from __future__ import annotations

import random
import struct
import tracemalloc
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from device_communicators.base import settings
from device_communicators.base.errors import (
    InvalidArgumentError,
    MessageDecodeError,
    MessageEncodeError,
    RemoteError,
)
from device_communicators.base.member import Timeout
from device_communicators.routing.communicator import GroupContext
from parallel_state.messages import wire
from parallel_state.messages.codec import coding as codec
from parallel_state.messages.codec.values import to_msgpack
from parallel_state.messages.wire import FRAME_BYTES, Header

CONTEXT = GroupContext("wire:0", (4, 7, 9), 1, torch.device("cpu"), timeout=Timeout(5.0))
SRC = 2
HEADER = struct.Struct("<4sBBHIIQQ")
INLINE_BYTES = FRAME_BYTES - HEADER.size
VALUE, ERROR = 0, 1


class FakeGroup(NamedTuple):
    world_size: int
    rank_in_group: int

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        raise NotImplementedError


def frame_of(
    body: bytes = b"",
    *,
    magic: bytes = b"PSM1",
    kind: int = VALUE,
    slices: int = 0,
    tensors: int = 0,
    body_bytes: int | None = None,
    tensor_bytes: int = 0,
) -> Tensor:
    told = len(body) if body_bytes is None else body_bytes
    data = HEADER.pack(magic, kind, 0, slices, tensors, 0, told, tensor_bytes) + body[:INLINE_BYTES]
    return torch.frombuffer(bytearray(data.ljust(FRAME_BYTES, b"\0")), dtype=torch.uint8)


def read(frame: Tensor, rest: Tensor | None = None, allow_pickle: bool = False) -> tuple[codec.Message, list[bool]]:
    header = wire.parse_frame(frame, CONTEXT, SRC)
    buffer = wire.rest_buffer(header)
    assert buffer is None or buffer.numel() <= settings.MAX_METADATA_BYTES.get()
    if rest is None and buffer is not None:
        rest = buffer.zero_()
    return wire.read_body(header, wire.body_of(header, frame, rest), CONTEXT, SRC, allow_pickle)


def check_refused(frame: Tensor, match: str) -> None:
    with pytest.raises(MessageDecodeError, match=match) as raised:
        message, _ = read(frame)
        assert sum(metadata.nbytes for metadata in message.tensors) <= BYTES
        tensors = [torch.zeros(metadata.shape, dtype=metadata.dtype) for metadata in message.tensors]
        wire.build(message, tensors, CONTEXT, SRC)
    error = raised.value
    assert "rank 2 of group 'wire:0'" in str(error)
    assert (error.group, error.rank, error.suspect_ranks) == ("wire:0", 1, (9,))
    assert len(str(error)) < 1000


def two_tensors() -> dict[str, Any]:
    return {"even": torch.arange(6.0), "odd": torch.arange(3), "text": "abc"}


BODY = codec.encode(two_tensors()).metadata
BYTES = 6 * 4 + 3 * 8
METADATA_LIMIT = settings.MAX_METADATA_BYTES.default


@pytest.mark.parametrize("size", [0, 100, *range(INLINE_BYTES - 12, INLINE_BYTES + 4), 100_000])
@pytest.mark.parametrize("tensors", [0, 3])
def test_a_message_of_any_size_is_read_back(size: int, tensors: int) -> None:
    value = ["x" * size, *(torch.full((i,), i) for i in range(tensors))]
    outgoing = wire.encode(value, allow_pickle=False)
    assert outgoing.error is None
    assert outgoing.frame.numel() == FRAME_BYTES
    header = wire.parse_frame(outgoing.frame, CONTEXT, SRC)
    expected = len(codec.encode(value).metadata) + tensors
    assert header == Header(VALUE, 0, tensors, expected, sum(8 * i for i in range(tensors)))
    assert header.rest_bytes == max(0, expected - INLINE_BYTES)
    assert (outgoing.rest is None) == (expected <= INLINE_BYTES)
    message, cut = read(outgoing.frame, outgoing.rest)
    assert cut == [False] * tensors
    assert [metadata.shape for metadata in message.tensors] == [(i,) for i in range(tensors)]
    got = wire.build(message, outgoing.tensors, CONTEXT, SRC)
    assert got[0] == "x" * size
    assert all(torch.equal(a, b) for a, b in zip(got[1:], value[1:], strict=True))


def test_the_form_of_a_frame() -> None:
    """Ranks of two versions must not misread each other: a change of these bytes needs another magic."""
    frame = wire.encode([torch.ones(2), None], allow_pickle=False).frame
    header = "50534d31 00 00 0000 01000000 00000000 1e00000000000000 0800000000000000"
    body = "01 10000000 9193a7 666c6f61743332 9102 a3637075 92 d60900000000 c0 00"
    expected = bytes.fromhex(header) + bytes.fromhex(body)
    assert bytes(frame.tolist()) == expected.ljust(FRAME_BYTES, b"\0")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_slices(rank: int) -> None:
    value = {
        "cut": torch.arange(12.0).view(4, 3),
        "strided": torch.arange(12.0).view(4, 3).t(),
        "odd": torch.arange(4),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(1),
        "own": torch.arange(3.0),
        "own with grad": torch.arange(3.0, requires_grad=True),
        "both": torch.arange(6, dtype=torch.int8),
    }
    whole = {"own": False, "own with grad": False, "both": True, "absent": False}
    outgoing = wire.encode(value, allow_pickle=False, all_gather_group=FakeGroup(3, rank), all_gather_tensors=whole)
    message, cut = read(outgoing.frame)
    keys = ["cut", "strided", "both"]
    assert [key for key, marked in zip(value, cut, strict=True) if marked] == keys
    assert [metadata.shape for metadata in message.tensors] == [tuple(x.shape) for x in value.values()]
    for tensor, (key, x) in zip(outgoing.tensors, value.items(), strict=True):
        expected = x.reshape(3, -1)[rank] if key in keys else x
        assert torch.equal(tensor, expected)
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
    header = wire.parse_frame(outgoing.frame, CONTEXT, SRC)
    assert header.slices == 3
    assert header.tensor_bytes == sum(x.nbytes for x in value.values())


def test_a_group_of_one_cuts_nothing() -> None:
    outgoing = wire.encode(two_tensors(), allow_pickle=False, all_gather_group=FakeGroup(1, 0))
    assert read(outgoing.frame)[1] == [False, False]


def test_what_can_not_be_encoded_becomes_an_error_frame() -> None:
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ({"a": [len]}, {}, MessageEncodeError, r"\['a'\]\[0\] is a builtin_function_or_method"),
        ([1], {"must_be": dict}, InvalidArgumentError, "a tensor dict must be a dict, but is a list"),
        ({1: 1}, {"must_be": list}, InvalidArgumentError, "an object list must be a list, but is a dict"),
        (
            {"s": torch.ones(2).to_sparse()},
            {"all_gather_group": FakeGroup(2, 0), "all_gather_tensors": {"s": False}},
            MessageEncodeError,
            r"\['s'\] is a tensor of layout",
        ),
        (torch.zeros(1).expand(1 << 45), {}, RuntimeError, "memory"),
        ("x" * (METADATA_LIMIT + 1), {}, MessageEncodeError, f"at most {METADATA_LIMIT} bytes"),
    ]
    for value, kwargs, kind, match in cases:
        outgoing = wire.encode(value, allow_pickle=False, **kwargs)
        assert isinstance(outgoing.error, kind)
        assert outgoing.rest is None
        assert outgoing.tensors == []
        with pytest.raises(RemoteError, match=match) as raised:
            read(outgoing.frame)
        assert raised.value.rank == 9
        assert "rank 2 of group 'wire:0' (global rank 9) could not send: " in str(raised.value)
        assert str(outgoing.error)[:3000] in str(raised.value)


def test_a_long_error_text_is_cut_to_the_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("é" * INLINE_BYTES + "\ud800")

    monkeypatch.setattr(codec, "encode", fail)
    outgoing = wire.encode(1, allow_pickle=False)
    assert isinstance(outgoing.error, ValueError)
    assert outgoing.frame.numel() == FRAME_BYTES
    with pytest.raises(RemoteError, match="é" * (INLINE_BYTES // 2)):
        read(outgoing.frame)


@pytest.mark.parametrize("size", [0, 1, 4, 31, 32, 33, FRAME_BYTES - 1, FRAME_BYTES + 1])
def test_a_frame_of_another_size(size: int) -> None:
    frame = torch.cat([frame_of(BODY + b"\0\0", tensors=2, tensor_bytes=BYTES), torch.zeros(1, dtype=torch.uint8)])
    check_refused(frame[:size].clone(), f"its frame has {size} bytes, not {FRAME_BYTES}")


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"magic": b"PSM0"}, r"begins with b'PSM0', not b'PSM1'"),
        ({"magic": b"\x80\x05\x95\x00"}, r"begins with b'\\x80"),
        ({"magic": b"\0\0\0\0"}, "begins with"),
        ({"kind": 3}, "its kind is 3"),
        ({"kind": 255}, "its kind is 255"),
        ({"body_bytes": METADATA_LIMIT + 1}, f"more than {METADATA_LIMIT} .PARALLEL_STATE_MAX_METADATA_BYTES"),
        ({"body_bytes": 1 << 62}, f"has {1 << 62} bytes"),
        ({"body_bytes": (1 << 64) - 1}, f"has {(1 << 64) - 1} bytes"),
        ({"tensors": (1 << 32) - 1}, "it announces 4294967295 tensors in"),
        ({"tensors": len(BODY) + 3}, "it announces .* tensors in"),
        ({"tensor_bytes": 1 << 48}, f"tensors of {1 << 48} bytes"),
        ({"tensor_bytes": (1 << 64) - 1}, f"tensors of {(1 << 64) - 1} bytes"),
        ({"tensor_bytes": BYTES - 1}, f"header announces {BYTES - 1} bytes of tensors, its metadata {BYTES}"),
        ({"tensor_bytes": BYTES + 1}, f"header announces {BYTES + 1} bytes of tensors, its metadata {BYTES}"),
        ({"tensors": 0}, "header announces 0 tensors, its metadata 2"),
        ({"tensors": 1}, "header announces 1 tensors, its metadata 2"),
        ({"tensors": 3}, "header announces 3 tensors, its metadata 2"),
        ({"tensors": len(BODY) + 2}, "metadata must be 5 bytes or more"),
        ({"body_bytes": 0, "tensors": 0}, "metadata must be 5 bytes or more, but is 0"),
        ({"body_bytes": len(BODY)}, "can't be cut into 0 slices"),
        ({"body_bytes": len(BODY) + 3}, "bytes from a peer are not a message"),
        ({"body_bytes": INLINE_BYTES + 5000}, "bytes from a peer are not a message"),
        ({"kind": ERROR, "tensors": 2}, "or tensors after the text"),
        ({"kind": ERROR, "tensors": 0}, "or tensors after the text"),
        ({"kind": ERROR, "tensors": 0, "tensor_bytes": 0, "body_bytes": INLINE_BYTES + 1}, "longer than the frame"),
        ({"kind": ERROR, "tensors": 0, "tensor_bytes": 0, "body_bytes": 1 << 63}, "longer than the frame"),
    ],
)
def test_a_header_that_lies(header: dict[str, Any], match: str) -> None:
    honest: dict[str, Any] = {"tensors": 2, "tensor_bytes": BYTES}
    read(frame_of(BODY + b"\0\0", **honest))
    tracemalloc.start()
    try:
        check_refused(frame_of(BODY + b"\0\0", **{**honest, **header}), match)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("slices", "flags", "match"),
    [
        (0, b"\1\0", "of shape .6. can't be cut into 0 slices"),
        (1, b"\1\0", "of shape .6. can't be cut into 1 slices"),
        (2, b"\0\1", "of shape .3. can't be cut into 2 slices"),
        (4, b"\1\0", "of shape .6. can't be cut into 4 slices"),
        (65535, b"\xff\0", "can't be cut into 65535 slices"),
    ],
)
def test_marks_of_slices_that_can_not_be(slices: int, flags: bytes, match: str) -> None:
    check_refused(frame_of(BODY + flags, tensors=2, tensor_bytes=BYTES, slices=slices), match)


def test_marks_of_slices_that_can_be() -> None:
    for slices, flags in ((2, b"\1\0"), (3, b"\1\1"), (6, b"\xff\0"), (65535, b"\0\0")):
        _, cut = read(frame_of(BODY + flags, tensors=2, tensor_bytes=BYTES, slices=slices))
        assert cut == [flag != 0 for flag in flags]


def test_a_slice_of_an_empty_tensor() -> None:
    body = codec.encode(torch.empty(0, 4)).metadata
    check_refused(frame_of(body + b"\1", tensors=1, slices=2), r"of shape \[0, 4\] can't be cut into 2 slices")


def test_every_truncated_body() -> None:
    for size in range(len(BODY) + 2):
        for tensors in (0, 2):
            check_refused(frame_of((BODY + b"\0\0")[:size], tensors=min(tensors, size), tensor_bytes=BYTES), ".")


def table_body(*rows: object) -> bytes:
    table = to_msgpack(list(rows))
    return struct.pack("<BI", codec.FORMAT_VERSION, len(table)) + table + b"\xc0" + bytes(len(rows))


@pytest.mark.parametrize(
    "row",
    [
        ["float32", [1 << 46], "cpu"],
        ["float32", [1 << 24, 1 << 24], "cpu"],
        ["float32", [1 << 47, 0, 1 << 47], "cpu"],
        ["float32", [-1], "cpu"],
        ["float32", [1] * 65, "cpu"],
        ["float32", [1.5], "cpu"],
        ["float32", 3, "cpu"],
        ["qint8", [1], "cpu"],
        ["Tensor", [1], "cpu"],
        ["float32", [1], "meta"],
        ["float32", [1], "cuda:0"],
        ["float32", [1], "nowhere"],
        ["float32", [1]],
        [],
        None,
        "float32",
    ],
)
def test_a_tensor_that_can_not_be(row: object) -> None:
    check_refused(frame_of(table_body(row), tensors=1, tensor_bytes=4), "rank 2")


@pytest.mark.parametrize(
    "body",
    [
        b"\x80\x05\x95" + bytes(50),
        b"\0" * 40,
        b"\xff" * 40,
        struct.pack("<BI", 1, 1 << 31),
        struct.pack("<BI", 1, 0),
        struct.pack("<BI", 1, 0) + b"\xc1",
        struct.pack("<BI", 1, 0) + b"\xdd\xff\xff\xff\xff",
        struct.pack("<BI", 1, 0) + b"\xc6\xff\xff\xff\xff",
        struct.pack("<BI", 1, 0) + b"\x91" * 2000 + b"\xc0",
        struct.pack("<BI", 1, 0) + b"\xd6\x09\0\0\0\0",
        struct.pack("<BI", 1, 0) + b"\xc7\x01\x63\0",
        struct.pack("<BI", 1, 0) + b"\xc0\xc0",
    ],
)
def test_a_body_that_is_none(body: bytes) -> None:
    tracemalloc.start()
    try:
        check_refused(frame_of(body), "rank 2")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_body_that_shows_to_be_none_with_its_tensors() -> None:
    body = BODY.replace(b"\xd6\x09\1\0\0\0", b"\xd6\x09\2\0\0\0")
    assert body != BODY
    message, _ = read(frame_of(body + b"\0\0", tensors=2, tensor_bytes=BYTES))
    with pytest.raises(
        MessageDecodeError, match=r"rank 2 of group 'wire:0'.*refers to tensor number 2, but has 2"
    ) as raised:
        wire.build(message, list(two_tensors().values())[:2], CONTEXT, SRC)
    assert raised.value.suspect_ranks == (9,)


def test_the_limit_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = len(BODY) + 2
    frame = frame_of(BODY + b"\0\0", tensors=2, tensor_bytes=BYTES)
    monkeypatch.setenv(settings.MAX_METADATA_BYTES.name, str(limit))
    read(frame)
    assert wire.encode(two_tensors(), allow_pickle=False).error is None
    monkeypatch.setenv(settings.MAX_METADATA_BYTES.name, str(limit - 1))
    check_refused(frame, f"has {limit} bytes, more than {limit - 1}")
    refused = wire.encode(two_tensors(), allow_pickle=False)
    assert isinstance(refused.error, MessageEncodeError)
    with pytest.raises(RemoteError, match=f"at most {limit - 1} bytes"):
        read(refused.frame)


def test_an_error_text_of_any_bytes() -> None:
    for text, match in ((b"", r"could not send: $"), (b"\xff\xfe", "�"), (b"x" * INLINE_BYTES, "x" * INLINE_BYTES)):
        with pytest.raises(RemoteError, match=match):
            read(frame_of(text, kind=ERROR))


def test_a_pickled_value_is_not_loaded() -> None:
    body = codec.encode([2j, slice(1)], allow_pickle=True).metadata
    check_refused(frame_of(body), "pickled value")
    message, _ = read(frame_of(body), allow_pickle=True)
    assert wire.build(message, [], CONTEXT, SRC) == [2j, slice(1)]


SAMPLES: list[Any] = [
    two_tensors(),
    [1, "text", {"key": (None, 2.5)}, {3, 4}, b"bytes"] * 3,
    {"nested": [[[[torch.ones(2, 2, dtype=torch.bool)]]]], "dtype": torch.bfloat16},
    "x" * (INLINE_BYTES + 100),
]


def mutate(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.choice([1, 1, 2, 5])):
        at = chance.randrange(len(data)) if chance.random() < 0.3 else chance.randrange(min(140, len(data)))
        kind = chance.randrange(4)
        if kind == 0:
            data[at] = chance.randrange(256)
        elif kind == 1:
            data[at] = chance.choice([0, 1, 0x7F, 0x80, 0xC1, 0xC6, 0xDD, 0xDF, 0xFF])
        elif kind == 2:
            data[at] ^= 1 << chance.randrange(8)
        else:
            length, source = chance.randrange(1, 9), chance.randrange(min(140, len(data)))
            data[at : at + length] = data[source : source + length].ljust(length, b"\0")[: len(data) - at]


def test_mutated_messages() -> None:
    chance = random.Random(0)
    outcomes = {"read": 0, "refused": 0, "told": 0}
    made = [wire.encode(sample, allow_pickle=False) for sample in SAMPLES]
    tracemalloc.start()
    try:
        for turn in range(3000):
            outgoing = made[turn % len(made)]
            data = bytearray(outgoing.frame.tolist())
            mutate(data, chance)
            frame = torch.frombuffer(data[:FRAME_BYTES], dtype=torch.uint8)
            try:
                header = wire.parse_frame(frame, CONTEXT, SRC)
                if header.rest_bytes > 1 << 20:
                    continue
                message, _ = read(frame, outgoing.rest if header.rest_bytes == 100 else None)
                if sum(metadata.nbytes for metadata in message.tensors) < 1 << 20:
                    tensors = [torch.zeros(metadata.shape, dtype=metadata.dtype) for metadata in message.tensors]
                    wire.build(message, tensors, CONTEXT, SRC)
                outcomes["read"] += 1
            except MessageDecodeError as error:
                assert error.suspect_ranks == (9,)
                outcomes["refused"] += 1
            except RemoteError:
                outcomes["told"] += 1
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert min(outcomes["read"], outcomes["refused"]) > 300, "the mutations are too mild, or too wild"


def test_noise() -> None:
    chance = random.Random(1)
    for _ in range(300):
        noise = bytearray(chance.randbytes(FRAME_BYTES))
        check_refused(torch.frombuffer(noise, dtype=torch.uint8), "begins with")
        noise[: HEADER.size] = HEADER.pack(b"PSM1", 0, 0, chance.randrange(9), 0, 0, chance.randrange(INLINE_BYTES), 0)
        check_refused(torch.frombuffer(noise, dtype=torch.uint8), "rank 2")
