"""Messages between leaders, over a pair of sockets in one process."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest

from device_communicators.hierarchical import streams
from device_communicators.hierarchical.streams import _HEAD as HEAD
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


def _wait(ends: Streams, transfers: Sequence[Transfer]) -> None:
    ends.wait(lambda: {each.stream for each in transfers if not each.done}, _limit())


def _frame(end: Streams, stream: Stream) -> Frame:
    end.wait(lambda: [stream] if stream.frame is None else [], _limit())
    assert stream.frame is not None
    return stream.frame


SIZES = (1, 31, 1000, 16_383, 16_384, 65_536, 70_000, 1_000_000)


def _call(end: Streams, seed: int, own: int) -> None:
    """Sends a frame and messages of two kinds; receives as many, the kinds in another order than they come in."""
    draw = random.Random(seed)
    (stream,) = end.by_rank.values()
    sizes = [draw.choice(SIZES) for _ in range(5)]
    first, *others = [bytes([(own + at) % 256]) * size for at, size in enumerate(sizes)]
    theirs = [bytes([(1 - own + at) % 256]) * size for at, size in enumerate(sizes)]
    sends = [stream.send(head_of(b"PSH4", bytes(8), b"call %d" % seed, len(first)), first)]
    sends += [stream.send_body(1 + at % 2, body) for at, body in enumerate(others)]
    frame = _frame(end, stream)
    assert (frame.text, frame.body_bytes) == (b"call %d" % seed, sizes[0])
    outs = [bytearray(size) for size in sizes]
    receives = [stream.receive_body(memoryview(outs[0]))]
    stream.parse()
    order = (1, 3, 2, 4) if draw.random() < 0.5 else (2, 4, 1, 3)
    receives += [stream.receive(1 + (at - 1) % 2, memoryview(outs[at])) for at in order]
    _wait(end, [*sends, *receives])
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
        ends[1].wait(lambda: [here], _limit(0.01))


@pytest.fixture
def three() -> Iterator[tuple[Streams, dict[int, Stream]]]:
    """The connections of rank 0 to ranks 1 and 2, and their ends of these."""
    pairs = {rank: socket.socketpair() for rank in (1, 2)}
    here = Streams({rank: Stream(pair[0], rank) for rank, pair in pairs.items()}, 0.0)
    theirs = {rank: Stream(pair[1], 0) for rank, pair in pairs.items()}
    yield here, theirs
    here.close()
    for stream in theirs.values():
        stream.socket.close()


def test_strangers_hold_nobody_up() -> None:
    """Silent ones, one with another token, one who leaves; and who is expected, whose words come one by one."""
    context = SimpleNamespace(deaths=lambda: False)
    token, made, began = bytes(range(16)), dict[int, socket.socket](), time.monotonic()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))

        def meet() -> socket.socket:
            return stack.enter_context(socket.create_connection(listener.getsockname(), LIMIT_S))

        for _ in range(20):
            meet()
        meet().sendall(bytes(20))
        meet().close()
        peer = meet()

        def speak() -> None:
            for byte in struct.pack("<16sI", token, 3):
                peer.sendall(bytes([byte]))
                time.sleep(0.005)

        speaker = threading.Thread(target=speak)
        speaker.start()
        streams._accept(context, listener, token, [3], made, began + LIMIT_S)  # type: ignore[arg-type]
        speaker.join()
        assert list(made) == [3] and made[3].getpeername() == peer.getsockname()
        made[3].close()
    assert time.monotonic() - began < 10 * streams._STRANGER_S, "each of twenty would take as long"


def test_who_has_sent_all_may_go(three: tuple[Streams, dict[int, Stream]]) -> None:
    here, theirs = three
    outs = {rank: bytearray(4) for rank in (1, 2)}
    receives = [here.by_rank[rank].receive(1, memoryview(out)) for rank, out in outs.items()]
    theirs[1].send_body(1, b"soon")
    theirs[1].socket.close()
    later = threading.Timer(0.2, lambda: theirs[2].send_body(1, b"late"))
    later.start()
    _wait(here, receives)
    assert outs == {1: b"soon", 2: b"late"}
    later.join()


def test_who_is_late_is_named_and_not_who_has_come(three: tuple[Streams, dict[int, Stream]]) -> None:
    here, theirs = three
    theirs[1].send_body(1, b"soon")
    receives = [here.by_rank[rank].receive(1, memoryview(bytearray(4))) for rank in (1, 2)]
    with pytest.raises(StreamError, match="timed out") as caught:
        here.wait(lambda: {each.stream for each in receives if not each.done}, _limit(0.3))
    assert caught.value.rank == 2


def test_a_wait_ends_as_another_thread_closes_or_fails(three: tuple[Streams, dict[int, Stream]]) -> None:
    here, _ = three
    one, two = (here.by_rank[rank] for rank in (1, 2))
    failing = threading.Timer(0.1, one.end_sending)
    failing.start()
    with pytest.raises(StreamError, match="a call of this rank in this group failed"):
        _wait(here, [one.receive(1, memoryview(bytearray(4)))])
    closing = threading.Timer(0.1, here.close)
    closing.start()
    with pytest.raises(StreamError, match="the group was closed"):
        _wait(here, [two.receive(1, memoryview(bytearray(4)))])
    failing.join()
    closing.join()


def test_a_text_or_body_that_has_no_room_breaks_the_stream(ends: tuple[Streams, Streams]) -> None:
    (there,), (here,) = (end.by_rank.values() for end in ends)
    there.send(HEAD.pack(b"PSH4", bytes(8), 0, 1 << 21, 0))
    with pytest.raises(StreamError, match="a text of 2097152 bytes"):
        _frame(ends[1], here)
    (back,) = ends[0].by_rank.values()
    here.error = ""
    here.send(HEAD.pack(b"", bytes(8), 7, 0, 1 << 62))
    with pytest.raises(StreamError, match="there is no memory for"):
        _frame(ends[0], back)
