"""Sends and receives messages between ranks of one host, through queues in shared memory (csrc/queue.h).

A signal handler that interrupts a send or receive can itself send. Its call raises UsageError if it would wait for the
interrupted thread.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from ctypes import c_int, c_int64
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from device_communicators.base.errors import CollectiveMismatchError, CommunicationError, UsageError
from device_communicators.base.helper_threads import HelperThread
from device_communicators.base.member import LOST
from device_communicators.calls.user_call import handler_error
from device_communicators.calls.work import DONE, Work
from device_communicators.cpu.native import QueueReport
from device_communicators.cpu.native_group import Members, QueueStatus, wait_failure
from device_communicators.cpu.plain_tree import PastPython, Pinned

# Of a `QueueReport`.
(
    _SUSPECT, _TOTAL_BYTES, _HEAD_BYTES, _FINGERPRINT, _LEFT_BYTES, _REPORTER, _REASON, _RESERVED, _FOUND, _BROKEN,
    _ELAPSED_US, _HOLDER,
) = range(12)  # fmt: skip
_SLICE_S = 0.2
_CLOSE_GRACE_S = 1.0
_HEAD_BUFFER_BYTES = 64 << 10
LINE_BYTES = 128


class Shape(NamedTuple):
    chunk_bytes: int
    chunks: int

    @property
    def data_bytes(self) -> int:
        return self.chunk_bytes * self.chunks


@dataclass(frozen=True)
class Place:
    control: int
    """Address of the queue's counters, which must be zero at first."""
    data: int
    shape: Shape
    ranks: tuple[int, ...]
    """The writer's rank, then the readers' ranks."""


class Waiting(NamedTuple):
    liveness: int
    spin_ns: int
    yields: int


def pieces_of(tensors: Sequence[Tensor], more_head: bytes | Pinned = b"") -> tuple[bytes | None, int]:
    """Returns the addresses and sizes of a message's parts, packed for C++ (None without parts), and the number of
    parts.

    `more_head`: the message's header without its first bytes, in one or more parts. Each non-empty tensor is one part.
    """
    flat: list[int] = []
    if isinstance(more_head, Pinned):
        for piece in more_head.pieces:
            flat += piece
    elif more_head:
        flat += (ctypes.cast(ctypes.c_char_p(more_head), ctypes.c_void_p).value or 0, len(more_head))
    elif not tensors:
        return None, 0
    for tensor in tensors:
        size = tensor.nbytes
        if size:
            flat += (tensor.data_ptr(), size)
    count = len(flat) // 2
    return (_PACKERS[count](*flat) if count < _FEW else struct.pack(f"{2 * count}Q", *flat)) or None, count


_FEW = 32
_PACKERS = [struct.Struct(f"{2 * count}Q").pack for count in range(_FEW)]


def counters_of(control: int, readers: int) -> list[int]:
    return [c_int64.from_address(control + LINE_BYTES * line).value for line in range(1, 2 + readers)]


class _End:
    side = ""

    def __init__(self, library: Any, members: Members, place: Place, waiting: Waiting, *me: int) -> None:
        self.members = members
        self.lock: Any = threading.RLock()  # knows its owner
        self.closed = False
        self._library = library
        self._place = place
        self._report = QueueReport()
        self._failure: CommunicationError | None = None
        self._delete = getattr(library, f"ps_queue_{self.side}_delete")
        self._leave = getattr(library, f"ps_queue_{self.side}_leave")
        self.end: int | None = getattr(library, f"ps_queue_{self.side}_new")(
            place.control, place.data, *place.shape, len(place.ranks) - 1, (c_int * len(place.ranks))(*place.ranks),
            *me, *waiting, self._report,
        )  # fmt: skip

    def failed(self, status: int, operation: str, started: float) -> CommunicationError:
        """Returns the error of a failed call, which later calls on this queue raise again. `status`: a
        `QueueStatus`.
        """
        report, members = self._report, self.members
        elapsed_s = max(time.monotonic() - started, report[_ELAPSED_US] / 1e6)
        report[_BROKEN] = status
        if status == QueueStatus.INTERRUPTED or (
            status == QueueStatus.MALFORMED and self.side == "writer"
        ):  # the message isn't finished
            self._failure = members.failure(
                CommunicationError,
                f"an earlier call of {members} was interrupted by a signal in the middle of a message. {LOST}; destroy "
                "the group and initialise again",
                None,
            )
            if status == QueueStatus.INTERRUPTED:
                self._library.raise_interruption()
            return self._failure
        if self.closed:
            return members.destroyed()  # type: ignore[return-value]
        suspect = self._place.ranks[0] if status == QueueStatus.MALFORMED else report[_SUSPECT]
        self._failure = failure = wait_failure(
            members, operation, status, suspect, elapsed_s, report[_REPORTER], report[_REASON]
        )
        return failure

    def check(self, operation: str = "") -> None:
        if self._failure is not None:
            raise self._failure
        if self.closed:
            raise self.members.destroyed()
        if self._report[_BROKEN]:
            raise self.failed(self._report[_BROKEN], operation, time.monotonic())

    def reserve(self, calls: int) -> None:
        """Adds `calls`, perhaps negative, to the number of receives pending in Python. While any are pending, C++
        leaves the next message to Python.
        """
        self._library.ps_queue_reserve(self._report, calls)

    @property
    def is_held_here(self) -> bool:
        """True in a signal handler that interrupted this thread's send or receive on this queue."""
        return bool(self.lock._is_owned()) or self._report[_HOLDER] == threading.get_ident()

    def leave(self) -> None:
        """Makes this process's calls on the queue fail. Call `close` afterwards."""
        if not self.closed:
            self.closed = True
            self._report[_BROKEN] = QueueStatus.PEER_DIED
            self._leave(self.end)

    def close(self) -> bool:
        """Frees this end of the queue. Returns False if a thread is still in a call; the memory must then stay
        mapped.
        """
        self.leave()
        deadline = time.monotonic() + _CLOSE_GRACE_S
        if self.is_held_here or not self.lock.acquire(timeout=_CLOSE_GRACE_S):
            return False
        try:
            while self.end is not None and not self._delete(self.end):
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
            self.end = None
            return True
        finally:
            self.lock.release()


class Message(NamedTuple):
    head: bytes
    tensors: Sequence[Tensor] = ()
    fingerprint: int = 0
    """Equal on sender and receiver: a broadcast's number, or 0 for other messages."""
    more_head: bytes | Pinned = b""
    """Further bytes of the head, separate to avoid a copy."""

    @property
    def pieces(self) -> tuple[bytes | None, int, int]:
        more = self.more_head
        return *pieces_of(self.tensors, more), len(more.pieces) if isinstance(more, Pinned) else 1 if more else 0


class _Sending:
    def __init__(self, sender: Sender, message: Message) -> None:
        self.message = message  # the library reads it
        self.error: Exception | None = None
        self._sender = sender
        self._done = threading.Event()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def finish(self, error: Exception | None = None) -> None:
        self.error = error
        self.message = Message(b"")
        self._done.set()

    def wait(self) -> None:
        if not self._done.is_set():
            started = time.monotonic()
            self._sender.check_writer("send")
            if not self._done.wait(self._sender.members.timeout_s):
                raise self._sender.failed(QueueStatus.TIMED_OUT, "send", started)
        if self.error is not None:
            raise self.error


class Sender(_End):
    """A queue's writing end. Messages arrive in the order of the calls. Thread-safe."""

    side = "writer"

    def __init__(self, library: Any, members: Members, place: Place, waiting: Waiting) -> None:
        super().__init__(library, members, place, waiting)
        self._waiting: deque[_Sending] = deque()
        self._writer = 0  # the thread that writes a message without the lock

    def send(self, message: Message, operation: str = "send") -> None:
        """Sends `message`. Returns once the program may change the message's tensors."""
        writer = 0
        try:
            with self.lock:
                if self._failure is not None or self.closed:
                    self.check()
                if self._writer:
                    self.check_writer(operation)
                    work = self._later(message)
                else:
                    writer = self._writer = threading.get_ident()
                    status = self._begin(message, 0.0)
                    if status == QueueStatus.DONE and not self._waiting:
                        writer = self._writer = 0
                        return
            if writer:
                started = time.monotonic()
                if status == QueueStatus.TIMED_OUT:
                    status = self._library.ps_queue_resume(self.end, self.members.timeout_s)
                if status != QueueStatus.DONE:
                    raise self.failed(status, operation, started)
                return
        finally:
            if writer:
                self._hand_on(writer)
        work.wait()

    def check_writer(self, operation: str) -> None:
        """Raises UsageError in a signal handler that would wait for the send that it interrupted."""
        if self._writer == threading.get_ident():
            raise handler_error(operation, str(self.members), "send")

    def has_room(self) -> bool:
        written, *read = counters_of(self._place.control, len(self._place.ranks) - 1)
        return all(written - each < self._place.shape.chunks for each in read)

    def isend(self, message: Message) -> Work:
        """Starts to send `message` and returns. If the message doesn't fit into the queue, a thread sends the rest."""
        writer, work = 0, None
        try:
            with self.lock:
                if self._failure is not None or self.closed:
                    self.check()
                if self._writer:
                    return self._later(message)
                writer = self._writer = threading.get_ident()
                status = self._begin(message, 0.0)
                if status == QueueStatus.DONE and not self._waiting:
                    writer = self._writer = 0
            if status == QueueStatus.TIMED_OUT:
                work = _Sending(self, message)
            elif status != QueueStatus.DONE:
                raise self.failed(status, "isend", time.monotonic())
            return work or DONE
        finally:
            if writer:
                self._hand_on(writer, work)

    def _begin(self, message: Message, timeout_s: float) -> int:
        head = message.head
        return self._library.ps_queue_send(self.end, head, len(head), *message.pieces, message.fingerprint, timeout_s)

    def _later(self, message: Message) -> _Sending:
        work = _Sending(self, message)
        self._waiting.append(work)
        self._report[_RESERVED] = 1
        return work

    def _hand_on(self, writer: int, begun: _Sending | None = None) -> None:
        with self.lock:
            if begun is None and not self._waiting:
                self._end_turn()
                return
        # No lock: a signal handler may send here.
        thread = HelperThread("send", self._write_all, begun)
        thread.start()
        with self.lock:
            if self._writer == writer:  # otherwise the thread has ended
                self._writer = thread.ident or 0

    def _end_turn(self) -> None:
        self._writer = self._report[_RESERVED] = 0

    def _write_all(self, begun: _Sending | None) -> None:
        work, error = begun, None
        while True:
            if work is not None:
                error = error or self._write_patiently(begun=work is begun, work=work)
            with self.lock:
                following = self._waiting.popleft() if self._waiting else None
                if following is None:
                    self._end_turn()
            if work is not None:
                work.finish(error)  # after the turn: the caller's next send needs no thread
            if following is None:
                return
            work = following

    def _write_patiently(self, *, begun: bool, work: _Sending) -> Exception | None:
        started = time.monotonic()
        status = QueueStatus.TIMED_OUT
        if not begun:
            status = self._begin(work.message, _SLICE_S)
        while status == QueueStatus.TIMED_OUT and self._failure is None:
            status = self._library.ps_queue_resume(self.end, _SLICE_S)
        if status == QueueStatus.DONE:
            return None
        return self._failure or self.failed(status, "isend", started)

    def close(self) -> bool:
        self.leave()
        deadline = time.monotonic() + _CLOSE_GRACE_S
        while self._writer not in (0, threading.get_ident()) and time.monotonic() < deadline:
            time.sleep(0.001)
        return not self._writer and super().close()


class Head(NamedTuple):
    data: memoryview
    """The message's head, valid until the receiver's next call. Empty if it exceeds the receiver's buffer."""
    head_bytes: int
    left_bytes: int
    fingerprint: int


class Receiver(_End):
    """A queue's reading end. A caller must hold `lock` while it receives a message."""

    side = "reader"

    def __init__(self, library: Any, members: Members, place: Place, waiting: Waiting) -> None:
        super().__init__(library, members, place, waiting, place.ranks.index(members.rank, 1))
        self._take = library.ps_queue_take
        self._enlarge(_HEAD_BUFFER_BYTES)

    def next(self, operation: str = "recv") -> Head:
        self.take(operation)
        return self.head()

    def take(self, operation: str = "recv") -> None:
        if self._failure is not None or self.closed:
            self.check()
        started = time.monotonic()
        status = self._take(self.end, self._address, _HEAD_BUFFER_BYTES, self.members.timeout_s)
        if status != QueueStatus.DONE:
            raise self.failed(status, operation, started)

    def poll(self, timeout_s: float, operation: str = "recv") -> bool:
        """Waits for the next message; `head()` then returns its header. Returns False if none arrives within
        `timeout_s`.
        """
        if self._failure is not None or self.closed:
            self.check()
        started = time.monotonic()
        status = self._take(self.end, self._address, _HEAD_BUFFER_BYTES, max(timeout_s, 1e-6))
        if status == QueueStatus.INTERRUPTED:  # before a message
            self._library.raise_interruption()
        if status not in (QueueStatus.DONE, QueueStatus.TIMED_OUT):
            raise self.failed(status, operation, started)
        return status == QueueStatus.DONE

    def head(self) -> Head:
        head_bytes, fingerprint, left_bytes = self._report[_HEAD_BYTES : _LEFT_BYTES + 1]
        data = self._view[:head_bytes] if head_bytes <= _HEAD_BUFFER_BYTES else self._view[:0]
        return Head(data, head_bytes, left_bytes, fingerprint)

    @property
    def has_found(self) -> bool:
        return self._report[_FOUND] != 0

    @property
    def fingerprint(self) -> int:
        return self._report[_FINGERPRINT]

    @property
    def found_bytes(self) -> tuple[int, int]:
        return self._report[_HEAD_BYTES], self._report[_TOTAL_BYTES] - self._report[_HEAD_BYTES]

    def read(self, pieces: bytes | None, count: int, operation: str = "recv") -> None:
        started = time.monotonic()
        status = self._library.ps_queue_read(self.end, pieces, count, self.members.timeout_s)
        if status != QueueStatus.DONE:
            raise self.failed(status, operation, started)

    def read_on(self, size_bytes: int, operation: str = "recv") -> memoryview:
        if size_bytes > len(self._buffer):
            self._enlarge(size_bytes)
        if size_bytes:
            self.read(struct.pack("2Q", self._address, size_bytes), 1, operation)
        return self._view[:size_bytes]

    def _enlarge(self, size_bytes: int) -> None:
        self._buffer = bytearray(size_bytes)
        self._view = memoryview(self._buffer)
        self._address = ctypes.addressof((ctypes.c_char * size_bytes).from_buffer(self._buffer))

    def receive(self, past: PastPython, number: int, group: int, *arguments: Any) -> Any:
        return past.receive_at(self.end, number, self.members.timeout_s, group, *arguments)

    def in_a_handler(self, operation: str) -> UsageError:
        return handler_error(operation, str(self.members), "recv")

    def mismatch(self, text: str, operation: str) -> CollectiveMismatchError:
        members = self.members
        self._report[_BROKEN] = QueueStatus.MALFORMED
        self._failure = error = members.mismatch(operation, text, (members.ranks[self._place.ranks[0]],))
        return error
