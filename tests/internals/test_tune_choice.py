from __future__ import annotations

import dataclasses
from dataclasses import replace
from itertools import combinations_with_replacement
from math import inf, log
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from device_communicators.cpu_communicator import CpuCommunicator
from device_communicators.peer.thresholds import Conditions, load
from device_communicators.process_group.device import DeviceGroupCommunicator
from parallel_state import __main__ as commands
from parallel_state.tools.bench.devices import Captured
from parallel_state.tools.tune.tuning import (
    CALLS_IN_A_GRAPH,
    FUSED,
    ORDERS,
    OTHER,
    TORCHS,
    UNBOUNDED,
    Candidates,
    TuneError,
    boundaries,
    choose,
    other_of,
    write,
)

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
    }  # 7 µs instead of 5 at one size saves 3 µs at the next


def test_a_single_slip_doesnt_move_a_boundary() -> None:
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


HERE = Conditions("9.0", 4, True, "NV18", "580.1", "2.28.9", "2.11.0")


def test_each_operation_has_thresholds_of_its_own() -> None:
    small, middle, large = 1 << 10, 1 << 12, 1 << 14
    moves = {small: {"push": 1, OTHER: 4, "pull": 2}, middle: {"push": 3, "pull": 2, OTHER: 4}}
    moves[large] = {"push": 9, "pull": 8, OTHER: 4}
    times: dict[str, Any] = {
        "all_reduce": {small: {"push": 1, "pull": 2, "two_shot": 3, OTHER: 4, TORCHS: 6}},
        "all_gather": moves,
        "reduce_scatter": moves,
        FUSED: {small: {"fused": 1, "push": 2, OTHER: 3}, middle: {"fused": 5, "push": 2, OTHER: 3}},
    }
    found = choose(times, HERE, "a test")
    assert (found.push, found.pull, found.two_shot, found.fused) == (1 << 10, 0, 0, 1 << 10)
    assert (found.all_gather, found.all_gather_push) == (1 << 12, 1 << 10)
    assert (found.reduce_scatter, found.reduce_scatter_push) == (1 << 10, 1 << 8)
    assert found.own_nccl and found.proven_calls == 0, "to be proven yet"
    assert (found.arch, found.world_size, found.link, found.driver) == ("9.0", 4, "NV18", "580.1")
    times["all_reduce"][small][TORCHS] = 3
    assert not choose(times, HERE, "a test").own_nccl


def test_what_was_not_measured_gives_no_row() -> None:
    times = {operation: {1 << 10: {OTHER: 1.0}} for operation in ORDERS if operation != FUSED}
    for nothing in ({}, {1 << 10: {}}):
        with pytest.raises(TuneError, match=f"every measurement of {FUSED} on 4 ranks failed"):
            choose({**times, FUSED: nothing}, HERE, "a test")


def test_a_row_takes_the_place_of_one_with_the_same_conditions(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.json"
    row = replace(UNBOUNDED, **dataclasses.asdict(HERE))
    for each in (row, replace(row, push=1), replace(row, driver="590.1")):
        write(each, path)
    assert [(each.push, each.driver) for each in load(path).rows] == [(1, "580.1"), (1 << 40, "590.1")]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_on_gpus_nobody_is_compared_with_who_carries_only_tensors_of_the_host() -> None:
    context: Any = SimpleNamespace(device=torch.device("cuda", 0), size=2)
    host, nccl = object.__new__(CpuCommunicator), object.__new__(DeviceGroupCommunicator)
    host.context = nccl.context = context
    assert other_of([host, nccl], "cuda") is nccl
    with pytest.raises(
        TuneError,
        match="tune has nothing to compare its kernels with: neither NCCL nor gloo supports cuda tensors here",
    ):
        other_of([host], "cuda")


def test_calls_are_captured_by_the_graph() -> None:
    group: Any = SimpleNamespace(rank_in_group=0, world_size=1, device=torch.device("cpu"))
    group.all_gather_object = lambda mine: [mine]
    calls: list[bool] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        calls.append(Captured.standing_in)
        return x.clone()

    team = Candidates(group, {"push": call})
    case = {"operation": "all_reduce", "bytes": 1024, "dtype": "bfloat16", "loop": "tight"}
    assert team.ask("prepare", case) == [["push"]]
    assert team.ask("check", "push") == [None]
    assert calls == [False, False, *[True] * CALLS_IN_A_GRAPH], "checked, made on the graph's stream, and captured"
    assert team.ask("check", "push") == [None] and len(calls) == CALLS_IN_A_GRAPH + 3, "captured once"
    (timing,) = team.ask("run", "push", 2 * CALLS_IN_A_GRAPH + 1)
    assert len(calls) == 5 * CALLS_IN_A_GRAPH + 3 and timing.elapsed_s > 0, "a graph to warm up, and three"


def test_without_a_gpu_there_is_nothing_to_tune(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert commands.main(["tune"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
