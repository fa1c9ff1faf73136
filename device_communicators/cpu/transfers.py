"""Sends tensors from one rank to another, and between hosts also messages. `csrc/transfers.h` moves the data.

The C++ library keeps tensors alive during a transfer, and completes transfers that no caller waits for.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import threading
import zlib
from collections.abc import Iterator
from ctypes import c_int64
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from device_communicators.base.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    GroupDestroyedError,
    InvalidArgumentError,
    UsageError,
)
from device_communicators.base.limits import describe_address_space
from device_communicators.base.member import LOST
from device_communicators.calls.user_call import DTYPE_NUMBERS, handler_error
from device_communicators.calls.work import DONE, TransferError, Work
from device_communicators.cpu.message_queue import Message
from device_communicators.cpu.native import NativeLibrary
from device_communicators.cpu.native_group import Members, QueueStatus, wait_failure
from device_communicators.cpu.plain_tree import PastPython

_NO_MEMORY, _CLOSED, _BROKEN = 7, 8, 9
"""Statuses of `TransferFailure` that `QueueStatus` lacks. Any other status means a malformed message."""
_DONE, _INSIDE = 0, -2
"""Results of starting a transfer: done, or refused inside of a signal handler (csrc/transfer_call.h). Other negative
numbers mean a failure.
"""
_ENDED, _WAIT_INTERRUPTED, _WAIT_INSIDE = 0, 3, 4
"""Results of a wait. Other numbers mean a failure."""
_LONGEST_S = 1e9
MOST_TAG = (1 << 31) - 1
_DTYPES: dict[int, object] = {number: dtype for dtype, number in DTYPE_NUMBERS.items()}
_DTYPES[1 << 20] = "a message"  # kMessageDtype


class Failed(NamedTuple):
    """A failed send or receive, as `TransferFailure` in csrc/transfer_call.h. `sends`: 1 for a send.

    `suspect`, `reporter`, `reason`: the arguments `place`, `reporter` and `reason` of `wait_failure`. After a mismatch,
    the dtypes and sizes are those of both ranks; otherwise the dtypes are -1.
    """

    status: int
    sends: int
    peer: int
    suspect: int
    reporter: int
    reason: int
    elapsed_us: int
    sent_dtype: int
    sent_bytes: int
    expected_dtype: int
    expected_bytes: int

    @property
    def operation(self) -> str:
        return "send" if self.sends else "recv"

    @property
    def is_interruption(self) -> bool:
        return self.status == QueueStatus.INTERRUPTED


Failure = CommunicationError | GroupDestroyedError | TransferError


def failure_of(members: Members, failed: Failed, text: str = "", needs_bytes: int = 0, operation: str = "") -> Failure:
    """Returns the error of a failed transfer. `text`: the error's text if the connection broke (TransferError).
    `needs_bytes`: size of a queue that couldn't be allocated, or 0. `operation`: name in errors; default: send or recv.
    """
    operation, status, elapsed_s = operation or failed.operation, failed.status, failed.elapsed_us / 1e6
    who = members.ranks[failed.suspect] if 0 <= failed.suspect < len(members.ranks) else -1
    if failed.sent_dtype >= 0:
        expected, sent = (
            f"{size} bytes of {_DTYPES.get(dtype, 'another dtype')}"
            for dtype, size in ((failed.expected_dtype, failed.expected_bytes), (failed.sent_dtype, failed.sent_bytes))
        )
        forms = f"this rank receives {expected}, and global rank {who} sent {sent}"
        if failed.sends:
            forms = f"this rank sends {sent}, and global rank {who} receives {expected}"
        return members.mismatch(operation, forms, (who,), elapsed_s=elapsed_s)
    if status == _BROKEN:
        return TransferError(text, max(failed.peer, 0))
    if status == _CLOSED:
        return members.destroyed()
    if status == QueueStatus.INTERRUPTED:
        text = (
            f"a transfer of {members} was interrupted by a signal, so this rank may have read or written only half of "
            f"a message. {LOST}; destroy the group and initialise again"
        )
        return members.failure(CommunicationError, text, operation, elapsed_s=elapsed_s)
    if status == _NO_MEMORY:
        text = f"{operation} of {members} failed for lack of memory: {_what_is_short(needs_bytes)}. {LOST}"
        return members.failure(CommunicationError, text, operation, elapsed_s=elapsed_s)
    if status == QueueStatus.TIMED_OUT and failed.peer < 0:
        text = f"{operation} of {members} timed out after {elapsed_s:.3f} s: no rank has sent anything. {LOST}"
        return members.failure(CollectiveTimeoutError, text, operation, elapsed_s=elapsed_s)
    return wait_failure(members, operation, status, failed.suspect, elapsed_s, failed.reporter, failed.reason)


def failure_text_of(library: Any, transfers: int) -> str:
    text = ctypes.create_string_buffer(512)
    library.ps_transfers_failure_text(transfers, text, len(text))
    return text.value.decode(errors="replace")


def _what_is_short(needs_bytes: int) -> str:
    with contextlib.suppress(OSError):
        found = os.statvfs("/dev/shm")
        free_bytes = found.f_bavail * found.f_frsize
        if found.f_blocks > 0 and free_bytes < needs_bytes:
            return (
                f"{needs_bytes >> 10} KiB of shared memory for a message queue: {os.strerror(errno.ENOSPC)}; make "
                f"/dev/shm larger ({free_bytes >> 10} KiB of it are free), or set PARALLEL_STATE_SHARED_MEMORY=off"
            )
    return (
        f"make /dev/shm larger, allow more address space ({describe_address_space()}), or set "
        "PARALLEL_STATE_SHARED_MEMORY=off"
    )


@functools.cache
def _number_of(dtype: torch.dtype) -> int:
    return DTYPE_NUMBERS.get(dtype, zlib.crc32(str(dtype).encode()) >> 1 | 1 << 30)


class Transfers:
    """This rank's sends and receives in one group. `dst` and `src`: ranks in the group. Thread-safe."""

    ANY_SOURCE = -1

    def __init__(
        self,
        library: NativeLibrary,
        members: Members,
        address: int | None,
        group: int = 0,
        ring_bytes: int = 0,
        tag: int = 0,
    ) -> None:
        """Owns the C++ object at `address`; raises MemoryError for None. `group`: number by which C++ code finds the
        object, or 0. `tag`: of messages. `ring_bytes`: size of a shared-memory queue; 0 between hosts.
        """
        self.members = members
        self._library = library
        self._ring_bytes = ring_bytes
        self.address = address or 0
        if not self.address:
            raise MemoryError(f"this process has no memory left for sends and receives of {members}")
        self._failure: Failure | None = None
        self._is_free = False
        self._waits: set[tuple[int, int, int]] = set()
        if group:
            library.ps_transfers_serve(self.address, group, tag)

    def isend(self, x: Tensor, dst: int, tag: int = 0) -> Work:
        """Starts to send the contiguous `x` to the group's rank `dst`. The returned work is complete if `x` could be
        buffered.
        """
        return self._started(1, x, dst, tag)

    def irecv_(self, out: Tensor, src: int, tag: int = 0) -> Work:
        """Starts to receive into the contiguous `out` from the group's rank `src`. Raises CollectiveMismatchError if
        the sent size or dtype differs.
        """
        return self._started(0, out, src, tag)

    def send(self, x: Tensor, dst: int, tag: int = 0) -> None:
        """Sends the contiguous `x` to the group's rank `dst`. The program may change `x` afterwards."""
        self._run(1, x, dst, tag)

    def recv_(self, out: Tensor, src: int, tag: int = 0) -> None:
        self._run(0, out, src, tag)

    def _check(self, sends: int, tag: int) -> None:
        if not 0 <= tag <= MOST_TAG:
            operation = "send" if sends else "recv"
            raise InvalidArgumentError(
                f"the tag of a {operation} on {self.members} must be from 0 to {MOST_TAG}, but is {tag}"
            )

    def _started(self, sends: int, x: Tensor, peer: int, tag: int) -> Work:
        self._check(sends, tag)
        if not sends or not self._ring_bytes:
            self._refuse_inside(sends, peer)
        number = self._library.ps_transfers_starting(
            self.address, sends, peer, tag, _number_of(x.dtype), x.data_ptr(), x.nbytes, x
        )
        return self._work(number, sends, peer)

    def _work(self, number: int, sends: int, peer: int) -> Work:
        if number == _DONE:
            return DONE
        if number == _INSIDE:
            raise self._in_a_handler(sends)
        if number < 0:
            raise self._failed()
        return _Transfer(self, number, sends, peer)

    def isend_message(self, message: Message, dst: int, tag: int) -> Work:
        self._refuse_inside(1, dst)
        pieces, _, more_heads = message.pieces
        number = self._library.ps_transfers_sending(
            self.address, dst, tag, message.head, pieces or b"", more_heads, message
        )
        return self._work(number, 1, dst)

    def started_message(self, number: int, dst: int) -> Work:
        return _Transfer(self, number, 1, dst)

    def receive_message(
        self, past: PastPython, src: int, tag: int, group: int, report: ctypes.Array[c_int64], *arguments: Any
    ) -> Any:
        with self._waiting(0, src):
            address = ctypes.addressof(report)
            return past.receive_over(self.address, src, tag, self._timeout_us, group, address, *arguments)

    def check(self) -> None:
        if self._failure is None:
            words = (c_int64 * len(Failed._fields))()
            if not self._library.ps_transfers_failure(self.address, words):
                return
        raise self._failed()

    def reserve(self, src: int, receives: int) -> None:
        """Adds `receives`, perhaps negative, to the number of receives from rank `src` pending in Python. While any are
        pending, C++ leaves messages from `src` to Python.
        """
        self._library.ps_transfers_reserve(self.address, src, receives)

    def _run(self, sends: int, x: Tensor, peer: int, tag: int) -> None:
        self._check(sends, tag)
        with self._waiting(sends, peer):
            status = self._library.ps_transfers_running(
                self.address, sends, peer, tag, _number_of(x.dtype), x.data_ptr(), x.nbytes, x, self._timeout_us
            )
            if status != _ENDED:
                self._raise(status, sends)

    @contextlib.contextmanager
    def _waiting(self, sends: int, peer: int) -> Iterator[None]:
        self._refuse_inside(sends, peer)
        key = self._key(sends, peer)
        self._waits.add(key)
        try:
            yield
        finally:
            self._waits.discard(key)

    def _refuse_inside(self, sends: int, peer: int) -> None:
        if self._key(sends, peer) in self._waits:
            raise self._in_a_handler(sends)

    def _key(self, sends: int, peer: int) -> tuple[int, int, int]:
        return (threading.get_ident(), sends, peer) if self._ring_bytes else (threading.get_ident(), 0, 0)

    def _in_a_handler(self, sends: int) -> UsageError:
        operation = "send" if sends else "recv"
        return handler_error(operation, str(self.members), operation)

    @property
    def _timeout_us(self) -> int:
        return int(1e6 * min(self.members.timeout_s, _LONGEST_S))

    def is_done(self, number: int) -> bool:
        return bool(self._library.ps_transfers_done(self.address, number))

    def wait(self, number: int, sends: int, peer: int) -> None:
        if self.is_done(number):
            status = self._library.ps_transfers_waiting(self.address, number, 0)
        else:
            with self._waiting(sends, peer):
                status = self._library.ps_transfers_waiting(self.address, number, self._timeout_us)
        if status != _ENDED:
            self._raise(status, sends)

    def _raise(self, status: int, sends: int) -> NoReturn:
        if status == _WAIT_INTERRUPTED:
            self._library.raise_interruption()
        if status == _WAIT_INSIDE:
            raise self._in_a_handler(sends)
        raise self._failed()

    def _failed(self) -> Failure:
        if self._failure is None:
            words = (c_int64 * len(Failed._fields))()
            self._library.ps_transfers_failure(self.address, words)
            self._failure = failure_of(self.members, Failed(*words), self.failure_text(), self._ring_bytes)
        return self._failure

    def failure_text(self) -> str:
        return failure_text_of(self._library, self.address)

    def abandon(self) -> None:
        """Makes this rank's started transfers fail. Peers on other hosts detect the failure at once."""
        self._library.ps_transfers_abandon(self.address)

    def is_inside(self, peer: int) -> bool:
        return bool(self._library.ps_transfers_is_inside(self.address, peer, 0))

    def waiting_sends(self, dst: int) -> int:
        return int(self._library.ps_transfers_waiting_sends(self.address, dst))

    def close(self) -> bool:
        """Ends all transfers. Returns False if a thread is still in a transfer; the memory must then stay mapped."""
        self._is_free = self._is_free or bool(self._library.ps_transfers_close(self.address))
        return self._is_free  # the memory may be unmapped then

    def __del__(self) -> None:
        address, self.address = getattr(self, "address", 0), 0
        if address:
            if not self._is_free:
                self._library.ps_transfers_close(address)
            self._library.ps_transfers_delete(address)


class _Transfer:
    def __init__(self, transfers: Transfers, number: int, sends: int, peer: int) -> None:
        self._transfers = transfers
        self._number = number
        self._sends = sends
        self._peer = peer

    def is_completed(self) -> bool:
        return self._transfers.is_done(self._number)

    def wait(self) -> None:
        self._transfers.wait(self._number, self._sends, self._peer)
