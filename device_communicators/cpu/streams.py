"""Messages over TCP connections between ranks of a group on different hosts. Each direction keeps the send order.

gloo sends a message after its receiver has posted the receive, and reads with a thread of its own. Here a send writes
at once as much as the kernel accepts, and the thread that waits for a message reads it to where it belongs. That saves
the receiver's request and two changes of thread.

A message is a head of fixed size, a text, and a body. The text describes the call. The *kind* in the head says which
receives the message fits: those of the same kind.

A body that arrives before its receive is stored in memory of its own. A sender may have only a limited number of bytes
there; the receiver chose that number when they connected. A message over this limit is *announced*: its head is sent,
and its body after the receive is posted (a rendezvous, in MPI's terms). Each head also says how many bytes its sender
has received so far, so the limit needs no messages of its own.

If the receiver stopped reading instead, the kernel would keep the rest, but then a receive of a later message on the
same connection could never finish. An announcement is short and is always read, so no limit causes a deadlock. A limit
on the size of each message would delay every large one by the receiver's request, and not bound the number of small
ones.

csrc/streams.h does all of this; this file is its interface to Python.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from device_communicators.cpu import native

STRIPED_BYTES = 256 << 10
"""Bodies from this size on are striped, if there are several connections."""
SLICE_S = 0.05
"""A wait calls its `limit` at least this often."""
_SLICE_US = int(1e6 * SLICE_S)
_LOOK, _FAILED = -1, -2
"""Outcomes in csrc/streams.h, less the rank for the last one."""


class StreamError(RuntimeError):
    """A connection broke, or delivered bytes that are no message; in words that `kind_of_failure` knows."""


Part = tuple[int, int, int, object]
"""A rank, an address, a number of bytes, and the object that owns that memory."""


def part_of(rank: int, x: Tensor) -> Part:
    """Returns the memory of contiguous `x` as a part for `rank`."""
    return rank, x.data_ptr(), x.nbytes, x


class _Functions:
    """The functions of csrc/streams_api.cpp."""

    def __init__(self, library: native.NativeLibrary) -> None:
        def method(name: str) -> Callable[..., Any]:
            return library.method(f"ps_streams_{name}")

        self.library = library
        self.send = method("sending")
        self.receive = method("receiving")
        self.wait = method("waiting")
        self.keep_moving = method("keeping_moving")
        self.is_done = method("is_done")
        self.found = method("found")
        self.error = method("error")
        self.release = method("releasing")


@functools.cache
def _functions() -> _Functions:
    return _Functions(native.load())


class Streams:
    """The connections of one rank to others: csrc/streams.h moves their messages.

    A transfer is a number. It keeps its tensor until it is done or its connection fails.
    """

    def __init__(
        self,
        sockets: Mapping[int, Sequence[socket.socket]],
        spin_s: float,
        early_bytes: Mapping[int, int],
        striped_bytes: int = STRIPED_BYTES,
    ) -> None:
        """`sockets`: the connections to each rank, in the peer's order; only `close` closes them.

        `early_bytes`: by rank, how many bytes this rank may send before that rank receives them.
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
            self._library.ps_streams_add(self.address, rank, first.fileno(), early_bytes[rank])
            for connection in others:
                self._library.ps_streams_add_stripe(self.address, rank, connection.fileno())
            for connection in self.sockets[rank]:
                connection.setblocking(False)

    def __del__(self) -> None:
        if getattr(self, "address", None):  # else it wasn't made
            self.close()
            self._library.ps_streams_delete(self.address)

    def send(self, part: Part, kind: int, text: bytes) -> int:
        """Starts to send a message, or announces it if it exceeds the limit of early bytes; returns the transfer.

        Raises StreamError only if the connections are unusable; `wait` raises the other errors.
        """
        return self._checked(self.functions.send(self.address, kind, text, *part))

    def receive(self, part: Part, kind: int, text: bytes) -> int:
        """Starts to receive the next message of a kind; returns the transfer.

        A message with another text isn't written to the part; `found` then returns that text.
        """
        return self._checked(self.functions.receive(self.address, kind, text, *part))

    def wait(self, number: int, limit: Callable[[], float]) -> None:
        """Waits until a transfer is done; moves the data of all connections meanwhile. Raises StreamError.

        `limit` returns the seconds until the deadline, or raises.
        """
        outcome = self.functions.wait(self.address, _SLICE_US, number)
        while outcome == _LOOK:
            left = limit()
            slice_us = max(1, int(1e6 * min(SLICE_S, left))) if left > 0 else 0  # once more, for data that just came
            outcome = self.functions.wait(self.address, slice_us, number)
            if outcome == _LOOK and left <= 0:
                raise StreamError("timed out")
        self._checked(outcome)

    def _checked(self, outcome: int) -> int:
        if outcome <= _FAILED:
            raise StreamError(self.error(_FAILED - outcome))
        return outcome

    def found(self, number: int) -> bytes:
        """Returns the peer's text of a transfer that is done, if it differs from the transfer's own; once."""
        return self.functions.found(self.address, number)

    def keep_moving(self) -> None:
        """Has the progress thread of the process move data until nothing is left to send or receive."""
        self.functions.keep_moving(self.address)

    def is_done(self, number: int) -> bool:
        return bool(self.functions.is_done(self.address, number))

    def error(self, rank: int) -> str:
        """Returns why the connection to a rank failed; empty if it didn't."""
        return self.functions.error(self.address, rank).decode(errors="replace")

    def end_sending(self) -> None:
        """Shuts down sending on all connections, so that peers fail at once; ends this rank's waits."""
        self._library.ps_streams_end_sending(self.address)
        self.functions.release(self.address)

    def facts(self, rank: int) -> tuple[int, int, int, int]:
        """Returns the bytes stored for later receives; sent at once; received of these; and taken by this rank."""
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
