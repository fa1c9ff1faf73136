"""TCP connections between ranks of a group on different hosts: messages, each way in the order in which they were sent.

gloo sends once the receiver has said that it receives, and has a thread of its own that takes in what comes. Here what
is sent goes out at once, as far as the kernel has room, and is read by the thread that waits for it, into the place
where it belongs; nothing moves while nobody waits. A call between hosts is the shorter for that by the word of the
receiver and two changes of thread.

A message is a head of fixed size, a text, and a body. Its *kind* says what it is: that of the first message of a call
is FRAME, whose body is read once its head and text were looked at; the others have the kinds that their receives have.

A body that comes before its receive is kept in memory of its own. Who sends may have only so many bytes there, as the
receiver said when they were connected; what has no room is *announced*: its head goes out, and its body once the
receive is there (rendezvous, as MPI calls it). Each head says how much its sender has received so far, so the room
comes back with the answers, and needs no messages of its own.

To stop reading instead would leave what is too much to the kernel, but a receiver that waits for a later message of
the same connection could then never get at it. An announcement is read past, so whoever waits for whatever message
gets it, and no bound can lead to a deadlock. A limit for each message, above which all is announced, would cost every
large one the word of the receiver, and not bound how many small ones there are.

Within a collective no such bound is needed: who leads a host sends what a call has to those in the same call, and who
doesn't is at most one call ahead.

Addresses, ports and tokens are told over the group's gloo, when the group is made; a connection begins with the token
of who listens and the rank of who connects.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import select
import socket
import struct
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from device_communicators import settings
from device_communicators.errors import CommunicationError, plain
from device_communicators.host import gloo_address
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import attributed
from device_communicators.routing.reductions import as_bytes
from device_communicators.routing.waiting import all_gather_bytes

FRAME = 0
"""The kind of the message that a call begins with."""

_HEAD = struct.Struct("<4s8sIIQ4x")
"""Magic, digest, kind, bytes of the text, bytes of the body."""
_TAKEN = struct.Struct("<Q")
"""In place of the digest, in what is no frame: how much its sender has received so far of what was sent at once."""
_AT_ONCE, _ANNOUNCED, _ASKED_FOR = bytes(4), b"PSHA", b"PSHB"
"""Magics of what is no frame: the body follows; it comes when it is asked for; this is that body."""
_MESSAGE_BYTES = 256
"""The memory that a kept message takes beside its body."""
_BUFFER_BYTES = 64 << 10
_MOST_TEXT_BYTES = 1 << 20
"""Enough for the splits of an all_to_all: 16 bytes for each rank of a host and each of a group of up to 256."""
_DIRECT_BYTES = 16 << 10
"""From so many missing bytes on a body is read to its place, past the buffer."""
SLICE_S = 0.05
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<{_TOKEN_BYTES}sI")
_TOLD_BYTES = 512
_STRANGER_S = 2.0
"""The time in which a connection must say whose it is; meanwhile others may."""
_BACKLOG = 512


class Frame(NamedTuple):
    """The facts of a call's first message beside its body."""

    magic: bytes
    digest: bytes
    body_bytes: int
    text: bytes


def memory_of(x: Tensor) -> Any:
    """Returns the bytes of contiguous `x`, which they keep alive."""
    return as_bytes(x).numpy().data


def head_of(magic: bytes, digest: bytes, text: bytes, body_bytes: int) -> bytes:
    """Returns what comes before the body of a call's first message."""
    return _HEAD.pack(magic, digest, FRAME, len(text), body_bytes) + text


class Transfer:
    """A message on its way to or from a rank, with the memory that it is read from or written to."""

    __slots__ = ("begun", "done", "found", "parts", "stream", "text")

    def __init__(self, stream: Stream, *parts: Any) -> None:
        self.stream = stream
        self.parts = list(parts)
        self.done = False
        self.text: bytes | None = b""
        """Of a receive: the text that the message must have; None if any will do."""
        self.found: bytes | None = None
        """The message's text, if that isn't empty."""
        self.begun: Callable[[int, bool], object] | None = None
        """Called when the message's head is there: with its size, and whether its body must be asked for."""


class Stream:
    """The connection to `rank`."""

    def __init__(self, connection: socket.socket, rank: int, early_bytes: int = 0) -> None:
        """`early_bytes`: how much this rank may send before the other one receives it; see `has_room`."""
        connection.setblocking(False)
        self.rank = rank
        self.socket = connection
        self.frame: Frame | None = None
        """Of the next call: its head and text have come, and nobody has asked for its body."""
        self.error = ""
        self._sends: deque[Transfer] = deque()
        self._receives: defaultdict[int, deque[Transfer]] = defaultdict(deque)
        self._asked: defaultdict[int, deque[Transfer]] = defaultdict(deque)
        """By kind: receives of announced messages, whose bodies are to come."""
        self._early: defaultdict[int, deque[tuple[bytes, bytearray | int]]] = defaultdict(deque)
        """By kind: text and body of what came before somebody asked for it, or the size of one that was announced."""
        self._early_bytes = early_bytes
        self._sent_bytes = self._received_bytes = self._taken_bytes = 0
        """What was sent at once, how much of that the other side has received, and this side of what came at once."""
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0
        self._body: Any = None
        """The place of what is missing of a body."""
        self._reading: Transfer | None = None
        """The receive that it is of; None where it comes before that."""
        self._unasked: tuple[int, bytes, bytearray] = FRAME, b"", bytearray()
        """Kind, text and memory of a body that comes before its receive."""

    @property
    def is_sending(self) -> bool:
        return bool(self._sends)

    def send(self, head: bytes, body: Any = None) -> Transfer:
        """Sends a message as far as there is room; `body` must not change before its end. Errors are the wait's."""
        transfer = Transfer(self, head) if body is None else Transfer(self, head, body)
        self._sends.append(transfer)
        self.write()
        return transfer

    @property
    def is_receiving(self) -> bool:
        """Returns True if something is to be received that has not come, or not wholly."""
        return self._reading is not None or any(self._receives.values()) or any(self._asked.values())

    def has_room(self, size_bytes: int) -> bool:
        """Returns True if a body of this size may be sent at once, be it received or not."""
        needed = size_bytes + _MESSAGE_BYTES
        if self._sent_bytes - self._received_bytes + needed > self._early_bytes:
            self.read()  # the other side may have received some since
        return self._sent_bytes - self._received_bytes + needed <= self._early_bytes

    def handle(self, events: int) -> None:
        """Writes or reads, as poll has found that it can."""
        if events & select.POLLOUT:
            self.write()
        if events & ~select.POLLOUT:
            self.read()

    def send_body(self, kind: int, body: Any, text: bytes = b"") -> Transfer:
        self._sent_bytes += len(body) + _MESSAGE_BYTES
        return self.send(self._head(_AT_ONCE, kind, text, len(body)), body)

    def announce(self, kind: int, size_bytes: int, text: bytes = b"") -> Transfer:
        """Sends a message without its body, for which the receiver asks, by a message that `text` is no part of."""
        return self.send(self._head(_ANNOUNCED, kind, text, size_bytes))

    def send_announced(self, kind: int, body: Any) -> Transfer:
        """Sends the body of the announced message of a kind that is the next one to be asked for."""
        return self.send(self._head(_ASKED_FOR, kind, b"", len(body)), body)

    def _head(self, magic: bytes, kind: int, text: bytes, size_bytes: int) -> bytes:
        return _HEAD.pack(magic, _TAKEN.pack(self._taken_bytes), kind, len(text), size_bytes) + text

    def write(self) -> None:
        """Sends what the kernel has room for."""
        while self._sends and not self.error:
            transfer = self._sends[0]
            parts = transfer.parts
            try:
                sent = self.socket.sendmsg(parts, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                self.error = _in_words(error)
                return
            while parts and sent >= len(parts[0]):  # of an empty body, too
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = memoryview(parts[0])[sent:]
                continue
            transfer.done = True
            self._sends.popleft()

    def receive(
        self, kind: int, out: Any, text: bytes | None = b"", begun: Callable[[int, bool], object] | None = None
    ) -> Transfer:
        """Receives the next message of a kind into `out`, which is as long.

        One with another text than `text` is not written there; see the transfer's `found`.
        """
        transfer = Transfer(self, out)
        transfer.text, transfer.begun = text, begun
        self._receives[kind].append(transfer)
        self._match_early(kind)
        return transfer

    def _match_early(self, kind: int) -> None:
        early, receives = self._early[kind], self._receives[kind]
        while early and receives:
            (text, body), transfer = early.popleft(), receives.popleft()
            if isinstance(body, int):
                self._ask(transfer, kind, text, body)
                continue
            out = self._place_of(transfer, text, len(body))
            if out is None:
                return
            out[:] = body
            transfer.done = True

    def receive_body(self, out: Any) -> Transfer:
        """Receives the body of `frame`, which is as long as `out`."""
        self.frame, self._reading = None, Transfer(self, out)
        transfer = self._reading
        self._expect(out)
        return transfer

    def skip_body(self) -> None:
        """Takes a frame that has no body."""
        self.frame = None

    def _expect(self, out: Any) -> None:
        """Has what comes next go to `out`, some of which may be in the buffer."""
        size = min(len(out), self._end - self._begin)
        out[:size] = self._view[self._begin : self._begin + size]
        self._begin += size
        self._body = out[size:]
        if size == len(out):
            self._end_message()

    def _end_message(self) -> None:
        self._body = None
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.done = True
            return
        kind, text, body = self._unasked
        self._early[kind].append((text, body))
        self._match_early(kind)

    def read(self) -> None:
        """Reads what has come, until somebody must ask for a body."""
        try:
            if self._body is not None and len(self._body) >= _DIRECT_BYTES:
                count = self.socket.recv_into(self._body)
                self._body = self._body[count:]
                if not self._body:
                    self._end_message()
            else:
                if self._begin == self._end:
                    self._begin = self._end = 0
                elif self._begin:
                    left = self._end - self._begin
                    self._view[:left] = bytes(self._view[self._begin : self._end])
                    self._begin, self._end = 0, left
                if self._end == len(self._buffer):
                    return  # full of what comes behind a frame that nobody has taken yet
                count = self.socket.recv_into(self._view[self._end :])
                self._end += count
        except BlockingIOError:
            return
        except OSError as error:
            self.error = _in_words(error)
            return
        if count == 0:
            self.error = "Connection closed by peer"
        self.parse()

    def parse(self) -> None:
        """Goes through what is in the buffer."""
        while self.frame is None and not self.error:
            if self._body is not None:
                if self._begin == self._end:
                    return
                self._expect(self._body)
                continue
            if self._end - self._begin < _HEAD.size:
                return
            magic, digest, kind, text_bytes, body_bytes = _HEAD.unpack_from(self._buffer, self._begin)
            text_at = self._begin + _HEAD.size
            if text_bytes > _MOST_TEXT_BYTES:
                self.error = f"a text of {text_bytes} bytes was to come, more than there may be"
                return
            if self._end - text_at < text_bytes:
                self._make_room(_HEAD.size + text_bytes)
                return
            self._begin = text_at + text_bytes
            if kind == FRAME:
                self.frame = Frame(magic, digest, body_bytes, bytes(self._view[text_at : self._begin]))
                return
            (self._received_bytes,) = _TAKEN.unpack(digest)
            text = bytes(self._view[text_at : self._begin])
            if magic == _ANNOUNCED:
                self._early[kind].append((text, body_bytes))
                self._match_early(kind)
            elif magic == _ASKED_FOR:
                self._begin_asked(kind, body_bytes)
            else:
                self._begin_body(kind, text, body_bytes)

    def _make_room(self, size: int) -> None:
        """Has a head and its text, of so many bytes, fit the buffer."""
        if size > len(self._buffer):
            buffer, left = bytearray(size), self._end - self._begin
            buffer[:left] = self._view[self._begin : self._end]
            self._buffer, self._view, self._begin, self._end = buffer, memoryview(buffer), 0, left

    def _ask(self, transfer: Transfer, kind: int, text: bytes, size_bytes: int) -> None:
        """Has an announced body come to its place; that of another message than is expected stays where it is."""
        transfer.found = text or None
        if transfer.text is not None and text != transfer.text:
            transfer.done = True
        elif len(transfer.parts[0]) != size_bytes:
            self.error = _other_size(len(transfer.parts[0]), size_bytes)
            return
        else:
            self._asked[kind].append(transfer)
        if transfer.begun is not None:
            transfer.begun(size_bytes, True)

    def _begin_asked(self, kind: int, size_bytes: int) -> None:
        asked = self._asked[kind]
        if not asked or len(asked[0].parts[0]) != size_bytes:
            self.error = f"{size_bytes} bytes came that nobody had asked for"
            return
        self._reading = asked.popleft()
        self._expect(self._reading.parts[0])

    def _begin_body(self, kind: int, text: bytes, size_bytes: int) -> None:
        receives = self._receives[kind]
        if not receives:
            try:
                self._unasked = kind, text, bytearray(size_bytes)
            except (MemoryError, OverflowError):
                self.error = f"there is no memory for {size_bytes} bytes that came before they were asked for"
                return
            self._expect(memoryview(self._unasked[2]))
            return
        transfer = receives.popleft()
        out = self._place_of(transfer, text, size_bytes)
        if out is not None:
            self._reading = transfer
            self._expect(out)

    def _place_of(self, transfer: Transfer, text: bytes, size_bytes: int) -> Any:
        """Returns where a receive's message goes; None if it is none that may come."""
        out = transfer.parts[0]
        transfer.found = text or None
        self._taken_bytes += size_bytes + _MESSAGE_BYTES
        if transfer.text is not None and text != transfer.text:
            out = memoryview(bytearray(size_bytes))  # past it, as the text tells the receiver
        elif len(out) != size_bytes:
            self.error = _other_size(len(out), size_bytes)
            return None
        if transfer.begun is not None:
            transfer.begun(size_bytes, False)
        return out

    def end_sending(self) -> None:
        """Lets the other side know that nothing more comes, after what was sent; ends this side's waits, too."""
        self.error = self.error or "a call of this rank in this group failed"
        self._sends.clear()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)


class StreamError(RuntimeError):
    """A connection that broke, or what came over it is none of ours; in words that `kind_of_failure` knows."""

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


class Streams:
    """The connections of one rank, by rank."""

    def __init__(self, by_rank: dict[int, Stream], spin_s: float) -> None:
        self.by_rank = by_rank
        self.spin_s = spin_s
        self._poll = select.poll()
        self._masks: dict[int, int] = {}
        self._by_descriptor = {stream.socket.fileno(): stream for stream in by_rank.values()}
        self._owner = os.getpid()

    def wait(self, awaited: Callable[[], Collection[Stream]], limit: Callable[[], float]) -> None:
        """Moves what can be moved until nothing is `awaited`; reads from those, and from those that it sends to.

        A rank of which nothing is awaited any more may end its connection. `limit` is asked now and then how many
        seconds more there are; it may raise. Raises StreamError.
        """
        now = time.monotonic()
        spin_until, look_at, slice_s = now + self.spin_s, now + SLICE_S, SLICE_S
        while reads := awaited():
            for stream in (*reads, *self.by_rank.values()):
                if stream.error and (stream in reads or stream.is_sending):
                    raise StreamError(stream.error, stream.rank)
            for descriptor, stream in self._by_descriptor.items():
                mask = select.POLLOUT if stream.is_sending else 0
                if (stream in reads or mask) and stream.frame is None:
                    mask |= select.POLLIN
                if self._masks.get(descriptor, 0) != mask:
                    self._masks[descriptor] = mask
                    if mask:
                        self._poll.register(descriptor, mask)
                    else:
                        self._poll.unregister(descriptor)
            ready = self._poll.poll(0 if now < spin_until else 1000 * slice_s)
            for descriptor, events in ready:
                if descriptor in self._by_descriptor:  # else it was closed
                    self._by_descriptor[descriptor].handle(events)
            now = time.monotonic()
            if now >= look_at:
                slice_s = min(SLICE_S, limit())
                if slice_s <= 0 and (late := awaited()):
                    raise StreamError("timed out", min(each.rank for each in late))
                look_at = now + slice_s

    def end_sending(self) -> None:
        for stream in self.by_rank.values():
            stream.end_sending()

    def close(self) -> None:
        for stream in self.by_rank.values():
            stream.error = stream.error or "the group was closed"
            if os.getpid() == self._owner:  # a fork of this process may hold the socket, too
                with contextlib.suppress(OSError):
                    stream.socket.shutdown(socket.SHUT_WR)
            stream.socket.close()
        self.by_rank, self._by_descriptor = {}, {}


def _in_words(error: OSError) -> str:
    return f"{error.strerror or error} (closed by peer)" if isinstance(error, ConnectionError) else str(error)


def _other_size(expected: int, found: int) -> str:
    return f"{expected} bytes were to come, and {found} came"


def connect(context: GroupContext, peers: Sequence[int], spin_s: float, address: str | None = None) -> Streams:
    """Connects this rank to `peers`, to each of which it is one, too. Every rank of the group calls it.

    `address`: at which others reach this rank; None for that which gloo tells them. Raises CommunicationError on all
    ranks where one can't listen, and on those that find out why some can't be connected; as soon as a rank of the
    failure domain has ended, the error that names it.
    """
    started = time.monotonic()
    token = secrets.token_bytes(_TOKEN_BYTES)
    with contextlib.ExitStack() as stack:
        listener, port, problem = None, 0, ""
        if peers:
            try:
                address = gloo_address() if address is None else address
                if not address:
                    raise OSError("the interface in GLOO_SOCKET_IFNAME has no address")
                family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
                listener = stack.enter_context(socket.create_server((address, 0), family=family, backlog=_BACKLOG))
                port = listener.getsockname()[1]
            except OSError as error:
                problem = f"{error}"[: _TOLD_BYTES // 4]
        place = [address or "", port, token.hex(), settings.EARLY_BYTES.get(), problem]
        told = json.dumps(place).encode().ljust(_TOLD_BYTES)
        places = _exchange_places(context, told, started)
        for rank, (at, *_, what) in enumerate(places):
            if what:
                text = f"global rank {context.ranks[rank]} of {context} can't listen at {at!r}: {what}"
                raise _not_connected(context, text, [rank], started)
        made: dict[int, socket.socket] = {}
        deadline = time.monotonic() + min(context.timeout_s, settings.START_TIMEOUT_S.get())
        other, where = -1, ""
        try:
            for other in peers:
                if other < context.rank:
                    where = f" at {places[other][0]} port {places[other][1]}"
                    made[other] = _greet(context, places[other], deadline)
            other, where = -1, f", which {address} port {port} is open for"
            if listener is not None:
                _accept(context, listener, token, [each for each in peers if each > context.rank], made, deadline)
        except OSError as error:
            for connection in made.values():
                connection.close()
            missing = [other] if other >= 0 else [each for each in peers if each not in made]
            names = ", ".join(str(context.ranks[rank]) for rank in missing)
            own = context.ranks[context.rank]
            text = f"global rank {own} of {context} can't be connected to global ranks {names}{where}: {error}"
            failure = _not_connected(context, text, missing, started)
            raise attributed(context, "connect", started, failure) from error
    for connection in made.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Streams({other: Stream(made[other], other, places[other][3]) for other in sorted(made)}, spin_s)


def _exchange_places(context: GroupContext, told: bytes, started: float) -> list[Any]:
    try:
        return [json.loads(text) for text in all_gather_bytes(context, told, "connect")]
    except CommunicationError:
        raise
    except RuntimeError as error:
        text = f"{context}: its ranks can't tell each other where they listen: {plain(error)}"
        raise attributed(context, "connect", started, _not_connected(context, text, (), started)) from error


def _not_connected(context: GroupContext, text: str, missing: Sequence[int], started: float) -> CommunicationError:
    return context.failure(
        CommunicationError,
        f"{text}. Open all TCP ports between the hosts, and set GLOO_SOCKET_IFNAME on each to the interface that leads "
        "to the others",
        "connect",
        started=started,
        suspect_ranks=[context.ranks[rank] for rank in missing],
    )


def _greet(context: GroupContext, place: Sequence[Any], deadline: float) -> socket.socket:
    """Connects to a rank that listens at `place`."""
    address, port, token, *_ = place
    family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(family, kind, protocol))
        connection.setblocking(False)
        error = connection.connect_ex(target)
        poll = select.poll()
        poll.register(connection, select.POLLOUT)
        while error == errno.EINPROGRESS:
            if poll.poll(1000 * SLICE_S):
                error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            else:
                _check_time(context, deadline)
        if error:
            raise OSError(error, os.strerror(error))
        connection.sendall(_HELLO.pack(bytes.fromhex(token), context.rank), socket.MSG_NOSIGNAL)
        stack.pop_all()
    return connection


def _check_time(context: GroupContext, deadline: float) -> None:
    if context.deaths():
        raise TimeoutError("a rank has ended")
    if time.monotonic() > deadline:
        raise TimeoutError("timed out")


def _accept(
    context: GroupContext,
    listener: socket.socket,
    token: bytes,
    peers: Sequence[int],
    made: dict[int, socket.socket],
    deadline: float,
) -> None:
    """Adds the connections of `peers`, all of which connect, to `made`; those of strangers end."""
    said: dict[int, tuple[socket.socket, bytearray, float]] = {}
    """By descriptor: who has not said whose it is, as much as it has, and until when it may."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    listener.setblocking(False)
    try:
        while not all(peer in made for peer in peers):
            ready = [descriptor for descriptor, _ in poll.poll(1000 * SLICE_S)]
            _check_time(context, deadline)
            now = time.monotonic()
            for descriptor in ready:
                if descriptor == listener.fileno():
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        connection, _ = listener.accept()
                        connection.setblocking(False)
                        said[connection.fileno()] = connection, bytearray(), now + _STRANGER_S
                        poll.register(connection, select.POLLIN)
            for descriptor, (connection, hello, until) in list(said.items()):
                rank = _read_hello(connection, hello, token) if descriptor in ready else None
                if rank is None and now < until:
                    continue
                poll.unregister(descriptor)
                del said[descriptor]
                if rank is not None and rank in peers and rank not in made:
                    made[rank] = connection
                else:
                    connection.close()
    finally:
        for connection, _, _ in said.values():
            connection.close()


def _read_hello(connection: socket.socket, hello: bytearray, token: bytes) -> int | None:
    """Adds what has come to `hello`; returns the rank that it is of, -1 for a stranger, None if more must come."""
    try:
        come = connection.recv(_HELLO.size - len(hello))
    except BlockingIOError:
        return None
    except OSError:
        return -1
    hello += come
    if not come or len(hello) < _HELLO.size:
        return None if come else -1
    said, rank = _HELLO.unpack(hello)
    return int(rank) if secrets.compare_digest(said, token) else -1
