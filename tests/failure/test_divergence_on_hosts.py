from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel_state as ps
from parallel_state.__main__ import main
from tests.contract.attempts import world
from tests.failure.test_divergence import REPORTS, check, play
from tests.failure.worlds import DEADLINE_S
from tests.helpers.queues import live_states
from tests.hosts import CLOCK_STEP_S, Host, HostRanks, Hosts, problem

LATE_S = 0.3

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def ranks() -> Iterator[HostRanks]:
    reason = problem()
    if reason is not None:
        pytest.skip(f"no hosts can be made here: {reason}")
    with Hosts([Host(own_pids=True)] * 2) as hosts, hosts.ranks((0, 0, 1, 1)) as pool:
        pool.run(int, timeout_s=DEADLINE_S)
        yield pool


def test_every_error_says_who_is_where(ranks: HostRanks, tmp_path: Path) -> None:
    names = list(REPORTS)
    check(ranks.run(play, "shared memory", str(tmp_path), names, timeout_s=DEADLINE_S + 20.0 * len(names)), names)


def _asked_live() -> dict[str, dict[str, Any]]:
    with world(4):
        group, states = ps.get_tp_group(), dict[str, dict[str, Any]]()
        group.barrier()
        until = time.monotonic() + DEADLINE_S / 2
        while group.rank == 0 and time.monotonic() < until:
            states = live_states()
            if all(state["key"] and "all_reduce" in state["call"] for rank, state in states.items() if rank != "0"):
                break
        group.all_reduce(torch.ones(8))
        return states


def test_live_asks_ranks_of_other_hosts(ranks: HostRanks) -> None:
    found, *_ = ranks.run(_asked_live, timeout_s=DEADLINE_S)
    assert "_asked_live" in found.pop("0")["place"]
    assert found.keys() == {"1", "2", "3"}
    for state in found.values():
        assert state["key"] and "all_reduce" in state["call"] and "_asked_live" in state["place"]


def _traced(folder: str) -> None:
    with world(4):
        group = ps.get_tp_group()
        group.barrier()
        with ps.trace(folder):
            group.all_reduce(torch.ones(8))
            if group.rank == 3:
                time.sleep(LATE_S)
            group.all_reduce(torch.ones(9))


def test_hosts_have_one_clock_in_a_trace(ranks: HostRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.run(_traced, str(tmp_path), timeout_s=DEADLINE_S)
    offsets = [json.loads((tmp_path / f"rank-{rank}.json").read_text())["otherData"]["offset_s"] for rank in range(4)]
    assert offsets[0] == offsets[1] == 0.0
    assert offsets[2] == offsets[3] != 0.0, "measured by the first rank of the host"
    assert abs(offsets[2] + CLOCK_STEP_S) < LATE_S / 3, "host 1's clock is ahead of host 0's"
    capsys.readouterr()
    assert main(["trace", str(tmp_path), "--json"]) == 0
    worst = json.loads(capsys.readouterr().out)[:3]
    assert {(wait["rank"], wait["last"]) for wait in worst} == {(0, 3), (1, 3), (2, 3)}
