"""From measured times to thresholds."""

from __future__ import annotations

import contextlib
from itertools import combinations_with_replacement
from math import inf, log
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from measure.choice import boundaries
from measure.rounds import Row
from measure.tensors import Exchange
from tune import FUSED, ORDERS, choose
from tune_ranks import TuneTeam, other_of

from device_communicators.device_group import DeviceGroupCommunicator
from device_communicators.shared_memory import SharedMemoryCommunicator

ORDER = ("push", "pull", "two_shot", "nccl")


def test_each_candidate_gets_the_sizes_at_which_it_is_fastest() -> None:
    times = {
        1 << 10: {"push": 2.0, "pull": 4.0, "two_shot": 6.0, "nccl": 9.0},
        1 << 14: {"push": 3.0, "pull": 4.0, "two_shot": 6.0, "nccl": 9.0},
        1 << 18: {"push": 20.0, "pull": 8.0, "two_shot": 8.5, "nccl": 10.0},
        1 << 22: {"push": 300.0, "pull": 90.0, "two_shot": 30.0, "nccl": 31.0},
        1 << 26: {"push": 9000.0, "pull": 2000.0, "two_shot": 700.0, "nccl": 400.0},
    }
    assert boundaries(times, ORDER) == {"push": 1 << 14, "pull": 1 << 18, "two_shot": 1 << 22}


def test_who_never_wins_gets_nothing() -> None:
    times = {size: {"push": 1.0, "pull": 2.0, "two_shot": 3.0, "nccl": 0.9 * size} for size in (1, 2, 4)}
    assert boundaries(times, ORDER) == {"push": 4, "pull": 0, "two_shot": 0}
    assert boundaries({8: {"push": 3.0, "nccl": 2.0}}, ORDER) == {"push": 0, "pull": 0, "two_shot": 0}
    assert boundaries({}, ORDER) == {"push": 0, "pull": 0, "two_shot": 0}


def test_a_candidate_without_a_time_isnt_chosen() -> None:
    times = {1: {"push": 1.0, "nccl": 5.0}, 2: {"pull": 7.0, "nccl": 5.0}, 4: {"two_shot": 3.0, "nccl": 5.0}}
    assert boundaries(times, ORDER) == {
        "push": 1,
        "pull": 2,
        "two_shot": 4,
    }  # 7 µs for 5 at one size, for 3 µs at the next


def test_a_single_slip_doesnt_move_a_boundary() -> None:
    """At 4 KiB push was disturbed; it goes on behind it."""
    times = {
        1 << 11: {"push": 2.0, "pull": 4.0},
        1 << 12: {"push": 4.5, "pull": 4.0},
        1 << 13: {"push": 2.2, "pull": 4.0},
        1 << 14: {"push": 9.0, "pull": 4.5},
    }
    assert boundaries(times, ("push", "pull")) == {"push": 1 << 13}


@pytest.mark.parametrize("seed", range(20))
def test_no_other_division_is_better(seed: int) -> None:
    random = Random(seed)
    sizes = [1 << power for power in range(6)]
    times = {
        size: {name: random.uniform(1, 9) for name in ORDER if name == "nccl" or random.random() < 0.8}
        for size in sizes
    }

    def cost(chosen: tuple[int, ...]) -> float:
        found = [times[size].get(ORDER[at]) for size, at in zip(sizes, chosen, strict=True)]
        return sum(inf if time is None else log(time) for time in found)

    ends = boundaries(times, ORDER)
    mine = tuple(next((at for at, name in enumerate(ORDER[:-1]) if size <= ends[name]), 3) for size in sizes)
    assert cost(mine) == pytest.approx(min(map(cost, combinations_with_replacement(range(4), len(sizes)))))


def _row(operation: str, size: int, **us: float) -> Row:
    return Row({"operation": operation, "bytes": size}, {name: [time] for name, time in us.items()})


def test_each_operation_has_thresholds_of_its_own() -> None:
    rows = [_row("all_reduce", 1 << 10, push=1, pull=2, two_shot=3, other=4)]
    for operation in ("all_gather", "reduce_scatter"):
        rows += [
            _row(operation, 1 << 10, push=1, pull=2, other=4),
            _row(operation, 1 << 12, push=3, pull=2, other=4),
            _row(operation, 1 << 14, push=9, pull=8, other=4),
        ]
    rows += [_row(FUSED, 1 << 10, fused=1, push=2, other=3), _row(FUSED, 1 << 12, fused=5, push=2, other=3)]
    found = choose(rows, "9.0", 4, "a test")
    assert (found.push, found.pull, found.two_shot, found.fused) == (1 << 10, 0, 0, 1 << 10)
    assert (found.all_gather, found.all_gather_push) == (1 << 12, 1 << 10)
    assert (found.reduce_scatter, found.reduce_scatter_push) == (1 << 10, 1 << 8)


def test_what_was_not_measured_gives_no_table() -> None:
    rows = [_row(operation, 1 << 10, other=1) for operation in ORDERS if operation != FUSED]
    with pytest.raises(SystemExit, match=f"nothing was measured of {FUSED} on 4 ranks"):
        choose([*rows, _row(FUSED, 1 << 10)], "9.0", 4, "a test")


def test_on_gpus_nobody_is_compared_with_who_carries_only_tensors_of_the_host() -> None:
    context: Any = SimpleNamespace(device=torch.device("cuda", 0), size=2)
    host, nccl = object.__new__(SharedMemoryCommunicator), object.__new__(DeviceGroupCommunicator)
    host.context = nccl.context = context
    assert other_of([host, nccl], "cuda") is nccl
    with pytest.raises(RuntimeError, match="nothing to compare with: no communicator carries tensors on cuda"):
        other_of([host], "cuda")


def test_calls_are_captured_with_the_tensors_of_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(TuneTeam):
        def __init__(self) -> None:
            self.rank, self.size, self._graphs = 0, 1, {}

        def exchanges(self, operation: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Exchange]:
            return {"copy": Exchange(lambda x: x.add_(1))}

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    team = OnGpu()
    team.prepare({"operation": "all_reduce", "bytes": 64, "dtype": "bfloat16", "loop": "produced"})
    assert team._replay("copy", 3).elapsed_s >= 0
