"""torch's analyzer names the rank that is to blame. torch has the hooks for backends since 2.15."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from device_communicators.base.errors import CollectiveTimeoutError, PeerDiedError
from device_communicators.c10d import creation
from parallel_state import error_of
from tests.failure.over_torch import torch_world
from tests.failure.ranks import Ranks
from tests.failure.worlds import kill_me

_c10d: Any = torch._C._distributed_c10d
pytestmark = pytest.mark.skipif(not hasattr(_c10d.Backend, "register_abort_hook"), reason="needs torch >= 2.15")
CULPRIT = 2
ALL = {0, 1, 2, 3}


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    creation.load()


def _recorded() -> dict[str, Any]:
    return pickle.loads(_c10d._dump_fr_trace(includeStackTraces=False, backend="parallel_state"))


def _all_kinds_of_calls() -> bool:
    with torch_world() as world:
        hooks: list[str] = []
        group: Any = world.group
        backend = group._get_backend(torch.device("cpu"))
        backend.register_abort_hook(7, lambda: hooks.append("called"))
        x = torch.ones(8)
        calls = [
            lambda: dist.all_reduce(x),
            lambda: dist.all_reduce(x, async_op=True).wait(),
            lambda: dist.barrier(),
            lambda: dist.broadcast(torch.ones(4).t(), 0, async_op=True).wait(),
            lambda: dist.all_reduce(torch._neg_view(torch.ones(2)), async_op=True).wait(),
            lambda: dist.all_reduce(torch.ones(2, 2).to_sparse()),
            lambda: dist.send(x, 1) if world.rank == 0 else dist.recv(x, 0) if world.rank == 1 else None,
        ]
        for call in calls:
            call()
        works = [dist.all_reduce(torch.ones(1 << 16), async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        entries = _recorded()["entries"]
        sends = [entry for entry in entries if entry["is_p2p"]]
        assert len(entries) == 6 + len(works) + (world.rank < 2)
        assert len(sends) == (world.rank < 2)
        assert {entry["state"] for entry in entries} == {"completed"}, entries
        assert all(entry["duration_ms"] >= 0 for entry in entries if "sparse" not in entry["profiling_name"])
        assert entries[0]["profiling_name"] == "parallel_state:all_reduce"
        (status,) = _recorded()["pg_status"].values()
        assert status["last_completed_collective"] == status["last_enqueued_collective"] == entries[-1]["op_id"]
        assert not hooks
        backend.unregister_abort_hook(7)
        backend.register_abort_hook(8, lambda: hooks.append("called once"))
        group.abort()
        until = time.monotonic() + 60.0
        while not hooks and time.monotonic() < until:
            time.sleep(0.01)
        group.abort()
        assert hooks == ["called once"]
    return True


def test_completed_calls_are_recorded_as_completed(ranks: Ranks) -> None:
    assert ranks.run(_all_kinds_of_calls) == [True] * 4
    ranks.kill()


def _failing(how: str, folder: str) -> tuple[str, float]:
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/trace_"
    os.environ["TORCH_FR_DUMP_ON_TIMEOUT"] = "1"
    os.environ["TORCH_INCLUDE_STACK_TRACE"] = "0"  # for the first one torch imports its compiler
    with torch_world(timeout_s=2.0 if how == "hang" else 60.0) as world:
        x = torch.ones(256)
        for _ in range(2000):
            dist.all_reduce(x)
        if world.rank == CULPRIT:
            if how == "kill":
                kill_me()
            _await_dumps(Path(folder), ALL - {CULPRIT})
            group: Any = world.group
            group.abort()
            _await_dumps(Path(folder), ALL)
            return "", 0.0
        started = time.monotonic()
        try:
            dist.all_reduce(x)
        except dist.DistBackendError as error:
            return type(error_of(error)).__name__, time.monotonic() - started
    raise AssertionError("it didn't raise")


def _await_dumps(folder: Path, ranks: set[int]) -> None:
    until = time.monotonic() + 60.0
    while not all((folder / f"trace_{rank}").exists() for rank in ranks):
        assert time.monotonic() < until, f"there are only {[each.name for each in folder.iterdir()]}"
        time.sleep(0.02)
    time.sleep(0.5)  # torch writes a file in place


def _analyze(folder: Path, *options: str) -> str:
    command = (
        sys.executable,
        "-m",
        "torch.distributed.flight_recorder.fr_trace",
        str(folder),
        "-p",
        "trace_",
        *options,
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_the_analyzer_names_the_culprit(ranks: Ranks, tmp_path: Path, how: str) -> None:
    found = ranks.survivors(_failing, how, str(tmp_path), timeout_s=120.0)
    others = ALL - {CULPRIT}
    _await_dumps(tmp_path, others)
    ranks.kill()
    print(found)
    kind = PeerDiedError if how == "kill" else CollectiveTimeoutError
    assert {rank: found[rank][0] for rank in others} == dict.fromkeys(others, kind.__name__)
    for rank in others:
        content = pickle.loads((tmp_path / f"trace_{rank}").read_bytes())
        assert [entry["state"] for entry in content["entries"][-2:]] == ["completed", "scheduled"]
    if how == "kill":
        assert f"Missing dump files from ranks {{{CULPRIT}}}" in _analyze(tmp_path)
        assert f"missed FR dumps from ranks ({{{CULPRIT}}})" in _analyze(tmp_path, "--allow-incomplete-ranks")
        return
    text = _analyze(tmp_path)
    assert "Not all ranks joining collective, sequence number: 2001" in text
    assert f"missing ranks: {{{CULPRIT}}}" in text
