"""Messages between hosts: the ends of a group's connections, with the methods that the ends of message queues have.

A message to one rank is one transfer (csrc/transfers.h). The library keeps its memory until it is sent, and its
progress thread sends what nobody waits for. A message to all ranks is one call of the group (csrc/hosts_group.h).
"""

from __future__ import annotations

import ctypes
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from device_communicators.base.errors import UsageError
from device_communicators.calls.user_call import UserCall, begin_sending, handler_error
from device_communicators.calls.work import Work
from device_communicators.cpu.message_queue import Message
from device_communicators.cpu.native import QueueReport
from device_communicators.cpu.native_group import NativeGroup
from device_communicators.cpu.plain_tree import PastPython
from device_communicators.cpu.transfers import Transfers

_STATUS = 9
"""`QueueReport::broken` of csrc/queue.h."""


class MessageStreams:
    """Sends and receives the messages of a group that has a connection between each two ranks. Any thread may call."""

    def __init__(self, transfers: Transfers, tag: int) -> None:
        """`tag`: of the messages; `Transfers.message_tag` in C++ is the same."""
        self.transfers = transfers
        self._tag = tag
        self._senders: dict[int, StreamSender] = {}
        self._receivers: dict[int, StreamReceiver] = {}

    def message_sender(self, dst: int) -> StreamSender:
        """Returns the sending end of the connection to `dst`."""
        return self._senders.get(dst) or self._senders.setdefault(dst, StreamSender(self.transfers, dst, self._tag))

    def message_receiver(self, src: int) -> StreamReceiver:
        """Returns the receiving end of the connection from `src`."""
        found = self._receivers.get(src)
        return found or self._receivers.setdefault(src, StreamReceiver(self.transfers, src, self._tag))


class StreamSender:
    """The sending end. Messages are sent in the order of the calls."""

    def __init__(self, transfers: Transfers, dst: int, tag: int) -> None:
        self._transfers = transfers
        self._dst = dst
        self._tag = tag

    def isend(self, message: Message) -> Work:
        """Starts to send. The message is kept until it is sent."""
        return self._transfers.isend_message(message, self._dst, self._tag)

    def send(self, message: Message, operation: str = "send") -> None:
        """Sends, and waits until the tensors may be changed."""
        self.isend(message).wait()

    def started(self, number: int) -> Work:
        """Returns the work of a message that the library started to send without Python."""
        return self._transfers.started_message(number, self._dst)


class _StreamEnd:
    """A receiving end: what it found last."""

    lock: AbstractContextManager[None] = nullcontext()

    def __init__(self) -> None:
        self._report = QueueReport()

    @property
    def found_bytes(self) -> tuple[int, int]:
        """Returns the bytes of the last message's head, and of its tensors."""
        _, total_bytes, head_bytes, *_ = self._report
        return head_bytes, total_bytes - head_bytes


class StreamReceiver(_StreamEnd):
    """The receiving end of messages to this rank."""

    def __init__(self, transfers: Transfers, src: int, tag: int) -> None:
        super().__init__()
        self.members = transfers.members
        self._transfers = transfers
        self._src = src
        self._tag = tag

    def receive(self, past: PastPython, number: int, group: int, *arguments: Any) -> Any:
        """Returns the object of the next message, as `PastPython.receive_at`; NotImplemented after a failure."""
        return self._transfers.receive_message(past, self._src, self._tag, group, self._report, *arguments)

    @property
    def is_held_here(self) -> bool:
        """Returns True in a handler of signals, or a decoder, that interrupts this thread in a transfer."""
        return self._transfers.is_inside(self._src)

    def check(self, operation: str = "") -> None:
        """Raises the failure of the group's transfers, also of a call without Python."""
        self._transfers.check()

    def reserve(self, calls: int) -> None:
        """Keeps lists received without Python from this end until as many are taken back. Any thread may call."""
        self._transfers.reserve(self._src, calls)

    def in_a_handler(self, operation: str) -> UsageError:
        """Returns the error for a handler of signals that would wait for the message that its thread is in."""
        return handler_error(operation, str(self.members), "recv")


class ToAllSender:
    """The sending end of one message to all ranks."""

    def __init__(self, group: NativeGroup, past: PastPython, call: UserCall) -> None:
        self._group, self._past, self._call = group, past, call

    def send(self, message: Message, operation: str = "") -> None:
        """Sends, and returns once the tensors may be changed."""
        begin_sending()
        started, (pieces, _, more_heads) = time.monotonic(), message.pieces
        words = self._call.words
        status = self._past.broadcast_between(self._group.number, *words, message.head, pieces or b"", more_heads)
        if status != 0:
            self._group.fail(status, self._call, started)


class ToAllReceiver(_StreamEnd):
    """The receiving end of one message to all ranks."""

    is_held_here = False

    def __init__(self, group: NativeGroup, src: int, call: UserCall) -> None:
        super().__init__()
        self._group, self._src, self._call = group, src, call

    def check(self, operation: str = "") -> None:
        """Does nothing: `receive` raises the group's failure."""

    def receive(self, past: PastPython, number: int, group: int, *arguments: Any) -> Any:
        """Returns the object of the message, as `PastPython.receive_value`. Raises as `NativeGroup.call`."""
        started, report = time.monotonic(), ctypes.addressof(self._report)
        found = past.receive_between(self._group.number, *self._call.words, self._src, report, *arguments)
        if found is NotImplemented:
            self._group.fail(self._report[_STATUS], self._call, started)
        return found
