"""Costs of creating groups: calls, on one rank of torch's `fake` backend, and leaks, on real ranks."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import parallel_state as ps
from benchmarks.init_scaling_ranks import Cost, cost_of_start
from tests import hosts
from tests.extent import LONG
from tests.programs import Program, script
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 120.0
ROOT = Path(__file__).resolve().parents[2]

SIZES = {
    "tensor_model_parallel_size": 8,
    "pipeline_model_parallel_size": 8,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 8,
}
ROUNDS, ROUNDS_OF_WORLDS = ((20, 100), (20, 100)) if LONG else ((6, 20), (4, 13))


def _costs(places: list[tuple[int, int]], eager: bool) -> list[Cost]:
    return [cost_of_start(rank, world_size, SIZES, eager=eager) for rank, world_size in places]


@pytest.mark.parametrize("eager", [False, True], ids=["made at start", "all kinds"])
def test_what_a_rank_does_does_not_grow_with_the_world(pools: Pools, eager: bool) -> None:
    small, large = 1024, 16384
    places = [(rank, size) for size in (small, large) for rank in (0, size // 2, size - 1)]
    first, *others = pools(1).run(_costs, places, eager, timeout_s=DEADLINE_S)[0]
    # A middle stage has no embedding groups, unlike the first and last stage.
    fewer = first._replace(groups=first.groups - eager, calls=first.calls - eager, rank_sets=first.rank_sets - eager)
    for place, cost in zip(places[1:], others, strict=True):
        assert cost in (first, fewer), place
    assert others[:2] == others[3:]
    assert others[2] == first
    assert first.calls == first.groups == (14 if eager else 5)
    assert not first.store, "ranks agree over the control plane"


class Footprint(NamedTuple):
    threads: int
    descriptors: int
    rss_kib: int


def _footprint() -> Footprint:
    gc.collect()
    with open("/proc/self/status", encoding="utf-8") as file:
        status = dict(line.split(":", 1) for line in file)
    return Footprint(int(status["Threads"]), len(os.listdir("/proc/self/fd")), int(status["VmRSS"].split()[0]))


def _use_groups() -> None:
    """A function of its own, because a local that holds a group keeps torch's threads alive."""
    for group in (ps.get_tp_group(), ps.get_dp_group()):
        assert group.all_reduce(torch.tensor([group.rank])).item() == sum(group.ranks)


def _again_and_again(world_too: bool, settled: int, rounds: int) -> tuple[Footprint, Footprint]:
    found = []
    if not world_too:
        ps.init_distributed_environment()
    for number in range(1, rounds + 1):
        if world_too:
            ps.init_distributed_environment()
        ps.initialize_model_parallel(2)
        _use_groups()
        if world_too:
            ps.destroy_distributed_environment()
        else:
            ps.destroy_model_parallel()
        if number in (settled, rounds):
            found.append(_footprint())
    if not world_too:
        ps.get_world_group().barrier()
    ps.destroy_distributed_environment()
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_too", "settled_at", "rounds"),
    [(False, *ROUNDS), (True, *ROUNDS_OF_WORLDS)],
    ids=["division", "world and division"],
)
def test_nothing_stays_of_groups_that_ended(pools: Pools, world_too: bool, settled_at: int, rounds: int) -> None:
    found = pools(4).run(_again_and_again, world_too, settled_at, rounds, timeout_s=3 * DEADLINE_S)
    for rank, (settled, after) in enumerate(found):
        assert after.threads <= settled.threads + 2, rank
        assert after.descriptors <= settled.descriptors + 2, rank
        assert after.rss_kib - settled.rss_kib < 4 * 1024, rank


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = ["--ranks", "2", "--repetitions", "1", "--no-counts", "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = Program(script(ROOT / "benchmarks" / "init_scaling.py", words), environment)
    said = "".join(program.communicate(DEADLINE_S))
    assert program.returncode == 0, said
    rows = json.loads(file.read_text())["real"]
    assert {(row["variant"], row["lazy"]) for row in rows} == {
        (variant, lazy) for variant in ("ours", "new_group", "device_mesh") for lazy in (False, True)
    }
    assert all(row["calls"] == 0 for row in rows if row["variant"] == "ours")


@pytest.mark.slow
def test_the_benchmark_of_the_meeting_runs(tmp_path: Path) -> None:
    if (problem := hosts.problem()) is not None:
        pytest.skip(f"hosts have no addresses of their own: {problem}")
    file, picture = tmp_path / "result.json", tmp_path / "picture.svg"
    words = ["--ranks", "16", "--repetitions", "1", "--json", str(file), "--plot", str(picture)]
    program = Program(
        script(ROOT / "benchmarks" / "meeting_scaling.py", words), {**os.environ, "PYTHONPATH": str(ROOT)}
    )
    said = "".join(program.communicate(DEADLINE_S))
    assert program.returncode == 0, said
    rows = json.loads(file.read_text())["rows"]
    assert [row["ranks"] for row in rows] == [16]
    for row in rows:
        for counted in (row["operations"], row["bytes"]):
            assert counted["all"] >= counted["rank 0"] + (row["ranks"] - 1) > counted["rank 0"] > 0
    assert picture.read_text().startswith("<svg")
