"""Plain sends and receives over gloo, where the receiver knows what comes before its tensor is touched.

gloo aborts the process where more comes than fits, and says nothing where less does. So a send begins with a frame
(`checked_calls`) with the beginning of the tensor, or all of it, which is copied to the receiver's when that is found
to be alike. The rest waits for the receiver's call, its answer: where they differ, both ranks raise. A receiver of a
tensor that has a rest answers when it begins to receive, so that the answer comes while the frame is under way.

The follow-ups have tags by the transfers' number, which both ranks count, so they don't mix when several are under way.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from device_communicators.base.errors import CollectiveMismatchError
from device_communicators.calls.memory import as_bytes
from device_communicators.calls.user_call import begin_sending
from device_communicators.process_group.checked_calls import Call, call_in, fill, head_bytes, transfer_of
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.waiting import ByThread, limit_of

_FOLLOW_UPS = 1 << 28  # a bit of tags that neither plain transfers nor started calls have
_CHANNEL_BITS = 18
_NUMBERS = 1 << 10
_ANSWER, _DATA = 1, 2
_SPLITS = ("number", "in_frame")
"""The content of a frame in place of a call's splits."""

FRAME_ROOM_BYTES = 64 << 10
"""Bytes of a tensor that go along in the frame. On a link of 1 Gbit it takes longer than the answer."""


class CheckedPairs:
    """This rank's ends of the transfers of a group."""

    def __init__(self, context: GroupContext) -> None:
        self.context = context
        self._lock = threading.Lock()
        self._sent: Counter[tuple[int, int]] = Counter()
        self._received: Counter[tuple[int, int]] = Counter()

    def isend(self, x: Tensor, dst: int, tag: int) -> Transfer:
        with self._lock:  # a receiver takes frames in the order of their numbers
            return _Send(self.context, x, dst, tag, _next(self._sent, (dst, tag)))

    def irecv(self, out: Tensor, src: int, tag: int) -> Transfer:
        with self._lock:
            return _Recv(self.context, out, src, tag, _next(self._received, (src, tag)))


def _next(numbers: Counter[tuple[int, int]], key: tuple[int, int]) -> int:
    number = numbers[key]
    numbers[key] = (number + 1) % _NUMBERS
    return number


class Transfer(ByThread):
    """A work, as c10d's, that a thread sees to its end: at once where it takes answers, else when it is waited for."""

    operation = ""

    def __init__(self, context: GroupContext, x: Tensor, peer: int, tag: int, number: int) -> None:
        super().__init__(context, self.operation, peer)
        self._group = context.cpu_group
        self._number = number
        self._call = transfer_of(self.operation, x)
        self._tensor = x
        data = as_bytes(x)
        self._head, self._rest = data[:FRAME_ROOM_BYTES], data[FRAME_ROOM_BYTES:]
        self._with = peer
        self._limit = limit_of(context)
        self._tag = tag

    def _follow_up(self, kind: int) -> int:
        return _FOLLOW_UPS | self._number << _CHANNEL_BITS | (self._tag & ~3) | kind

    def _start_send(self, x: Tensor, tag: int) -> Any:
        begin_sending()
        return self._group.send([x], self._with, tag)

    def _start_recv(self, out: Tensor, tag: int) -> Any:
        begin_sending()
        return self._group.recv([out], self._with, tag)

    def _mismatch(self, own: Call, other: Call | None) -> CollectiveMismatchError:
        context, peer = self._context, self._context.ranks[self._with]
        what = "something that is not of this library" if other is None else f"{other}"
        return context.failure(
            CollectiveMismatchError,
            f"{self.operation} of {context} met another call: this rank is in {own}, and global rank {peer} in {what}. "
            "Nothing was written. The group can't be used further; give the receiving rank the shape and dtype that "
            "are sent, and receive in the order of the sends",
            self.operation,
            suspect_ranks=[peer],
            timeout_s=context.timeout_s,
        )


class _Send(Transfer):
    operation = "send"

    def __init__(self, context: GroupContext, x: Tensor, dst: int, tag: int, number: int) -> None:
        super().__init__(context, x, dst, tag, number)
        in_frame = self._rest.numel() == 0
        self._answer = _empty_frame(0)
        self._answered = None if in_frame else self._start_recv(self._answer, self._follow_up(_ANSWER))
        self._frame = _frame_of(self._call._replace(splits=(number, in_frame)), self._head)
        self._framed = self._start_send(self._frame, tag)
        if not in_frame:
            self.begin()

    def _run(self) -> None:
        self._framed.wait(self._limit)
        if self._answered is None:
            return
        self._answered.wait(self._limit)
        expected = call_in(self._answer)
        if expected is None or expected._replace(operation="send") != self._call:
            raise self._mismatch(self._call, expected)
        self._start_send(self._rest, self._follow_up(_DATA)).wait(self._limit)


class _Recv(Transfer):
    operation = "recv"

    def __init__(self, context: GroupContext, out: Tensor, src: int, tag: int, number: int) -> None:
        super().__init__(context, out, src, tag, number)
        self._frame = _empty_frame(FRAME_ROOM_BYTES)
        self._framed = self._start_recv(self._frame, tag)
        self._data = self._answered = None
        if self._rest.numel():
            self._data = self._start_recv(self._rest, self._follow_up(_DATA))
            self._answered = self._start_answer()
            self.begin()

    def _start_answer(self) -> Any:
        self._answer = _frame_of(self._call, self._head[:0])
        return self._start_send(self._answer, self._follow_up(_ANSWER))

    def _run(self) -> None:
        self._framed.wait(self._limit)
        framed = call_in(self._frame)
        if framed is None or framed.operation != "send" or len(framed.splits) != len(_SPLITS):
            raise self._mismatch(self._call, framed)
        (number, in_frame), sent = framed.splits, framed._replace(splits=())
        alike = sent._replace(operation="recv") == self._call and number == self._number
        if not in_frame:
            # Who sends something larger than what fits into a frame waits for the answer of who expects less, too.
            (self._answered or self._start_answer()).wait(self._limit)
        if not alike:
            raise self._mismatch(self._call, sent)
        begin = head_bytes(len(_SPLITS))
        self._head.copy_(self._frame[begin : begin + self._head.nbytes])
        if self._data is not None:
            self._data.wait(self._limit)


def _empty_frame(room_bytes: int) -> Tensor:
    return torch.empty(head_bytes(len(_SPLITS)) + room_bytes, dtype=torch.uint8, device="cpu")


def _frame_of(call: Call, payload: Tensor) -> Tensor:
    frame = _empty_frame(payload.nbytes)
    return frame[: fill(frame, call, payload)]
