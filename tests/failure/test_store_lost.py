"""Row 55 of docs/failures.md: the store's process is stopped, or its host cut off, while other ranks make
groups."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import parallel_state as ps
from tests.contract.attempts import Outcome, attempt
from tests.contract.test_rendezvous import held_port
from tests.failure.over_torch import OVER_TORCH, torch_world
from tests.failure.ranks import Ranks
from tests.failure.trials import assert_in_time
from tests.failure.worlds import DEADLINE_S, world_over
from tests.hosts import INTERFACE, Hosts, problem

pytestmark = pytest.mark.side_by_side
T_S = 3.0
BEAT_S, LIMIT_S = 0.2, 2.0


def _divide() -> None:
    ps.destroy_model_parallel()
    ps.initialize_model_parallel(2, 2)


MAKING: dict[str, tuple[str, Callable[[], object]]] = {
    "make_sub_group": ("shared memory", lambda: ps.get_world_group().make_sub_group([1, 2, 3])),
    "initialize_model_parallel": ("shared memory", _divide),
    "initialize_model_parallel over connections": ("connections", _divide),
    "new_group": (OVER_TORCH, lambda: dist.new_group([1, 2, 3], timeout=timedelta(seconds=T_S))),
    "monitored_barrier": (OVER_TORCH, lambda: dist.monitored_barrier(timeout=timedelta(seconds=T_S))),
}


def _of(what: str, *others: object) -> Any:
    over_torch = MAKING[what][0] == OVER_TORCH
    return pytest.param(what, *others, marks=pytest.mark.door(OVER_TORCH if over_torch else "coordinator"))


def _make_without_the_store(what: str, port: int, folder: str) -> Outcome | None:
    route, make = MAKING[what]
    with world_over(route, port, T_S) as group:
        group.barrier()
        part = Path(folder, f"part-{group.rank}")
        part.write_text(str(os.getpid()), encoding="utf-8")
        part.rename(Path(folder, f"ready-{group.rank}"))  # never seen empty
        until = time.monotonic() + DEADLINE_S / 2
        if group.rank == 0:
            while len(list(Path(folder).glob("told-*"))) < 3 and time.monotonic() < until:
                time.sleep(0.01)
            return None
        while not Path(folder, "stopped").exists() and time.monotonic() < until:
            time.sleep(0.01)
        told = attempt(make)
        Path(folder, f"told-{group.rank}").touch()
    return told


def _stop_rank_0(folder: Path) -> None:
    until = time.monotonic() + DEADLINE_S
    while len(list(folder.glob("ready-*"))) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    pid, until = int((folder / "ready-0").read_text()), time.monotonic() + DEADLINE_S / 2
    os.kill(pid, signal.SIGSTOP)
    try:
        while (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0] != "T"
            and time.monotonic() < until
        ):
            time.sleep(0.001)
        (folder / "stopped").touch()
        while len(list(folder.glob("told-*"))) < 3 and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("what", [_of(what) for what in MAKING])
def test_row_55_the_store_s_process_is_stopped(ranks: Ranks, tmp_path: Path, what: str) -> None:
    def trial(folder: Path) -> float:
        thread = threading.Thread(target=_stop_rank_0, args=(folder,))
        thread.start()
        try:
            with held_port() as port:
                results = ranks.survivors(_make_without_the_store, what, port, str(folder), timeout_s=DEADLINE_S)
        finally:
            thread.join(DEADLINE_S)
        assert sorted(results) == [0, 1, 2, 3]
        for rank in (1, 2, 3):
            told = results[rank]
            if what == "new_group":  # without rank 0, its ranks agree over the control plane
                assert told.kind == "ok", (rank, told)
                continue
            assert told.kind == "CollectiveTimeoutError", (rank, told)
            assert told.suspect_ranks == (0,), (rank, told)
            of_store = f"127.0.0.1:{port}, which rank 0 serves, has not answered"
            assert of_store in told.text or "ranks [0] did not come" in told.text, (rank, told)
            assert "global rank 0 is stopped by a signal" in told.text, (rank, told)
        return max(results[rank].seconds for rank in (1, 2, 3))

    assert_in_time(trial, tmp_path, T_S + 1.0, before=ranks.kill)


def _make_behind_a_dead_link(what: str, host_of_store: bool) -> tuple[Outcome, float]:
    over_torch = MAKING[what][0] == OVER_TORCH
    if over_torch:
        world = torch_world(None, T_S)
        world.__enter__()
    else:
        ps.init_distributed_environment(timeout=T_S)
    rank = int(os.environ["RANK"])
    make = {
        "make_sub_group": lambda: ps.get_world_group().make_sub_group([0, 1, 2, 3]),
        "initialize_model_parallel": _divide,
        "new_group": lambda: dist.new_group(timeout=timedelta(seconds=T_S)),
    }[what]
    time.sleep(3 * BEAT_S)
    told = attempt(make)
    if rank == (0 if host_of_store else 2):
        subprocess.run(f"ip link set {INTERFACE} down", shell=True, check=True, timeout=10)
    started = time.monotonic()
    while told.kind == "ok" and time.monotonic() < started + DEADLINE_S / 2:
        told = attempt(make)
    told = told._replace(seconds=time.monotonic() - started)
    left = time.monotonic()
    dist.destroy_process_group() if over_torch else ps.destroy_distributed_environment()
    return told, time.monotonic() - left


@pytest.mark.over("hosts")
@pytest.mark.parametrize(
    ("what", "host_of_store"),
    [
        _of("make_sub_group", True),
        _of("initialize_model_parallel", False),
        _of("new_group", True),
        _of("new_group", False),
    ],
)
def test_row_55_a_host_is_cut_off(tmp_path: Path, what: str, host_of_store: bool) -> None:
    if problem() is not None:
        pytest.skip(f"no hosts can be made here: {problem()}")

    def trial(_: Path) -> float:
        limits = {
            "PARALLEL_STATE_HEARTBEAT_S": str(BEAT_S),
            "PARALLEL_STATE_HEARTBEAT_LIMIT_S": str(LIMIT_S),
            "PARALLEL_STATE_START_TIMEOUT_S": "20",
        }
        with Hosts(2) as two, two.ranks((0, 0, 1, 1), **limits) as ranks:
            results = ranks.survivors(_make_behind_a_dead_link, what, host_of_store, timeout_s=DEADLINE_S)
        assert sorted(results) == [0, 1, 2, 3]
        for rank, (told, _) in results.items():
            assert told.kind == "HostUnreachableError", (rank, told)
            others = {2, 3} if rank < 2 else {0, 1}
            assert told.suspect_ranks and set(told.suspect_ranks) <= others, (rank, told)
            assert "host 'parallel-state-host-" in told.text, (rank, told)
        return max(max(told.seconds, leaving_s) for told, leaving_s in results.values())

    assert_in_time(trial, tmp_path, T_S + 1.0)
