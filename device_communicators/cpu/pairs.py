"""Sends and receives between two ranks of a group over several hosts, by a connection of each two.

A message says what the sender's call is: where the receiver's differs, nothing is written, and both ranks raise. The
sender of up to ANSWERED_BYTES is done once the kernel has it; of more once the receiver has said what its call is. What
the receiver has no room for before its call (PARALLEL_STATE_EARLY_BYTES) is sent when it has said so, however small.

Any thread may wait, and several at once: each moves what it can. The process' progress thread moves what was started
and isn't waited for. A signal's handler may interrupt a thread anywhere, in the middle of a message too, so
it can't send or receive in the group that it interrupts.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from device_communicators.base.errors import CollectiveMismatchError, CommunicationError, InvalidArgumentError
from device_communicators.base.member import GroupMember
from device_communicators.calls.user_call import begin_sending, handler_error
from device_communicators.calls.work import TransferError
from device_communicators.cpu.streams import SLICE_S, StreamError, Streams, part_of
from device_communicators.liveness.health import NOTICE_S

ANSWERED_BYTES = 64 << 10
"""`kAnsweredBytes` of csrc/streams.cpp."""
MOST_TAG = (1 << 31) - 1
"""Each tag has two kinds of 32 bits: one for messages, one for their answers."""


class Pairs:
    """This rank's ends of a group's connections; they go with the group."""

    def __init__(
        self, members: GroupMember, streams: Streams, died: Callable[[str, float], CommunicationError | None]
    ) -> None:
        """`died`: returns the error of a call, from its operation and start, if ranks have died; else None."""
        self.members = members
        self.streams = streams
        self.died = died
        self._inside: dict[int, str] = {}
        """By thread: the operation that it is in."""

    def isend(self, x: Tensor, dst: int, tag: int) -> PairTransfer:
        with _Inside(self, "send"):
            return PairTransfer(self, x, dst, tag, "send")

    def irecv(self, out: Tensor, src: int, tag: int) -> PairTransfer:
        with _Inside(self, "recv"):
            return PairTransfer(self, out, src, tag, "recv")

    def send(self, x: Tensor, dst: int, tag: int) -> None:
        with _Inside(self, "send"):
            PairTransfer(self, x, dst, tag, "send").wait_inside()

    def recv(self, out: Tensor, src: int, tag: int) -> None:
        with _Inside(self, "recv"):
            PairTransfer(self, out, src, tag, "recv").wait_inside()

    def enter(self, operation: str) -> None:
        """Refuses a handler of this thread's signals."""
        thread = threading.get_ident()
        if thread in self._inside:
            raise handler_error(operation, str(self.members), self._inside[thread])
        self._inside[thread] = operation

    def exit(self, failure: BaseException | None) -> None:
        """Ends the connections where a call was broken off by Ctrl-C, or what else a signal's handler raised.

        Else another receive would get the message of the one that was interrupted, or the rest of it.
        """
        try:
            if failure is not None and not isinstance(failure, CommunicationError):
                self.end_sending()
        finally:
            self._inside.pop(threading.get_ident(), None)

    def end_sending(self) -> None:
        self.streams.end_sending()

    def close(self) -> None:
        self.streams.close()


class _Inside:
    """`with` it in a call."""

    __slots__ = ("_operation", "_pairs")

    def __init__(self, pairs: Pairs, operation: str) -> None:
        self._pairs = pairs
        self._operation = operation

    def __enter__(self) -> None:
        self._pairs.enter(self._operation)

    def __exit__(self, _: object, failure: BaseException | None, __: object) -> None:
        self._pairs.exit(failure)


class PairTransfer:
    """A work, as c10d's."""

    def __init__(self, pairs: Pairs, x: Tensor, peer: int, tag: int, operation: str) -> None:
        if not 0 <= tag <= MOST_TAG:
            raise InvalidArgumentError(
                f"the tag of a {operation} on {pairs.members} must be from 0 to {MOST_TAG}, but is {tag}"
            )
        begin_sending()
        self._pairs = pairs
        self._peer = peer
        self.operation = operation
        self._text = _text_of(x.dtype, x.numel())
        self._found = b""
        self._has_failed = False
        start = pairs.streams.send if operation == "send" else pairs.streams.receive
        try:
            self._number = start(part_of(peer, x), 2 * tag, self._text)
        except StreamError as error:  # the connection was closed; the wait says so
            self._number, self._has_failed = 0, True
            self._error = error

    def is_completed(self) -> bool:
        return not self._has_failed and self._pairs.streams.is_done(self._number)

    def begin(self) -> PairTransfer:
        """Has it moved on while nobody waits."""
        if not self.is_completed():
            self._pairs.streams.keep_moving()
        return self

    def run_in_this_thread(self) -> None:
        """Sees it to its end without a deadline, for who keeps its tensor; errors are the wait's."""

        started = time.monotonic()

        def limit() -> float:
            if self._pairs.died(self.operation, started):
                raise StreamError("a rank has ended")
            return SLICE_S

        with contextlib.suppress(StreamError):
            self._pairs.streams.wait(self._number, limit)

    def wait(self) -> None:
        with _Inside(self._pairs, self.operation):
            self.wait_inside()

    def wait_inside(self) -> None:
        died, started, noticed = self._pairs.died, time.monotonic(), 0.0
        deadline = started + self._pairs.members.timeout_s

        def limit() -> float:
            nonlocal noticed
            now = time.monotonic()
            if death := died(self.operation, started):
                noticed = noticed or now  # what the dead rank sent before may still be on its way
                if now - noticed > NOTICE_S:
                    raise death
            return deadline - now

        try:
            if self._has_failed:
                raise self._error
            self._pairs.streams.wait(self._number, limit)
        except StreamError as error:
            if death := died(self.operation, started):
                raise death from error
            self._pairs.end_sending()  # as the group can't be used further: others needn't wait for their deadline
            raise TransferError(str(error), self._peer) from error
        self._found = self._found or self._pairs.streams.found(self._number)
        if self._found:
            raise self._mismatch(self._found)

    def _mismatch(self, found: bytes) -> CollectiveMismatchError:
        members = self._pairs.members
        peer, other = members.ranks[self._peer], "recv" if self.operation == "send" else "send"
        return members.failure(
            CollectiveMismatchError,
            f"{self.operation} of {members} met another call: this rank is in {_in_words(self.operation, self._text)}, "
            f"and global rank {peer} in {_in_words(other, found)}. Nothing was written. The group can't be used "
            "further; give the receiving rank the shape and dtype that are sent, and receive in the order of the sends",
            self.operation,
            suspect_ranks=[peer],
            timeout_s=members.timeout_s,
        )


@functools.lru_cache(maxsize=1024)
def _text_of(dtype: torch.dtype, count: int) -> bytes:
    return f"{str(dtype).removeprefix('torch.')} {count}".encode()


def _in_words(operation: str, text: bytes) -> str:
    dtype, _, numel = text.decode(errors="replace").partition(" ")
    return f"{operation} of {numel} × {dtype}"
