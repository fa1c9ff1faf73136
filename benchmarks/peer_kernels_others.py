"""For `peer_kernels`: NCCL and torch's symmetric memory, as far as they can be measured on one GPU by one process.

That is a group of one rank, which exchanges nothing: what is left is the cost of a call, below which no exchange of
theirs can be. Several ranks of theirs need a process each, and processes that share a GPU take turns on it, so that a
kernel that waits holds the GPU until its time slice ends: nothing to measure. Not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NCCL, ONE_SHOT = "NCCL, 1 rank", "symm_mem.one_shot_all_reduce, 1 rank"
SEVERAL_RANKS = (
    "several ranks need a process each, which take turns on one GPU: on a GPU for each rank, torchrun "
    "benchmarks/collectives.py and `python -m parallel_state tune` have them in turns with these kernels"
)


class Others:
    """`of` gives what all-reduces a tensor; what can't be had, and why, goes into the case's `refused`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._problem: str | None = "there is no GPU"
        self._own_group = False
        self._staged: dict[tuple[int, torch.dtype], Tensor] = {}
        if device.type == "cuda":
            self._problem = self._start()

    def of(self, x: Tensor, refused: dict[str, str]) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
        """By name: a call that leaves the sum of `given` in `out`, or returns it elsewhere, for tensors like `x[0]`."""
        refused["NCCL and symm_mem with several ranks"] = SEVERAL_RANKS
        found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
        for name, make in ((NCCL, self._nccl), (ONE_SHOT, self._one_shot)):
            try:
                if self._problem is not None:
                    raise RuntimeError(self._problem)
                call = make(x)
                call(torch.empty_like(x), x)
                found[name] = call
            except Exception as problem:  # whatever this torch lacks on this machine
                refused[name] = str(problem).strip().partition("\n")[0]
        return found

    def close(self) -> None:
        self._staged.clear()
        if self._own_group:
            dist.destroy_process_group()

    def _start(self) -> str | None:
        try:
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=self._device)
        except Exception as problem:
            return str(problem).strip().partition("\n")[0]
        self._own_group = True
        return None

    def _nccl(self, x: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        def call(out: Tensor, given: Tensor) -> Tensor:
            out.copy_(given)  # it works in place
            dist.all_reduce(out)
            return out

        return call

    def _one_shot(self, x: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        import torch.distributed._symmetric_memory as symmetric_memory

        group: Any = dist.group.WORLD
        staged = self._staged.get((x.numel(), x.dtype))
        if staged is None:
            staged = symmetric_memory.empty(x.numel(), dtype=x.dtype, device=x.device)
            symmetric_memory.rendezvous(staged, group.group_name)
            self._staged[x.numel(), x.dtype] = staged

        def call(out: Tensor, given: Tensor) -> Tensor:
            staged.copy_(given)  # its input lies in symmetric memory
            result: Tensor = torch.ops.symm_mem.one_shot_all_reduce(staged, "sum", group.group_name)
            return result

        return call
