"""vLLM's MessageQueue over this library's queue, between processes of one host. Needs no process group.

Messages are pickled: give a handle only to processes that are trusted to run code here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int64
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from device_communicators.base import settings
from device_communicators.base.cores import usable_cores
from device_communicators.base.errors import (
    CommunicationError,
    GroupDestroyedError,
    PeerDiedError,
    UnsupportedError,
    UsageError,
)
from device_communicators.base.host import local_namespace
from device_communicators.base.member import Timeout
from device_communicators.cpu import native
from device_communicators.cpu.message_queue import Message, Place, Receiver, Sender, Shape, Waiting
from device_communicators.cpu.native_group import Members
from device_communicators.cpu.segment import Segment, SegmentError
from device_communicators.liveness.health import Watcher
from parallel_state.compat import pickles
from parallel_state.compat.vllm.stateless import in_the_same_node_as

logger = logging.getLogger("parallel_state")

_PAGE_BYTES = 4096
_CHUNK_BYTES = 256 << 10
_SPIN_NS, _CROWDED_SPIN_NS = 100_000, 2_000
_LOG_S = 60.0
_FOREVER_S = 1e9  # no timeout: a wait ends if the other end's process exits
_GRACE_S = 0.5
"""Delay of PeerDiedError after another process's exit, so that the program can call `shutdown` first."""
_NAP_S = 0.001
_READY = b"READY"
_OUT_OF_BAND_BYTES = 1 << 20


@dataclass
class Handle:
    local_reader_ranks: list[int] = field(default_factory=list)
    buffer_handle: tuple[int, int, int, str] | None = None
    """Number of local readers, bytes per chunk, number of chunks, name of the segment."""
    local_subscribe_addr: str | None = None
    """Unused, like the fields below; vLLM's callers expect these fields."""
    local_notify_addr: str | None = None
    remote_subscribe_addr: str | None = None
    remote_addr_ipv6: bool = False
    tensor_arena_handle: tuple[int, int, int, str] | None = None


class _Ring:
    """One end of a queue in shared memory. `me` is 0 for the writer, or 1 + the index of a reader."""

    def __init__(self, segment: Segment, shape: Shape, readers: int, me: int) -> None:
        self._library = native.load()
        control_bytes = self._library.ps_queue_control_bytes(readers)
        data_at = _PAGE_BYTES * (1 + -(-control_bytes // _PAGE_BYTES))
        self._size_bytes = data_at + shape.data_bytes
        if me == 0:
            segment.resize(self._size_bytes)
            segment.allocate(self._size_bytes)
        self._address = self._library.ps_map(segment.descriptor, self._size_bytes, 0) or 0
        if not self._address:
            raise SegmentError(
                f"this process can't map {self._size_bytes >> 10} KiB of shared memory; raise the limit of address "
                "space (ulimit -v)"
            )
        ends = tuple(range(readers + 1))
        self._facts = (c_int64 * (2 * len(ends))).from_address(self._address)
        """PID and PID namespace of each end."""
        self._facts[2 * me + 1] = local_namespace("pid")
        self._facts[2 * me] = os.getpid()
        segment.close()
        self._members = Members("message queue", ends, me, Timeout(_FOREVER_S))
        self._place = Place(self._address + _PAGE_BYTES, self._address + data_at, shape, ends)
        self._liveness = 0
        self._end: Any = None
        self._opening = threading.Lock()

    def pid(self, index: int) -> int:
        return int(self._facts[2 * index])

    @property
    def end(self) -> Any:
        """Returns this end's Sender or Receiver. The first access starts to detect exits of the other processes."""
        with self._opening:
            if self._end is None:
                ends, me = self._place.ranks, self._members.rank
                watched = ends[1:] if me == 0 else ends[:1]  # readers watch the writer only
                is_near = [at in watched and self._facts[2 * at + 1] == self._facts[2 * me + 1] for at in ends]
                pids = [self.pid(at) if near else -1 for at, near in zip(ends, is_near, strict=True)]
                self._liveness = self._library.ps_liveness_new((c_int64 * len(ends))(*pids), len(ends))
                crowded = len(usable_cores()) <= len(ends) + 1
                waiting = Waiting(self._liveness, _CROWDED_SPIN_NS if crowded else _SPIN_NS, 0)
                kind = Receiver if me else Sender
                self._end = kind(self._library, self._members, self._place, waiting)
            return self._end

    def leave(self) -> None:
        """Makes the queue's calls raise in all processes."""
        if self._end is not None:
            self._end.leave()

    def close(self) -> None:
        """Releases the shared memory. Does nothing while a thread uses this end."""
        if self._end is not None:
            if not self._end.close():
                return
            self._library.ps_liveness_delete(self._liveness)
        self._library.ps_unmap(self._address, self._size_bytes)


class MessageQueue:
    HANDLE = Handle
    handle: Handle
    n_local_reader: int
    n_remote_reader: int
    shutting_down = False
    _ring: _Ring

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: list[int] | None = None,
        max_chunk_bytes: int = 1024 * 1024 * 24,
        max_chunks: int = 10,
        connect_ip: str | None = None,
        enable_shm_tensor_arena: bool = False,
    ) -> None:
        """Makes the writing end. Pass `export_handle()` to the readers.

        All readers must be on this host, so `n_local_reader` equals `n_reader`. `local_reader_ranks`: their ranks, by
        default 0, 1, …. `connect_ip` and `enable_shm_tensor_arena` have no effect. The queue holds max(max_chunks, 2)
        unread messages of at most min(max_chunk_bytes, 256 KiB). Sending a longer message waits for the readers.
        """
        if not 0 <= n_local_reader <= n_reader:
            raise UsageError(f"n_local_reader must be in 0 … {n_reader} (n_reader), but is {n_local_reader}")
        ranks = list(range(n_local_reader)) if local_reader_ranks is None else list(local_reader_ranks)
        if len(ranks) != n_local_reader:
            raise UsageError(f"local_reader_ranks must have n_local_reader ranks, {n_local_reader}, but is {ranks}")
        _check_local([each < n_local_reader for each in range(n_reader)])
        self.n_local_reader, self.n_remote_reader = n_local_reader, 0
        self._begin(handle := Handle(ranks), is_writer=True)
        shape = Shape(min(_CHUNK_BYTES, -(-max_chunk_bytes // 64) * 64), max(2, max_chunks))
        with _needing_shared_memory("a message queue"):
            segment = Segment.make()
            # Unlinked when all readers have opened it, at the latest with this object or process.
            self._unlink = weakref.finalize(self, _unlink, segment, os.getpid())
            self._ring = _Ring(segment, shape, n_local_reader, 0)
        handle.buffer_handle = (n_local_reader, *shape, segment.name)

    @staticmethod
    def create_from_handle(handle: Handle, rank: int) -> MessageQueue:
        if rank not in handle.local_reader_ranks or handle.buffer_handle is None:
            raise UsageError(
                f"rank {rank} isn't a reader of this message queue; its readers are ranks {handle.local_reader_ranks}"
            )
        self: MessageQueue = object.__new__(MessageQueue)
        self._begin(handle, is_writer=False)
        readers, chunk_bytes, chunks, name = handle.buffer_handle
        with _needing_shared_memory(f"the message queue of {name}"):
            segment = Segment.open(name)
            if segment is None:
                raise SegmentError(
                    "the queue's shared memory isn't on this host, or was removed. Each reader must run on the "
                    "writer's host, and open the queue before the writer closes it"
                )
            me = 1 + handle.local_reader_ranks.index(rank)
            self._ring = _Ring(segment, Shape(chunk_bytes, chunks), readers, me)
        return self

    def _begin(self, handle: Handle, *, is_writer: bool) -> None:
        self.handle, self._is_writer, self._pid = handle, is_writer, os.getpid()
        self._lock = threading.Lock()

    def export_handle(self) -> Handle:
        return self.handle

    def wait_until_ready(self) -> None:
        """Waits until all readers have opened the queue. The writer and every reader must call this."""
        if self._is_writer:
            while not all(map(self._ring.pid, range(1, self.n_local_reader + 1))):
                self._check()
                time.sleep(_NAP_S)
            self._unlink()
            self.enqueue(_READY)
            return
        found = self.dequeue(indefinite=True)
        if found != _READY:
            raise CommunicationError(
                f"the first message of {self} must be {_READY!r}, but is a {type(found).__name__}; call "
                "wait_until_ready() in the writer before enqueue()"
            )

    def shutdown(self) -> None:
        """Makes this process's calls of the queue raise RuntimeError. The queue's other processes raise PeerDiedError.
        Callable from any thread.
        """
        self.shutting_down = True
        self._ring.leave()

    def _check(self) -> None:
        if self.shutting_down:
            raise RuntimeError("cancelled")

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Sends an object to all readers. If the queue is full for `timeout` s, raises TimeoutError without sending."""
        if not self._is_writer:
            raise UsageError("only the writer of a message queue can enqueue")
        head, bodies = _encode(obj)
        with self._lock:
            self._check()
            with self._naming_ends("enqueue"):
                self._wait_for_room(self._ring.end, timeout)
                tensors = [torch.frombuffer(each, dtype=torch.uint8) for each in bodies]
                self._ring.end.send(Message(head, tensors), "enqueue")

    def _wait_for_room(self, sender: Sender, timeout: float | None) -> None:
        deadline = time.monotonic() + (timeout or 0.0)
        while timeout is not None and not sender.has_room():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self} stayed full for {timeout:g} s")
            time.sleep(_NAP_S)
            self._check()

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """Returns the next object. Raises TimeoutError after `timeout` seconds. With `indefinite`, doesn't log long
        waits.

        Raises PeerDiedError if the writer exited and all its messages were read, and RuntimeError after `shutdown`.
        """
        if self._is_writer:
            raise UsageError("only the readers of a message queue can dequeue")
        with self._lock:
            self._check()
            with self._naming_ends("dequeue"):
                receiver: Receiver = self._ring.end
                while not receiver.poll(_LOG_S if timeout is None else timeout, "dequeue"):
                    if timeout is not None:
                        raise TimeoutError(f"{self} had no message for {timeout:g} s")
                    if not indefinite:
                        logger.info(
                            "%s had no message for %d s; its writer is alive, and computes or hangs", self, _LOG_S
                        )
                head = receiver.head()
                data = head.data or receiver.read_on(head.head_bytes, "dequeue")
                return _decode(data, functools.partial(_read, receiver))

    @contextlib.contextmanager
    def _naming_ends(self, operation: str) -> Iterator[None]:
        """If the block fails because a process exited, raises PeerDiedError with the process's PID, or RuntimeError
        after `shutdown`.
        """
        try:
            yield
        except (PeerDiedError, GroupDestroyedError) as error:
            deadline = time.monotonic() + _GRACE_S
            while not self.shutting_down and time.monotonic() < deadline:
                time.sleep(_NAP_S)
            self._check()
            ranks, end = self.handle.local_reader_ranks, getattr(error, "suspect_ranks", (0,))[0]
            who = "the writer" if end == 0 else f"the reader with rank {ranks[end - 1]}"
            raise PeerDiedError(
                f"{operation} of {self}: {who}, process {self._ring.pid(end)}, exited or closed the queue. See the log "
                "of that process",
                operation=operation,
                suspect_ranks=(ranks[end - 1],) if end else (),
            ) from error

    def broadcast_object(self, obj: Any = None) -> Any:
        """Sends `obj` if this end is the writer. Returns the object on every process; all must call this."""
        if self._is_writer:
            self.enqueue(obj)
            return obj
        return self.dequeue()

    @staticmethod
    def create_from_process_group_single_reader(
        pg: Any, max_chunk_bytes: int, max_chunks: int, reader_rank: int = 0, blocking: bool = False
    ) -> tuple[MessageQueue, list[Handle]]:
        """Creates a queue from each rank to the global rank `reader_rank`. Every rank of the group must call this.

        Returns this rank's queue and, on the reader, the handles of all queues (on other ranks []). `blocking`: calls
        `wait_until_ready`.
        """
        _check_local(in_the_same_node_as(pg, dist.get_group_rank(pg, reader_rank)))
        queue = MessageQueue(1, 1, None, max_chunk_bytes, max_chunks)
        handles = _exchange(pg, queue.handle)
        if blocking:
            queue.wait_until_ready()
        return queue, handles if dist.get_rank() == reader_rank else []

    @staticmethod
    def create_from_process_group(
        pg: Any,
        max_chunk_bytes: int,
        max_chunks: int,
        writer_rank: int = 0,
        external_writer_handle: Handle | None = None,
        blocking: bool = True,
    ) -> MessageQueue:
        """Creates a queue from `writer_rank`, a rank in the group, to all other ranks.

        Every rank of the group must call this. With `external_writer_handle`, the writer is the process that made
        this handle, and `writer_rank` is a reader. `blocking`: calls `wait_until_ready`.
        """
        queue, handle = None, external_writer_handle
        _check_local(same := in_the_same_node_as(pg, writer_rank))
        rank = dist.get_rank(pg) if isinstance(pg, dist.ProcessGroup) else pg.rank
        if rank == writer_rank and handle is None:
            readers = [each for each in range(len(same)) if each != writer_rank]
            queue = MessageQueue(len(readers), len(readers), readers, max_chunk_bytes, max_chunks)
            handle = queue.handle
        if isinstance(pg, dist.ProcessGroup):
            handle = _exchange(pg, handle)[writer_rank]
        else:
            handle = pg.broadcast_obj(handle, writer_rank)
        queue = queue or MessageQueue.create_from_handle(handle, rank)
        if blocking:
            queue.wait_until_ready()
        return queue

    def __str__(self) -> str:
        return f"the message queue to ranks {self.handle.local_reader_ranks}"

    def __del__(self) -> None:
        if getattr(self, "_pid", None) == os.getpid():
            with contextlib.suppress(Exception):  # modules may be torn down at interpreter exit
                self._ring.close()


@contextlib.contextmanager
def _needing_shared_memory(what: str) -> Iterator[None]:
    try:
        yield
    except (SegmentError, native.NativeUnavailableError) as error:
        raise UnsupportedError(f"{what} needs shared memory: {error}") from None


def _check_local(readers: Sequence[bool]) -> None:
    if not all(readers):
        raise UnsupportedError(
            f"all readers of a message queue must be on the writer's host, but {[*readers].count(False)} of "
            f"{len(readers)} are on other hosts. Use vLLM's own MessageQueue for them"
        )


def _exchange(pg: Any, handle: Handle | None) -> list[Any]:
    ranks = range(dist.get_world_size(pg))
    every = Watcher().gather("queue", ranks, bytes(pickles.dumps(handle)), settings.TIMEOUT_S.get(), gloo=pg)
    return [pickles.loads(each) for each in every]


def _unlink(segment: Segment, pid: int) -> None:
    if os.getpid() == pid:
        segment.unlink()


def _encode(obj: Any) -> tuple[bytes, list[Any]]:
    """Returns a head (number and sizes of the buffers, and the pickle) and the buffers of 1 MiB or more."""
    bodies: list[Any] = []

    def is_in_band(buffer: Any) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _OUT_OF_BAND_BYTES:
            return True
        bodies.append(bytearray(raw) if raw.readonly else raw)  # torch.frombuffer needs writable memory
        return False

    pickled = pickles.dumps(obj, is_in_band)
    return struct.pack(f"<{len(bodies) + 1}Q", len(bodies), *map(len, bodies)) + pickled, bodies


def _decode(head: bytes | memoryview, take: Callable[[int], bytearray]) -> Any:
    count, *_ = struct.unpack_from("<Q", head)
    sizes = struct.unpack_from(f"<{count}Q", head, 8)
    buffers = [take(size) for size in sizes]  # read all of them first: loads() may raise
    return pickles.loads(memoryview(head)[8 * (count + 1) :], buffers=buffers)


def _read(receiver: Receiver, size_bytes: int) -> bytearray:
    into = bytearray(size_bytes)
    address = ctypes.addressof((ctypes.c_char * size_bytes).from_buffer(into))
    receiver.read(struct.pack("2Q", address, size_bytes), 1, "dequeue")
    return into
