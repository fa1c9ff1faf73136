"""Memory for message queues without a group: a file that the ranks of a test have mapped."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

from device_communicators.cpu import native
from device_communicators.cpu.channels import Channels, region_bytes
from device_communicators.cpu.native_group import Members

_PIDS_BYTES = 4096
_DEADLINE_S = 30.0


class FileMemory:
    """A `QueueMemory` over a file: the ranks' pids, the control part, the data part."""

    def __init__(self, path: Path, size: int) -> None:
        control_bytes, data_bytes = region_bytes(size)
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self.descriptor, _PIDS_BYTES + control_bytes + data_bytes)
        self._map = mmap.mmap(self.descriptor, 0)
        self._view = (ctypes.c_char * len(self._map)).from_buffer(self._map)
        address = ctypes.addressof(self._view)
        self._pids = (ctypes.c_int64 * size).from_buffer(self._map)
        self.control_address = address + _PIDS_BYTES
        self.data_offset = _PIDS_BYTES + control_bytes
        self._data_address = address + self.data_offset
        self.pids: list[int] = [os.getpid()] * size

    def meet(self, rank: int) -> None:
        """Tells this process' pid and waits for those of the others."""
        self._pids[rank] = os.getpid()
        deadline = time.monotonic() + _DEADLINE_S
        while not all(self._pids):
            if time.monotonic() > deadline:
                raise TimeoutError("not all ranks came")
            time.sleep(0.001)
        self.pids = list(self._pids)

    def map(self, offset: int, size_bytes: int) -> int:
        return self._data_address + offset

    def commit(self, offset: int, size_bytes: int) -> None:
        os.posix_fallocate(self.descriptor, self.data_offset + offset, size_bytes)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def unmap(self) -> None:
        if not self._map.closed:
            del self._view, self._pids
            self._map.close()


def members_of(rank: int, size: int, timeout_s: float = 30.0) -> Members:
    return Members("queue:0", tuple(range(size)), rank, timeout_s)


@contextlib.contextmanager
def channels(
    path: Path, rank: int, size: int, timeout_s: float = 30.0, spin_ns: int = 20_000, meet: bool = True
) -> Iterator[Channels]:
    """Rank's ends of the queues in the file; with `meet`, once all ranks are there."""
    memory = FileMemory(path, size)
    if meet:
        memory.meet(rank)
    library = native.load()
    liveness = library.ps_liveness_new((ctypes.c_int64 * size)(*memory.pids), size)
    made = Channels(library, members_of(rank, size, timeout_s), memory, liveness, spin_ns, 20)
    try:
        yield made
    finally:
        made.close()
