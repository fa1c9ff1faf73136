"""Transfers between hosts. Ranks are threads, connected by socket pairs."""

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
import torch

from device_communicators.base.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    GroupDestroyedError,
    InvalidArgumentError,
    MessageDecodeError,
    PeerDiedError,
    UsageError,
)
from device_communicators.base.member import Timeout
from device_communicators.calls.user_call import DTYPE_NUMBERS
from device_communicators.calls.work import TransferError, Work
from device_communicators.cpu import connections, native
from device_communicators.cpu.connections import Connections
from device_communicators.cpu.message_queue import Message, pieces_of
from device_communicators.cpu.native_group import Members
from device_communicators.cpu.streams import open_streams
from device_communicators.cpu.transfers import MOST_TAG, Transfers
from parallel_state.messages.codec.values import use_library

try:
    native.load()
except native.NativeUnavailableError as error:
    pytest.skip(f"no compiled library: {error}", allow_module_level=True)

LIMIT_S = 60.0
ANSWERED_BYTES = 64 << 10
"""`kAnsweredBytes` of csrc/streams.h."""
SMALL, LARGE = 1000, 20 * ANSWERED_BYTES
STRIPED_BYTES = 100
EARLY_BYTES = 64 << 20
HEAD = struct.Struct("<4sIi4xQQQ")
"""`Frame` of csrc/streams.h: magic, tag, dtype, bytes received so far, bytes of the body, of these the head's."""
AT_ONCE, ANNOUNCED, ASKED_FOR, ANSWER = b"PSM\1", b"PSMA", b"PSMB", b"PSMC"
KEPT_BYTES = 256
BYTE = DTYPE_NUMBERS[torch.uint8]
MESSAGE = 1 << 20
"""`kMessageDtype` of csrc/transfer_call.h."""
MESSAGES = 5
MOST_HEAD_BYTES = 1 << 20
Taker = Callable[[bytes, int, int], bytes]


class Rank:
    def __init__(
        self,
        rank: int,
        sockets: Mapping[int, Sequence[socket.socket]],
        *,
        early_bytes: int = EARLY_BYTES,
        striped_bytes: int = 1 << 20,
        timeout_s: float = LIMIT_S,
        spin_s: float = 0.0,
    ) -> None:
        library, size = native.load(), 1 + max(rank, *sockets)
        self.made = Connections(sockets, dict.fromkeys(sockets, early_bytes), early_bytes)
        for each in (each for all_ in sockets.values() for each in all_):
            each.setblocking(False)
        losses = library.ps_liveness_new((ctypes.c_int64 * size)(), size)
        address = open_streams(self.made, losses, rank, size, int(1e9 * spin_s), striped_bytes)
        library.ps_liveness_delete(losses)
        self.transfers = Transfers(library, Members("test", tuple(range(size)), rank, Timeout(timeout_s)), address)

    def send(self, x: torch.Tensor, dst: int, tag: int = 0) -> None:
        self.transfers.send(x, dst, tag)

    def recv(self, out: torch.Tensor, src: int, tag: int = 0) -> None:
        self.transfers.recv_(out, src, tag)

    def isend(self, x: torch.Tensor, dst: int, tag: int = 0) -> Work:
        return self.transfers.isend(x, dst, tag)

    def irecv(self, out: torch.Tensor, src: int, tag: int = 0) -> Work:
        return self.transfers.irecv_(out, src, tag)

    def isend_message(self, dst: int, head: bytes, *tensors: torch.Tensor) -> Work:
        return self.transfers.isend_message(Message(head, tensors), dst, MESSAGES)

    def receive_message(
        self, src: int, take: Callable[[bytes, int, int], bytes], most: int = MOST_HEAD_BYTES
    ) -> object:
        past, report = use_library().past_python, native.QueueReport()
        wanted = (most, 0, None, None, False, None, 0)
        return self.transfers.receive_message(past, src, MESSAGES, 0, report, *wanted, take)

    def receive_pieces(self, src: int, sizes: Sequence[int] = ()) -> tuple[bytes, list[torch.Tensor]]:
        heads, tensors = list[bytes](), list[torch.Tensor]()

        def take(head: bytes, head_bytes: int, tensor_bytes: int) -> bytes:
            assert len(head) == head_bytes
            heads.append(head)
            tensors.extend(_room(size) for size in sizes or (tensor_bytes,))
            return pieces_of(tensors)[0] or b""

        assert self.receive_message(src, take) is take
        return heads[0], tensors

    def facts(self, peer: int) -> tuple[int, int, int, int]:
        words = (ctypes.c_uint64 * 4)()
        native.load().ps_streams_facts(self.transfers.address, peer, words)
        return tuple(words)

    def close(self) -> None:
        self.transfers.close()
        self.made.close()


def _two(count: int = 1, **options: Any) -> tuple[Rank, Rank]:
    pairs = [socket.socketpair() for _ in range(count)]
    for near, _ in pairs:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    sides = zip(*pairs, strict=True)
    first, second = (Rank(rank, {1 - rank: side}, **options) for rank, side in enumerate(sides))
    return first, second


@pytest.fixture(params=[1, 3], ids=["one connection", "three connections"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Rank, Rank]]:
    pair = _two(request.param, striped_bytes=STRIPED_BYTES)
    yield pair
    for end in pair:
        end.close()


@pytest.fixture(params=[64 << 20, 3 * SMALL, 0], ids="{} early bytes".format)
def early_bytes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def ranks(early_bytes: int) -> Iterator[tuple[Rank, Rank]]:
    pair = _two(early_bytes=early_bytes)
    yield pair
    for end in pair:
        end.close()


def _both(*calls: Callable[[], Any]) -> list[Any]:
    found: list[Any] = [None] * len(calls)

    def run(rank: int) -> None:
        try:
            found[rank] = calls[rank]()
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    return found


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _room(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def _data(x: torch.Tensor) -> bytes:
    return x.numpy().tobytes()


def _head(kind: bytes, size: int, tag: int = 0, dtype: int = BYTE, *, head_size: int = 0) -> bytes:
    return HEAD.pack(kind, tag, dtype, 0, size, head_size)


def _socket(end: Rank, peer: int, number: int = 0) -> socket.socket:
    return end.made.sockets[peer][number]


SIZES = (1, 31, 1000, 16_383, 16_384, 65_536, 70_000, 1_000_000)


def _call(end: Rank, seed: int, own: int) -> None:
    draw, other = random.Random(seed), 1 - own
    sizes = [draw.choice(SIZES) for _ in range(5)]
    sends = [
        end.isend(torch.full((size,), (own + at) % 256, dtype=torch.uint8), other, at % 2)
        for at, size in enumerate(sizes)
    ]
    outs = [_room(size) for size in sizes]
    order = (0, 2, 4, 1, 3) if draw.random() < 0.5 else (1, 3, 0, 2, 4)
    for work in [*sends, *[end.irecv(outs[at], other, at % 2) for at in order]]:
        work.wait()
    assert all(out.eq((other + at) % 256).all() for at, out in enumerate(outs)), seed


def test_messages_come_whole_and_by_tag(ends: tuple[Rank, Rank]) -> None:
    def run(own: int) -> None:
        for seed in range(60):
            _call(ends[own], seed, own)

    assert _both(lambda: run(0), lambda: run(1)) == [None, None]


def test_a_message_of_many_tensors_is_one_system_call() -> None:
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps what each call sent apart
    rank, tensors = Rank(0, {1: [own]}), [_room(16) for _ in range(1000)]
    sent = rank.isend_message(1, b"head", *tensors)
    assert len(other.recv(1 << 20)) == HEAD.size + len(b"head") + 16 * len(tensors)
    sent.wait()
    rank.close()
    other.close()


def test_an_early_message_waits_for_its_receive(ends: tuple[Rank, Rank]) -> None:
    there, here = ends
    there.send(_bytes(b"early"), 1, 4)
    there.send(_bytes(b"first"), 1, 2)
    first, early = _room(5), _room(5)
    here.recv(first, 0, 2)
    assert here.facts(0)[0] == 5
    assert here.irecv(early, 0, 4).is_completed()
    assert (_data(first), _data(early)) == (b"first", b"early") and here.facts(0)[0] == 0


def test_a_closed_connection_ends_a_send(ends: tuple[Rank, Rank]) -> None:
    ends[1].close()
    with pytest.raises(PeerDiedError, match="has left: it destroyed its group"):
        ends[0].send(_room(1 << 20), 1)


@pytest.mark.parametrize("has_failed", [False, True], ids=["left", "failed"])
@pytest.mark.parametrize("src", [1, Transfers.ANY_SOURCE], ids=["from it", "from any"])
def test_a_rank_that_left_differs_from_one_that_failed(ends: tuple[Rank, Rank], src: int, has_failed: bool) -> None:
    near, far = ends
    far.send(_bytes(b"last"), 0)
    if has_failed:
        far.transfers.abandon()
    far.close()
    last = _room(4)
    near.recv(last, src)
    assert _data(last) == b"last"
    kind, words = (TransferError, "closed by peer") if has_failed else (PeerDiedError, "global rank 1 has left")
    with pytest.raises(kind, match=words):
        near.recv(_room(1), src)


def test_a_peer_that_ends_within_a_body_ends_the_receive(ends: tuple[Rank, Rank]) -> None:
    there, here = ends
    out = _room(1 << 20)
    received = here.irecv(out, 0)
    _socket(there, 1).sendall(_head(AT_ONCE, len(out)) + bytes([7]) * 1000)
    while not out.any():
        time.sleep(0.01)
    there.close()
    with pytest.raises(TransferError, match="closed by peer"):
        received.wait()


@pytest.mark.parametrize("striped", [299, 300, 301])
def test_stripes_of_any_length_come_to_their_places(striped: int) -> None:
    near, far = _two(4, striped_bytes=min(striped, 300))
    for size in (striped, 1000, 3):
        body, out = _bytes(random.Random(size).randbytes(size)), _room(size)
        sent = near.isend(body, 1)
        far.recv(out, 0)
        sent.wait()
        assert torch.equal(out, body)
    near.close()
    far.close()


def test_a_connection_that_ends_within_its_stripe_is_an_error() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    here = Rank(0, {1: [pair[0] for pair in pairs]}, striped_bytes=STRIPED_BYTES)
    out = _room(1000)
    received = here.irecv(out, 1)
    pairs[0][1].sendall(_head(AT_ONCE, len(out)) + bytes([7]) * 500)
    pairs[1][1].sendall(bytes([8]) * 499)
    pairs[1][1].close()
    with pytest.raises(TransferError, match="closed by peer"):
        received.wait()
    assert _data(out) == bytes([7]) * 500 + bytes([8]) * 499 + bytes(1)
    here.close()
    pairs[0][1].close()


def test_a_wait_has_a_deadline() -> None:
    near, far = _two(timeout_s=0.1)
    began = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match="timed out") as raised:
        far.recv(_room(1), 0)
    assert raised.value.suspect_ranks == (0,) and time.monotonic() - began < 1.0
    near.close()
    far.close()


HEADS = {
    "another magic": _head(b"PSHX", 0, 7),
    "no magic": _head(b"", 4, 7),
    "an older version": _head(b"PSH\1", 0),
    "a large body": _head(AT_ONCE, 1 << 62, 7),
    "the largest body": _head(AT_ONCE, (1 << 64) - 1, 7),
    "more than was granted": _head(AT_ONCE, EARLY_BYTES, 7),
    "what nobody asked for": _head(ASKED_FOR, 4),
    "a head of a tensor": _head(AT_ONCE, 4, 7, head_size=1),
    "a head longer than its message": _head(AT_ONCE, 4, 7, MESSAGE, head_size=5),
    "an answer to nothing": _head(ANSWER, 4),
}


@pytest.mark.parametrize("hostile", HEADS)
def test_hostile_heads_break_the_connection(ends: tuple[Rank, Rank], hostile: str) -> None:
    _socket(ends[0], 1).sendall(HEADS[hostile])
    out = _room(4)
    with pytest.raises(MessageDecodeError, match="global rank 0 wrote something that isn't the next part of a message"):
        ends[1].recv(out, 0)
    assert not out.any()


def test_many_small_messages_that_nobody_receives_are_bounded() -> None:
    granted = 32 << 10
    ends = _two(early_bytes=granted)
    _socket(ends[0], 1).sendall(_head(AT_ONCE, 0, 7) * (granted // 256 + 1))
    with pytest.raises(MessageDecodeError, match="global rank 0 wrote something that isn't the next part of a message"):
        ends[1].recv(_room(4), 0)
    for end in ends:
        end.close()


@pytest.mark.parametrize("kind", [AT_ONCE, ANNOUNCED], ids=["at once", "announced"])
@pytest.mark.parametrize("size", [3, 1 << 62])
def test_a_message_of_another_size_is_refused(ends: tuple[Rank, Rank], kind: bytes, size: int) -> None:
    _socket(ends[0], 1).sendall(_head(kind, size))
    out = _room(4)
    with pytest.raises(CollectiveMismatchError, match=f"receives 4 bytes of torch.uint8, .* sent {size} bytes"):
        ends[1].recv(out, 0)
    assert not out.any()


def test_strangers_hold_nobody_up() -> None:
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
    assert time.monotonic() - began < LIMIT_S / 2


@pytest.fixture
def three() -> Iterator[tuple[Rank, dict[int, Rank]]]:
    pairs = {rank: socket.socketpair() for rank in (1, 2)}
    here = Rank(0, {rank: pair[:1] for rank, pair in pairs.items()})
    theirs = {rank: Rank(rank, {0: pair[1:]}) for rank, pair in pairs.items()}
    yield here, theirs
    for end in (here, *theirs.values()):
        end.close()


def test_who_has_sent_all_may_go(three: tuple[Rank, dict[int, Rank]]) -> None:
    here, theirs = three
    outs = {rank: _room(4) for rank in (1, 2)}
    receives = [here.irecv(out, rank) for rank, out in outs.items()]
    theirs[1].send(_bytes(b"soon"), 0)
    theirs[1].close()
    later = threading.Timer(0.2, lambda: theirs[2].send(_bytes(b"late"), 0))
    later.start()
    for receive in receives:
        receive.wait()
    assert [_data(out) for out in outs.values()] == [b"soon", b"late"]
    later.join()


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_a_receive_from_any_rank_takes_the_next_message(three: tuple[Rank, dict[int, Rank]], count: int) -> None:
    here, theirs = three
    out = torch.zeros(count)
    received = here.irecv(out, Transfers.ANY_SOURCE)
    sent = theirs[2].isend(torch.full((count,), 2.0), 0)
    received.wait()
    sent.wait()
    assert out.eq(2).all()
    sent = theirs[1].isend(torch.ones(count), 0)
    theirs[2].close()
    here.recv(out, Transfers.ANY_SOURCE)
    sent.wait()
    assert out.eq(1).all()
    received = here.irecv(out, Transfers.ANY_SOURCE)
    theirs[1].close()
    with pytest.raises(PeerDiedError, match="has left: it destroyed its group"):
        received.wait()


def test_a_transfer_keeps_its_memory_until_it_is_done(ends: tuple[Rank, Rank]) -> None:
    there, here = ends
    memory = [_room(1 << 20) for _ in range(2)]
    alive = [weakref.ref(each) for each in memory]
    works = [there.isend(memory[0], 1), here.irecv(memory[1], 0)]
    memory.clear()
    assert any(each() is not None for each in alive), "its caller may have been interrupted"
    assert _both(works[0].wait, works[1].wait) == [None, None]
    _next_call(there)
    assert [each() for each in alive] == [None, None]


def _next_call(end: Rank) -> None:
    """Waits for sends, which another thread completes without the GIL. Then a call frees their tensors."""
    until = time.monotonic() + LIMIT_S
    while end.transfers.waiting_sends(1) and time.monotonic() < until:
        time.sleep(0.01)
    end.transfers.is_done(0)


@pytest.mark.parametrize("end", [Rank.close, lambda rank: rank.transfers.abandon()], ids=["close", "abandon"])
def test_a_connection_with_an_error_lets_go_of_memory(ends: tuple[Rank, Rank], end: Callable[[Rank], None]) -> None:
    there, _ = ends
    memory = [_room(1 << 20) for _ in range(2)]
    alive = [weakref.ref(each) for each in memory]
    there.isend(memory[0], 1)
    there.irecv(memory[1], 1)
    memory.clear()
    end(there)
    time.sleep(0.05)
    _next_call(there)
    assert [each() for each in alive] == [None] * 2
    with pytest.raises((TransferError, GroupDestroyedError)):
        there.irecv(_room(1), 1)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda rank: rank.transfers.abandon(), "a call of this rank in this group failed"),
        (Rank.close, "was destroyed"),
    ],
    ids=["abandon", "close"],
)
def test_a_wait_ends_as_another_thread_closes_or_fails(
    ends: tuple[Rank, Rank], end: Callable[[Rank], None], words: str
) -> None:
    there, _ = ends
    ending = threading.Timer(0.1, end, args=(there,))
    ending.start()
    began = time.monotonic()
    with pytest.raises((TransferError, GroupDestroyedError), match=words):
        there.recv(_room(4), 1)
    ending.join()
    assert time.monotonic() - began < 1.0


def test_what_a_rank_said_before_it_left_is_heard_by_who_writes_to_it() -> None:
    """Closing a connection with unread bytes resets it: writes fail, but reads still work."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    here, out = Rank(0, {1: [near]}), _room(4)
    far.sendall(_head(AT_ONCE, 4) + b"last")
    received = here.irecv(_room(1), 1, 5)
    here.send(_bytes(b"unread"), 1)
    far.close()
    deadline = time.monotonic() + LIMIT_S
    while not received.is_completed() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert here.facts(1)[0] in (0, 4)
    with pytest.raises(TransferError, match=r"closed by peer|reset by peer"):
        received.wait()
    here.close()
    del out


@pytest.mark.parametrize("spin_s", [0.0, 0.01])
def test_ctrl_c_ends_a_wait(spin_s: float) -> None:
    """The whole group ends, because the receive may have been partial."""
    near, far = socket.socketpair()
    here = Rank(0, {1: [near]}, spin_s=spin_s)
    started = here.irecv(_room(4), 1)
    killer = threading.Timer(0.1, os.kill, args=(os.getpid(), signal.SIGINT))
    began = time.monotonic()
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        here.recv(_room(4), 1)
    assert time.monotonic() - began < 1.0
    killer.join()
    with pytest.raises(CommunicationError, match="interrupted by a signal"):
        started.wait()
    assert far.recv(1) == b"", "the other side sees the end"
    here.close()
    far.close()


def test_a_forked_child_ends_nothing(ends: tuple[Rank, Rank]) -> None:
    there, here = ends
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                there.send(_bytes(b"no"), 1)
            except GroupDestroyedError:
                code = 0
            there.transfers.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    there.send(_bytes(b"still"), 1)
    out = _room(5)
    here.recv(out, 0)
    assert _data(out) == b"still"


class _Model:
    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.sent: dict[int, list[bytes]] = {}
        self.stream = bytearray()

    def add(self, tag: int) -> None:
        body = self.draw.randbytes(self.draw.choice((0, 1, 31, 500, 65_536 - HEAD.size, 65_536, 90_000)))
        self.sent.setdefault(tag, []).append(body)
        self.stream += _head(AT_ONCE, len(body), tag) + body


@pytest.mark.parametrize("seed", range(12))
def test_a_stream_cut_anywhere_is_parsed_as_a_model_has_it(seed: int) -> None:
    draw = random.Random(seed)
    model, (near, far) = _Model(draw), socket.socketpair()
    here = Rank(0, {1: [near]})
    for _ in range(25):
        model.add(draw.randrange(3))
    expected: list[tuple[Work, torch.Tensor, bytes]] = []
    to_receive = [(tag, body) for tag, messages in model.sent.items() for body in messages]

    def receive_some(count: int) -> None:
        for tag, body in to_receive[:count]:
            out = _room(len(body))
            expected.append((here.irecv(out, 1, tag), out, body))
        del to_receive[:count]

    with near, far:
        far.setblocking(False)
        sent = 0
        while sent < len(model.stream) or to_receive:
            if draw.random() < 0.3:
                receive_some(draw.randrange(4))
            with contextlib.suppress(BlockingIOError):
                cut = draw.choice((1, 31, 32, 33, 1000, 65_536, 200_000))
                sent += far.send(model.stream[sent : sent + cut])
            with contextlib.suppress(BlockingIOError):
                far.recv(1 << 20)
            if sent == len(model.stream):
                receive_some(len(to_receive))
        for work, out, body in expected:
            work.wait()
            assert _data(out) == body
        kept, _, _, taken = here.facts(1)
        bodies = [body for messages in model.sent.values() for body in messages]
        assert (kept, taken) == (0, sum(map(len, bodies)) + KEPT_BYTES * len(bodies))
        here.close()


@pytest.mark.parametrize("count", [0, 1, SMALL, LARGE])
def test_tensors_come_by_tag(ranks: tuple[Rank, Rank], count: int) -> None:
    def send() -> None:
        for each in [ranks[0].isend(torch.full((count,), tag, dtype=torch.int16), 1, tag) for tag in range(4)]:
            each.wait()

    def receive() -> list[torch.Tensor]:
        outs = [torch.empty(count, dtype=torch.int16) for _ in range(4)]
        for tag in (2, 0, 3, 1):
            ranks[1].recv(outs[tag], 0, tag)
        return outs

    sent, outs = _both(send, receive)
    assert sent is None
    assert all(torch.equal(out, torch.full((count,), tag, dtype=torch.int16)) for tag, out in enumerate(outs))


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_what_was_started_moves_while_nobody_waits(ranks: tuple[Rank, Rank], count: int) -> None:
    out = torch.zeros(count)
    received = ranks[1].irecv(out, 0)
    sent = ranks[0].isend(torch.ones(count), 1)
    until = time.monotonic() + LIMIT_S
    while not (received.is_completed() and sent.is_completed()):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert int(out.sum()) == count


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_ranks_that_receive_first_may_both_send(ranks: tuple[Rank, Rank], count: int) -> None:
    def exchange(rank: int) -> torch.Tensor:
        out = torch.zeros(count)
        received = ranks[rank].irecv(out, 1 - rank)
        ranks[rank].send(torch.full((count,), float(rank)), 1 - rank)
        received.wait()
        return out

    for rank, out in enumerate(_both(lambda: exchange(0), lambda: exchange(1))):
        assert torch.equal(out, torch.full((count,), 1.0 - rank))


def test_threads_wait_at_once(ranks: tuple[Rank, Rank]) -> None:
    def run(rank: int, tag: int) -> int:
        total = 0
        for number in range(50):
            if (number + tag) % 2 == rank:
                ranks[rank].send(torch.full((number * 1000,), tag), 1 - rank, tag)
            else:
                out = torch.empty(number * 1000, dtype=torch.int64)
                ranks[rank].recv(out, 1 - rank, tag)
                total += int((out == tag).all())
        return total

    found = _both(*(lambda rank=rank, tag=tag: run(rank, tag) for rank in (0, 1) for tag in (0, 1, 2)))  # type: ignore[misc]
    assert found == [25] * 6


@pytest.mark.parametrize("count", [SMALL, LARGE // 4])
def test_only_so_much_is_kept_before_it_is_received(ranks: tuple[Rank, Rank], count: int, early_bytes: int) -> None:
    xs = [torch.full((count,), float(number)) for number in range(100)]
    kept: list[int] = []

    def send() -> None:
        started = [ranks[0].isend(x, 1) for x in xs]
        ranks[0].send(torch.ones(3), 1, 1)
        for each in started:
            each.wait()

    def receive() -> bool:
        last, outs = torch.zeros(3), [torch.empty(count) for _ in xs]
        ranks[1].recv(last, 0, 1)
        kept.append(ranks[1].facts(0)[0])
        for out in outs:
            ranks[1].recv(out, 0)
        return bool(last.all()) and all(torch.equal(out, x) for out, x in zip(outs, xs, strict=True))

    assert _both(send, receive) == [None, True]
    assert kept[0] <= early_bytes and ranks[1].facts(0)[0] == 0
    if early_bytes > 4 * count:
        assert kept[0], "else the bound is lower than it says"


def test_room_comes_back_with_what_was_received(ranks: tuple[Rank, Rank], early_bytes: int) -> None:
    """A sender may be 64 MiB ahead of its receiver. Received bytes no longer count."""
    count = max(1, early_bytes // 16)
    for number in range(12):
        sent = ranks[0].isend(torch.full((count,), float(number)), 1)
        out = torch.empty(count)
        ranks[1].recv(out, 0)
        sent.wait()
        assert out.eq(number).all()
    assert ranks[0].facts(1)[1] >= 1.5 * early_bytes, "of three times as much"


@pytest.mark.parametrize("sent", [SMALL, LARGE])
@pytest.mark.parametrize("expected", [SMALL // 2, 2 * LARGE])
def test_another_size_is_named_on_the_receiver_and_of_a_large_one_on_both(
    ranks: tuple[Rank, Rank], sent: int, expected: int, early_bytes: int
) -> None:
    out = torch.zeros(expected)
    there, here = _both(lambda: ranks[0].send(torch.ones(sent), 1), lambda: ranks[1].recv(out, 0))
    forms = f"{4 * expected} bytes of torch.float32", f"{4 * sent} bytes of torch.float32"
    assert isinstance(here, CollectiveMismatchError) and here.suspect_ranks == (0,), here
    assert f"this rank receives {forms[0]}, and global rank 0 sent {forms[1]}" in str(here)
    assert not out.any()
    if sent == LARGE or 4 * sent > early_bytes:
        assert isinstance(there, CollectiveMismatchError) and there.suspect_ranks == (1,), there
        assert f"this rank sends {forms[1]}, and global rank 1 receives {forms[0]}" in str(there)
    else:
        assert there is None


def test_tags_are_those_that_messages_have_room_for(ranks: tuple[Rank, Rank]) -> None:
    out = torch.zeros(1)
    received = ranks[1].irecv(out, 0, MOST_TAG)
    ranks[0].isend(torch.ones(1), 1, MOST_TAG)
    received.wait()
    assert out == 1
    for tag in (-8, MOST_TAG + 1, 1 << 62):
        with pytest.raises(InvalidArgumentError, match=f"must be from 0 to {MOST_TAG}, but is {tag}"):
            ranks[0].isend(out, 1, tag)


def _messages(seed: int, count: int) -> list[tuple[bytes, list[bytes]]]:
    draw = random.Random(seed)
    sizes = (0, 1, 31, 99, 100, 101, 5000, 65_000, 200_000)
    return [
        (
            draw.randbytes(draw.choice((1, 32, 33, 4000, 70_000))),
            [draw.randbytes(draw.choice(sizes)) for _ in range(draw.choice((0, 1, 2, 70)))],
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("early", [EARLY_BYTES, 20_000, 0])
@pytest.mark.parametrize("count", [1, 3], ids=["one connection", "three connections"])
def test_messages_of_unknown_size_come_whole_and_in_order(count: int, early: int) -> None:
    ends = _two(count, striped_bytes=STRIPED_BYTES, early_bytes=early)

    def run(own: int) -> None:
        end, peer, began = ends[own], 1 - own, list[Work]()
        plain = _bytes(b"tensor")
        for head, tensors in _messages(own, 12):
            began.append(end.isend_message(peer, head, *map(_bytes, tensors)))
            began.append(end.isend(plain, peer, 3))
        time.sleep(0.05 * own)
        for number, (head, tensors) in enumerate(_messages(peer, 12)):
            sizes = [len(data) for data in tensors]
            found, received = end.receive_pieces(peer, sizes if number % 3 else [sum(sizes)])
            assert found == head
            assert b"".join(map(_data, received)) == b"".join(tensors)
            out = _room(6)
            end.recv(out, peer, 3)
            assert torch.equal(out, plain)
        for each in began:
            each.wait()

    assert _both(lambda: run(0), lambda: run(1)) == [None, None]
    for end in ends:
        end.close()


def test_a_started_message_is_kept_until_it_is_sent() -> None:
    near, far = _two()
    tensor = torch.arange(1 << 20)
    kept, expected = weakref.ref(tensor), _data(tensor)
    near.isend_message(1, b"head", tensor)
    del tensor
    assert kept() is not None
    (head, (received,)) = far.receive_pieces(0)
    assert head == b"head" and _data(received) == expected
    until = time.monotonic() + LIMIT_S
    while kept() is not None and time.monotonic() < until:
        near.transfers.isend(_room(0), 1, 4)
    assert kept() is None
    near.close()
    far.close()


@pytest.mark.parametrize("early", [EARLY_BYTES, 0], ids=["at once", "announced"])
@pytest.mark.parametrize("first", ["send", "receive"])
def test_a_long_head_is_refused_by_its_beginning(early: int, first: str) -> None:
    near, far = _two(early_bytes=early)
    seen: list[tuple[int, int, int]] = []

    def take(head: bytes, head_bytes: int, tensor_bytes: int) -> bytes:
        seen.append((len(head), head_bytes, tensor_bytes))
        raise MessageDecodeError("too long")

    def send() -> None:
        time.sleep(0.1 if first == "receive" else 0)
        near.isend_message(1, b"x" * 5000, _room(10))

    def receive() -> None:
        time.sleep(0.1 if first == "send" else 0)
        far.receive_message(0, take, most=100)

    _, error = _both(send, receive)
    assert isinstance(error, MessageDecodeError) and seen == [(32, 5000, 10)]
    near.close()
    far.close()


def test_a_refused_message_without_tensors_is_passed_over(ends: tuple[Rank, Rank]) -> None:
    def take(head: bytes, head_bytes: int, tensor_bytes: int) -> bytes:
        raise ValueError(head)

    ends[0].isend_message(1, b"an error")
    ends[0].isend_message(1, b"next", _bytes(b"tensor"))
    with pytest.raises(ValueError, match="an error"):
        ends[1].receive_message(0, take)
    head, (received,) = ends[1].receive_pieces(0)
    assert (head, _data(received)) == (b"next", b"tensor")


@pytest.mark.parametrize("kind", ["tensor for message", "message for tensor"])
def test_a_message_and_a_tensor_do_not_match(ends: tuple[Rank, Rank], kind: str) -> None:
    if kind == "tensor for message":
        ends[0].isend(_room(4), 1, MESSAGES)
        with contextlib.suppress(AssertionError):
            ends[1].receive_pieces(0)
    else:
        ends[0].isend_message(1, b"head")
        with pytest.raises(CollectiveMismatchError, match="a message"):
            ends[1].recv(_room(4), 0, MESSAGES)
    with pytest.raises(CollectiveMismatchError, match="a message"):
        ends[1].transfers.check()


def test_a_receive_of_a_message_has_a_deadline() -> None:
    near, far = _two(timeout_s=0.3)
    began = time.monotonic()
    assert far.receive_message(0, lambda *_: b"") is NotImplemented
    assert 0.2 < time.monotonic() - began < 3.0
    with pytest.raises(CollectiveTimeoutError, match="global rank 0"):
        far.transfers.check()
    near.close()
    far.close()


def test_a_call_of_a_taker_is_refused(ends: tuple[Rank, Rank]) -> None:
    """`take` runs within a receive. Another receive in it would wait for the first, and so for itself."""

    def take(head: bytes, head_bytes: int, tensor_bytes: int) -> bytes:
        ends[1].recv(_room(1), 0)
        return b""

    ends[0].isend_message(1, b"head")
    with pytest.raises(UsageError):
        ends[1].receive_message(0, take)
