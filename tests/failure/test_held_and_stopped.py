"""Rows 51 to 54 and 60 of docs/failures.md: ranks that can't run for a while. The first of a host's two ranks
is its lead."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

import parallel_state as ps
from tests.contract.attempts import Outcome, attempt
from tests.failure.trials import assert_in_time
from tests.failure.worlds import DEADLINE_S, LONG_TIMEOUT_S, kill_me
from tests.hosts import HostRanks, Hosts, problem

pytestmark = pytest.mark.over("hosts")
BEAT_S, LIMIT_S = 0.2, 1.5
HELD_S = 3 * LIMIT_S
LARGE_BYTES = 4 << 30
PLACEMENT = (0, 0, 1, 1)


def _hosts() -> Hosts:
    if problem() is not None:
        pytest.skip(f"no hosts can be made here: {problem()}")
    return Hosts(2)


def _ranks(hosts: Hosts) -> HostRanks:
    return hosts.ranks(
        PLACEMENT,
        PARALLEL_STATE_HEARTBEAT_S=str(BEAT_S),
        PARALLEL_STATE_HEARTBEAT_LIMIT_S=str(LIMIT_S),
        PARALLEL_STATE_TIMEOUT_S=str(LONG_TIMEOUT_S),
    )


def _world() -> ps.GroupCoordinator:
    ps.init_distributed_environment(timeout=LONG_TIMEOUT_S)
    group = ps.get_world_group()
    group.barrier()
    time.sleep(3 * BEAT_S)
    return group


def _hold_the_interpreter(who: tuple[int, ...]) -> Outcome:
    group = _world()
    if group.rank in who:
        ctypes.PyDLL(None).usleep(int(HELD_S * 1e6))
    told = attempt(lambda: group.all_reduce(torch.ones(3)).tolist())
    ps.destroy_distributed_environment()
    return told


@pytest.mark.side_by_side
def test_row_51_all_ranks_of_a_host_hold_the_interpreter_lock() -> None:
    with _hosts() as two, _ranks(two) as ranks:
        found = ranks.survivors(_hold_the_interpreter, (2, 3), timeout_s=DEADLINE_S)
    assert {rank: told.text for rank, told in found.items()} == dict.fromkeys(range(4), "[4.0, 4.0, 4.0]")


@pytest.mark.side_by_side
def test_row_51_one_rank_of_a_host_holds_the_interpreter_lock() -> None:
    with _hosts() as two, _ranks(two) as ranks:
        found = ranks.survivors(_hold_the_interpreter, (2,), timeout_s=DEADLINE_S)
    assert {rank: told.text for rank, told in found.items()} == dict.fromkeys(range(4), "[4.0, 4.0, 4.0]")


def _stop_and_go_on(who: tuple[int, ...], pause_s: float) -> tuple[Outcome, list[int]]:
    group = _world()
    if group.rank in who:
        with subprocess.Popen(["sh", "-c", f"sleep {pause_s}; kill -CONT {os.getpid()}"]):
            os.kill(os.getpid(), signal.SIGSTOP)
    started = time.monotonic()
    told = attempt(group.all_reduce, torch.ones(3))
    while group.rank not in who and told.kind == "ok" and time.monotonic() < started + pause_s:
        told = attempt(group.all_reduce, torch.ones(3))
    told = told._replace(seconds=time.monotonic() - started)
    time.sleep(2 * BEAT_S)
    watcher = group.context.watcher
    dead = [] if watcher is None else [death.rank for death in watcher.deaths_of(range(4))]
    ps.destroy_distributed_environment()
    return told, dead


@pytest.mark.side_by_side
def test_row_52_all_ranks_of_a_host_are_stopped(tmp_path: Path) -> None:
    def trial(_: Path) -> float:
        with _hosts() as two, _ranks(two) as ranks:
            found = ranks.survivors(_stop_and_go_on, (2, 3), HELD_S, timeout_s=DEADLINE_S)
        for rank in (0, 1):
            told, _ = found[rank]
            assert told.kind == "CollectiveTimeoutError" and set(told.suspect_ranks) == {2, 3}, (rank, told)
            assert "stopped" in told.text and "the network" not in told.text, (rank, told)
        return max(found[rank][0].seconds for rank in (0, 1))

    assert_in_time(trial, tmp_path, LIMIT_S + 1.0)


def _until_told(folder: str, victims: tuple[int, ...], how: str) -> tuple[Outcome, float]:
    group = _world()
    attempt(group.all_reduce, torch.ones(3))
    Path(folder, f"pid-{group.rank}").write_text(str(os.getpid()), encoding="utf-8")
    group.barrier()
    if group.rank == 1:
        pids = {victim: int(Path(folder, f"pid-{victim}").read_text(encoding="utf-8")) for victim in (*victims, 2, 3)}
        time.sleep(0.3)
        if how == "lead stopped":
            os.kill(pids[2], signal.SIGSTOP)
            time.sleep(0.3)
        Path(folder, "killed").write_text(repr(time.time()), encoding="utf-8")
        for victim in victims:
            os.kill(pids[victim], signal.SIGKILL)
            if how == "one after the other":
                time.sleep(BEAT_S / 4)
    told = attempt(group.all_reduce, torch.ones(3))
    until = time.monotonic() + DEADLINE_S / 2
    while told.kind == "ok" and time.monotonic() < until:
        told = attempt(group.all_reduce, torch.ones(3))
    told_s = time.time()
    if group.rank == 1 and how == "lead stopped":
        os.kill(pids[2], signal.SIGCONT)
    ps.destroy_distributed_environment()
    return told, told_s - float(Path(folder, "killed").read_text(encoding="utf-8"))


@pytest.mark.side_by_side
@pytest.mark.parametrize(
    ("victims", "how"),
    [
        ((3,), "lead stopped"),
        ((3, 2), "one after the other"),
        ((2, 3), "at once"),
    ],
    ids=str,
)
def test_row_53_the_lead_of_a_host_goes(tmp_path: Path, victims: tuple[int, ...], how: str) -> None:
    def trial(folder: Path) -> float:
        with _hosts() as two, _ranks(two) as ranks:
            found = ranks.survivors(_until_told, str(folder), victims, how, timeout_s=DEADLINE_S)
        survivors = [rank for rank in range(4) if rank not in victims]
        assert sorted(found) == survivors
        stopped = {2} if how == "lead stopped" else set()
        for rank in set(survivors) - stopped:
            told, _ = found[rank]
            assert told.kind == "PeerDiedError", (rank, told)
            assert told.suspect_ranks and set(told.suspect_ranks) <= set(victims), (rank, told)
            assert how == "one after the other" or set(told.suspect_ranks) == set(victims), (rank, told)
        return max(found[rank][1] for rank in set(survivors) - stopped)

    assert_in_time(trial, tmp_path)


def _large_until_killed(folder: str, route: str) -> tuple[Outcome, float] | None:
    ps.init_distributed_environment(timeout=LONG_TIMEOUT_S)
    group = ps.get_world_group()
    if group.rank == 1:
        resident = torch.ones(LARGE_BYTES, dtype=torch.uint8)
    group.barrier()
    if group.rank == 1:
        assert resident[-1] == 1
        Path(folder, "killed").write_text(repr(time.monotonic()), encoding="utf-8")
        kill_me()
    told = attempt(group.all_reduce, torch.ones(3))
    told_s = time.monotonic()
    ps.destroy_distributed_environment()
    return told, told_s - float(Path(folder, "killed").read_text(encoding="utf-8"))


def _free_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        facts = dict(line.split(":") for line in file)
    return int(facts["MemAvailable"].split()[0]) << 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "over_hosts",
    [pytest.param(False, id="one host", marks=pytest.mark.over("shared memory")), pytest.param(True, id="two hosts")],
)
def test_row_54_a_large_rank_is_killed(tmp_path: Path, over_hosts: bool) -> None:
    """The kernel frees 4 GiB before it closes the sockets and signals the pidfd."""
    if _free_bytes() < 2 * LARGE_BYTES:
        pytest.skip(f"needs {2 * LARGE_BYTES >> 30} GiB of free memory")

    def trial(folder: Path) -> float:
        with _hosts() as two, _ranks(two) if over_hosts else two.ranks((0, 0, 0, 0)) as ranks:
            found = ranks.survivors(_large_until_killed, str(folder), "", timeout_s=DEADLINE_S)
        assert sorted(found) == [0, 2, 3]
        for rank, (told, _) in found.items():
            assert told.kind == "PeerDiedError" and told.suspect_ranks == (1,), (rank, told)
        return max(told_s for _, told_s in found.values())

    assert_in_time(trial, tmp_path)


@pytest.mark.side_by_side
@pytest.mark.parametrize("who", [(1,), (3,), (1, 3)], ids=str)
def test_row_60_a_rank_that_was_stopped_judges_nobody(who: tuple[int, ...]) -> None:
    with _hosts() as two, _ranks(two) as ranks:
        found = ranks.survivors(_stop_and_go_on, who, 2 * LIMIT_S, timeout_s=DEADLINE_S)
    assert sorted(found) == [0, 1, 2, 3]
    for rank, (told, dead) in found.items():
        assert told.kind == "ok" and dead == [], (rank, told, dead)
