"""vLLM's MessageQueue over this library's ring: one writer, readers in other processes, which need no process group.

Readers of the writer's host share a ring of chunks in a segment, and sleep in the kernel while there is nothing to
read: a scheduler that waits leaves its core to the workers. Readers of other hosts are connected by TCP, with a secret
that the handle carries. Messages are pickled, as vLLM's: give a handle only to processes that may run code here.
"""

from __future__ import annotations

import contextlib
import copyreg
import ctypes
import io
import json
import logging
import multiprocessing
import os
import pickle
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from ctypes import c_int, c_int64
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from device_communicators.base.errors import CommunicationError, PeerDiedError, UnsupportedError, UsageError
from device_communicators.base.host import local_namespace
from device_communicators.calls.memory import as_bytes, dense, dtype_refusal
from device_communicators.cpu import native
from device_communicators.cpu.native_build import usable_cores
from device_communicators.cpu.segment import Segment, SegmentError
from parallel_state.groups.same_node import in_the_same_node_as

logger = logging.getLogger("parallel_state")

_PAGE_BYTES = 4096
_CHUNK_BYTES = 256 << 10
_OUT_OF_BAND_BYTES = 1 << 20
_HEAD_BYTES = 64 << 10
_SPIN_NS, _CROWDED_SPIN_NS = 100_000, 2_000
_DONE, _TIMED_OUT, _PEER_DIED, _INTERRUPTED = 0, 1, 2, 4
_SLICE_S = 60.0
_FOREVER_S = 1e9  # its writer lives, or the wait ends
_GRACE_S = 0.5
"""The time in which a process that goes because its peer went may hear of it in its own way first."""
_NAP_S = 0.001
_STEP_S = 0.2
"""Between looks of a wait for a reader of another host at whether this end was shut down."""
_HANDLE_BYTES = 2048
_WAITS = "no message for %d s on %s, whose other end lives: it computes, or hangs"


@dataclass
class Handle:
    """Locates a queue for its readers; picklable."""

    local_reader_ranks: list[int] = field(default_factory=list)
    buffer_handle: tuple[int, int, int, str] | None = None
    """Local readers, bytes of a chunk, chunks, and the segment's name."""
    local_subscribe_addr: str | None = None
    """Not used; there for vLLM's callers, as the next one is."""
    local_notify_addr: str | None = None
    remote_subscribe_addr: str | None = None
    """`address:port` for readers of other hosts."""
    remote_addr_ipv6: bool = False
    tensor_arena_handle: tuple[int, int, int, str] | None = None
    secret: bytes = b""


class _Ring:
    """One process' end of the ring: the writer's, `me` 0, or a reader's."""

    def __init__(self, segment: Segment, shape: tuple[int, int, int], me: int) -> None:
        self._library = native.load()
        self.readers, self.chunk_bytes, self.chunks = shape
        self._me = me
        self._segment = segment
        control_bytes = self._library.ps_queue_control_bytes(self.readers)
        self._data_offset = _PAGE_BYTES + (-(-control_bytes // _PAGE_BYTES)) * _PAGE_BYTES
        self._size_bytes = self._data_offset + self.chunk_bytes * self.chunks
        if me == 0:
            segment.resize(self._size_bytes)
            segment.allocate(self._size_bytes)
        self._address = self._library.ps_map(segment.descriptor, self._size_bytes, 0) or 0
        if not self._address:
            raise SegmentError(f"{self._size_bytes >> 10} KiB can't be mapped")
        self._facts = (c_int64 * (2 * (self.readers + 1))).from_address(self._address)
        """PID and its namespace of each end, the writer first."""
        self._facts[2 * me + 1] = local_namespace("pid")
        self._facts[2 * me] = os.getpid()
        segment.close()
        self._report = native.QueueReport()
        self._liveness = 0
        self._end = 0
        self._sides = threading.Lock()
        self._left = False

    def pid(self, index: int) -> int:
        """Returns the process of an end, 0 for one that hasn't come."""
        return int(self._facts[2 * index])

    def open(self) -> int:
        """Returns the library's object for this end, made at the first call: then the others' processes are watched."""
        with self._sides:
            if not self._end:
                own = self._facts[2 * self._me + 1]
                count = self.readers + 1
                pids = [self.pid(i) if self._facts[2 * i + 1] == own and i != self._me else -1 for i in range(count)]
                if self._me:  # other readers' ends are the writer's affair
                    pids[1:] = [-1] * self.readers
                self._liveness = self._library.ps_liveness_new((c_int64 * count)(*pids), count)
                crowded = len(usable_cores()) <= self.readers + 2
                side, me = ("writer", ()) if self._me == 0 else ("reader", (self._me,))
                self._end = getattr(self._library, f"ps_queue_{side}_new")(
                    self._address + _PAGE_BYTES, self._address + self._data_offset, self.chunk_bytes, self.chunks,
                    self.readers, (c_int * count)(*range(count)), *me,
                    self._liveness, _CROWDED_SPIN_NS if crowded else _SPIN_NS, 0, self._report,
                )  # fmt: skip
            return self._end

    def send(self, head: bytes, bodies: list[bytes], timeout_s: float) -> int:
        flat = [x for body in bodies for x in (ctypes.cast(ctypes.c_char_p(body), ctypes.c_void_p).value, len(body))]
        pieces = struct.pack(f"{len(flat)}Q", *flat) if flat else None
        return int(self._library.ps_queue_send(self.open(), head, len(head), pieces, len(bodies), 0, 0, timeout_s))

    def resume(self, timeout_s: float) -> int:
        return int(self._library.ps_queue_resume(self._end, timeout_s))

    def next(self, buffer: Any, timeout_s: float) -> int:
        address = ctypes.addressof(buffer)
        return int(self._library.ps_queue_take(self.open(), address, len(buffer), None, 0, None, 0, timeout_s))

    def read(self, into: bytearray, timeout_s: float) -> int:
        address = ctypes.addressof((ctypes.c_char * len(into)).from_buffer(into))
        return int(self._library.ps_queue_read(self._end, struct.pack("2Q", address, len(into)), 1, timeout_s))

    @property
    def head_bytes(self) -> int:
        return int(self._report[2])

    @property
    def suspect(self) -> int:
        return int(self._report[0])

    def has_room(self, written: int) -> bool:
        """Returns True if the writer's next message finds a free chunk; `written` chunks have been used."""
        counters = self._address + _PAGE_BYTES + 128
        return all(
            c_int64.from_address(counters + 128 * reader).value > written - self.chunks
            for reader in range(1, self.readers + 1)
        )

    def leave(self) -> None:
        """Tells the other ends, and sends back who waits here."""
        if self._end and not self._left:
            self._left = True
            getattr(self._library, f"ps_queue_{'reader' if self._me else 'writer'}_leave")(self._end)

    def close(self) -> None:
        """Frees the end, in which nobody may be any more."""
        self.leave()
        end, self._end = self._end, 0
        if end:
            getattr(self._library, f"ps_queue_{'reader' if self._me else 'writer'}_delete")(end)
            self._library.ps_liveness_delete(self._liveness)
        address, self._address = self._address, 0
        if address:
            self._library.ps_unmap(address, self._size_bytes)


class MessageQueue:
    """A queue from one process to others; see the module's text, and vLLM's class of this name for the interface."""

    HANDLE = Handle
    _ring: _Ring | None = None
    _buffer: Any
    """For the heads of messages in shared memory."""

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
        """Makes the writing end; `export_handle` is for the readers. So many unread messages fit as `max_chunks`, of
        at most 256 KiB; a longer message waits for its readers to begin. Raises UnsupportedError without shared memory.
        """
        if not 0 <= n_local_reader <= n_reader:
            raise UsageError(f"n_local_reader must be in 0 … {n_reader}, all readers, but is {n_local_reader}")
        ranks = list(range(n_local_reader)) if local_reader_ranks is None else list(local_reader_ranks)
        if len(ranks) != n_local_reader:
            raise UsageError(f"local_reader_ranks must name {n_local_reader} ranks, but is {ranks}")
        self.n_local_reader = n_local_reader
        self.n_remote_reader = n_reader - n_local_reader
        self._begin(is_writer=True)
        self.handle = Handle(ranks)
        self._connections: list[Any] = []
        self._listener: Any = None
        if n_local_reader:
            shape = (n_local_reader, min(_CHUNK_BYTES, -(-max_chunk_bytes // 64) * 64), max(2, max_chunks))
            try:
                segment = Segment.make()
                # Its name goes when all have opened it, and with this object or process at the latest.
                self._unlink = weakref.finalize(self, _unlink, segment, os.getpid())
                self._ring = _Ring(segment, shape, 0)
            except (SegmentError, native.NativeUnavailableError) as error:
                raise UnsupportedError(f"a message queue needs shared memory: {error}") from None
            self.handle.buffer_handle = (*shape, segment.name)
        if self.n_remote_reader:
            ip = connect_ip or "127.0.0.1"
            self.handle.remote_addr_ipv6 = ":" in ip
            self.handle.secret = secrets.token_bytes(32)
            family = "AF_INET6" if self.handle.remote_addr_ipv6 else "AF_INET"
            self._listener = connection.Listener(
                (ip, 0), family, backlog=self.n_remote_reader, authkey=self.handle.secret
            )
            self.handle.remote_subscribe_addr = f"{ip}:{self._listener.address[1]}"

    def _begin(self, *, is_writer: bool) -> None:
        self._is_writer = is_writer
        self._is_local_reader = self._is_remote_reader = False
        self._chunks_written = 0
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.shutting_down = False

    @staticmethod
    def create_from_handle(handle: Handle, rank: int) -> MessageQueue:
        """Returns the reading end of `rank`: in shared memory if the handle names it among its local readers."""
        self: MessageQueue = object.__new__(MessageQueue)
        self._begin(is_writer=False)
        self.handle = handle
        self._connections = []
        self._listener = None
        self._is_local_reader = rank in handle.local_reader_ranks
        self._is_remote_reader = not self._is_local_reader
        if self._is_local_reader and handle.buffer_handle is not None:
            *shape, name = handle.buffer_handle
            try:
                segment = Segment.open(name)
                if segment is None:
                    raise SegmentError("this host has no such segment")
                self._ring = _Ring(segment, tuple(shape), 1 + handle.local_reader_ranks.index(rank))  # type: ignore[arg-type]
            except (SegmentError, native.NativeUnavailableError) as error:
                raise UnsupportedError(f"the message queue of {name} can't be opened: {error}") from None
            self._buffer = (ctypes.c_char * _HEAD_BYTES)()
        return self

    def export_handle(self) -> Handle:
        """Returns what `create_from_handle` takes."""
        return self.handle

    def wait_until_ready(self) -> None:
        """Returns once all ends have come. Every process of the queue calls it."""
        if self._is_writer:
            self._await(lambda: all(self._pid_of(reader) for reader in range(1, self.n_local_reader + 1)))
            if self.n_local_reader:
                self._unlink()
            while len(self._connections) < self.n_remote_reader:
                self._accept()
            if self._listener is not None:
                self._listener.close()
            self.enqueue(_READY)
            return
        if self._is_remote_reader:
            address, _, port = (self.handle.remote_subscribe_addr or "").rpartition(":")
            family = "AF_INET6" if self.handle.remote_addr_ipv6 else "AF_INET"
            self._connections = [connection.Client((address, int(port)), family, authkey=self.handle.secret)]
        found = self.dequeue(indefinite=True)
        if found != _READY:
            raise CommunicationError(f"the first message of {self} must be {_READY!r}, but is a {type(found).__name__}")

    def _accept(self) -> None:
        """Waits for one more remote reader; a connection without the handle's secret is refused."""
        asked = [self._listener._listener._socket]  # multiprocessing has no other way to wait for it with a deadline
        while not connection.wait(asked, _STEP_S):
            self._check()
        with contextlib.suppress(multiprocessing.AuthenticationError, EOFError, ConnectionError):
            self._connections.append(self._listener.accept())

    def _pid_of(self, reader: int) -> int:
        return 1 if self._ring is None else self._ring.pid(reader)

    def _await(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self._check()
            time.sleep(_NAP_S)

    def shutdown(self) -> None:
        """Sends back who waits in this end, with RuntimeError, and tells the others. From any thread."""
        self.shutting_down = True
        if self._ring is not None:
            self._ring.leave()
        for each in self._connections:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(each.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)

    def _check(self) -> None:
        if self.shutting_down:
            raise RuntimeError("cancelled")

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Sends an object to all readers. Raises TimeoutError where it finds no room in time, and isn't sent then."""
        if not self._is_writer:
            raise UsageError("only the writer of a message queue can enqueue")
        head, bodies = _encode(obj)
        with self._lock:
            if self._ring is not None:
                self._write(self._ring, head, bodies, timeout)
            try:
                for each in self._connections:
                    for piece in (head, *bodies):
                        each.send_bytes(piece)
            except OSError as error:
                self._check()
                raise PeerDiedError(
                    f"enqueue of {self}: a reader on another host has closed it, or has ended: {error}",
                    operation="enqueue",
                ) from error

    def _write(self, ring: _Ring, head: bytes, bodies: list[bytes], timeout: float | None) -> None:
        self._check()
        if timeout is not None:
            deadline = time.monotonic() + timeout
            while not ring.has_room(self._chunks_written):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self} had no room for a message in {timeout:g} s")
                time.sleep(_NAP_S)
                self._check()
        size_bytes = len(head) + sum(map(len, bodies))
        self._chunks_written += max(1, -(-size_bytes // (ring.chunk_bytes - 64)))
        status = ring.send(head, bodies, _SLICE_S)
        while status == _TIMED_OUT:
            logger.info(_WAITS, _SLICE_S, self)
            status = ring.resume(_SLICE_S)
        self._raise_for(status, "enqueue")

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """Returns the next object. Raises TimeoutError after `timeout` seconds.

        A wait without end says in the log that it lasts, unless it is `indefinite`. Raises PeerDiedError once the
        writer's process has ended and all that it sent was read, RuntimeError after `shutdown`.
        """
        if self._is_writer:
            raise UsageError("only the readers of a message queue can dequeue")
        with self._lock:
            if self._ring is None:
                return self._receive(timeout)
            deadline = None if timeout is None else time.monotonic() + timeout
            while True:
                self._check()
                left_s = _SLICE_S if deadline is None else min(_SLICE_S, deadline - time.monotonic())
                status = self._ring.next(self._buffer, max(left_s, 1e-6))
                if status != _TIMED_OUT:
                    break
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"{self} had no message in {timeout:g} s")
                if not indefinite:
                    logger.info(_WAITS, _SLICE_S, self)
            self._raise_for(status, "dequeue")
            return self._read(self._ring)

    def _read(self, ring: _Ring) -> Any:
        def take(size_bytes: int) -> bytearray:
            into = bytearray(size_bytes)
            if size_bytes:
                self._raise_for(ring.read(into, _FOREVER_S), "dequeue")
            return into

        if ring.head_bytes <= len(self._buffer):
            head: Any = memoryview(self._buffer)[: ring.head_bytes]
        else:
            head = memoryview(take(ring.head_bytes))
        return _decode(head, take)

    def _receive(self, timeout: float | None) -> Any:
        (source,) = self._connections
        try:
            if source.poll(timeout):
                return _decode(memoryview(source.recv_bytes()), lambda size: bytearray(source.recv_bytes()))
        except (EOFError, OSError) as error:
            self._check()
            raise PeerDiedError(
                f"dequeue of {self}: the writer, on another host, has closed it, or has ended", operation="dequeue"
            ) from error
        raise TimeoutError(f"{self} had no message in {timeout:g} s")

    def _raise_for(self, status: int, operation: str) -> None:
        if status == _DONE:
            return
        if status == _INTERRUPTED:
            native.load().raise_interruption()
        deadline = time.monotonic() + _GRACE_S
        while status == _PEER_DIED and not self.shutting_down and time.monotonic() < deadline:
            time.sleep(_NAP_S)
        self._check()
        ring = self._ring
        if status != _PEER_DIED or ring is None:
            raise CommunicationError(f"{operation} of {self} found what is no message ({status})", operation=operation)
        end = ring.suspect
        who = "the writer" if end == 0 else f"the reader with rank {self.handle.local_reader_ranks[end - 1]}"
        raise PeerDiedError(
            f"{operation} of {self}: {who}, process {ring.pid(end)}, has ended or has closed the queue. Look at what "
            "that process said last",
            operation=operation,
            suspect_ranks=(self.handle.local_reader_ranks[end - 1],) if end else (),
        )

    def broadcast_object(self, obj: Any = None) -> Any:
        """Sends `obj` on the writer, which it returns there; returns the next object on readers."""
        if self._is_writer:
            self.enqueue(obj)
            return obj
        return self.dequeue()

    @staticmethod
    def create_from_process_group_single_reader(
        pg: Any, max_chunk_bytes: int, max_chunks: int, reader_rank: int = 0, blocking: bool = False
    ) -> tuple[MessageQueue, list[Handle]]:
        """Returns a queue that each rank writes and the global `reader_rank` reads, and there all ranks' handles."""
        same = in_the_same_node_as(pg, dist.get_group_rank(pg, reader_rank))
        queue = MessageQueue(1, int(same[dist.get_rank(pg)]), max_chunk_bytes=max_chunk_bytes, max_chunks=max_chunks)
        handles = [each for each in _exchange(pg, queue.export_handle()) if each is not None]
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
        """Returns the queue from `writer_rank`, one in the group, to the others; all of its ranks call it.

        With the handle of a queue that some other process writes, `writer_rank` passes it on and reads as well.
        """
        is_stateless = not isinstance(pg, dist.ProcessGroup)
        rank, size = (pg.rank, pg.world_size) if is_stateless else (dist.get_rank(pg), dist.get_world_size(pg))
        same = pg.same_node(writer_rank) if is_stateless else in_the_same_node_as(pg, writer_rank)
        queue, handle = None, external_writer_handle
        if rank == writer_rank and handle is None:
            local = [each for each in range(size) if same[each] and each != writer_rank]
            queue = MessageQueue(
                size - 1,
                len(local),
                local,
                max_chunk_bytes=max_chunk_bytes,
                max_chunks=max_chunks,
                connect_ip=_own_ip(),
            )
            handle = queue.export_handle()
        if is_stateless:
            handle = pg.broadcast_obj(handle, writer_rank)
        else:
            handle = _exchange(pg, handle)[writer_rank]
        queue = queue or MessageQueue.create_from_handle(handle, rank)  # type: ignore[arg-type]
        if blocking:
            queue.wait_until_ready()
        return queue

    def __str__(self) -> str:
        remote = self.handle.remote_subscribe_addr
        others = "" if remote is None else f" and readers of other hosts, from {remote}"
        return f"the message queue to ranks {self.handle.local_reader_ranks}{others}"

    def __del__(self) -> None:
        if getattr(self, "_pid", None) == os.getpid():
            with contextlib.suppress(Exception):  # at the interpreter's end anything may be gone
                if self._ring is not None:
                    self._ring.close()
                for each in self._connections:
                    each.close()


_READY = b"READY"


def _exchange(pg: Any, handle: Handle | None) -> list[Handle | None]:
    """Returns the handles of a process group's ranks, all of which call it."""
    text = b"" if handle is None else json.dumps({**vars(handle), "secret": handle.secret.hex()}).encode()
    mine = torch.frombuffer(bytearray(text.ljust(_HANDLE_BYTES)), dtype=torch.uint8)
    every = torch.empty(dist.get_world_size(pg) * _HANDLE_BYTES, dtype=torch.uint8, device="cpu")
    dist.all_gather_into_tensor(every, mine, group=pg)
    return [_handle_of(bytes(row.tolist()).strip()) for row in every.view(-1, _HANDLE_BYTES)]


def _handle_of(text: bytes) -> Handle | None:
    if not text:
        return None
    facts = json.loads(text)
    place = facts.pop("buffer_handle")
    facts["secret"] = bytes.fromhex(facts["secret"])
    return Handle(**facts, buffer_handle=None if place is None else tuple(place))


def _own_ip() -> str:
    from device_communicators.base.host import address_towards

    return address_towards(("192.0.2.1", 9)) or "127.0.0.1"  # of a net for documentation: nothing is sent


def _unlink(segment: Segment, pid: int) -> None:
    if os.getpid() == pid:
        segment.unlink()


def _rebuild(data: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.uint8)
    return flat.view(dtype).view(shape)  # frombuffer doesn't know every dtype


def _reduce(tensor: Tensor) -> Any:
    """Returns the pickler's words for a tensor: plain CPU ones as their bytes, which travel beside the pickle."""
    is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and dtype_refusal(tensor.dtype) is None
    if not is_plain or tensor.requires_grad:
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    view = as_bytes(dense(tensor))
    data: Any = b""
    if view.numel():
        data = (ctypes.c_char * view.numel()).from_address(view.data_ptr())
        data.tensor = view  # which the memory is of
    return _rebuild, (pickle.PickleBuffer(data), tuple(tensor.shape), tensor.dtype)


def _encode(obj: Any) -> tuple[bytes, list[bytes]]:
    """Returns the pickle with the sizes of its long buffers before it, and these."""
    bodies: list[bytes] = []

    def is_in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _OUT_OF_BAND_BYTES:
            return True
        bodies.append(bytes(raw))
        return False

    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=is_in_band)
    pickler.dispatch_table = {**copyreg.dispatch_table, Tensor: _reduce}
    pickler.dump(obj)
    return struct.pack(f"<{len(bodies) + 1}Q", len(bodies), *map(len, bodies)) + stream.getbuffer(), bodies


def _decode(head: memoryview, take: Callable[[int], bytearray]) -> Any:
    count, *_ = struct.unpack_from("<Q", head)
    sizes = struct.unpack_from(f"<{count}Q", head, 8)
    buffers = [take(size) for size in sizes]
    return pickle.loads(head[8 * (count + 1) :], buffers=buffers)
