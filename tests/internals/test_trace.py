from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import parallel_state as ps
from parallel_state.tools import trace as command
from tests.contract.attempts import environment, world
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 120.0
LATE_S = 0.2


def _traced(route: str, folder: str) -> list[str]:
    with environment(PARALLEL_STATE_SHARED_MEMORY="off" if route == "connections" else None), world(4):
        group = ps.get_tp_group()
        group.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, ps.trace(folder):
            group.all_reduce(torch.ones(8))
            if group.rank == 2:
                time.sleep(LATE_S)
            group.all_gather(torch.ones(2))
            if group.rank == 0:
                group.send(torch.ones(3), 1)
            elif group.rank == 1:
                group.recv((3,), torch.float32, 0)
        group.all_reduce(torch.ones(8))
        return [event.name for event in profile.events() if event.name.startswith("parallel_state.")]


@pytest.mark.parametrize("route", ["shared memory", "connections"])
def test_a_late_rank_is_seen(pools: Pools, tmp_path: Path, capsys: pytest.CaptureFixture[str], route: str) -> None:
    profiled = pools(4).run(_traced, route, str(tmp_path), timeout_s=DEADLINE_S)
    assert command.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "events of 4 ranks; open it in ui.perfetto.dev" in lines[0]
    assert any("waited for rank 2 in all_gather number" in line for line in lines)
    assert command.main([str(tmp_path), "--json"]) == 0
    worst = [wait for wait in json.loads(capsys.readouterr().out) if wait["operation"] == "all_gather"]
    assert {wait["rank"] for wait in worst[:3]} == {0, 1, 3} and {wait["last"] for wait in worst[:3]} == {2}
    assert all(LATE_S / 2 < wait["seconds"] < 20 * LATE_S for wait in worst[:3])
    events = _all(tmp_path)
    spans = [event for event in events if event["ph"] == "X"]
    assert sorted(span["name"] for span in spans) == sorted(["all_reduce", "all_gather"] * 4 + ["send", "recv"])
    assert all(span["dur"] >= 0 and span["ts"] >= 0 for span in spans)
    sent = next(span for span in spans if span["name"] == "send")
    assert (sent["args"]["peer"], sent["args"]["bytes"], sent["args"]["dtype"]) == (1, 12, "float32")
    starts, ends = ([event for event in events if event["ph"] == phase] for phase in "sf")
    assert len(starts) == len(ends) == 6, "of two collectives of four ranks"
    assert {start["pid"] for start in starts if start["name"] == "all_gather"} == {2}
    assert {event["args"]["name"].partition(" on ")[0] for event in events if event["name"] == "process_name"} == {
        f"rank {rank}" for rank in range(4)
    }
    for names in profiled:
        assert any(name.startswith("parallel_state.all_reduce tp:") and name.endswith(" 32 bytes") for name in names)


def _all(folder: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((folder / command.MERGED).read_text())["traceEvents"]
    return found


_ARGS = {"group": "tp:0", "ranks": [0, 1], "number": 1, "peer": -1}


def test_a_wait_is_from_its_own_beginning_to_the_lasts() -> None:
    span = {"ph": "X", "name": "barrier", "tid": 1, "dur": 50.0, "args": _ARGS}
    merged, waits = command.merge([{**span, "pid": 0, "ts": 1000.0}, {**span, "pid": 1, "ts": 1040.0}])
    assert [event["ts"] for event in merged] == [0.0, 40.0, 40.0, 40.0]
    assert [(wait.rank, wait.last, wait.seconds) for wait in waits] == [(0, 1, pytest.approx(40e-6))]


def test_who_is_done_before_the_last_comes_waits_no_longer() -> None:
    span = {"ph": "X", "name": "broadcast", "tid": 1, "args": _ARGS}
    root, late = {**span, "pid": 0, "ts": 0.0, "dur": 20.0}, {**span, "pid": 1, "ts": 200_000.0, "dur": 30.0}
    _, (wait,) = command.merge([root, late])
    assert (wait.rank, wait.seconds) == (0, pytest.approx(20e-6))


def test_no_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.json").write_text("{")
    assert command.main([str(tmp_path)]) == 2
    assert "rank-0.json can't be read" in capsys.readouterr().err
