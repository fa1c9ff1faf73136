"""Plain sends and receives over gloo, where the receiver knows what comes before its tensor is touched.

gloo aborts the process where more comes than fits, and says nothing where less does. So a send begins with a frame
(`checked_calls`): a small tensor is in it, and is copied to the receiver's when it is found to be alike. A larger one
waits for the receiver's answer to the frame: its consent, or a refusal, which both ranks raise.

The follow-ups have tags by the sender's count, so transfers don't mix when several are under way.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from device_communicators.errors import CollectiveMismatchError
from device_communicators.process_group.checked_calls import (
    Call,
    call_in,
    fill,
    frame_bytes,
    payload_of,
    room_for,
    transfer_of,
)
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.reductions import as_bytes
from device_communicators.routing.user_call import begin_sending
from device_communicators.routing.waiting import ByThread, limit_of

_FOLLOW_UPS = 1 << 28  # a bit of tags that neither plain transfers nor started calls have
_CHANNEL_BITS = 18
_NUMBERS = 1 << 10
_ANSWER, _DATA = 1, 2
_BETWEEN_TWO = 2  # the size of the group whose frames these are


class CheckedPairs:
    """This rank's ends of the transfers of a group."""

    def __init__(self, context: GroupContext) -> None:
        self.context = context
        self._lock = threading.Lock()
        self._sent: Counter[tuple[int, int]] = Counter()

    def isend(self, x: Tensor, dst: int, tag: int) -> Transfer:
        with self._lock:  # a receiver takes frames in the order of their numbers
            number = self._sent[dst, tag]
            self._sent[dst, tag] = (number + 1) % _NUMBERS
            return _Send(self.context, x, dst, tag, number)

    def irecv(self, out: Tensor, src: int, tag: int) -> Transfer:
        return _Recv(self.context, out, src, tag)


class Transfer(ByThread):
    """A work, as c10d's, that a thread sees to its end: at once where it takes answers, else when it is waited for."""

    operation = ""

    def __init__(self, context: GroupContext, x: Tensor, peer: int, tag: int) -> None:
        super().__init__(context, self.operation, peer)
        self._group = context.cpu_group
        self._tensor = x
        self._with = peer
        self._limit = limit_of(context)
        self._tag = tag

    def _follow_up(self, kind: int, number: int) -> int:
        return _FOLLOW_UPS | number << _CHANNEL_BITS | (self._tag & ~3) | kind

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
        super().__init__(context, x, dst, tag)
        self._number = number
        self._call = transfer_of("send", x)
        in_frame = x.nbytes <= room_for(_BETWEEN_TWO)
        frame = _empty_frame()
        length = fill(frame, self._call._replace(splits=(number, in_frame)), x if in_frame else None)
        self._answer = _empty_frame()
        self._answered = None if in_frame else self._start_recv(self._answer, self._follow_up(_ANSWER, number))
        self._frame = frame[:length]
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
        self._start_send(as_bytes(self._tensor), self._follow_up(_DATA, self._number)).wait(self._limit)


class _Recv(Transfer):
    operation = "recv"

    def __init__(self, context: GroupContext, out: Tensor, src: int, tag: int) -> None:
        super().__init__(context, out, src, tag)
        self._call = transfer_of("recv", out)
        self._frame = _empty_frame()
        self._framed = self._start_recv(self._frame, tag)
        if out.nbytes > room_for(_BETWEEN_TWO):
            self.begin()

    def _run(self) -> None:
        self._framed.wait(self._limit)
        framed, out = call_in(self._frame), self._tensor
        if framed is None or framed.operation != "send" or len(framed.splits) != len(("number", "in_frame")):
            raise self._mismatch(self._call, framed)
        (number, in_frame), sent = framed.splits, framed._replace(splits=())
        alike = sent._replace(operation="recv") == self._call
        if in_frame:
            if alike:
                as_bytes(out).copy_(payload_of(self._frame, framed, out))
        else:
            data = self._start_recv(as_bytes(out), self._follow_up(_DATA, number)) if alike and out.numel() else None
            answer = _empty_frame()
            length = fill(answer, self._call, None)
            self._start_send(answer[:length], self._follow_up(_ANSWER, number)).wait(self._limit)
            if data is not None:
                data.wait(self._limit)
        if not alike:
            raise self._mismatch(self._call, sent)


def _empty_frame() -> Tensor:
    return torch.zeros(frame_bytes(_BETWEEN_TWO), dtype=torch.uint8)
