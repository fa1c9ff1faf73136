"""Groups of the compiled library on mapped files, without communicators or torch.distributed."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from device_communicators.cpu import native

ARENA_BYTES = 8 << 20
DTYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3, torch.int64: 7}
MEET_S = 30.0


class KernelRank:
    def __init__(self, folder: str, timeout_s: float, spin_us: int = 5, yields: int = 100) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.timeout_s = timeout_s
        self._library = native.load()
        segment_bytes = self._library.ps_segment_bytes(self.size)
        self._table = self._map(f"{folder}/table", mmap.PAGESIZE)
        own = self._map(f"{folder}/arena{self.rank}", ARENA_BYTES)
        self._meet()
        self.group = self._library.ps_group_new(
            self._mapped(f"{folder}/segment", segment_bytes), segment_bytes, self.rank, self.size,
            spin_us * 1000, yields, timeout_s,
        )  # fmt: skip
        pages = [self._mapped(f"{folder}/arena{rank}", mmap.PAGESIZE, ARENA_BYTES) for rank in range(self.size)]
        with open(f"{folder}/arena{self.rank}", "r+b") as file:
            # Rank 0 populates its arena as kernels without MADV_POPULATE need.
            descriptor = file.fileno() if self.rank == 0 or not self._library.ps_has_populate() else -1
            self._library.ps_group_arenas(self.group, (ctypes.c_void_p * self.size)(*pages), ARENA_BYTES, descriptor, 0)
        # The group finds arena tensors by the address at which it mapped the arena.
        base = self._library.ps_group_allocate(self.group, ARENA_BYTES)
        self._arena = torch.frombuffer((ctypes.c_char * ARENA_BYTES).from_address(base), dtype=torch.uint8)
        own.close()

    @staticmethod
    def _map(path: str, size_bytes: int) -> mmap.mmap:
        with open(path, "a+b") as file:
            if os.fstat(file.fileno()).st_size < size_bytes:
                file.truncate(size_bytes)
            return mmap.mmap(file.fileno(), size_bytes)

    def _mapped(self, path: str, size_bytes: int, file_bytes: int = 0) -> int:
        with open(path, "a+b") as file:
            if os.fstat(file.fileno()).st_size < max(size_bytes, file_bytes):
                file.truncate(max(size_bytes, file_bytes))
            return self._library.ps_map(file.fileno(), size_bytes, 0)

    def _meet(self) -> None:
        table = memoryview(self._table).cast("q")
        table[self.rank] = os.getpid()
        deadline = time.monotonic() + MEET_S
        while not all(table[: self.size]):
            if time.monotonic() > deadline:
                raise TimeoutError("the other ranks have not come")
            time.sleep(0.001)

    def at(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        return self._arena[offset : offset + count * dtype.itemsize].view(dtype)

    def call(self, name: str, *args: Any) -> int:
        given = [arg.data_ptr() if isinstance(arg, Tensor) else DTYPES.get(arg, arg) for arg in args]
        return getattr(self._library, f"ps_{name}")(self.group, 0, 0, *given)

    def failure(self) -> list[int]:
        told = (ctypes.c_int64 * 200)()
        self._library.ps_group_failure(self.group, told)
        return [told[0], told[7], told[7 + 67]]

    def inputs(self, seed: int, count: int, dtype: torch.dtype) -> list[Tensor]:
        return [
            torch.randint(0, 8, (count,), generator=torch.Generator().manual_seed(seed * 64 + rank)).to(dtype)
            for rank in range(self.size)
        ]

    def close(self) -> None:
        self._library.ps_group_close(self.group)


@contextmanager
def kernel_rank(folder: str, timeout_s: float = 20.0, **policy: int) -> Iterator[KernelRank]:
    rank = KernelRank(folder, timeout_s, **policy)
    try:
        yield rank
    finally:
        rank.close()
