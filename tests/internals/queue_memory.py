"""Message queues without a group, in a file that all ranks map."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from device_communicators.base.member import Timeout
from device_communicators.cpu import native
from device_communicators.cpu.channels import Channels, QueueMemory
from device_communicators.cpu.native_group import Members

_PIDS_BYTES = 4096
_DEADLINE_S = 30.0


class FileMemory(QueueMemory):
    def __init__(self, path: Path, size: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        segment: Any = SimpleNamespace(
            descriptor=self._file,
            resize=lambda size_bytes: os.ftruncate(self._file, size_bytes),
            allocate=lambda size_bytes, offset: os.posix_fallocate(self._file, offset, size_bytes),
        )
        super().__init__(native.load(), segment, _PIDS_BYTES, size, makes=True)
        self._map = mmap.mmap(self._file, _PIDS_BYTES)
        self._pids = (ctypes.c_int64 * size).from_buffer(self._map)
        self.pids: list[int] = [os.getpid()] * size

    def meet(self, rank: int) -> None:
        self._pids[rank] = os.getpid()
        deadline = time.monotonic() + _DEADLINE_S
        while not all(self._pids):
            if time.monotonic() > deadline:
                raise TimeoutError("not all ranks came")
            time.sleep(0.001)
        self.pids = list(self._pids)

    def unmap(self) -> None:
        super().unmap()
        if not self._map.closed:
            del self._pids
            self._map.close()
            os.close(self._file)


def members_of(rank: int, size: int, timeout_s: float = 30.0) -> Members:
    return Members("queue:0", tuple(range(size)), rank, Timeout(timeout_s))


@contextlib.contextmanager
def channels(
    path: Path, rank: int, size: int, timeout_s: float = 30.0, spin_ns: int = 20_000, meet: bool = True
) -> Iterator[Channels]:
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
