"""Sends and receives messages between hosts: to one rank as a transfer, to all ranks as a collective."""

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
"""Index of `broken` in `QueueReport` (csrc/queue.h)."""


class MessageStreams:
    """Sends and receives a group's messages between hosts. Each two ranks of different hosts must be connected.
    Thread-safe.
    """

    def __init__(self, transfers: Transfers, tag: int) -> None:
        self.transfers = transfers
        self._tag = tag
        self._senders: dict[int, StreamSender] = {}
        self._receivers: dict[int, StreamReceiver] = {}

    def message_sender(self, dst: int) -> StreamSender:
        return self._senders.get(dst) or self._senders.setdefault(dst, StreamSender(self.transfers, dst, self._tag))

    def message_receiver(self, src: int) -> StreamReceiver:
        found = self._receivers.get(src)
        return found or self._receivers.setdefault(src, StreamReceiver(self.transfers, src, self._tag))


class StreamSender:
    def __init__(self, transfers: Transfers, dst: int, tag: int) -> None:
        self._transfers = transfers
        self._dst = dst
        self._tag = tag

    def isend(self, message: Message) -> Work:
        return self._transfers.isend_message(message, self._dst, self._tag)

    def send(self, message: Message, operation: str = "send") -> None:
        self.isend(message).wait()

    def started(self, number: int) -> Work:
        return self._transfers.started_message(number, self._dst)


class _StreamEnd:
    lock: AbstractContextManager[None] = nullcontext()

    def __init__(self) -> None:
        self._report = QueueReport()

    @property
    def found_bytes(self) -> tuple[int, int]:
        _, total_bytes, head_bytes, *_ = self._report
        return head_bytes, total_bytes - head_bytes


class StreamReceiver(_StreamEnd):
    def __init__(self, transfers: Transfers, src: int, tag: int) -> None:
        super().__init__()
        self.members = transfers.members
        self._transfers = transfers
        self._src = src
        self._tag = tag

    def receive(self, past: PastPython, number: int, group: int, *arguments: Any) -> Any:
        return self._transfers.receive_message(past, self._src, self._tag, group, self._report, *arguments)

    @property
    def is_held_here(self) -> bool:
        """True in a signal handler or decoder that runs inside a transfer of this thread."""
        return self._transfers.is_inside(self._src)

    def check(self, operation: str = "") -> None:
        self._transfers.check()

    def reserve(self, calls: int) -> None:
        self._transfers.reserve(self._src, calls)

    def in_a_handler(self, operation: str) -> UsageError:
        return handler_error(operation, str(self.members), "recv")


class ToAllSender:
    def __init__(self, group: NativeGroup, past: PastPython, call: UserCall) -> None:
        self._group, self._past, self._call = group, past, call

    def send(self, message: Message, operation: str = "") -> None:
        begin_sending()
        started, (pieces, _, more_heads) = time.monotonic(), message.pieces
        words = self._call.words
        status = self._past.broadcast_between(self._group.number, *words, message.head, pieces or b"", more_heads)
        if status != 0:
            self._group.fail(status, self._call, started)


class ToAllReceiver(_StreamEnd):
    is_held_here = False

    def __init__(self, group: NativeGroup, src: int, call: UserCall) -> None:
        super().__init__()
        self._group, self._src, self._call = group, src, call

    def check(self, operation: str = "") -> None:
        """Does nothing, because `receive` raises the group's failure."""

    def receive(self, past: PastPython, number: int, group: int, *arguments: Any) -> Any:
        started, report = time.monotonic(), ctypes.addressof(self._report)
        found = past.receive_between(self._group.number, *self._call.words, self._src, report, *arguments)
        if found is NotImplemented:
            self._group.fail(self._report[_STATUS], self._call, started)
        return found
