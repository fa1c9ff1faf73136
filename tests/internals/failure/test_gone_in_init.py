"""Row 56 of docs/failures.md: rank 0, which serves the store, is killed at each stage of init, alone or with
another rank."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import parallel_state as ps
from tests.contract.attempts import Outcome, attempt, attempt_all, environment
from tests.contract.test_rendezvous import held_port
from tests.failure.over_torch import torch_world
from tests.failure.ranks import Ranks, start_again
from tests.failure.trials import assert_in_time
from tests.failure.worlds import DEADLINE_S, kill_me, later, some
from tests.hosts import HostRanks, Hosts, problem
from tests.internals.faults import STAGES, after_entering
from tests.workers import WorkerPool

pytestmark = pytest.mark.side_by_side
SOON_S = 2.0
START_S = 30.0
MEETING_S = 2.0
OF_THE_BACKEND = "exchange of the backend"


def _die_at(stage: str, victims: tuple[int, ...], folder: str) -> None:
    rank = int(os.environ["RANK"])
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()), encoding="utf-8")
    if rank != 0:
        if stage in ("meeting", OF_THE_BACKEND):
            after_entering(Path(folder, f"entered-{rank}").touch, of_backend=stage == OF_THE_BACKEND)
        return
    owner, name = STAGES[stage]
    function = getattr(owner, name)

    def kill() -> None:
        Path(folder, "killed").write_text(repr(time.time()), encoding="utf-8")
        for victim in reversed(victims):
            os.kill(int(Path(folder, f"pid-{victim}").read_text(encoding="utf-8")), signal.SIGKILL)

    def kill_once_others_meet() -> None:
        while not all(Path(folder, f"entered-{other}").exists() for other in (1, 2)):
            time.sleep(0.01)
        later(MEETING_S, kill)  # ranks that come later can't learn who served the store

    def and_kill(*args: Any, **kwargs: Any) -> Any:
        if stage == "meeting":
            later(0.0, kill_once_others_meet)
        elif stage == OF_THE_BACKEND and len(victims) > 1:
            kill_once_others_meet()
            time.sleep(DEADLINE_S)
        else:
            kill()
        return function(*args, **kwargs)

    setattr(owner, name, and_kill)


def _start(stage: str, victims: tuple[int, ...], port: int | None, folder: str) -> tuple[Outcome, float] | None:
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if stage == "meeting" and rank == 3:
        return None
    _die_at(stage, victims, folder)
    with environment(PARALLEL_STATE_START_TIMEOUT_S=str(START_S)):
        if stage == OF_THE_BACKEND:
            told = attempt_all(lambda: torch_world(port).__enter__())
        else:
            method = "env://" if port is None else f"tcp://127.0.0.1:{port}"
            told = attempt(ps.init_distributed_environment, size, rank, method, timeout=START_S)
        told_s = time.time()
        while told.kind == "ok" and time.time() < told_s + DEADLINE_S / 2:
            told = attempt(dist.barrier if stage == OF_THE_BACKEND else ps.get_world_group().barrier)
        told_s = time.time()
        ps.destroy_distributed_environment()
    return told, told_s - float(Path(folder, "killed").read_text(encoding="utf-8"))


def _check(results: dict[int, tuple[Outcome, float] | None], victims: tuple[int, ...]) -> float:
    assert sorted(results) == [rank for rank in range(4) if rank not in victims]
    survivors = {rank: each for rank, each in results.items() if each is not None}
    for rank, (told, _) in survivors.items():
        assert told.kind == "PeerDiedError", (rank, told)
        assert set(told.suspect_ranks) == set(victims), (rank, told)
    return max(told_s for _, told_s in survivors.values())


def _trial(make: Callable[[], WorkerPool], stage: str, victims: tuple[int, ...], folder: Path) -> float:
    ranks = make()
    try:
        if isinstance(ranks, HostRanks):
            results = ranks.survivors(_start, stage, victims, None, str(folder), timeout_s=DEADLINE_S)
        else:
            with held_port() as port:
                results = ranks.survivors(_start, stage, victims, port, str(folder), timeout_s=DEADLINE_S)
    finally:
        ranks.kill()
    if len(victims) > 1 and not isinstance(ranks, HostRanks):
        start_again()
    return _check(results, victims)


@pytest.mark.over("shared memory")
@pytest.mark.parametrize(
    ("stage", "victims"),
    some(
        [
            ("meeting", (0, 2)), ("default group", (0, 2)), ("shared memory", (0, 2)), ("first call", (0, 2)),
            pytest.param(OF_THE_BACKEND, (0,), marks=pytest.mark.door("torch.distributed")),
            ("meeting", (0,)), ("default group", (0,)), ("shared memory", (0,)),
            ("first call", (0,)),
        ],
        6,
    ),
    ids=str,
)  # fmt: skip
def test_row_56_rank_0_is_killed_during_init(tmp_path: Path, stage: str, victims: tuple[int, ...]) -> None:
    assert_in_time(lambda folder: _trial(lambda: Ranks(4), stage, victims, folder), tmp_path, SOON_S)


@pytest.mark.door("torch.distributed")
@pytest.mark.over("shared memory")
def test_row_56_two_are_killed_while_the_backend_s_ranks_meet(tmp_path: Path) -> None:
    assert_in_time(lambda folder: _trial(lambda: Ranks(4), OF_THE_BACKEND, (0, 2), folder), tmp_path, SOON_S)


@pytest.mark.over("hosts")
@pytest.mark.parametrize(
    ("stage", "victims"),
    some(
        [
            ("meeting", (0, 2)), ("reachability", (0,)), ("default group", (0, 2)), ("first call", (0, 2)),
            ("shared memory", (0, 2)),
        ],
        4,
    ),
    ids=str,
)  # fmt: skip
def test_row_56_rank_0_of_two_hosts_is_killed_during_init(tmp_path: Path, stage: str, victims: tuple[int, ...]) -> None:
    if problem() is not None:
        pytest.skip(f"no hosts can be made here: {problem()}")

    def trial(folder: Path) -> float:
        with Hosts(2) as two:
            return _trial(lambda: two.ranks((0, 0, 1, 1)), stage, victims, folder)

    assert_in_time(trial, tmp_path, SOON_S)


def _come_late(late_s: float, port: int, folder: str) -> tuple[Outcome, float] | None:
    """Infinite `late_s`: rank 3 never comes, and rank 0's port must close by itself."""
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if rank == 2:

        def die() -> None:
            Path(folder, "killed").write_text(repr(time.time()), encoding="utf-8")
            kill_me()

        after_entering(die)
    if rank == 3:
        while not Path(folder, "killed").exists():
            time.sleep(0.002)
        if late_s == math.inf:
            return None
        time.sleep(late_s)
    with environment(PARALLEL_STATE_START_TIMEOUT_S="6"):
        told = attempt(ps.init_distributed_environment, size, rank, f"tcp://127.0.0.1:{port}")
        told_s = time.time() - float(Path(folder, "killed").read_text(encoding="utf-8"))
    Path(folder, f"told-{rank}").touch()
    until = time.monotonic() + DEADLINE_S / 4
    while late_s < math.inf and len(list(Path(folder).glob("told-*"))) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    if late_s == math.inf and rank == 0:
        with contextlib.suppress(ConnectionRefusedError):
            while time.monotonic() < until:
                socket.create_connection(("127.0.0.1", port)).close()
                time.sleep(0.05)
            raise AssertionError("rank 0 goes on listening after its start has failed")
    elif late_s < math.inf:  # rank 0's process can listen again at once, and nobody reads the old verdict
        at = min(rank, 2)
        again = attempt(ps.init_distributed_environment, 3, at, f"tcp://127.0.0.1:{port}", at)
        assert again.kind == "ok", again
        ps.destroy_distributed_environment()
    return told, told_s


def test_who_comes_after_rank_0_gave_up_is_told_why(ranks: Ranks, tmp_path: Path) -> None:
    def trial(folder: Path) -> float:
        with held_port() as port:
            return _check(ranks.survivors(_come_late, 0.2, port, str(folder), timeout_s=DEADLINE_S), (2,))

    assert_in_time(trial, tmp_path, SOON_S, before=ranks.kill)


def test_who_comes_long_after_rank_0_gave_up_is_told_why(ranks: Ranks, tmp_path: Path) -> None:
    with held_port() as port:
        _check(ranks.survivors(_come_late, 1.5, port, str(tmp_path), timeout_s=DEADLINE_S), (2,))


def test_rank_0_stops_listening_some_time_after_it_gave_up(ranks: Ranks, tmp_path: Path) -> None:
    with held_port() as port:
        _check(ranks.survivors(_come_late, math.inf, port, str(tmp_path), timeout_s=DEADLINE_S), (2,))


CONNECT_S = 4.0


def _linger(port: int) -> tuple[Outcome, Outcome]:
    rank = int(os.environ["RANK"])
    with environment(PARALLEL_STATE_START_TIMEOUT_S=str(CONNECT_S)), pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            owner, name = STAGES["default group"]
            connect = getattr(owner, name)

            def connect_late(*args: Any) -> None:
                time.sleep(CONNECT_S + 3.0)
                connect(*args)

            patch.setattr(owner, name, connect_late)
        told = attempt(ps.init_distributed_environment, 4, rank, f"tcp://127.0.0.1:{port}")
    again = attempt(ps.init_distributed_environment, 4, rank, f"tcp://127.0.0.1:{port}")
    ps.destroy_distributed_environment()
    return told, again


def test_a_rank_that_does_not_connect_is_named(ranks: Ranks, tmp_path: Path) -> None:
    def trial(_: Path) -> float:
        with held_port() as port:
            results = ranks.run(_linger, port, timeout_s=DEADLINE_S)
        for rank, (told, again) in enumerate(results):
            assert again.kind == "ok", (rank, again)
            assert told.kind == "RendezvousError", (rank, told)
            assert rank == 2 or told.suspect_ranks == (2,), (rank, told)
        return max(told.seconds for rank, (told, _) in enumerate(results) if rank != 2)

    assert_in_time(trial, tmp_path, CONNECT_S + SOON_S, before=ranks.kill)
