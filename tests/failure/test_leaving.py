"""Who leaves on purpose is no death; who is missing or has ended is named also where nobody can watch its process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

import parallel_state as ps
from tests.contract.attempts import Outcome, attempt
from tests.failure.ranks import Ranks
from tests.failure.trials import assert_in_time
from tests.failure.worlds import DEADLINE_S, ROUTES, kill_me, world_over
from tests.hosts import Hosts, problem

pytestmark = pytest.mark.side_by_side
T_S = 2.0


def _one_leaves(route: str) -> list[str]:
    """Rank 3 destroys its world and ends; the others, which know that, go on with what doesn't need it."""
    found: list[str] = []
    with world_over(route) as group:
        group.barrier()
        if group.rank == 3:
            ps.destroy_distributed_environment()
            os._exit(0)
        time.sleep(1.0)
        for number in range(3):
            told = attempt(group.send if group.rank == 0 else group.recv, *_pair(group.rank, number))
            if group.rank != 2:
                found.append(f"{told.kind} {told.text if told.kind != 'ok' else ''}")
    return found


def _pair(rank: int, number: int) -> tuple[object, ...]:
    return (torch.full((3,), float(number)), 1) if rank == 0 else ((3,), torch.float32, 0)


@pytest.mark.parametrize("route", ROUTES)
def test_who_leaves_on_purpose_is_no_death(ranks: Ranks, route: str) -> None:
    found = ranks.survivors(_one_leaves, route, timeout_s=DEADLINE_S)
    assert found[0] == found[1] == ["ok "] * 3


def _late(operation: str) -> Outcome:
    with world_over("gloo", timeout_s=T_S) as group:
        group.barrier()
        if group.rank == 1:
            time.sleep(T_S + 2.5)
        if operation == "barrier":
            return attempt(group.barrier)
        return attempt(group.recv, (3,), torch.float32, 1 - group.rank)


@pytest.mark.parametrize("operation", ["barrier", "recv"])
def test_the_other_one_of_two_is_named(tmp_path: Path, operation: str) -> None:
    """Who comes too late hears that the other one gave up, and not that it has ended."""

    def trial(_: Path) -> float:
        pair = Ranks(2)
        try:
            first, second = pair.run(_late, operation, timeout_s=DEADLINE_S)
        finally:
            pair.kill()
        assert (first.kind, first.suspect_ranks) == ("CollectiveTimeoutError", (1,)), first
        assert second.kind in ("CommunicationError", "CollectiveTimeoutError"), second
        return first.seconds

    assert_in_time(trial, tmp_path, T_S + 1.0)


def _sub_group_with_a_dead_rank() -> Outcome:
    with world_over("gloo", timeout_s=20.0) as group:
        group.barrier()
        if group.rank == 3:
            kill_me()
        return attempt(ps.get_world_group().make_sub_group, [0, 1, 3])


def test_a_sub_group_with_a_rank_that_has_ended(ranks: Ranks, tmp_path: Path) -> None:
    def trial(_: Path) -> float:
        outcomes = ranks.survivors(_sub_group_with_a_dead_rank, timeout_s=DEADLINE_S)
        for told in outcomes.values():
            assert (told.kind, told.suspect_ranks) == ("PeerDiedError", (3,)), told
        return max(told.seconds for told in outcomes.values())

    assert_in_time(trial, tmp_path, before=ranks.kill)


def _killed_alone_on_its_host() -> Outcome:
    ps.init_distributed_environment(timeout=20.0)
    ps.initialize_model_parallel(3)
    group = ps.get_tp_group()
    group.barrier()
    if group.rank == 1:
        kill_me()
    told = attempt(group.all_reduce, torch.ones(5))
    ps.destroy_distributed_environment()
    return told


def test_a_rank_that_is_alone_on_its_host_is_named(tmp_path: Path) -> None:
    reason = problem()
    if reason is not None:
        pytest.skip(f"no hosts can be made here: {reason}")

    def trial(_: Path) -> float:
        with Hosts(3) as hosts, hosts.ranks((0, 1, 2)) as ranks:
            outcomes = ranks.survivors(_killed_alone_on_its_host, timeout_s=DEADLINE_S)
        assert sorted(outcomes) == [0, 2]
        for told in outcomes.values():
            assert (told.kind, told.suspect_ranks) == ("PeerDiedError", (1,)), told
        return max(told.seconds for told in outcomes.values())

    assert_in_time(trial, tmp_path)


def _leave_one_by_one() -> Outcome:
    """Ranks 2 and 3 share a host; 2 goes, and 3 goes on with the other host for longer than the heartbeats' limit."""
    ps.init_distributed_environment(timeout=20.0)
    ps.initialize_model_parallel(4)
    world = ps.get_world_group()
    rest = world.make_sub_group([0, 1, 3])
    world.barrier()
    if world.rank == 2:
        ps.destroy_distributed_environment()
        return Outcome("ok", "", 0.0)
    assert rest is not None
    for _ in range(30):
        told = attempt(rest.broadcast_object, 1)
        if told.kind != "ok":
            break
        time.sleep(0.1)
    ps.destroy_distributed_environment()
    return told


def test_the_first_rank_of_a_host_may_leave() -> None:
    reason = problem()
    if reason is not None:
        pytest.skip(f"no hosts can be made here: {reason}")
    limits = {"PARALLEL_STATE_HEARTBEAT_S": "0.3", "PARALLEL_STATE_HEARTBEAT_LIMIT_S": "1.5"}
    with Hosts(2) as hosts, hosts.ranks((0, 0, 1, 1), **limits) as ranks:
        outcomes = ranks.run(_leave_one_by_one, timeout_s=DEADLINE_S)
    assert [told.kind for told in outcomes] == ["ok"] * 4, outcomes
