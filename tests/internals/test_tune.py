from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

import parallel_state as ps
from device_communicators.peer.thresholds import ALGORITHMS, Conditions, Thresholds
from parallel_state.tools.tune import tuning as tuning_module
from parallel_state.tools.tune.tuning import FUSED, ORDERS, OTHER, UNBOUNDED, Plan, TuneError, Tuning
from tests.helpers import cuda_on_cpu, peer_stand_in
from tests.helpers.peer_stand_in import StandInPeerMemory
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
HERE = Conditions("9.0", 2, False, "none", "580.1", "2.28.9", "2.11.0")
PLAN = Plan(sizes=(1024, 4096), rounds=1, round_s=1e-5, proof_calls=60)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {peer_stand_in.FOLDER: str(tmp_path), peer_stand_in.LIBRARY: str(cuda_on_cpu.build())}


Spoil = Callable[[StandInPeerMemory, Event], None]


def _tuned(env: dict[str, str], spoil: Spoil) -> tuple[Thresholds | str, list[Any]]:
    os.environ.update(env)
    tuning_module.CALLS_IN_A_GRAPH = 2
    group = ps.get_tp_group()
    peers = StandInPeerMemory(group.context, thresholds=UNBOUNDED)
    assert peers.admit() is None
    try:
        proving = Event()
        spoil(peers, proving)
        tuning, found = Tuning(group, peers, plan=PLAN), []
        prove = tuning.prove

        def noted_prove(chosen: Thresholds) -> None:
            proving.set()
            prove(chosen)

        tuning.prove = noted_prove  # type: ignore[method-assign]
        times = tuning._times

        def noted(operation: str, size_bytes: int) -> dict[str, float]:
            found.append((operation, times(operation, size_bytes)))
            return found[-1][1]

        tuning._times = noted  # type: ignore[method-assign]
        try:
            return tuning.row(HERE, "a test"), found
        except TuneError as error:
            return str(error), found
    finally:
        peers.close()


def _tuned_body(env: dict[str, str]) -> Any:
    row, times = _tuned(env, lambda peers, proving: None)
    assert isinstance(row, Thresholds), row
    return (row.world_size, row.arch, row.proven_calls, row.one_gpu_each), [
        (operation, sorted(us)) for operation, us in times
    ], [getattr(row, name) for name in (*ALGORITHMS, "fused", "all_gather", "reduce_scatter")]  # fmt: skip


def test_every_candidate_is_measured_and_the_choice_is_proven(pools: Pools, env: dict[str, str]) -> None:
    one, other = pools(2).run(_tuned_body, env, tp=2)
    assert one == other, "the ranks chose alike"
    assert one[0] == (2, "9.0", 60, False)
    assert one[1] == [(operation, sorted(ORDERS[operation])) for operation in ORDERS for _ in PLAN.sizes]


def _spoiled_body(env: dict[str, str]) -> Any:
    def spoil(peers: StandInPeerMemory, proving: Event) -> None:
        right, calls = peers.group.all_reduce, [0]

        def wrong(out: torch.Tensor, x: torch.Tensor, how: str) -> None:
            right(out, x, how)
            calls[0] += proving.is_set()
            if calls[0] and calls[0] % 5 == 0 and ps.get_tp_group().is_last_rank:
                out.view(-1)[0] += 1

        peers.group.all_reduce = wrong  # type: ignore[method-assign]

    return _tuned(env, spoil)[0]


def test_a_result_that_is_wrong_once_in_a_while_is_no_row(pools: Pools, env: dict[str, str]) -> None:
    for text in pools(2).run(_spoiled_body, env, tp=2):
        assert isinstance(text, str) and text.startswith("tune wrote no row to its table: "), text
        assert " of 60 calls were wrong on rank 1" in text


def _broken_body(env: dict[str, str]) -> Any:
    def spoil(peers: StandInPeerMemory, proving: Event) -> None:
        right = peers.group.all_reduce

        def wrong(out: torch.Tensor, x: torch.Tensor, how: str) -> None:
            right(out, x, how)
            if how == "pull":
                out.zero_()

        peers.group.all_reduce = wrong  # type: ignore[method-assign]

    return [(operation, sorted(us)) for operation, us in _tuned(env, spoil)[1] if operation == "all_reduce"]


def test_a_candidate_that_is_wrong_has_no_times(pools: Pools, env: dict[str, str]) -> None:
    for found in pools(2).run(_broken_body, env, tp=2):
        assert found == [("all_reduce", sorted({"push", "two_shot", OTHER}))] * len(PLAN.sizes)


def test_proof_sizes_lie_on_both_sides_of_each_bound() -> None:
    tuning = object.__new__(Tuning)
    tuning.size = 2
    row = replace(UNBOUNDED, push=1024, pull=0, two_shot=4096, fused=0)
    assert tuning._proof_sizes("all_reduce", row) == [8, 512, 520, 2048, 2056]
    assert tuning._proof_sizes(FUSED, row) == [8]
