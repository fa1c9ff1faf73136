"""Allocates the GPU tensors that `group.empty` returns. NCCL's symmetric kernels read and write these tensors in place.

A kernel assumes that all ranks' tensors have the same offset. Therefore the ranks agree on each allocation over gloo,
and a tensor's memory is free once all ranks have released the tensor. If a rank can't register memory, all ranks use
ordinary memory from then on.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import operator
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from device_communicators.base import settings
from device_communicators.cuda.foreign_memory import tensor_over
from device_communicators.cuda.nccl_library import SUCCESS, NcclLibrary
from device_communicators.cuda.streams import CudaStreams
from device_communicators.routing.communicator import GroupContext

logger = logging.getLogger("parallel_state")

FUNCTIONS = ("ncclMemAlloc", "ncclMemFree", "ncclCommWindowRegister", "ncclCommWindowDeregister")
MOST_BLOCKS = 1024
"""Largest number of tensors in registered memory. Further tensors are in ordinary memory."""
WINDOW_BYTES = 16 << 20
_GRANULE_BYTES = 2 << 20
"""ncclMemAlloc rounds sizes up to a multiple of this."""
_ALIGNMENT_BYTES = 512
_RECORD = struct.Struct(f"<QQQ{MOST_BLOCKS // 8}s")


class Block(NamedTuple):
    window: int
    begin: int
    end: int


class Ledger:
    """The allocated blocks of memory. Equal on all ranks, because all make the same changes in the same order."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.digest = 0
        """Checksum of all changes. Ranks compare it at each allocation, in case a rank missed a change."""

    def take(self, size_bytes: int) -> int | None:
        number = next((each for each in range(MOST_BLOCKS) if each not in self.blocks), None)
        if number is None:
            return None
        size_bytes = _rounded(size_bytes, _ALIGNMENT_BYTES)
        for window, window_bytes in enumerate(self.sizes):
            begin = 0
            for block in sorted(each for each in self.blocks.values() if each.window == window):
                if block.begin - begin >= size_bytes:
                    break
                begin = block.end
            if window_bytes - begin >= size_bytes:
                self.blocks[number] = Block(window, begin, begin + size_bytes)
                self._note(number)
                return number
        return None

    def free(self, number: int) -> None:
        self._note(-number)
        del self.blocks[number]

    def add_window(self, size_bytes: int) -> None:
        self._note(size_bytes)
        self.sizes.append(size_bytes)

    def _note(self, change: int) -> None:
        self.digest = zlib.crc32(change.to_bytes(8, "little", signed=True), self.digest)

    def next_window(self, size_bytes: int, limit_bytes: int) -> int | None:
        left_bytes = limit_bytes - sum(self.sizes)
        least_bytes = _rounded(size_bytes, _GRANULE_BYTES)
        window_bytes = max(least_bytes, min(WINDOW_BYTES, left_bytes // _GRANULE_BYTES * _GRANULE_BYTES))
        return window_bytes if window_bytes <= left_bytes and len(self.blocks) < MOST_BLOCKS else None


def _rounded(size_bytes: int, step_bytes: int) -> int:
    return -(-size_bytes // step_bytes) * step_bytes


class Lease:
    """Releases a memory block on this rank when the tensor that owns this object is freed."""

    def __init__(self, number: int, returned: deque[int]) -> None:
        self._number = number
        self._returned = returned

    def __del__(self) -> None:
        self._returned.append(self._number)  # runs in any thread at any time, so it does nothing else


class Windows:
    def __init__(self, context: GroupContext, library: NcclLibrary, streams: CudaStreams) -> None:
        self.problem: str | None = None
        """Reason why registered memory is unavailable, or None. Equal on all ranks."""
        self._context = context
        self._library = library
        self._streams = streams
        self._limit_bytes = settings.SYMMETRIC_BYTES.get()
        self._ledger = Ledger()
        self._addresses: list[int] = []
        self._refused: list[int] = []
        """Addresses of memory that some rank couldn't register."""
        self._returned: deque[int] = deque()
        """Blocks that this rank has released since the last `_collect`."""
        self._free: set[int] = set()
        """Blocks that this rank has released, but that perhaps other ranks still use."""
        self._allocated_on: set[int] = set()
        self._warned = False

    def __str__(self) -> str:
        problem = self.problem or self._own_problem()
        if problem:
            return f"tensors of empty in ordinary memory: {problem}"
        size = sum(self._ledger.sizes)
        return f"tensors of empty in registered memory, {size >> 20} MiB in {len(self._ledger.sizes)} windows"

    def _own_problem(self) -> str:
        missing = [self._library.missing[name] for name in FUNCTIONS if name in self._library.missing]
        if missing:
            return missing[0]
        return "" if self._limit_bytes else f"{settings.SYMMETRIC_BYTES.name} is 0"

    def allocate(
        self, size_bytes: int, register: Callable[[int, int], str | None], used_streams: Callable[[], list[int]]
    ) -> Tensor | None:
        """Returns `size_bytes` uninitialised bytes of registered memory. If one rank can't, all ranks return None.
        Every rank of the group calls this.

        `register(address, size)` registers memory and returns the reason if that fails, else None. `used_streams()`
        returns the streams whose calls may still use memory that was freed.
        """
        self._collect()
        agreed = self._exchange(size_bytes)
        if agreed is None:
            return None
        is_new, number = False, self._ledger.take(size_bytes)
        if number is None:
            is_new = self._add_window(size_bytes, agreed, register)
            number = self._ledger.take(size_bytes) if is_new else None
        if number is None:
            return None
        self._order(used_streams(), is_new)
        block = self._ledger.blocks[number]
        address = self._addresses[block.window] + block.begin
        return tensor_over(address, size_bytes, self._device(), Lease(number, self._returned))

    def _device(self) -> torch.device:
        device = self._context.device
        return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device

    def _collect(self) -> None:
        while self._returned:
            self._free.add(self._returned.popleft())

    def _exchange(self, size_bytes: int) -> int | None:
        mine = sum(1 << number for number in self._free).to_bytes(MOST_BLOCKS // 8, "little")
        own = _RECORD.pack(size_bytes, self._limit_bytes, self._ledger.digest, mine)
        records = self._context.gather(own + self._own_problem().encode(), "empty")
        sizes, limits, digests, frees = zip(*map(_RECORD.unpack_from, records), strict=True)
        problem = self._first_problem([record[_RECORD.size :] for record in records])
        if problem is None and len(set(digests)) > 1:
            problem = "a rank was interrupted in an earlier call"
        if problem is not None:
            self._give_up(problem)
            return None
        free = functools.reduce(operator.and_, (int.from_bytes(each, "little") for each in frees))
        for number in sorted(self._free):
            if free >> number & 1:
                self._ledger.free(number)
                self._free.discard(number)
        if len(set(sizes)) > 1:
            self._warn(f"ranks asked for different sizes, {min(sizes)} to {max(sizes)} bytes")
            return None
        return min(limits)

    def _add_window(self, size_bytes: int, limit_bytes: int, register: Callable[[int, int], str | None]) -> bool:
        free_closed()
        window_bytes = self._ledger.next_window(size_bytes, limit_bytes)
        if window_bytes is None:
            name = settings.SYMMETRIC_BYTES.name
            self._warn(f"the limit of {name} ({limit_bytes} bytes) or of {MOST_BLOCKS} tensors is reached")
            return False
        address = ctypes.c_void_p()
        with self._streams.guard():
            result = self._library.ncclMemAlloc(ctypes.byref(address), window_bytes)
            if result != SUCCESS:
                self._streams.release_cached_memory()
                result = self._library.ncclMemAlloc(ctypes.byref(address), window_bytes)
            why = "" if result == SUCCESS else f"no {window_bytes >> 20} MiB: {self._library.text_of(result)}"
            problem = self._agree(why)
            if problem is not None:  # tried again: memory of other tensors may be free then
                self._warn(problem)
                if not why:
                    self._library.ncclMemFree(address)
                return False
            why = register(address.value or 0, window_bytes) or ""
        problem = self._agree(why)
        if problem is not None:  # perhaps registered here: freed after the communicator's end
            self._refused.append(address.value or 0)
            self._give_up(problem)
            return False
        self._addresses.append(address.value or 0)
        self._ledger.add_window(window_bytes)
        return True

    def _agree(self, problem: str) -> str | None:
        return self._first_problem(self._gather(problem))

    def _gather(self, text: str) -> list[bytes]:
        return self._context.gather(text.encode(errors="replace"), "empty")

    def _first_problem(self, texts: Sequence[bytes]) -> str | None:
        found = ((rank, text.decode(errors="replace")) for rank, text in enumerate(texts))
        return next((f"global rank {self._context.ranks[rank]}: {text}" for rank, text in found if text), None)

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        self._warn(problem)

    def _warn(self, why: str) -> None:
        if not self._warned and self._context.rank == 0:
            logger.warning("%s: a tensor of empty is in ordinary memory: %s", self._context, why)
        self._warned = True

    def _order(self, used_streams: list[int], is_new: bool) -> None:
        current = self._streams.current()
        if not is_new:
            for stream in {*used_streams, *self._allocated_on} - {current}:
                self._streams.wait_for(current, stream)
        self._allocated_on.add(current)

    def compare(self, operation: str, symmetric: Sequence[Tensor], own: Sequence[Tensor] = ()) -> None:
        """Raises CollectiveMismatchError if offsets of `symmetric` tensors in their windows differ between ranks. Every
        rank calls this.

        Tensors in `own` can have different offsets, but must be registered on all ranks or on none. `operation`: for
        errors.
        """
        if not self._ledger.sizes:
            return
        places = [self._place_of(x) or "ordinary memory" for x in symmetric]
        places += ["registered memory" if self._place_of(x) else "ordinary memory" for x in own]
        texts = [each.decode() for each in self._gather(", ".join(places))]
        mine = texts[self._context.rank]
        for rank, text in zip(self._context.ranks, texts, strict=True):
            if text != mine:
                raise self._context.mismatch(
                    operation,
                    f"this rank's tensors are in {mine}, but those of global rank {rank} are in {text}. All ranks must "
                    "pass the same part of a tensor that the same call of group.empty() returned on each rank",
                    [rank],
                )

    def _place_of(self, x: Tensor) -> str:
        for window, (address, size) in enumerate(zip(self._addresses, self._ledger.sizes, strict=True)):
            if 0 <= x.data_ptr() - address < size:
                return f"window {window} at byte {x.data_ptr() - address}"
        return ""

    def close(self, deregistered: bool) -> None:
        """Frees the windows. A window with tensors in use is kept, and freed when another group closes or needs a
        window.

        `deregistered`: True if NCCL has deregistered the windows. After an abort this is False, and no window is ever
        freed: aborted kernels can still use the memory. Idempotent.
        """
        self.problem = self.problem or "the group was closed"
        is_open = vars(self).pop("_context", None) is not None  # it has process groups, which mustn't outlive the group
        if is_open and deregistered:
            with _LOCK:
                _CLOSED.append(self)
        free_closed()

    def free_unused(self) -> bool:
        self._collect()
        used = {block.window for number, block in self._ledger.blocks.items() if number not in self._free}
        unused = [at for at, address in enumerate(self._addresses) if address and at not in used]
        if (unused or self._refused) and not self._streams.is_capturing():
            with self._streams.guard():
                self._streams.synchronize()
                for at in unused:
                    self._library.ncclMemFree(self._addresses[at])
                    self._addresses[at] = 0
                while self._refused:
                    self._library.ncclMemFree(self._refused.pop())
        return not any(self._addresses) and not self._refused


_LOCK = threading.Lock()
_CLOSED: list[Windows] = []


def free_closed() -> None:
    with _LOCK:
        _CLOSED[:] = [each for each in _CLOSED if not each.free_unused()]
