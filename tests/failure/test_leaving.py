"""Leaving on purpose is no death. Missing and dead ranks are named even if no rank can watch their processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parallel_state as ps
from device_communicators.c10d import creation
from tests.contract.attempts import Outcome, attempt
from tests.contract.test_threads import PAST_PYTHON
from tests.failure.over_torch import OVER_TORCH
from tests.failure.ranks import Ranks
from tests.failure.trials import assert_in_time
from tests.failure.worlds import DEADLINE_S, LONG_TIMEOUT_S, ROUTES, ROUTES_AND_TORCH, kill_me, world_over
from tests.hosts import Hosts, problem

pytestmark = pytest.mark.side_by_side
T_S = 2.0


def _one_leaves(route: str) -> list[str]:
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


def _one_leaves_and_lives(route: str, call: str, folder: str) -> Outcome | None:
    with world_over(route, timeout_s=LONG_TIMEOUT_S) as group:
        group.barrier()
        if group.rank == 1:
            dist.destroy_process_group() if route == OVER_TORCH else ps.destroy_distributed_environment()
            until = time.monotonic() + DEADLINE_S / 2
            while len(list(Path(folder).iterdir())) < 3 and time.monotonic() < until:
                time.sleep(0.01)
            return None
        told = attempt(WAITING[call], group)
        Path(folder, str(group.rank)).touch()
        return told


@pytest.mark.parametrize("over_hosts", [False, True], ids=["one host", "two hosts"])
@pytest.mark.parametrize("call", ["all_reduce", "recv", "recv_object"])
@pytest.mark.parametrize("route", ROUTES_AND_TORCH)
def test_who_leaves_and_lives_is_not_told_as_ended(tmp_path: Path, route: str, call: str, over_hosts: bool) -> None:
    if over_hosts and problem() is not None:
        pytest.skip(f"no hosts can be made here: {problem()}")
    if route == OVER_TORCH:
        creation.load()
    with Hosts(2) if over_hosts else nullcontext() as hosts:
        ranks = Ranks(4) if hosts is None else hosts.ranks((0, 1, 0, 1))
        try:
            found = ranks.survivors(_one_leaves_and_lives, route, call, str(tmp_path), timeout_s=DEADLINE_S)
        finally:
            ranks.kill()
    assert sorted(found) == [0, 1, 2, 3]
    for rank in (0, 2, 3):
        told = found[rank]
        assert told.kind == "PeerDiedError" and told.suspect_ranks == (1,), told
        assert "global rank 1 has left" in told.text and "has ended" not in told.text, told
        assert told.seconds < LONG_TIMEOUT_S / 2, told


WAITING: dict[str, Callable[[Any], object]] = {
    "all_reduce": lambda group: group.all_reduce(torch.ones(3)),
    "barrier": lambda group: group.barrier(),
    "recv": lambda group: group.recv((3,), torch.float32, 1),
    "recv_object": lambda group: group.recv_object(1),
    "broadcast_object": lambda group: group.broadcast_object(None, 1),
}
LATE_S = 10.0


def _ended_by_a_handler(route: str, call: str, folder: str, past_python: bool = False) -> tuple[object, float]:
    ended = Path(folder, "ended")
    wait, send = PAST_PYTHON[call] if past_python else (WAITING[call], lambda group: None)

    def end(*_: object) -> None:
        dist.destroy_process_group() if route == OVER_TORCH else ps.destroy_distributed_environment()
        sys.exit(3)

    told, started = object(), time.monotonic()
    with suppress(AssertionError), world_over(route, timeout_s=LONG_TIMEOUT_S) as group:
        for _ in range(2 if past_python else 0):
            if group.rank == 1:
                send(group)
            elif group.rank == 0 or "broadcast" in call:
                wait(group)
        group.barrier()
        if group.rank:
            until = time.monotonic() + LATE_S
            while not ended.exists() and time.monotonic() < until:
                time.sleep(0.01)
            return None, 0.0
        signal.signal(signal.SIGALRM, end)
        started = time.monotonic()
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            told = attempt(wait, group)
        except SystemExit as error:
            told = error.code
    took_s = time.monotonic() - started
    ended.touch()
    return told, took_s


@pytest.mark.parametrize("over_hosts", [False, True], ids=["one host", "two hosts"])
@pytest.mark.parametrize("call", WAITING)
@pytest.mark.parametrize("route", ROUTES_AND_TORCH)
def test_a_handler_that_ends_the_world_and_exits(tmp_path: Path, route: str, call: str, over_hosts: bool) -> None:
    if over_hosts and problem() is not None:
        pytest.skip(f"no hosts can be made here: {problem()}")
    if route == OVER_TORCH:
        creation.load()
    with Hosts(2) if over_hosts else nullcontext() as hosts:
        ranks = Ranks(4) if hosts is None else hosts.ranks((0, 0, 1, 1))
        try:
            told = ranks.run(_ended_by_a_handler, route, call, str(tmp_path), timeout_s=DEADLINE_S)[0]
        finally:
            ranks.kill()
    assert told[0] == 3, told
    assert told[1] < LATE_S, told


@pytest.mark.parametrize("call", PAST_PYTHON)
def test_a_handler_that_ends_the_world_in_a_receive_past_python(ranks: Ranks, tmp_path: Path, call: str) -> None:
    told = ranks.run(_ended_by_a_handler, "shared memory", call, str(tmp_path), True, timeout_s=DEADLINE_S)[0]
    assert told[0] == 3 and told[1] < LATE_S, told


def _late(operation: str) -> Outcome:
    with world_over("connections", timeout_s=T_S) as group:
        group.barrier()
        if group.rank == 1:
            time.sleep(T_S + 2.5)
        if operation == "barrier":
            return attempt(group.barrier)
        return attempt(group.recv, (3,), torch.float32, 1 - group.rank)


@pytest.mark.parametrize("operation", ["barrier", "recv"])
def test_the_other_one_of_two_is_named(tmp_path: Path, operation: str) -> None:
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
    with world_over("connections", timeout_s=20.0) as group:
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
