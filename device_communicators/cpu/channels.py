"""The message queues of one group on one host: between each two ranks, and from each rank to all others.

All of them have their place in two stretches of a file that the group's ranks have had since it was made. The
*control* part, a few hundred bytes a queue, is mapped and backed by memory from the start. A queue's ring in the *data*
part is mapped by each rank at its first use, and gets memory when its writer sends the first message. So a queue costs
nothing until it is used, no rank has to wait for another to make one, and no name of a segment is left behind by ranks
that are killed.

Queues of different kinds don't match each other, as transfers of different tags don't.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
import weakref
import zlib
from collections import deque
from ctypes import addressof, c_uint64
from typing import Any

import torch
from torch import Tensor

from device_communicators.base.errors import CommunicationError
from device_communicators.base.helper_threads import HelperThread
from device_communicators.base.limits import describe_address_space
from device_communicators.calls.user_call import DTYPE_NUMBERS
from device_communicators.calls.work import Work
from device_communicators.cpu.message_queue import (
    LINE_BYTES,
    Message,
    Place,
    Receiver,
    Sender,
    Shape,
    Waiting,
    pieces_of,
)
from device_communicators.cpu.native_group import Members
from device_communicators.cpu.segment import Segment, SegmentError

_PAGE_BYTES = 4096


class QueueMemory:
    """The memory of a group's queues as this process has mapped it: a stretch of the segment that its ranks share.

    The control part is mapped and backed by memory from the start, the data part queue by queue.
    """

    def __init__(self, library: Any, segment: Segment, offset: int, size: int, makes: bool) -> None:
        """Maps the stretch from `offset` on, for `size` ranks, of which one `makes` it. Raises SegmentError."""
        control_bytes, data_bytes = region_bytes(size)
        control_bytes = -(-control_bytes // _PAGE_BYTES) * _PAGE_BYTES
        if makes:
            segment.resize(offset + control_bytes + data_bytes)
            segment.allocate(control_bytes, offset)
        self._library = library
        self._control_bytes = control_bytes
        self.data_offset = offset + control_bytes
        self.control_address: int = library.ps_map(segment.descriptor, control_bytes, offset) or 0
        first_page = library.ps_map(segment.descriptor, _PAGE_BYTES, self.data_offset)
        if not self.control_address or not first_page:
            if self.control_address:
                library.ps_unmap(self.control_address, control_bytes)
            raise SegmentError(f"{control_bytes >> 10} KiB can't be mapped: {describe_address_space()}")
        self.windows: int | None = library.ps_windows_new(first_page, data_bytes, _PAGE_BYTES)
        # A descriptor for each group would soon be one too many; older kernels back nothing without one.
        self.descriptor = -1 if library.ps_has_populate() else os.dup(segment.descriptor)

    def map(self, offset: int, size_bytes: int) -> int:
        """Returns the address of bytes of the data part. OSError where the process has no address space left."""
        address: int | None = self._library.ps_windows_at(self.windows, offset, size_bytes)
        if not address:
            raise OSError(errno.ENOMEM, f"this process has no address space left ({describe_address_space()})")
        return address

    def commit(self, offset: int, size_bytes: int) -> None:
        """Backs bytes of the data part with memory. OSError where there is none left, instead of SIGBUS later."""
        address = self.map(offset, size_bytes)
        if not self._library.ps_back(address, size_bytes, self.descriptor, self.data_offset + offset):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Ends commits."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def unmap(self) -> None:
        """Unmaps the memory, once nobody is in a queue any more."""
        address, self.control_address = self.control_address, 0
        windows, self.windows = self.windows, None
        if address:
            self._library.ps_unmap(address, self._control_bytes)
        if windows:
            self._library.ps_windows_delete(windows)


TENSORS, MESSAGES = 0, 1
"""Kinds of queues: send and recv of plain tensors; objects and tensor dicts."""
KINDS = 2
SHAPE = Shape(128 << 10, 16)
"""With chunks of 64 KiB a pair of 2 MiB tensors takes 1.15 of the time, a blob of 1 MB 1.3; with 256 KiB, a ring beyond
a core's cache, both take twice as long."""


def region_bytes(size: int) -> tuple[int, int]:
    """Returns bytes of the control part, and of the data part, for a group of `size` ranks."""
    pairs, broadcasts = size * size * KINDS, size
    return pairs * _control_bytes(1) + broadcasts * _control_bytes(size - 1), (pairs + broadcasts) * SHAPE.data_bytes


def _control_bytes(readers: int) -> int:
    return (2 + readers) * LINE_BYTES


class Channels:
    """This rank's ends of its group's queues, each opened at its first use. Any thread may call.

    `liveness`, of `ps_liveness_of` or `ps_liveness_new`, tells which ranks are lost; this object deletes it. `spin_ns`
    and `yields` are the wait policy on this host. `group` is the number of their group, 0 without one.
    """

    def __init__(
        self,
        library: Any,
        members: Members,
        memory: QueueMemory,
        liveness: int,
        spin_ns: int,
        yields: int,
        group: int = 0,
    ) -> None:
        self.members = members
        self._group = group
        self._broadcasts = c_uint64(0)
        self._library = library
        self.memory = memory
        self._lock = threading.RLock()
        self._closed = False
        self._senders: dict[tuple[int, int], Sender] = {}
        self._receivers: dict[tuple[int, int], Receiver] = {}
        self._tensors: dict[int, TensorReceiver] = {}
        self._waiting = Waiting(liveness, spin_ns, yields)
        _set_tensor_forms(library)
        _ALL.add(self)

    @property
    def broadcasts(self) -> int:
        """Returns the number of messages sent to all ranks, by whomever, also past Python.

        The ranks must agree about which one they are in.
        """
        return self._broadcasts.value

    def begin_broadcast(self) -> int:
        """Returns the number of the message to all ranks that begins."""
        self._broadcasts.value += 1
        return self._broadcasts.value

    @property
    def spin_ns(self) -> int:
        """Returns how long a reader spins before it sleeps."""
        return self._waiting.spin_ns

    # The queues. `to_all` stands for a rank where it is a broadcast.

    def sender(self, dst: int | None, kind: int) -> Sender:
        """Returns the writing end of the queue to `dst`, or to all others."""
        key = (-1 if dst is None else dst, kind)
        return self._senders.get(key) or self._open_sender(*key)

    def receiver(self, src: int, kind: int, *, broadcast: bool = False) -> Receiver:
        """Returns the reading end of the queue from `src` to this rank, or to all others."""
        key = (src, kind | KINDS if broadcast else kind)
        return self._receivers.get(key) or self._open_receiver(*key, broadcast)

    def _open_sender(self, dst: int, kind: int) -> Sender:
        with self._lock:
            self._check()
            sender = self._senders.get((dst, kind))
            if sender is None:
                place = self._place(self.members.rank, None if dst < 0 else dst, kind, commit=True)
                sender = Sender(self._library, self.members, place, self._waiting)
                sender.meanwhile = receive_meanwhile
                if (first := self._senders.setdefault((dst, kind), sender)) is not sender:  # a handler of signals was
                    return first
                if self._group:
                    shared = (kind == TENSORS, *self._of_calls_past_python)
                    self._library.ps_queue_writer_serve(sender.end, self._group, dst, *shared)
            return sender

    def _open_receiver(self, src: int, kind: int, broadcast: bool) -> Receiver:
        with self._lock:
            self._check()
            receiver = self._receivers.get((src, kind))
            if receiver is None:
                place = self._place(src, None if broadcast else self.members.rank, kind % KINDS)
                receiver = Receiver(self._library, self.members, place, self._waiting)
                if (first := self._receivers.setdefault((src, kind), receiver)) is not receiver:
                    return first
                if self._group:
                    shared = (kind % KINDS == TENSORS, *self._of_calls_past_python)
                    self._library.ps_queue_reader_serve(receiver.end, self._group, src, broadcast, *shared)
            return receiver

    @property
    def _of_calls_past_python(self) -> tuple[float, int]:
        """Returns their timeout, and where the number of messages to all ranks is."""
        return self.members.timeout_s, addressof(self._broadcasts)

    def _place(self, src: int, dst: int | None, kind: int, *, commit: bool = False) -> Place:
        """Maps the queue's ring, with `commit` gives it memory, and returns where the queue lies."""
        size = len(self.members.ranks)
        pairs = size * size * KINDS
        if dst is None:
            index, readers = pairs + src, tuple(rank for rank in range(size) if rank != src)
            control = pairs * _control_bytes(1) + src * _control_bytes(size - 1)
        else:
            index, readers = (src * size + dst) * KINDS + kind, (dst,)
            control = index * _control_bytes(1)
        offset = index * SHAPE.data_bytes
        memory = self.memory
        try:
            if commit:
                memory.commit(offset, SHAPE.data_bytes)
            address = memory.map(offset, SHAPE.data_bytes)
        except OSError as error:
            raise self.members.failure(
                CommunicationError,
                f"{self.members} finds no {SHAPE.data_bytes >> 10} KiB of shared memory for a message queue: "
                f"{error.strerror}; make /dev/shm larger, allow more address space (ulimit -v), or set "
                "PARALLEL_STATE_SHARED_MEMORY=off",
                None,
            ) from error
        return Place(memory.control_address + control, address, SHAPE, (src, *readers))

    # Plain tensors.

    def isend(self, x: Tensor, dst: int) -> Work:
        """Starts to send a contiguous CPU tensor. Done at once where the ring has room for it."""
        return self.sender(dst, TENSORS).isend(Message(b"", (x,), _form_of(x.dtype)))

    def send(self, x: Tensor, dst: int) -> None:
        """Sends a contiguous CPU tensor, which may be changed afterwards."""
        self.sender(dst, TENSORS).send(Message(b"", (x,), _form_of(x.dtype)))

    def irecv_(self, out: Tensor, src: int) -> Work:
        """Starts to receive into a contiguous CPU tensor; CollectiveMismatchError if another size or dtype was sent."""
        tensors = self._tensors.get(src)
        if tensors is None:
            tensors = self._tensors.setdefault(src, TensorReceiver(self.receiver(src, TENSORS)))
        return tensors.start(out)

    def _check(self) -> None:
        if self._closed:
            raise self.members.destroyed()

    def receive_pending(self) -> None:
        """Lets threads take in what was started to be received."""
        for tensors in list(self._tensors.values()):
            tensors.take_in_by_thread()

    def close(self) -> bool:
        """Ends all queues on this rank. False where a thread is still in one of them: the memory must stay then."""
        with self._lock:
            self._closed = True
            ends = [*self._senders.values(), *self._receivers.values()]
            for end in ends:
                end.leave()
            closed = [end.close() for end in ends]  # each of them, whatever the others answer
            free = all(closed)
            if free and self._waiting.liveness:
                self._library.ps_liveness_delete(self._waiting.liveness)
                self._waiting = self._waiting._replace(liveness=0)
            self.memory.close()
            if free:
                self.memory.unmap()
            else:
                _STUCK.append(self)
            return free


_STUCK: list[Channels] = []
"""Those that a thread is in for good: what it works in must stay."""
_ALL: weakref.WeakSet[Channels] = weakref.WeakSet()


def receive_meanwhile() -> None:
    """Takes in, by threads, the tensors that any group has started to receive: before this rank waits for a reader.

    Else two ranks that each call irecv, then send, would wait for each other.
    """
    for channels in list(_ALL):
        channels.receive_pending()


class TensorReceiver:
    """The plain tensors of one rank, in the order in which their receives were started."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._pending: deque[_Receipt] = deque()
        self._thread: threading.Thread | None = None

    def start(self, out: Tensor) -> Work:
        if self._receiver.is_held_here:  # else the handler's would be in the way of the receives that follow
            raise self._receiver.in_a_handler("recv")
        receipt = _Receipt(self, out)
        self._receiver.reserve(1)  # a receive that comes past Python must not overtake this one
        self._pending.append(receipt)
        return receipt

    def take_in(self, last: _Receipt) -> None:
        """Receives everything up to `last`."""
        if self._receiver.is_held_here:
            raise self._receiver.in_a_handler("recv")
        with self._receiver.lock:
            while not last.is_completed():
                first = self._pending[0]
                try:
                    if first.out is not None:
                        self._take(first.out)
                except Exception as error:
                    first.error = error
                first.out = None
                self._pending.popleft()
                self._receiver.reserve(-1)

    def _take(self, out: Tensor) -> None:
        receiver = self._receiver
        head = receiver.next()
        if head.left_bytes != out.nbytes or head.fingerprint != _form_of(out.dtype):
            raise receiver.mismatch(
                f"this rank receives {out.nbytes} bytes of {out.dtype}, and {head.left_bytes} bytes"
                f"{' of another dtype' if head.left_bytes == out.nbytes else ''} were sent",
                "recv",
            )
        receiver.read(*pieces_of((out,)))

    def take_in_by_thread(self) -> None:
        if self._pending and (self._thread is None or not self._thread.is_alive()):
            self._thread = HelperThread("receive", self.take_in, self._pending[-1])
            self._thread.start()


class _Receipt:
    """A tensor to come: a work."""

    def __init__(self, receiver: TensorReceiver, out: Tensor) -> None:
        self.out: Tensor | None = out
        """None as soon as nothing is written to it any more."""
        self.error: Exception | None = None
        self._receiver = receiver

    def is_completed(self) -> bool:
        return self.out is None

    def wait(self) -> None:
        if self.out is not None:
            self._receiver.take_in(self)
        if self.error is not None:
            raise self.error


@functools.cache
def _form_of(dtype: torch.dtype) -> int:
    """Returns what sender and receiver of a plain tensor must agree on, beside its size."""
    return zlib.crc32(str(dtype).encode())


@functools.cache
def _set_tensor_forms(library: Any) -> None:
    """Tells the library the forms of the dtypes that it knows."""
    forms = (c_uint64 * (max(DTYPE_NUMBERS.values()) + 1))()
    for dtype, number in DTYPE_NUMBERS.items():
        forms[number] = _form_of(dtype)
    library.ps_set_tensor_forms(forms, len(forms))
