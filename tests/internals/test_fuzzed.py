"""Row 36 of docs/failures.md: damaged frames become an object or a MessageDecodeError, within a constant
multiple of their size in memory. Thousands run by default, a million with FAILURE_TESTS=long."""

from __future__ import annotations

import collections
import ctypes
import gc
import mmap
import os
import pickle
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from device_communicators.base.errors import CollectiveTimeoutError, MessageDecodeError
from device_communicators.base.member import Timeout
from device_communicators.cpu import native
from device_communicators.cpu.message_queue import Message, Place, Receiver, Sender, Shape, Waiting
from device_communicators.cpu.native_group import Members
from device_communicators.routing.communicator import GroupContext
from parallel_state.messages import wire
from parallel_state.messages.codec import coding as codec
from tests.extent import LONG
from tests.failure.conftest import nothing_left  # noqa: F401 - for each test
from tests.internals.test_codec_hostile import SAMPLE

CODEC_FRAMES, WIRE_FRAMES, QUEUE_HEADERS = (count if LONG else count // 100 for count in (700_000, 250_000, 50_000))

MOST_BYTES = 16 << 20
CONTEXT = GroupContext("fuzzed:0", (0, 1), 0, torch.device("cpu"), timeout=Timeout(5.0))
DEEP = 10**4
SHAPE = Shape(512, 8)
LENGTHS = (0, 1, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def _ran() -> None:
    raise SystemError("a pickle was loaded")


class Boom:
    def __reduce__(self) -> Any:
        return _ran, ()


def frames(seed: int, count: int, whole: list[bytes]) -> Iterator[bytes]:
    rng = random.Random(seed)
    pickles = [pickle.dumps(Boom(), protocol) for protocol in range(6)]
    deep = [b"\x91" * DEEP, b"\x81\xa0" * DEEP, b"\xdd\0\0\0\1" * DEEP, b"\xc9\0\0\x27\x10\x01" * DEEP]
    for number in range(count):
        data = bytearray(rng.choice(whole))
        kind = rng.randrange(8)
        if kind == 0:
            del data[rng.randrange(len(data)) :]
        elif kind == 1:
            for _ in range(rng.randrange(1, 5)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        elif kind == 2:
            length = rng.choice(LENGTHS)
            size = rng.choice([size for size in (1, 2, 4, 8) if length < 1 << 8 * size] or [8])
            at = rng.randrange(len(data))
            data[at : at + size] = length.to_bytes(size, rng.choice(["little", "big"]))
        elif kind == 3:
            data += rng.randbytes(rng.randrange(1, 100))
        elif kind == 4:
            at = rng.randrange(len(data))
            data[at:at] = rng.choice(pickles)
        elif kind == 5:
            data = bytearray(rng.randbytes(rng.randrange(200)))
        elif kind == 6 and number % 50 == 0:
            at = rng.randrange(len(data))
            data[at:] = rng.choice(deep)
        else:
            other = rng.choice(whole)
            data[rng.randrange(len(data)) :] = other[rng.randrange(len(other)) :]
        yield bytes(data)


@contextmanager
def bounded_memory(most_bytes: int = MOST_BYTES) -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    try:
        yield
        gc.collect()
        held, peak = tracemalloc.get_traced_memory()
        assert peak < most_bytes, f"{peak} bytes at once"
        assert held < 1 << 20, f"{held} bytes stay"
    finally:
        tracemalloc.stop()


def outcomes_of(read: Callable[[bytes], object], data: Iterator[bytes]) -> collections.Counter[str]:
    outcomes: collections.Counter[str] = collections.Counter()
    for each in data:
        try:
            read(each)
        except MessageDecodeError:
            outcomes["refused"] += 1
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error}, for {each[:200]!r} ({len(each)} bytes)")
        else:
            outcomes["read"] += 1
    return outcomes


def test_row_36_messages_of_the_codec() -> None:
    whole = [codec.encode(value).metadata for value in (SAMPLE, *SAMPLE.values(), [], {"a": "b" * 300}, 1)]

    def read(data: bytes) -> None:
        message = codec.read(data)
        if sum(metadata.nbytes for metadata in message.tensors) < 1 << 20:
            message.build([torch.empty(metadata.shape, dtype=metadata.dtype) for metadata in message.tensors])

    with bounded_memory():
        outcomes = outcomes_of(read, frames(1, CODEC_FRAMES, whole))
    assert outcomes["refused"] > CODEC_FRAMES // 4 and outcomes["read"] > CODEC_FRAMES // 100, outcomes


def test_row_36_frames_of_a_group() -> None:
    values = (SAMPLE["tensors"], SAMPLE["plain"], {"x": torch.ones(3)}, 1, "text" * 100)
    whole = []
    for value in values:
        sent = wire.encode(value, allow_pickle=False)
        rest = sent.rest
        whole.append(wire.bytes_of(sent.frame) + (b"" if rest is None else wire.bytes_of(rest)))
        whole.append(whole[-1][: wire.HEADER_BYTES + 200])

    def read(data: bytes) -> None:
        header = wire.parse_header(data, CONTEXT, 1)
        if not header.is_error:
            wire.read_body(header, data[wire.HEADER_BYTES :][: header.body_bytes], CONTEXT, 1, False)

    with bounded_memory():
        outcomes = outcomes_of(read, frames(2, WIRE_FRAMES, whole))
    assert outcomes["refused"] > WIRE_FRAMES // 4 and outcomes["read"] > WIRE_FRAMES // 100, outcomes


class Ring:
    def __init__(self) -> None:
        self._library = native.load()
        self._control_bytes = self._library.ps_queue_control_bytes(1)
        self.memory = mmap.mmap(-1, self._control_bytes + SHAPE.data_bytes)
        self._view = (ctypes.c_char * len(self.memory)).from_buffer(self.memory)
        self._address = ctypes.addressof(self._view)
        self._members = [Members("queue:0", (0, 1), rank, Timeout(0.001)) for rank in (0, 1)]
        self._liveness = self._library.ps_liveness_new((ctypes.c_int64 * 2)(os.getpid(), os.getpid()), 2)

    def header_of(self, chunk: int) -> int:
        return self._control_bytes + chunk * SHAPE.chunk_bytes

    @contextmanager
    def ends(self) -> Iterator[tuple[Sender, Receiver]]:
        self.memory[: self._control_bytes] = bytes(self._control_bytes)
        place = Place(self._address, self._address + self._control_bytes, SHAPE, (0, 1))
        waiting = Waiting(self._liveness, 0, 0)
        sender, receiver = (
            end(self._library, members, place, waiting)
            for end, members in zip((Sender, Receiver), self._members, strict=True)
        )
        try:
            yield sender, receiver
        finally:
            sender.close()
            receiver.close()

    def close(self) -> None:
        self._library.ps_liveness_delete(self._liveness)
        del self._view
        self.memory.close()


def test_row_36_headers_in_a_message_queue() -> None:
    rng = random.Random(5)
    fields = struct.Struct("<6Q")
    outcomes: collections.Counter[str] = collections.Counter()
    ring = Ring()

    def read_damaged() -> None:
        with ring.ends() as (sender, receiver):
            size = rng.choice([0, 1, 100, 447, 448, 449, 1500])
            sender.send(Message(bytes(size)))
            at = ring.header_of(rng.randrange(size // (SHAPE.chunk_bytes - 64) + 1))
            values = list(fields.unpack_from(ring.memory, at))
            field = rng.randrange(6)
            values[field] = rng.choice([rng.choice(LENGTHS), values[field] ^ 1 << rng.randrange(64)])
            if rng.random() < 0.1:
                values = [rng.getrandbits(64) for _ in values]
            fields.pack_into(ring.memory, at, *values)
            head = receiver.next()
            for _ in range(2):
                receiver.read_on(min(head.left_bytes // 2, 4096))

    with bounded_memory():
        for _ in range(QUEUE_HEADERS):
            try:
                read_damaged()
                outcomes["read"] += 1
            except MessageDecodeError:
                outcomes["refused"] += 1
            except CollectiveTimeoutError:
                outcomes["late"] += 1
    ring.close()
    assert outcomes["refused"] > QUEUE_HEADERS // 4 and outcomes["read"] > QUEUE_HEADERS // 20, outcomes
    assert 0 < outcomes["late"] < QUEUE_HEADERS // 2, outcomes
