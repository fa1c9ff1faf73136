"""The message queues in shared memory of one group on one host: from each rank to each other rank, and from each rank
to all others.

A queue's writer allocates the memory at first use. Each kind of message has its own queues.
"""

from __future__ import annotations

import errno
import os
import threading
from ctypes import addressof, c_int64, c_uint64
from typing import Any, TypeVar

from device_communicators.base.errors import CommunicationError
from device_communicators.base.limits import describe_address_space
from device_communicators.cpu.message_queue import LINE_BYTES, Place, Receiver, Sender, Shape, Waiting, counters_of
from device_communicators.cpu.native_group import Members
from device_communicators.cpu.segment import Segment, SegmentError
from device_communicators.cpu.transfers import Transfers

_PAGE_BYTES = 4096
_Key = tuple[int, int]
_E = TypeVar("_E", Sender, Receiver)


class QueueMemory:
    def __init__(self, library: Any, segment: Segment, offset: int, size: int, makes: bool) -> None:
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
            raise SegmentError(
                f"a message queue's {control_bytes >> 10} KiB of shared memory can't be mapped into this process: "
                f"{describe_address_space()}; raise the limit of address space (ulimit -v)"
            )
        self.windows: int | None = library.ps_windows_new(first_page, data_bytes, _PAGE_BYTES)
        # One descriptor per group would be too many; older kernels need it.
        self.descriptor = -1 if library.ps_has_populate() else os.dup(segment.descriptor)

    def map(self, offset: int, size_bytes: int) -> int:
        address: int | None = self._library.ps_windows_at(self.windows, offset, size_bytes)
        if not address:
            raise OSError(errno.ENOMEM, f"this process has no address space left ({describe_address_space()})")
        return address

    def commit(self, offset: int, size_bytes: int) -> None:
        """Allocates memory. Raises OSError if /dev/shm is full; without this, a later write could kill the process."""
        address = self.map(offset, size_bytes)
        if not self._library.ps_back(address, size_bytes, self.descriptor, self.data_offset + offset):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def unmap(self) -> None:
        address, self.control_address = self.control_address, 0
        windows, self.windows = self.windows, None
        if address:
            self._library.ps_unmap(address, self._control_bytes)
        if windows:
            self._library.ps_windows_delete(windows)


TENSORS, MESSAGES = 0, 1
"""Kinds of messages: single tensors; objects and tensor dicts."""
KINDS = 2
SHAPE = Shape(128 << 10, 16)
"""Bytes per chunk, and chunks per queue. Messages of 2 MiB take 1.15 times as long with chunks of 64 KiB, and twice as
long with 256 KiB.
"""


def region_bytes(size: int) -> tuple[int, int]:
    pairs, broadcasts = size * size * KINDS, size
    return pairs * _control_bytes(1) + broadcasts * _control_bytes(size - 1), (pairs + broadcasts) * SHAPE.data_bytes


def _control_bytes(readers: int) -> int:
    return (2 + readers) * LINE_BYTES


class Channels:
    """This rank's queues to and from other ranks of its group. Thread-safe."""

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
        """Owns the C++ object at address `liveness`, which ends waits when a rank dies. `spin_ns`, `yields`: how long
        waits poll, from `wait_policy`.
        """
        self.members = members
        self._group = group
        self._broadcasts = c_uint64(0)  # messages that the group's ranks have broadcast so far, also by C++
        self._library = library
        self.memory = memory
        self._lock = threading.RLock()
        self._closed = False
        self._senders: dict[tuple[int, int], Sender] = {}
        self._receivers: dict[tuple[int, int], Receiver] = {}
        self._waiting = Waiting(liveness, spin_ns, yields)
        self.transfers = Transfers(library, members, self.open_transfers(), group, SHAPE.data_bytes)

    def begin_broadcast(self) -> int:
        self._broadcasts.value += 1
        return self._broadcasts.value

    @property
    def spin_ns(self) -> int:
        return self._waiting.spin_ns

    def open_transfers(self) -> int | None:
        """Creates the C++ object that runs sends and receives. Returns its address, or None if there is no memory."""
        memory, waiting, members = self.memory, self._waiting, self.members
        places = (
            memory.control_address, memory.windows or 0, memory.descriptor, memory.data_offset,
            SHAPE.chunk_bytes, SHAPE.chunks, KINDS, waiting.spin_ns, waiting.yields,
        )  # fmt: skip
        words = (c_int64 * len(places))(*places)  # of `TransferPlaces` in csrc/rings.h
        address: int | None = self._library.ps_rings_new(waiting.liveness, members.rank, len(members.ranks), words)
        return address

    def message_sender(self, dst: int) -> Sender:
        return self.sender(dst, MESSAGES)

    def message_receiver(self, src: int) -> Receiver:
        return self.receiver(src, MESSAGES)

    def sender(self, dst: int | None, kind: int) -> Sender:
        key = (-1 if dst is None else dst, kind)
        place = self.members.rank, dst, kind
        return self._senders.get(key) or self._open(self._senders, key, Sender, place, key[0])

    def receiver(self, src: int, kind: int, *, broadcast: bool = False) -> Receiver:
        """Returns the queue from rank `src` to this rank, or if `broadcast`, from rank `src` to all other ranks, for
        reading. `kind`: TENSORS or MESSAGES.
        """
        key = (src, kind | KINDS if broadcast else kind)
        place = src, None if broadcast else self.members.rank, kind
        return self._receivers.get(key) or self._open(self._receivers, key, Receiver, place, src, broadcast)

    def _open(
        self, ends: dict[_Key, _E], key: _Key, make: type[_E], place: tuple[int, int | None, int], *peer: int
    ) -> _E:
        with self._lock:
            self._check()
            end = ends.get(key)
            if end is None:
                writes = issubclass(make, Sender)
                end = make(self._library, self.members, self._place(*place, commit=writes), self._waiting)
                if (first := ends.setdefault(key, end)) is not end:  # a signal handler was faster
                    return first
                if self._group:
                    serve = self._library.ps_queue_writer_serve if writes else self._library.ps_queue_reader_serve
                    serve(end.end, self._group, *peer, addressof(self._broadcasts))
            return end

    def _place(self, src: int, dst: int | None, kind: int, *, commit: bool = False) -> Place:
        offset, control, readers = self._where(src, dst, kind)
        memory = self.memory
        try:
            if commit:
                memory.commit(offset, SHAPE.data_bytes)
            address = memory.map(offset, SHAPE.data_bytes)
        except OSError as error:
            raise self.members.failure(
                CommunicationError,
                f"{self.members} can't allocate {SHAPE.data_bytes >> 10} KiB of shared memory for a message queue: "
                f"{error.strerror}; make /dev/shm larger, allow more address space (ulimit -v), or set "
                "PARALLEL_STATE_SHARED_MEMORY=off",
                None,
            ) from error
        return Place(control, address, SHAPE, (src, *readers))

    def _where(self, src: int, dst: int | None, kind: int) -> tuple[int, int, tuple[int, ...]]:
        size = len(self.members.ranks)
        pairs = size * size * KINDS
        if dst is None:
            index, readers = pairs + src, tuple(rank for rank in range(size) if rank != src)
            control = pairs * _control_bytes(1) + src * _control_bytes(size - 1)
        else:
            index, readers = (src * size + dst) * KINDS + kind, (dst,)
            control = index * _control_bytes(1)
        return index * SHAPE.data_bytes, self.memory.control_address + control, readers

    def written_rings(self) -> tuple[list[int], list[int]]:
        """Returns the offsets of queues that this rank has written, and the ranks in the group that have not read all
        messages.
        """
        me, size = self.members.rank, len(self.members.ranks)
        ends: list[tuple[int | None, int]] = [(dst, kind) for dst in range(size) for kind in range(KINDS) if dst != me]
        offsets, unread = [], set[int]()
        for dst, kind in (*ends, (None, MESSAGES)):
            offset, control, readers = self._where(me, dst, kind)
            written, *read = counters_of(control, len(readers))
            if written:
                offsets.append(offset)
            unread.update(rank for rank, count in zip(readers, read, strict=True) if count < written)
        return offsets, sorted(unread)

    def _check(self) -> None:
        if self._closed:
            raise self.members.destroyed()

    def close(self) -> bool:
        """Frees the queues. Returns False, and leaves the memory mapped, if a thread still uses a queue."""
        with self._lock:
            self._closed = True
            ends = [*self._senders.values(), *self._receivers.values()]
            for end in ends:
                end.leave()
            closed = [self.transfers.close(), *(end.close() for end in ends)]  # close each, even after a False
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
