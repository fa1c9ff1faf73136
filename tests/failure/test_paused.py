"""A rank that is stopped for longer than the heartbeat limit and resumes is not given up."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
import torch

import parallel_state as ps
from tests.contract.attempts import Outcome, attempt
from tests.failure.worlds import DEADLINE_S, LONG_TIMEOUT_S
from tests.hosts import Hosts, problem

BEAT_S, LIMIT_S = 0.2, 1.5
PAUSE_S = 2 * LIMIT_S


def _pausing(victim: int) -> tuple[list[Outcome], list[int]]:
    ps.init_distributed_environment(timeout=LONG_TIMEOUT_S)
    ps.initialize_model_parallel(2, 2)
    world = ps.get_world_group()
    time.sleep(3 * BEAT_S)
    outcomes = [attempt(world.all_reduce, torch.ones(3))]
    if world.rank == victim:
        with subprocess.Popen(["sh", "-c", f"sleep {PAUSE_S}; kill -CONT {os.getpid()}"]):
            os.kill(os.getpid(), signal.SIGSTOP)
    outcomes.append(attempt(world.all_reduce, torch.ones(3)))
    time.sleep(LIMIT_S + 2 * BEAT_S)
    outcomes += [attempt(group.all_reduce, torch.ones(3)) for group in (world, ps.get_tp_group(), ps.get_pp_group())]
    watcher = world.context.watcher
    assert watcher is not None
    dead = [death.rank for death in watcher.deaths_of(range(4))]
    ps.destroy_distributed_environment()
    return outcomes, dead


@pytest.mark.side_by_side
@pytest.mark.over("hosts")
@pytest.mark.parametrize("victim", [1, 2, 3])
def test_a_rank_that_was_stopped_goes_on(victim: int) -> None:
    if problem() is not None:
        pytest.skip(f"no hosts can be made here: {problem()}")
    limits = {"PARALLEL_STATE_HEARTBEAT_S": str(BEAT_S), "PARALLEL_STATE_HEARTBEAT_LIMIT_S": str(LIMIT_S)}
    with Hosts(2) as hosts, hosts.ranks((0, 0, 1, 1), **limits) as ranks:
        told = ranks.survivors(_pausing, victim, timeout_s=2 * DEADLINE_S)
    assert sorted(told) == [0, 1, 2, 3]
    for rank, (outcomes, dead) in told.items():
        assert [outcome.kind for outcome in outcomes] == ["ok"] * 5, (rank, outcomes)
        assert dead == [], (rank, dead)
