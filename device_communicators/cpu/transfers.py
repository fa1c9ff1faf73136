"""Sends and receives of plain tensors between the ranks of one host, as `csrc/transfers.h` carries them; their errors.

The library keeps a transfer's tensor until it no longer uses its memory. It moves what nobody waits for by the
process' progress thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from device_communicators.base.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    GroupDestroyedError,
    MessageDecodeError,
    UsageError,
)
from device_communicators.base.limits import describe_address_space
from device_communicators.base.member import LOST
from device_communicators.calls.user_call import DTYPE_NUMBERS, handler_error
from device_communicators.calls.work import DONE, Work
from device_communicators.cpu.native import NativeLibrary
from device_communicators.cpu.native_group import OUTSIDE, Members, given_up, outsider_died, peer_died, timed_out

_TIMED_OUT, _PEER_DIED, _INTERRUPTED, _GIVEN_UP, _NO_MEMORY, _CLOSED = 1, 2, 4, 5, 7, 8
"""`QueueStatus` in csrc/queue.h and the statuses of `TransferFailure`; any other is of a malformed message."""
_DONE, _INSIDE = 0, -2
"""What starting returns in csrc/transfer_call.h; any other negative number is a refusal."""
_ENDED, _WAIT_INTERRUPTED, _WAIT_INSIDE = 0, 3, 4
"""How a wait ends there; any other number is a failure."""
_LONGEST_S = 1e9
_DTYPES = {number: dtype for dtype, number in DTYPE_NUMBERS.items()}


class Failed(NamedTuple):
    """How a transfer failed: the words of `TransferFailure` in csrc/transfer_call.h. Ranks are those of the group."""

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
        return self.status == _INTERRUPTED


def failure_of(members: Members, failed: Failed, needs_bytes: int = 0) -> CommunicationError | GroupDestroyedError:
    """Returns the error for a failed transfer.

    `needs_bytes`: how much of /dev/shm a ring takes at its first message; 0 where transfers take none.
    """
    operation, status, elapsed_s = failed.operation, failed.status, failed.elapsed_us / 1e6
    who = members.ranks[failed.suspect] if 0 <= failed.suspect < len(members.ranks) else -1
    if failed.sent_dtype >= 0:
        expected, sent = (
            f"{size} bytes of {_DTYPES.get(dtype, 'another dtype')}"
            for dtype, size in ((failed.expected_dtype, failed.expected_bytes), (failed.sent_dtype, failed.sent_bytes))
        )
        forms = f"this rank receives {expected}, and global rank {who} sent {sent}"
        return members.mismatch(operation, forms, (who,), elapsed_s=elapsed_s)
    if status == _CLOSED:
        return members.destroyed()
    if status == _INTERRUPTED:
        text = (
            f"a transfer of {members} was interrupted by a signal, so that this rank may have left a message half "
            f"read or written. {LOST}; destroy it and make it anew"
        )
        return members.failure(CommunicationError, text, operation, elapsed_s=elapsed_s)
    if status == _NO_MEMORY:
        text = f"{operation} of {members} finds no memory for a message: {_what_is_short(needs_bytes)}. {LOST}"
        return members.failure(CommunicationError, text, operation, elapsed_s=elapsed_s)
    if status == _TIMED_OUT and failed.peer < 0:
        text = f"{operation} of {members} timed out after {elapsed_s:.3f} s: no rank has sent anything. {LOST}"
        return members.failure(CollectiveTimeoutError, text, operation, elapsed_s=elapsed_s)
    if status == _TIMED_OUT:
        return timed_out(members, operation, who, elapsed_s)
    if failed.suspect == OUTSIDE:
        return outsider_died(members, operation, elapsed_s)
    if status == _GIVEN_UP:
        return given_up(members, operation, who, elapsed_s, failed.reason, members.ranks[failed.reporter])
    if status == _PEER_DIED:
        return peer_died(members, operation, who, elapsed_s, "has ended, or has destroyed its group")
    text = (
        f"{operation} of {members}: what global rank {who} wrote is not the next part of a message. {LOST}; every rank "
        "must run the same version of parallel_state"
    )
    return members.failure(MessageDecodeError, text, operation, suspect_ranks=(who,))


def _what_is_short(needs_bytes: int) -> str:
    """Returns what ran out and what to do. The library tells only that there was no memory: see what is left now."""
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


class _Functions:
    """The functions of csrc/transfers_api.cpp that are called for each transfer."""

    def __init__(self, library: NativeLibrary) -> None:
        self.start = library.method("ps_transfers_starting")
        self.run = library.method("ps_transfers_running")
        self.wait = library.method("ps_transfers_waiting")
        self.is_done = library.method("ps_transfers_done")


@functools.cache
def _functions(library: NativeLibrary) -> _Functions:
    return _Functions(library)


@functools.cache
def _number_of(dtype: torch.dtype) -> int:
    """Returns what sender and receiver must agree on, beside the size."""
    return DTYPE_NUMBERS.get(dtype, zlib.crc32(str(dtype).encode()) >> 1 | 1 << 30)


class Transfers:
    """This rank's transfers in a group. Any thread may call.

    `places`: the words of `TransferPlaces` in csrc/transfers.h. `liveness`, of `ps_liveness_of` or `ps_liveness_new`,
    tells which ranks are lost. `group`: the group's number, 0 without one.
    """

    def __init__(self, library: Any, members: Members, liveness: int, places: Sequence[int], group: int = 0) -> None:
        self.members = members
        self._library = library
        self._functions = _functions(library)
        words = (ctypes.c_int64 * len(places))(*places)
        has_rings, chunk_bytes, chunks = places[0] != 0, places[4], places[5]
        self._ring_bytes = chunk_bytes * chunks if has_rings else 0
        self._address: int = library.ps_transfers_new(liveness, members.rank, len(members.ranks), words) or 0
        if not self._address:
            raise MemoryError(f"there is no memory for the transfers of {members}")
        self._failure: CommunicationError | GroupDestroyedError | None = None
        self._is_free = False
        self._waits: set[tuple[int, int, int]] = set()
        """Waits: their threads, whether they send, and their peers."""
        if group:
            library.ps_transfers_serve(self._address, group, min(members.timeout_s, _LONGEST_S))

    def isend(self, x: Tensor, dst: int) -> Work:
        """Starts to send a contiguous CPU tensor. Done at once if the ring has room for it."""
        return self._started(1, x, dst)

    def irecv_(self, out: Tensor, src: int) -> Work:
        """Starts to receive into a contiguous CPU tensor; CollectiveMismatchError if another size or dtype was sent."""
        return self._started(0, out, src)

    def send(self, x: Tensor, dst: int) -> None:
        """Sends a contiguous CPU tensor, which may be changed afterwards."""
        self._run(1, x, dst)

    def recv_(self, out: Tensor, src: int) -> None:
        """Receives as `irecv_`, and waits."""
        self._run(0, out, src)

    def _started(self, sends: int, x: Tensor, peer: int) -> Work:
        if not sends:
            self._refuse_inside(sends, peer)
        number = self._functions.start(self._address, sends, peer, 0, _number_of(x.dtype), x.data_ptr(), x.nbytes, x)
        if number == _DONE:
            return DONE
        if number == _INSIDE:
            raise self._in_a_handler(sends)
        if number < 0:
            raise self._failed()
        return _Transfer(self, number, sends, peer)

    def _run(self, sends: int, x: Tensor, peer: int) -> None:
        with self._waiting(sends, peer):
            status = self._functions.run(
                self._address, sends, peer, 0, _number_of(x.dtype), x.data_ptr(), x.nbytes, x, self._timeout_us
            )
            if status != _ENDED:
                self._raise(status, sends)

    @contextlib.contextmanager
    def _waiting(self, sends: int, peer: int) -> Iterator[None]:
        self._refuse_inside(sends, peer)
        key = (threading.get_ident(), sends, peer)
        self._waits.add(key)
        try:
            yield
        finally:
            self._waits.discard(key)

    def _refuse_inside(self, sends: int, peer: int) -> None:
        """Raises UsageError in a handler of signals whose thread waits for the same peer, the same way."""
        if (threading.get_ident(), sends, peer) in self._waits:
            raise self._in_a_handler(sends)

    def _in_a_handler(self, sends: int) -> UsageError:
        operation = "send" if sends else "recv"
        return handler_error(operation, str(self.members), operation)

    @property
    def _timeout_us(self) -> int:
        return int(1e6 * min(self.members.timeout_s, _LONGEST_S))

    def is_done(self, number: int) -> bool:
        return bool(self._functions.is_done(self._address, number))

    def wait(self, number: int, sends: int, peer: int) -> None:
        if self.is_done(number):
            status = self._functions.wait(self._address, number, 0)
        else:
            with self._waiting(sends, peer):
                status = self._functions.wait(self._address, number, self._timeout_us)
        if status != _ENDED:
            self._raise(status, sends)

    def _raise(self, status: int, sends: int) -> NoReturn:
        if status == _WAIT_INTERRUPTED:
            self._library.raise_interruption()
        if status == _WAIT_INSIDE:
            raise self._in_a_handler(sends)
        raise self._failed()

    def _failed(self) -> CommunicationError | GroupDestroyedError:
        """Returns the error for the first failure, with which all transfers end."""
        if self._failure is None:
            words = (ctypes.c_int64 * len(Failed._fields))()
            self._library.ps_transfers_failure(self._address, words)
            self._failure = failure_of(self.members, Failed(*words), self._ring_bytes)
        return self._failure

    def is_inside(self, peer: int) -> bool:
        """Returns True in a handler of signals that interrupts this thread's receive from `peer`."""
        return bool(self._library.ps_transfers_is_inside(self._address, peer, 0))

    def waiting_sends(self, dst: int) -> int:
        """Returns how many sends wait until another one to the same rank is written."""
        return int(self._library.ps_transfers_waiting_sends(self._address, dst))

    def close(self) -> bool:
        """Fails what is under way. False where a thread is still in a queue: the memory must stay then."""
        self._is_free = self._is_free or bool(self._library.ps_transfers_close(self._address))
        return self._is_free  # then the memory may be unmapped: a second close must not touch it

    def __del__(self) -> None:
        address, self._address = getattr(self, "_address", 0), 0
        if address:
            self._library.ps_transfers_delete(address)


class _Transfer:
    """A work."""

    def __init__(self, transfers: Transfers, number: int, sends: int, peer: int) -> None:
        self._transfers = transfers
        self._number = number
        self._sends = sends
        self._peer = peer

    def is_completed(self) -> bool:
        return self._transfers.is_done(self._number)

    def wait(self) -> None:
        self._transfers.wait(self._number, self._sends, self._peer)
