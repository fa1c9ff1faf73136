from __future__ import annotations

import ctypes
import functools
import statistics
import time
from pathlib import Path

import pytest
import torch

from device_communicators.base.errors import CollectiveTimeoutError, MessageDecodeError
from device_communicators.cpu import native
from device_communicators.cpu.channels import MESSAGES, SHAPE, Channels
from device_communicators.cpu.message_queue import Message, Receiver, Sender, pieces_of
from tests.internals.queue_memory import channels

TIMEOUT_S = 0.15
MAGIC, CHUNK, MESSAGE, TOTAL_BYTES, HEAD_BYTES, FINGERPRINT = range(6)
"""Words of `ChunkHeader` in csrc/queue.h."""

try:
    native.load()
except native.NativeUnavailableError as error:
    pytest.skip(f"no shared-memory library: {error}", allow_module_level=True)


@pytest.mark.slow
def test_waits_end_at_their_deadline(tmp_path: Path) -> None:
    readers: list[float] = []
    writers: list[float] = []
    x = torch.zeros(8 << 20, dtype=torch.uint8)
    with channels(tmp_path / "queue", 0, 6, timeout_s=TIMEOUT_S, meet=False) as ends:
        for other in range(1, 6):
            sender = ends.sender(other, MESSAGES)
            for waits, call in (
                (readers, ends.receiver(other, MESSAGES).next),
                (writers, functools.partial(sender.send, Message(b"", (x,)))),
            ):
                started = time.monotonic()
                with pytest.raises(CollectiveTimeoutError) as caught:
                    call()
                waits.append(time.monotonic() - started)
                assert caught.value.suspect_ranks == (other,)
    for waits in (readers, writers):
        assert min(waits) >= TIMEOUT_S
        assert statistics.median(waits) < 1.3 * TIMEOUT_S


def _word(ends: Channels, chunk: int, word: int) -> ctypes.c_uint64:
    place = ends.sender(1, MESSAGES)._place
    return ctypes.c_uint64.from_address(place.data + chunk * place.shape.chunk_bytes + 8 * word)


@pytest.mark.parametrize(
    ("chunk", "word", "value"),
    [(0, MAGIC, 1), (0, CHUNK, 2), (0, MESSAGE, 2), (0, MESSAGE, 0), (0, HEAD_BYTES, 1 << 40)]
    + [(0, TOTAL_BYTES, 1 << 61)]
    + [(1, MAGIC, 1), (1, CHUNK, 1), (1, MESSAGE, 2), (1, MESSAGE, 0), (1, TOTAL_BYTES, 200_001)],
)  # fmt: skip
def test_a_chunk_that_is_not_the_next_of_its_message(tmp_path: Path, chunk: int, word: int, value: int) -> None:
    sent, received = torch.full((200_000,), 5, dtype=torch.uint8), torch.zeros(200_000, dtype=torch.uint8)
    path = tmp_path / "queue"
    with channels(path, 0, 2, meet=False) as ours, channels(path, 1, 2, meet=False) as theirs:
        receiver = theirs.receiver(0, MESSAGES)
        ours.sender(1, MESSAGES).send(Message(b"", (sent,)))
        _word(ours, chunk, word).value = value
        with pytest.raises(MessageDecodeError, match="isn't the next part of a message"):
            _receive(receiver, received)
        with pytest.raises(MessageDecodeError):
            receiver.next()


def test_a_second_message_with_the_number_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "queue"
    with channels(path, 0, 2, meet=False) as ours, channels(path, 1, 2, meet=False) as theirs:
        sender: Sender = ours.sender(1, MESSAGES)
        receiver = theirs.receiver(0, MESSAGES)
        out = torch.zeros(3)
        for number in range(2):
            sender.send(Message(b"", (torch.ones(3),)))
            if number == 0:
                _receive(receiver, out)
        assert out.tolist() == [1.0] * 3
        assert [_word(ours, chunk, MESSAGE).value for chunk in range(2)] == [1, 2]
        _word(ours, 1, MESSAGE).value = 1
        with pytest.raises(MessageDecodeError):
            receiver.next()


def _receive(receiver: Receiver, out: torch.Tensor) -> None:
    with receiver.lock:
        receiver.next()
        receiver.read(*pieces_of((out,)))


def test_a_poll_that_finds_nothing_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "queue"
    with channels(path, 0, 2, meet=False) as ours, channels(path, 1, 2, meet=False) as theirs:
        sender, receiver = ours.sender(1, MESSAGES), theirs.receiver(0, MESSAGES)
        assert not receiver.poll(0.01)
        sent = 0
        while sender.has_room():
            sender.send(Message(b"%d" % sent))
            sent += 1
        assert sent == SHAPE.chunks
        for number in range(sent):
            assert receiver.poll(TIMEOUT_S) and bytes(receiver.head().data) == b"%d" % number
        assert sender.has_room() and not receiver.poll(0.0)
