from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from device_communicators.peer.kernels import MAX_BLOCKS, REGION_BYTES, Call, KernelReport, read_report
from tests.helpers.cuda_on_cpu import CpuKernels

JOIN_S = 120


class CpuRanks:
    def __init__(self, size: int, kernels: CpuKernels | None = None, deadline_s: float = 60.0) -> None:
        self.size = size
        self.kernels = kernels or CpuKernels()
        self.deadline_s = deadline_s
        self._memory = [mmap.mmap(-1, REGION_BYTES + mmap.PAGESIZE) for _ in range(size)]
        self.regions = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in self._memory]
        self.reports = (ctypes.c_uint64 * size)()
        self.aborts = (ctypes.c_uint64 * size)()

    def call(self, rank: int, **fields: Any) -> Call:
        call = Call(rank=rank, size=self.size, deadline_ns=int(self.deadline_s * 1e9))
        call.regions[: self.size] = self.regions
        call.report = ctypes.addressof(self.reports) + 8 * rank
        call.abort = ctypes.addressof(self.aborts) + 8 * rank
        for name, value in fields.items():
            setattr(call, name, value.data_ptr() if isinstance(value, torch.Tensor) else value)
        return call

    def run(self, body: Callable[[int], Any], ranks: Sequence[int] | None = None) -> dict[int, Any]:
        results: dict[int, Any] = {}

        def keep(rank: int) -> None:
            try:
                results[rank] = body(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=keep, args=(rank,)) for rank in (ranks or range(self.size))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_S)
            assert not thread.is_alive(), "a kernel didn't end"
        return results

    def report(self, rank: int) -> KernelReport | None:
        return read_report(self.reports[rank])

    def epochs(self, rank: int) -> list[int]:
        return list((ctypes.c_uint32 * MAX_BLOCKS).from_address(self.regions[rank]))

    def set_epochs(self, epoch: int) -> None:
        for region in self.regions:
            (ctypes.c_uint32 * MAX_BLOCKS).from_address(region)[:] = [epoch] * MAX_BLOCKS


def sum_in_rank_order(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    total = inputs[0].float()
    for each in inputs[1:]:
        total = total + each.float()
    return total.to(inputs[0].dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
