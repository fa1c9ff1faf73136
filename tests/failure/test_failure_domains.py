"""Rows 39 and 50 of docs/failures.md: a death fails all groups of its failure domain on all ranks, and no
other group. Row 39 has 2 trials a transport with up to 4 ranks; with FAILURE_TESTS=long 200 with up to 8."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel_state as ps
from tests.contract.attempts import Outcome, attempt, environment
from tests.extent import LONG
from tests.failure.domains import TRANSPORTS, results_in, run_to_the_bound, run_trials
from tests.failure.trials import folder_of_results, late, median_of
from tests.failure.worlds import DEADLINE_S, LONG_TIMEOUT_S, ROUTES, SLACK_S, kill_me, settings_of
from tests.hosts import INTERFACE, Hosts, problem
from tests.workers import WorkerPool

BEAT_S, LIMIT_S = 0.2, 2.0


@pytest.mark.side_by_side
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_row_39_random_layouts_random_kills(transport: str, tmp_path: Path) -> None:
    if transport == "two hosts" and problem() is not None:
        pytest.skip(f"no hosts can be made here: {problem()}")
    if LONG:
        folder = folder_of_results(tmp_path)
        run_trials(transport, range(200), folder)
        trials = results_in(folder, transport)
    else:
        trials = [run_to_the_bound(transport, seed, _new(tmp_path / str(seed)), most_ranks=4) for seed in range(2)]
    wrong = [f"seed {trial.seed}, {trial.layout}: {text}" for trial in trials for text in trial.wrong]
    assert not wrong, "\n".join(wrong)
    assert not late((trial.seed, trial.latest_s or [trial.last_s]) for trial in trials)


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _live_in(route: str, tp: int, pp: int, folder: str, victims: tuple[int, ...], options: dict[str, Any]) -> Any:
    with environment(**settings_of(route)):
        ps.init_distributed_environment(timeout=LONG_TIMEOUT_S)
        ps.initialize_model_parallel(tp, pp, **options)
    groups = {"tp": ps.get_tp_group(), "pp": ps.get_pp_group(), "dp": ps.get_dp_group(), "world": ps.get_world_group()}
    return _after_deaths(groups, folder, victims)


def _after_deaths(groups: dict[str, ps.GroupCoordinator], folder: str, victims: tuple[int, ...]) -> Any:
    world = ps.get_world_group()
    time.sleep(0.5)
    world.barrier()
    if world.rank in victims:
        kill_me()
    watcher = world.context.watcher
    assert watcher is not None
    assert len(watcher.await_death_of(victims, 1.0 + SLACK_S)) > 0
    until = time.monotonic() + 1.0 + SLACK_S
    while len(watcher.deaths_of(victims)) < len(victims) and time.monotonic() < until:
        time.sleep(0.01)
    found = {
        name: [attempt(group.all_reduce, torch.ones(3)) for _ in range(3)]
        for name, group in groups.items()
        if group.world_size > 1
    }
    Path(folder, f"done-{world.rank}").touch()
    while len(list(Path(folder).glob("done-*"))) < world.world_size - len(victims) and time.monotonic() < until:
        time.sleep(0.01)
    ps.destroy_distributed_environment()
    return found


@pytest.mark.parametrize("route", ROUTES)
def test_other_replicas_go_on(route: str, tmp_path: Path) -> None:
    with _pool(8) as pool:
        told = pool.survivors(
            _live_in, route, 2, 2, str(tmp_path), (6,), {"failure_domain": "replica"}, timeout_s=2 * DEADLINE_S
        )
    assert sorted(told) == [0, 1, 2, 3, 4, 5, 7]
    broken = {2, 3, 6, 7}
    for rank, calls in told.items():
        for name, outcomes in calls.items():
            kinds = [outcome.kind for outcome in outcomes]
            if rank in broken or name in ("dp", "world"):
                assert kinds == ["PeerDiedError", "GroupFailedError", "GroupFailedError"], (rank, name, outcomes)
                assert outcomes[0].suspect_ranks == (6,)
            else:
                assert kinds == ["ok"] * 3 and outcomes[0].text == "tensor([2., 2., 2.])", (rank, name, outcomes)


def _two_roots(route: str, folder: str) -> Any:
    os.environ.update({name: value for name, value in settings_of(route).items() if value is not None})
    ps.init_distributed_environment(timeout=LONG_TIMEOUT_S)
    world = ps.get_world_group()
    halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
    (half,) = (sub for sub in [world.make_sub_group(ranks) for ranks in halves] if sub is not None)
    own = ps.create_parallel_groups(half, {"tp": 2, "pp": 2})
    inner = own.tp.make_sub_group([0, 1])
    beside = world.make_sub_group([0, 1, 2])
    assert inner is not None
    groups = {"tp": own.tp, "pp": own.pp, "half": half, "inner": inner, "world": world}
    if beside is not None:
        groups["beside"] = beside
    return _after_deaths(groups, folder, (6,))


@pytest.mark.parametrize("route", ROUTES)
def test_other_roots_go_on(route: str, tmp_path: Path) -> None:
    with _pool(8) as pool:
        told = pool.survivors(_two_roots, route, str(tmp_path), timeout_s=2 * DEADLINE_S)
    assert sorted(told) == [0, 1, 2, 3, 4, 5, 7]
    for rank, calls in told.items():
        for name, outcomes in calls.items():
            if rank >= 4 or name == "world":
                assert outcomes[0].suspect_ranks == (6,), (rank, name, outcomes)
            else:
                assert [outcome.kind for outcome in outcomes] == ["ok"] * 3, (rank, name, outcomes)


def _make_a_group_without_rank_0() -> list[float] | None:
    ps.init_distributed_environment(timeout=LONG_TIMEOUT_S)
    ps.initialize_model_parallel(2, 1, failure_domain="replica")
    tp, world = ps.get_tp_group(), ps.get_world_group()
    world.barrier()
    if world.rank == 0:
        kill_me()
    assert world.context.watcher is not None
    assert world.context.watcher.await_death_of((0,), 1.0 + SLACK_S)
    if world.rank < 2:
        return None
    group = tp.make_sub_group([0, 1])
    assert group is not None
    result: list[float] = group.all_reduce(torch.full((2,), float(world.rank))).tolist()
    ps.destroy_distributed_environment()
    return result


def test_a_replica_makes_groups_after_rank_0_was_killed() -> None:
    with _pool(4) as pool:
        told = pool.survivors(_make_a_group_without_rank_0, timeout_s=DEADLINE_S)
    assert told == {1: None, 2: [5.0, 5.0], 3: [5.0, 5.0]}


@contextmanager
def _pool(size: int) -> Iterator[WorkerPool]:
    pool = WorkerPool(size)
    try:
        yield pool
    finally:
        pool.kill()


def _one_group(folder: str, dying: tuple[int, ...], silently: bool) -> tuple[Outcome, float, list[int]]:
    ps.init_distributed_environment(timeout=LONG_TIMEOUT_S)
    ps.initialize_model_parallel(4)
    group = ps.get_tp_group()
    time.sleep(3 * BEAT_S)
    group.barrier()
    started = time.monotonic()
    if group.rank in dying:
        Path(folder, f"new-{group.rank}").write_text(str(os.getpid()), encoding="utf-8")
        Path(folder, f"new-{group.rank}").rename(Path(folder, f"pid-{group.rank}"))
        while group.rank == dying[0] and len(pids := list(Path(folder).glob("pid-*"))) < len(dying):
            time.sleep(0.001)
        while group.rank != dying[0]:
            time.sleep(1.0)
        if silently:
            subprocess.run(["ip", "link", "set", INTERFACE, "down"], check=True)
        for pid in sorted((int(path.read_text()) for path in pids), key=lambda pid: pid == os.getpid()):
            os.kill(pid, signal.SIGKILL)
    outcome = attempt(group.all_reduce, torch.ones(10))
    while outcome.kind == "ok" and time.monotonic() < started + DEADLINE_S / 2:
        outcome = attempt(group.all_reduce, torch.ones(10))
    took_s = time.monotonic() - started
    time.sleep(LIMIT_S + 1.0)
    watcher = group.context.watcher
    dead = [] if watcher is None else [death.rank for death in watcher.deaths_of(range(4))]
    ps.destroy_distributed_environment()
    return outcome, took_s, sorted(dead)


@pytest.mark.side_by_side
@pytest.mark.parametrize(
    ("dying", "silently"), [((2, 3), False), ((0, 1), False), ((3,), False), ((0,), False), ((0, 1), True)], ids=str
)
def test_row_50_a_host_or_a_rank_of_it_dies(tmp_path: Path, dying: tuple[int, ...], silently: bool) -> None:
    if problem() is not None:
        pytest.skip(f"no hosts can be made here: {problem()}")
    limits = {"PARALLEL_STATE_HEARTBEAT_S": str(BEAT_S), "PARALLEL_STATE_HEARTBEAT_LIMIT_S": str(LIMIT_S)}
    numbers, within_s = itertools.count(), LIMIT_S + 1.0 if silently else 1.0

    def run() -> float:
        folder = _new(tmp_path / str(next(numbers)))
        with Hosts(2) as hosts, hosts.ranks((0, 0, 1, 1), **limits) as ranks:
            told = ranks.survivors(_one_group, str(folder), dying, silently, timeout_s=2 * DEADLINE_S)
        assert sorted(told) == [rank for rank in range(4) if rank not in dying]
        for rank, (outcome, _, dead) in told.items():
            # A silent host may be dead or only cut off.
            assert outcome.kind == ("HostUnreachableError" if silently else "PeerDiedError"), (rank, outcome)
            assert outcome.suspect_ranks and set(outcome.suspect_ranks) <= set(dying), (rank, outcome)
            assert dead == list(dying), (rank, dead)
            if len(outcome.suspect_ranks) < len(dying):
                return within_s  # the kills, or their reports, were 0.25 s apart; else most trials are late
        return max(took_s for _, took_s, _ in told.values())

    assert not late([(0, median_of(run, run(), within_s))], within_s)
