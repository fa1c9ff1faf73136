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

Compiled code moves all of it (csrc/streams.h). Here is what Python asks of it.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from device_communicators.cpu import native

logger = logging.getLogger("parallel_state")

FRAME = 0
"""The kind of the message that a call begins with."""

_HEAD = struct.Struct("<4s8sIIQ4x")
"""Magic, digest, kind, bytes of the text, bytes of the body: `kHead` of csrc/streams.cpp."""
_MARKS = struct.Struct("<4s8sQ")
"""A frame as C++ returns it: magic, digest, bytes of the body; its text follows."""
STRIPED_BYTES = 256 << 10
"""Bodies from this size on are striped, where there are several connections."""
SLICE_S = 0.05
"""So long a wait lasts at most before its caller looks whether it makes sense to go on."""
_LOOK, _DIFFER, _FAILED = -1, -2, -4
"""Outcomes in csrc/streams.h, less the rank for the last one."""


class Frame(NamedTuple):
    """The facts of a call's first message beside its body."""

    magic: bytes
    digest: bytes
    body_bytes: int
    text: bytes


def head_of(magic: bytes, digest: bytes, text: bytes, body_bytes: int = 0) -> bytes:
    """Returns what comes before the body of a call's first message."""
    return _HEAD.pack(magic, digest, FRAME, len(text), body_bytes) + text


class StreamError(RuntimeError):
    """A connection that broke, or what came over it is none of ours; in words that `kind_of_failure` knows."""

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


class FramesDiffer(Exception):
    """Another rank's frame isn't that of this call: see `Streams.frame`."""


Part = tuple[int, int, int, object]
"""A rank, an address, a number of bytes, and the object whose memory that is."""
_PART = 4


def part_of(rank: int, x: Tensor | None) -> Part:
    """Returns the memory of contiguous `x` as a part for `rank`, or nothing as one."""
    return (rank, 0, 0, None) if x is None else (rank, x.data_ptr(), x.nbytes, x)


class _Functions:
    """The functions of csrc/streams_api.cpp."""

    def __init__(self, library: native.NativeLibrary) -> None:
        def method(name: str) -> Callable[..., Any]:
            return library.method(f"ps_streams_{name}")

        self.library = library
        self.exchange = method("exchanging")
        self.send_frames = method("framing")
        self.meet = method("meeting")
        self.send = method("sending")
        self.receive = method("receiving")
        self.send_pair = method("pair_sending")
        self.receive_pair = method("pair_receiving")
        self.wait = method("waiting")
        self.keep_moving = method("keeping_moving")
        self.flush = method("flushing")
        self.rank_of = method("rank_of")
        self.found = method("found")
        self.frame = method("frame")
        self.error = method("error")
        self.late = method("late")
        self.release = method("releasing")


@functools.cache
def _functions() -> _Functions:
    return _Functions(native.load())


class Streams:
    """The connections of one rank, by rank: csrc/streams.h moves what goes over them.

    A transfer is a number, and keeps its tensor until it is done, or the connection has an error. What waits is called
    with a function `limit`, which is asked now and then how many seconds more there are, and may raise.
    """

    def __init__(
        self,
        sockets: Mapping[int, Sequence[socket.socket]],
        spin_s: float,
        early_bytes: Mapping[int, int] | None = None,
        striped_bytes: int = STRIPED_BYTES,
    ) -> None:
        """`sockets`: the connections to each rank, in the order of the other side; only `close` closes them.

        `early_bytes`: how much this rank may send to each other one before that receives it.
        """
        self.functions = _functions()
        self._library = self.functions.library
        self._owner = os.getpid()
        self.sockets: dict[int, Sequence[socket.socket]] = {}
        self.address = self._library.ps_streams_new(int(spin_s * 1e9), striped_bytes)
        if not self.address:
            raise MemoryError("there is no memory for the connections to other hosts")
        self.sockets = dict(sockets)
        for rank in sorted(self.sockets):
            first, *others = self.sockets[rank]
            room = 0 if early_bytes is None else early_bytes[rank]
            self._library.ps_streams_add(self.address, rank, first.fileno(), room)
            for connection in others:
                self._library.ps_streams_add_stripe(self.address, rank, connection.fileno())
            for connection in self.sockets[rank]:
                connection.setblocking(False)

    def __del__(self) -> None:
        if getattr(self, "address", None):  # else it wasn't made
            self.close()
            self._library.ps_streams_delete(self.address)

    def send(self, part: Part, kind: int) -> int:
        """Sends bytes to a rank, as far as there is room; errors are the wait's."""
        return self._number(self.functions.send(self.address, kind, *part))

    def receive(self, part: Part, kind: int) -> int:
        """Receives the next message of a kind from a rank, which must be as long."""
        return self._number(self.functions.receive(self.address, kind, *part))

    def send_frames(self, head: bytes, parts: Sequence[object]) -> range:
        """Sends the parts, one after the other in `parts`, each behind the head of a call."""
        first = self._number(self.functions.send_frames(self.address, head, *parts))
        return range(first, first + len(parts) // _PART)

    def exchange(
        self, head: bytes, sent: Sequence[object], received: Sequence[object], limit: Callable[[], float]
    ) -> None:
        """Sends frames with parts in them, and receives those of `received`, all of which must begin with this head.

        Raises FramesDiffer where they don't, having taken none; else StreamError.
        """
        count = len(sent) // _PART
        outcome = self.functions.exchange(self.address, _SLICE_US, head, count, *sent, *received)
        if outcome != 0:
            again = functools.partial(self.functions.exchange, self.address)
            self._go_on(outcome, lambda us: again(us, head, count, *sent, *received), limit)

    def meet(self, head: bytes, take: bool, received: Sequence[object], limit: Callable[[], float]) -> range:
        """Waits for frames, which must begin with `head`; starts to receive what is in them if `take`. Raises as
        `exchange`."""
        outcome = self.functions.meet(self.address, _SLICE_US, head, take, *received)
        if outcome < 0:
            again = functools.partial(self.functions.meet, self.address)
            outcome = self._go_on(outcome, lambda us: again(us, head, take, *received), limit)
        return range(outcome, outcome + sum(1 for size in received[2::_PART] if size)) if take else range(0)

    def wait(self, numbers: Sequence[int], limit: Callable[[], float], all_move: bool = False) -> None:
        """Waits until transfers are done. Moves those of other ranks, too, if `all_move`. Raises StreamError."""
        outcome = self.functions.wait(self.address, _SLICE_US, all_move, *numbers)
        if outcome != 0:
            again = functools.partial(self.functions.wait, self.address)
            self._go_on(outcome, lambda us: again(us, all_move, *numbers), limit, numbers)

    def _go_on(
        self,
        outcome: int,
        again: Callable[[int], int],
        limit: Callable[[], float],
        numbers: Sequence[int] = (),
    ) -> int:
        """Calls `again` with slices of time until it has come to an end."""
        while outcome == _LOOK:
            left = limit()
            if left <= 0:
                outcome = again(0)  # what came just now counts
                if outcome == _LOOK and (late := self._late(numbers)) >= 0:
                    raise StreamError("timed out", late)
            else:
                outcome = again(max(1, int(1e6 * min(SLICE_S, left))))
        if outcome == _DIFFER:
            raise FramesDiffer
        if outcome <= _FAILED:
            rank = _FAILED - outcome
            raise StreamError(self.error(rank), rank)
        return outcome

    def _late(self, numbers: Sequence[int]) -> int:
        """Returns the lowest rank of which something is awaited still: of `numbers`, if any are given; -1 for none."""
        if not numbers:
            return self.functions.late(self.address)
        late = [self.functions.rank_of(self.address, number) for number in numbers]
        return min((rank for rank in late if rank >= 0), default=-1)

    def _number(self, outcome: int) -> int:
        if outcome <= _FAILED:
            rank = _FAILED - outcome
            raise StreamError(self.error(rank), rank)
        return outcome

    def send_pair(self, part: Part, kind: int, text: bytes) -> int:
        """Sends a message of `text`, or announces it where there is no room for it before its receive."""
        return self._number(self.functions.send_pair(self.address, kind, text, *part))

    def receive_pair(self, part: Part, kind: int, text: bytes) -> int:
        """Receives the next message of a kind, and writes nothing where its text is another one: see `found`."""
        return self._number(self.functions.receive_pair(self.address, kind, text, *part))

    def found(self, number: int) -> bytes:
        """Returns the other rank's text where that isn't the one of this transfer, which is done; once."""
        return self.functions.found(self.address, number)

    def keep_moving(self) -> None:
        """Has the process' progress thread move what nobody waits for, until nothing is to be sent or received."""
        self.functions.keep_moving(self.address)

    def is_done(self, number: int) -> bool:
        return self.functions.rank_of(self.address, number) < 0

    def frame(self, rank: int) -> Frame | None:
        """Returns the frame of a rank that nobody has taken yet."""
        found = self.functions.frame(self.address, rank)
        if not found:
            return None
        magic, digest, body_bytes = _MARKS.unpack_from(found)
        return Frame(magic, digest, body_bytes, found[_MARKS.size :])

    def error(self, rank: int) -> str:
        """Returns what is wrong with the connection to a rank; empty for nothing."""
        return self.functions.error(self.address, rank).decode(errors="replace")

    def flush(self) -> None:
        """Sends what the kernel has room for."""
        self.functions.flush(self.address)

    def end_sending(self, rank: int = -1) -> None:
        """Lets the other sides, or one, know that nothing more comes after what was sent; ends this side's waits."""
        self._library.ps_streams_end_sending(self.address, rank)
        self.functions.release(self.address)

    def facts(self, rank: int) -> tuple[int, int, int, int]:
        """Returns the bytes kept for receives to come; sent at once; received of these; and taken by this side."""
        words = (ctypes.c_uint64 * 4)()
        self._library.ps_streams_facts(self.address, rank, words)
        return tuple(words)

    def close(self) -> None:
        """Ends the connections, and all waits. Twice is fine."""
        if os.getpid() == self._owner:  # a fork of this process may hold the sockets, too
            self._library.ps_streams_close(self.address)
            self.functions.release(self.address)
        for connection in itertools.chain.from_iterable(self.sockets.values()):
            connection.close()
        self.sockets = {}


_SLICE_US = int(1e6 * SLICE_S)
