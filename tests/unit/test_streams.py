"""Messages between leaders, over a pair of sockets in one process."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from device_communicators.hierarchical.streams import Frame, Stream, StreamError, Streams, Transfer, head_of

LIMIT_S = 20.0


@pytest.fixture
def ends() -> Iterator[tuple[Streams, Streams]]:
    pair = [Streams({rank: Stream(end, rank)}, 0.0) for rank, end in zip((1, 0), socket.socketpair(), strict=True)]
    pair[0].by_rank[1].socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    yield pair[0], pair[1]
    for end in pair:
        end.close()


def _limit(limit_s: float = LIMIT_S) -> Callable[[], float]:
    until = time.monotonic() + limit_s
    return lambda: until - time.monotonic()


def _wait(streams: Streams, transfers: Sequence[Transfer]) -> None:
    streams.wait(lambda: all(each.done for each in transfers), [each.stream for each in transfers], _limit())


def _frame(streams: Streams, stream: Stream) -> Frame:
    streams.wait(lambda: stream.frame is not None, [stream], _limit())
    assert stream.frame is not None
    return stream.frame


SIZES = (1, 31, 1000, 16_383, 16_384, 65_536, 70_000, 1_000_000)


def _call(streams: Streams, seed: int, own: int) -> None:
    """Sends a frame and messages of two kinds; receives as many, the kinds in another order than they come in."""
    draw = random.Random(seed)
    (stream,) = streams.by_rank.values()
    sizes = [draw.choice(SIZES) for _ in range(5)]
    first, *others = [bytes([(own + at) % 256]) * size for at, size in enumerate(sizes)]
    theirs = [bytes([(1 - own + at) % 256]) * size for at, size in enumerate(sizes)]
    sends = [stream.send(head_of(b"PSH4", bytes(8), b"call %d" % seed, len(first)), first)]
    sends += [stream.send_body(1 + at % 2, body) for at, body in enumerate(others)]
    frame = _frame(streams, stream)
    assert (frame.text, frame.body_bytes) == (b"call %d" % seed, sizes[0])
    outs = [bytearray(size) for size in sizes]
    receives = [stream.receive_body(memoryview(outs[0]))]
    stream.parse()
    order = (1, 3, 2, 4) if draw.random() < 0.5 else (2, 4, 1, 3)
    receives += [stream.receive(1 + (at - 1) % 2, memoryview(outs[at])) for at in order]
    _wait(streams, [*sends, *receives])
    assert outs == theirs, seed


def test_messages_come_whole_and_by_kind(ends: tuple[Streams, Streams]) -> None:
    failures: list[BaseException] = []

    def run(own: int) -> None:
        try:
            for seed in range(60):
                _call(ends[own], seed, own)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(own,)) for own in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not failures, failures


def test_an_early_message_waits_for_its_receive(ends: tuple[Streams, Streams]) -> None:
    (there,), (here,) = (end.by_rank.values() for end in ends)
    there.send_body(2, b"early")
    there.send_body(1, b"first")
    first, early = bytearray(5), bytearray(5)
    _wait(ends[1], [here.receive(1, memoryview(first))])
    assert here.receive(2, memoryview(early)).done
    assert (first, early) == (b"first", b"early")


def test_a_frame_s_body_is_left_alone_until_it_is_asked_for(ends: tuple[Streams, Streams]) -> None:
    (there,), (here,) = (end.by_rank.values() for end in ends)
    there.send(head_of(b"PSH4", b"12345678", b"words", 4), b"body")
    there.send(head_of(b"PSD4", b"12345678", b"", 0))
    assert _frame(ends[1], here) == (b"PSH4", b"12345678", 4, b"words")
    out = bytearray(4)
    assert here.receive_body(memoryview(out)).done and out == b"body"
    assert here.frame is None
    here.parse()
    assert here.frame == (b"PSD4", b"12345678", 0, b"")


def test_what_was_sent_before_the_end_is_read(ends: tuple[Streams, Streams]) -> None:
    (there,), (here,) = (end.by_rank.values() for end in ends)
    there.send(head_of(b"PSD4", bytes(8), b"no", 0))
    ends[0].end_sending()
    assert _frame(ends[1], here).text == b"no"
    here.skip_body()
    with pytest.raises(StreamError, match="closed by peer") as caught:
        _frame(ends[1], here)
    assert caught.value.rank == 0


def test_a_closed_connection_ends_a_send(ends: tuple[Streams, Streams]) -> None:
    (there,) = ends[0].by_rank.values()
    ends[1].close()
    with pytest.raises(StreamError, match="closed by peer"):
        _wait(ends[0], [there.send_body(1, bytes(1 << 20))])


def test_a_message_of_another_size_is_refused(ends: tuple[Streams, Streams]) -> None:
    (there,), (here,) = (end.by_rank.values() for end in ends)
    there.send_body(1, b"four")
    out = bytearray(5)
    with pytest.raises(StreamError, match="5 bytes were to come, and 4 came"):
        _wait(ends[1], [here.receive(1, memoryview(out))])
    assert out == bytes(5)


def test_a_wait_has_a_deadline(ends: tuple[Streams, Streams]) -> None:
    (here,) = ends[1].by_rank.values()
    with pytest.raises(StreamError, match="timed out"):
        ends[1].wait(lambda: False, [here], _limit(0.01))
