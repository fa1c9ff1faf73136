"""Measures several implementations of an operation, all in the same ranks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

import parallel_state as ps
from device_communicators.base import settings
from parallel_state.tools.bench.collectives import ROWS, Call, Exchange, TensorTeam, ours_by_method, torch_by_call
from parallel_state.tools.bench.devices import Clock, describe, share_gpus
from parallel_state.tools.bench.progress import Progress
from parallel_state.tools.bench.rounds import OBJECT, OWN, Plan, Row, Timing, measure

IN_PLACE = f"{OWN} in place"


class GroupTeam(TensorTeam):
    name = "ranks"

    def __init__(self, group: ps.GroupCoordinator) -> None:
        self.group, self.clock = group, Clock(group.device)
        self.rank, self.size, self.device = group.rank_in_group, group.world_size, group.device

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Calls the method named `method` on this rank and returns all ranks' results. Every rank must call this."""
        mine = getattr(self, method)(*arguments)
        if isinstance(mine, Timing):
            return [Timing(elapsed_s) for elapsed_s in self.group.all_gather_object(mine.elapsed_s)]
        return list(self.group.all_gather_object(str(mine) if isinstance(mine, str) else mine))

    def finish(self) -> None:
        self.clock.finish()

    def _run_tight(self, call: Call, x: Tensor, calls: int) -> float:
        self.group.barrier()
        return self.clock.seconds(lambda: [call(x) for _ in range(calls)] and None)


class OwnAndTorch(GroupTeam):
    def __init__(self, group: ps.GroupCoordinator) -> None:
        super().__init__(group)
        self.torchs_name = "torch over nccl" if group.device.type == "cuda" else "torch over gloo"

    def exchanges(self, operation: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Exchange]:
        call, in_place = ours_by_method(self.group, operation)
        torchs_group = self.group.cpu_group if operation == OBJECT else self.group.device_group
        found = {OWN: call, IN_PLACE: in_place, self.torchs_name: torch_by_call(operation, torchs_group, self.size)}
        return {name: Exchange(each) for name, each in found.items() if each is not None}


def cases_of(operations: Sequence[str], sizes: Sequence[int], ranks: int, dtype: str) -> list[dict[str, object]]:
    unit = ROWS * ranks * getattr(torch, dtype).itemsize
    rounded = list(dict.fromkeys(max(unit, size // unit * unit) for size in sizes))
    common = {"part": "collectives", "ranks": ranks, "dtype": dtype, "loop": "tight"}
    return [
        {**common, "operation": operation, "bytes": size}
        for operation in operations
        for size in ([0] if operation == "barrier" else rounded)
    ]


@contextmanager
def one_group(device: str) -> Iterator[tuple[ps.GroupCoordinator, dict[str, Any]]]:
    sharing = share_gpus() if device == "cuda" else ""
    os.environ.setdefault(settings.NCCL.name, "on")  # measured even if the default is off
    torch.set_num_threads(1)
    ps.init_distributed_environment(backend="nccl" if device == "cuda" else "gloo")
    try:
        ps.initialize_model_parallel(ps.get_world_group().world_size, warm_up=True)
        group = ps.get_tp_group()
        yield group, {**describe(group.device), "sharing": sharing, "route": group.explain()}
    finally:
        ps.destroy_distributed_environment()


def run_rank(options: argparse.Namespace, plan: Plan, show: Callable[[list[Row], dict[str, Any]], object]) -> bool:
    """Measures all operations, and calls `show(new rows, device facts)` on rank 0 after each. Every rank must call
    this.

    Returns True if an implementation failed.
    """
    with one_group(options.device) as (group, about):
        cases = cases_of(options.operations, options.sizes, group.world_size, options.dtype)
        progress = Progress(len(cases) * plan.case_s) if group.is_first_rank else None
        rows: list[Row] = []
        failed = False
        try:
            for case, following in zip_longest(cases, cases[1:]):
                rows.append(measure([OwnAndTorch(group)], case, plan))
                failed |= bool(rows[-1].wrong)
                if progress is not None:
                    progress.step(plan.case_s, "ends" if following is None else f"{following['operation']}")
                    if following is None or following["operation"] != case["operation"]:
                        progress.hide()
                        show(rows, about)
                        rows = []
        finally:
            if progress is not None:
                progress.hide()
                if rows:
                    show(rows, about)
        return failed
