"""Messages between ranks, over a pair of sockets in one process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from device_communicators.cpu import connections, native
from device_communicators.cpu.streams import Part, StreamError, Streams

try:
    native.load()
except native.NativeUnavailableError as error:
    pytest.skip(f"no compiled library: {error}", allow_module_level=True)

LIMIT_S = 20.0
STRIPED_BYTES = 100
EARLY_BYTES = 64 << 20
HEAD = struct.Struct("<4s8sIIQ4x")
"""Magic, bytes received so far, kind, bytes of the text, bytes of the body: `kHead` of csrc/streams.cpp."""
AT_ONCE, ANNOUNCED, ASKED_FOR = b"PSH\1", b"PSHA", b"PSHB"
TEXT = b"float32 3"
KEPT_BYTES = 256
"""Beside a kept message's body."""


@pytest.fixture(params=[1, 3], ids=["one connection", "three connections"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Streams, Streams]]:
    """Two ranks; with several connections most bodies are striped."""
    pairs = [socket.socketpair() for _ in range(request.param)]
    for near, _ in pairs:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    sides = zip((1, 0), zip(*pairs, strict=True), strict=True)
    pair = [_streams({rank: side}, STRIPED_BYTES) for rank, side in sides]
    yield pair[0], pair[1]
    for end in pair:
        end.close()


def _streams(
    sockets: Mapping[int, Sequence[socket.socket]], striped_bytes: int = 1 << 20, spin_s: float = 0
) -> Streams:
    return Streams(sockets, spin_s, dict.fromkeys(sockets, EARLY_BYTES), striped_bytes)


def _wait(end: Streams, transfers: Sequence[int], limit_s: float = LIMIT_S) -> None:
    until = time.monotonic() + limit_s
    for transfer in transfers:
        end.wait(transfer, lambda: until - time.monotonic())


def _send(end: Streams, part: Part, kind: int = 2) -> int:
    return end.send(part, kind, TEXT)


def _receive(end: Streams, part: Part, kind: int = 2) -> int:
    return end.receive(part, kind, TEXT)


def _part(rank: int, memory: Any) -> Part:
    if isinstance(memory, bytes):
        at = ctypes.cast(ctypes.c_char_p(memory), ctypes.c_void_p).value
    else:
        at = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
    return rank, at or 0, len(memory), memory


SIZES = (1, 31, 1000, 16_383, 16_384, 65_536, 70_000, 1_000_000)


def _call(end: Streams, seed: int, own: int) -> None:
    """Sends messages of two kinds; receives as many, the kinds in another order than they were sent in."""
    draw, other = random.Random(seed), 1 - own
    sizes = [draw.choice(SIZES) for _ in range(5)]
    bodies = [bytes([(own + at) % 256]) * size for at, size in enumerate(sizes)]
    theirs = [bytes([(1 - own + at) % 256]) * size for at, size in enumerate(sizes)]
    sends = [_send(end, _part(other, body), 2 + 2 * (at % 2)) for at, body in enumerate(bodies)]
    outs = [bytearray(size) for size in sizes]
    order = (0, 2, 4, 1, 3) if draw.random() < 0.5 else (1, 3, 0, 2, 4)
    receives = [_receive(end, _part(other, outs[at]), 2 + 2 * (at % 2)) for at in order]
    _wait(end, [*sends, *receives])
    assert outs == theirs, seed


def _in_threads(*runs: Callable[[], object]) -> list[BaseException]:
    failures: list[BaseException] = []

    def run(each: Callable[[], object]) -> None:
        try:
            each()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    return failures


def test_messages_come_whole_and_by_kind(ends: tuple[Streams, Streams]) -> None:
    def run(own: int) -> None:
        for seed in range(60):
            _call(ends[own], seed, own)

    assert not _in_threads(lambda: run(0), lambda: run(1))


def test_an_early_message_waits_for_its_receive(ends: tuple[Streams, Streams]) -> None:
    there, here = ends
    _send(there, _part(1, b"early"), 4)
    _send(there, _part(1, b"first"), 2)
    first, early = bytearray(5), bytearray(5)
    _wait(here, [_receive(here, _part(0, first), 2)])
    assert here.facts(0)[0] == 5
    assert here.is_done(_receive(here, _part(0, early), 4))
    assert (first, early) == (b"first", b"early") and here.facts(0)[0] == 0


def test_a_closed_connection_ends_a_send(ends: tuple[Streams, Streams]) -> None:
    ends[1].close()
    body = bytes(1 << 20)
    with pytest.raises(StreamError, match="closed by peer"):
        _wait(ends[0], [_send(ends[0], _part(1, body))])


def test_a_peer_that_ends_within_a_body_ends_the_receive(ends: tuple[Streams, Streams]) -> None:
    there, here = ends
    out = bytearray(1 << 20)
    receive = _receive(here, _part(0, out))
    there.sockets[1][0].sendall(HEAD.pack(AT_ONCE, bytes(8), 2, len(TEXT), len(out)) + TEXT + bytes([7]) * 1000)
    with pytest.raises(StreamError, match="timed out"):
        _wait(here, [receive], 0.1)
    there.close()
    with pytest.raises(StreamError, match="closed by peer"):
        _wait(here, [receive])
    assert not here.is_done(receive)


@pytest.mark.parametrize("striped", [299, 300, 301])
def test_stripes_of_any_length_come_to_their_places(striped: int) -> None:
    """Of bodies around the least that is striped; of three bytes over four connections one carries nothing."""
    pairs = [socket.socketpair() for _ in range(4)]
    near = _streams({1: [pair[0] for pair in pairs]}, min(striped, 300))
    far = _streams({0: [pair[1] for pair in pairs]}, min(striped, 300))
    for size in (striped, 1000, 3):
        body, out = random.Random(size).randbytes(size), bytearray(size)
        sent = _send(near, _part(1, body))
        _wait(far, [_receive(far, _part(0, out))])
        _wait(near, [sent])
        assert out == body
    near.close()
    far.close()


def test_a_connection_that_ends_within_its_stripe_is_an_error() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    here = _streams({0: [pair[0] for pair in pairs]}, STRIPED_BYTES)
    out = bytearray(1000)
    receive = _receive(here, _part(0, out))
    pairs[0][1].sendall(HEAD.pack(AT_ONCE, bytes(8), 2, len(TEXT), len(out)) + TEXT + bytes([7]) * 500)
    pairs[1][1].sendall(bytes([8]) * 499)
    with pytest.raises(StreamError, match="timed out"):
        _wait(here, [receive], 0.1)
    pairs[1][1].close()
    with pytest.raises(StreamError, match="closed by peer"):
        _wait(here, [receive])
    assert out == bytes([7]) * 500 + bytes([8]) * 499 + bytes(1)
    here.close()
    pairs[0][1].close()


def test_a_message_of_another_size_is_refused(ends: tuple[Streams, Streams]) -> None:
    _send(ends[0], _part(1, b"four"))
    out = bytearray(5)
    with pytest.raises(StreamError, match="5 bytes were to come, and 4 came"):
        _wait(ends[1], [_receive(ends[1], _part(0, out))])
    assert out == bytes(5)


def test_a_wait_has_a_deadline(ends: tuple[Streams, Streams]) -> None:
    with pytest.raises(StreamError, match="timed out"):
        _wait(ends[1], [_receive(ends[1], _part(0, bytearray(1)))], 0.01)


HEADS = {
    "another magic": (HEAD.pack(b"PSHX", bytes(8), 7, 0, 0), "no message of this version"),
    "no magic": (HEAD.pack(b"", bytes(8), 7, 0, 4), "no message of this version"),
    "an older version": (HEAD.pack(b"PSH4", bytes(8), 0, 0, 0), "no message of this version"),
    "a long text": (HEAD.pack(AT_ONCE, bytes(8), 2, 1025, 0), "a text of 1025 bytes"),
    "the longest text": (HEAD.pack(AT_ONCE, bytes(8), 7, (1 << 32) - 1, 0), "a text of 4294967295 bytes"),
    "a large body": (HEAD.pack(AT_ONCE, bytes(8), 7, 0, 1 << 62), "there is no memory for 4611686018427387904 bytes"),
    "the largest body": (HEAD.pack(AT_ONCE, bytes(8), 7, 0, (1 << 64) - 1), "there is no memory for"),
    "a large body of a receive": (
        HEAD.pack(AT_ONCE, bytes(8), 2, 9, 1 << 62) + TEXT,
        "4 bytes were to come, and 46116860",
    ),
    "what nobody asked for": (HEAD.pack(ASKED_FOR, bytes(8), 2, 0, 4), "4 bytes came that nobody had asked for"),
    "another size announced": (
        HEAD.pack(ANNOUNCED, bytes(8), 2, 9, 1 << 62) + TEXT,
        "4 bytes were to come, and 46116860",
    ),
}


@pytest.mark.parametrize("hostile", HEADS)
def test_hostile_heads_break_the_connection(ends: tuple[Streams, Streams], hostile: str) -> None:
    head, words = HEADS[hostile]
    ends[0].sockets[1][0].sendall(head)
    out = bytearray(4)
    with pytest.raises(StreamError, match=words):
        _wait(ends[1], [_receive(ends[1], _part(0, out))])
    assert out == bytes(4)


@pytest.fixture
def three() -> Iterator[tuple[Streams, dict[int, Streams]]]:
    """The connections of rank 0 to ranks 1 and 2, and their ends of these."""
    pairs = {rank: socket.socketpair() for rank in (1, 2)}
    here = _streams({rank: pair[:1] for rank, pair in pairs.items()})
    theirs = {rank: _streams({0: pair[1:]}) for rank, pair in pairs.items()}
    yield here, theirs
    for end in (here, *theirs.values()):
        end.close()


def test_strangers_hold_nobody_up() -> None:
    """Silent ones, one with another token, one who leaves; and who is expected, whose words come one by one."""
    meeting = SimpleNamespace(has_lost_a_rank=lambda: False)
    token, made, began = bytes(range(16)), dict[tuple[int, int], socket.socket](), time.monotonic()
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
            for byte in struct.pack("<16sHH", token, 3, 1):
                peer.sendall(bytes([byte]))
                time.sleep(0.005)

        speaker = threading.Thread(target=speak)
        speaker.start()
        connections._accept(meeting, [listener], token, [(3, 1)], made, began + LIMIT_S)  # type: ignore[arg-type]
        speaker.join()
        assert list(made) == [(3, 1)] and made[3, 1].getpeername() == peer.getsockname()
        made[3, 1].close()
    assert time.monotonic() - began < 10 * connections._STRANGER_S, "each of twenty would take as long"


def test_who_has_sent_all_may_go(three: tuple[Streams, dict[int, Streams]]) -> None:
    here, theirs = three
    outs = {rank: bytearray(4) for rank in (1, 2)}
    receives = [_receive(here, _part(rank, out)) for rank, out in outs.items()]
    _send(theirs[1], _part(0, b"soon"))
    theirs[1].close()
    later = threading.Timer(0.2, lambda: _send(theirs[2], _part(0, b"late")))
    later.start()
    _wait(here, receives)
    assert outs == {1: b"soon", 2: b"late"}
    later.join()


class _Memory(bytearray):
    """Of which one can tell whether it is there."""


def test_a_transfer_keeps_its_memory_until_it_is_done(ends: tuple[Streams, Streams]) -> None:
    there, here = ends
    memory = [_Memory(1 << 20) for _ in range(2)]
    alive = [weakref.ref(each) for each in memory]
    numbers = [_send(there, _part(1, memory[0])), _receive(here, _part(0, memory[1]))]
    memory.clear()
    assert all(each() is not None for each in alive), "its caller may have been interrupted"
    assert not _in_threads(lambda: _wait(there, numbers[:1]), lambda: _wait(here, numbers[1:]))
    assert [each() for each in alive] == [None, None]


@pytest.mark.parametrize("end", [Streams.close, Streams.end_sending])
def test_a_connection_with_an_error_lets_go_of_memory(
    ends: tuple[Streams, Streams], end: Callable[[Streams], None]
) -> None:
    there, _ = ends
    memory = [_Memory(1 << 20) for _ in range(3)]
    alive = [weakref.ref(each) for each in memory]
    _send(there, _part(1, memory[0]))
    _receive(there, _part(1, memory[1]))
    end(there)
    number = _receive(there, _part(1, memory[2]))
    memory.clear()
    assert not there.is_done(number)
    assert [each() for each in alive] == [None] * 3


@pytest.mark.parametrize(
    ("end", "words"),
    [(Streams.end_sending, "a call of this rank in this group failed"), (Streams.close, "the group was closed")],
)
def test_a_wait_ends_as_another_thread_closes_or_fails(
    ends: tuple[Streams, Streams], end: Callable[[Streams], None], words: str
) -> None:
    there, _ = ends
    ending = threading.Timer(0.1, end, args=(there,))
    ending.start()
    with pytest.raises(StreamError, match=words):
        _wait(there, [_receive(there, _part(1, bytearray(4)))])
    ending.join()


def test_what_a_rank_said_before_it_left_is_heard_by_who_writes_to_it() -> None:
    """Who closes a connection with something unread in it resets it: writing fails then, and reading doesn't."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    here, out = _streams({1: [near]}), bytearray(4)
    far.sendall(HEAD.pack(AT_ONCE, bytes(8), 2, len(TEXT), 4) + TEXT + b"last")
    _send(here, _part(1, b"unread"))
    far.close()
    deadline = time.monotonic() + LIMIT_S
    while near.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:  # takes it: the next write gets EPIPE
        assert time.monotonic() < deadline
    _send(here, _part(1, b"body"))
    _wait(here, [_receive(here, _part(1, out))])
    assert out == b"last"
    with pytest.raises(StreamError, match="closed by peer"):
        _wait(here, [_receive(here, _part(1, bytearray(4)))])
    here.close()


@pytest.mark.parametrize("spin_s", [0.0, 0.01])
def test_ctrl_c_ends_a_wait_and_leaves_the_connection(spin_s: float) -> None:
    near, far = socket.socketpair()
    here, out = _streams({1: [near]}, spin_s=spin_s), bytearray(4)
    receive = _receive(here, _part(1, out))
    killer = threading.Timer(0.1, os.kill, args=(os.getpid(), signal.SIGINT))
    began = time.monotonic()
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        _wait(here, [receive])
    assert time.monotonic() - began < 1.0
    killer.join()
    far.sendall(HEAD.pack(AT_ONCE, bytes(8), 2, len(TEXT), 4) + TEXT + b"body")
    _wait(here, [receive])
    assert out == b"body"
    here.close()
    far.close()


def test_a_forked_child_ends_nothing(ends: tuple[Streams, Streams]) -> None:
    there, here = ends
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                _send(there, _part(1, b"no"))
            except StreamError as error:
                code = 0 if "forked" in str(error) else 2
            there.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    _send(there, _part(1, b"still"))
    out = bytearray(5)
    _wait(here, [_receive(here, _part(0, out))])
    assert out == b"still"


class _Model:
    """Messages by kind, in the order in which a receiver gets them, and the bytes that bring them."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.sent: dict[int, list[tuple[bytes, bytes]]] = {}
        self.stream = bytearray()

    def add(self, kind: int) -> None:
        text = self.draw.choice((TEXT, b"x" * self.draw.choice((1, 200, 1024))))
        body = self.draw.randbytes(self.draw.choice((0, 1, 31, 500, 65_536 - HEAD.size, 65_536, 90_000)))
        self.sent.setdefault(kind, []).append((text, body))
        self.stream += HEAD.pack(AT_ONCE, bytes(8), kind, len(text), len(body)) + text + body


@pytest.mark.parametrize("seed", range(12))
def test_a_stream_cut_anywhere_is_parsed_as_a_model_has_it(seed: int) -> None:
    """Messages with receives before and after they come, of the texts that are expected and of others."""
    draw = random.Random(seed)
    model, (near, far) = _Model(draw), socket.socketpair()
    here = _streams({1: [near]})
    for _ in range(25):
        model.add(2 * draw.randrange(3))
    expected: list[tuple[int, bytearray, bytes, bytes]] = []
    to_receive = [(kind, *each) for kind, messages in model.sent.items() for each in messages]

    def receive_some(count: int) -> None:
        for kind, text, body in to_receive[:count]:
            asked = text if draw.random() < 0.8 else b"another"
            out = bytearray(len(body) if asked == text else 5)
            expected.append((here.receive(_part(1, out), kind, asked), out, body, text if asked != text else b""))
        del to_receive[:count]

    with near, far:
        far.setblocking(False)
        sent = answers = 0
        while sent < len(model.stream) or to_receive:
            if draw.random() < 0.3:
                receive_some(draw.randrange(4))
            with contextlib.suppress(BlockingIOError):
                cut = draw.choice((1, 31, 32, 33, 1000, 65_536, 200_000))
                sent += far.send(model.stream[sent : sent + cut])
            if awaited := next((number for number, *_ in expected if not here.is_done(number)), None):
                here.functions.wait(here.address, 0, awaited)
            with contextlib.suppress(BlockingIOError):  # answers to large messages, as the protocol has them
                answers += len(far.recv(1 << 20))
            if sent == len(model.stream):
                receive_some(len(to_receive))
        _wait(here, [number for number, *_ in expected])
        for number, out, body, found in expected:
            assert here.found(number) == found
            assert out == (bytes(5) if found else body)
        kept, _, _, taken = here.facts(1)
        bodies = [body for messages in model.sent.values() for _, body in messages]
        assert (kept, taken) == (0, sum(map(len, bodies)) + KEPT_BYTES * len(bodies))
        here.close()
