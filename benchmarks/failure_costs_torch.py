"""The candidates of `failure_costs` that live in torch: calls in normal and in debug mode, and calls over gloo.

A team is a world; what sets them apart is in their environments.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from collectives_torch import ours_by_op, use_once
from measure.worker import Timing, timed
from torch import Tensor

import parallel_state as ps

EXCHANGE = "gloo's all_gather of 512 bytes"
CALL_BYTES = 512
"""What each rank tells of its call in debug mode."""


def make(name: str, settings: dict[str, Any]) -> CallTeam:
    return CallTeam(settings)


class CallTeam:
    """`settings["after"]` follows the candidates' names, to tell worlds apart."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        ps.init_distributed_environment(backend="gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        ps.initialize_model_parallel(self.size)
        self.group = ps.get_tp_group()
        use_once(self.group)
        self._after = settings["after"]
        self._own = torch.full((CALL_BYTES,), self.rank, dtype=torch.uint8)
        self._told = torch.empty(self.size * CALL_BYTES, dtype=torch.uint8)

    def prepare(self, values: dict[str, Any]) -> list[str]:
        self._x = torch.zeros(values["bytes"] // 4)
        self._told.fill_(self.size)  # what no rank sends
        calls = self._over_gloo() if values["part"] == "gloo" else self._over_shared_memory()
        self._calls = {name + self._after: call for name, call in calls.items()}
        return list(self._calls)

    def _over_shared_memory(self) -> dict[str, Callable[[Tensor], Tensor]]:
        return {
            "op, in place": ours_by_op(self.group, "all_reduce_", {}),
            "all_reduce": self.group.all_reduce,
            "record in Python": self._record,
            EXCHANGE: self._exchange,
        }

    def _over_gloo(self) -> dict[str, Callable[[Tensor], Tensor]]:
        def of_torch(x: Tensor) -> Tensor:
            dist.all_reduce(x, group=self.group.cpu_group)
            return x

        return {
            "torch.distributed": of_torch,
            "all_reduce": self.group.all_reduce,
            "all_reduce_": self.group.all_reduce_,
        }

    def _record(self, x: Tensor) -> Tensor:
        """What a call that Python carries adds to the ring; its number is the next one on every rank."""
        self.group.route.note("all_reduce_", x).ended_s = time.monotonic()
        return x

    def _exchange(self, x: Tensor) -> Tensor:
        self.group.cpu_group._allgather_base(self._told, self._own).wait()
        return x

    def check(self, name: str) -> str | None:
        x = (torch.arange(self._x.numel()) % 7 + self.rank).float()
        expected = sum((torch.arange(self._x.numel()) % 7 + rank).float() for rank in range(self.size))
        with torch.inference_mode():
            try:
                y = self._calls[name](x)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        if name.startswith("record"):
            return self._unrecorded(name)
        if name.startswith(EXCHANGE):
            ranks = torch.arange(self.size, dtype=torch.uint8).repeat_interleave(CALL_BYTES)
            return None if torch.equal(self._told, ranks) else f"{name}: not every rank's bytes have come"
        return None if torch.equal(y, expected) else f"{name} of {list(x.shape)} is wrong on rank {self.rank}"

    def _unrecorded(self, name: str) -> str | None:
        last = self.group.route.operations()[-1]
        found = (last.name, last.shape, last.sequence, bool(last.ended_s), bool(last.site))
        wanted = ("all_reduce_", tuple(self._x.shape), self.group.route.sequence, True, self.group.route.in_debug_mode)
        return None if found == wanted else f"{name}: {found} is in the ring instead of {wanted}"

    def run(self, name: str, calls: int) -> Timing:
        call, x = self._calls[name], self._x
        with torch.inference_mode():
            return timed(lambda: call(x), calls)
