from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel_state as ps
from device_communicators import find_route
from parallel_state.__main__ import main
from tests.contract.attempts import attempt, environment, world
from tests.helpers.queues import is_busy
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 120.0
ROUTES = ("shared memory", "python", "connections")


def _settings(route: str) -> dict[str, str]:
    return {"PARALLEL_STATE_SHARED_MEMORY": "off"} if route == "connections" else {}


def _operations(route: str) -> list[tuple[int, str, str, tuple[int, ...], bool]]:
    with environment(**_settings(route)), world(2):
        group = ps.get_tp_group()
        found = find_route(group.unique_name)
        if route == "python":
            found.serve_ops(False)
        for _ in range(70):
            group.barrier()
        group.all_reduce(torch.ones(2, 3))
        group.gather(torch.ones(4).half())
        group.broadcast_object({"a": 1})
        if group.rank_in_group == 0:
            group.send(torch.ones(5))
        else:
            group.recv([5], torch.float32)
        group.all_gather(torch.ones(2, 2).bfloat16())
        return [
            (each.sequence, each.name, each.dtype, each.shape, each.ended_s is not None) for each in found.operations()
        ]


@pytest.mark.parametrize("route", ROUTES)
def test_the_last_operations_of_a_group(pools: Pools, route: str) -> None:
    first, second = pools(2).run(_operations, route, timeout_s=DEADLINE_S)
    assert len(first) <= 64
    for operations in (first, second):
        named = {name: (number, dtype, shape) for number, name, dtype, shape, _ in operations}
        number, dtype, shape = named["all_reduce"]
        assert (dtype, shape) == ("float32", (2, 3))
        assert named["gather"] == (number + 1, "float16", (4,))
        assert named["all_gather"][1:] == ("bfloat16", (2, 2))
        assert all(ended for *_, ended in operations)
    numbers = [(number, name) for number, name, *_ in first if name in ("all_reduce", "gather", "all_gather")]
    assert numbers == [(number, name) for number, name, *_ in second if name in ("all_reduce", "gather", "all_gather")]


def _beside_another_thread(route: str) -> tuple[str, list[str]]:
    with environment(**_settings(route)), world(2):
        group = ps.get_tp_group()
        if group.rank_in_group == 1:
            group.recv([1], torch.float32)
            group.barrier()
            return "", []
        thread = threading.Thread(target=group.barrier)
        thread.start()
        while not is_busy(group):
            time.sleep(0.001)
        kind = attempt(group.all_reduce, torch.ones(3)).kind
        under_way = [each.name for each in find_route(group.unique_name).operations() if each.ended_s is None]
        group.send(torch.ones(1))
        thread.join(DEADLINE_S)
        return kind, under_way


@pytest.mark.parametrize("route", ["shared memory", "connections"])
def test_a_refused_call_leaves_the_record_of_the_call_under_way(pools: Pools, route: str) -> None:
    (kind, under_way), _ = pools(2).run(_beside_another_thread, route, timeout_s=DEADLINE_S)
    assert kind == "UsageError" and "barrier" in under_way, (kind, under_way)


def _hangs(route: str, folder: str) -> tuple[str, tuple[str, ...]]:
    with environment(PARALLEL_STATE_DEBUG_DIR=folder, **_settings(route)), world(4) as everyone:
        group = ps.create_parallel_groups(everyone, {"tp": 4}, timeout=1.5).tp
        for _ in range(3):
            group.all_reduce(torch.ones(7))
        if group.rank == 2:
            ps.write_record(folder)
            while len(list(Path(folder).glob("failed-*"))) < 3:
                time.sleep(0.02)
            return "", ()
        told = attempt(group.all_gather, torch.ones(3, 5))
        # gloo's peers still wait for this rank: its exit would end their waits too.
        Path(folder, f"failed-{group.rank}").touch()
        while len(list(Path(folder).glob("failed-*"))) < 3:
            time.sleep(0.02)
        return told.kind, ()


@pytest.mark.parametrize("route", ["shared memory", "connections"])
def test_records_tell_who_is_missing(
    pools: Pools, tmp_path: Path, capsys: pytest.CaptureFixture[str], route: str
) -> None:
    outcomes = pools(4).run(_hangs, route, str(tmp_path), timeout_s=DEADLINE_S)
    kinds = {kind for kind, _ in outcomes}
    assert "CollectiveTimeoutError" in kinds
    assert kinds <= {"CollectiveTimeoutError", "CommunicationError", ""}, (
        "over gloo, other ranks may fail because the first one gave up"
    )
    assert main(["debug", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    (part,) = (part for part in text.split("\n\n") if "behind" in part)
    assert "behind: ranks [2]" in part
    assert part.splitlines()[1].startswith("  rank 2: all_reduce number ")
    assert "all_gather number " in part and "of [3, 5] float32, in it for " in part
    assert "failed: all_gather of group" in part or "failed: all_gather number" in part


def test_folders_without_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", str(tmp_path)]) == 2
    assert "there are no records" in capsys.readouterr().err
    (tmp_path / "rank-0-1.json").write_text("{")
    assert main(["debug", str(tmp_path)]) == 2
    assert "rank-0-1.json can't be read" in capsys.readouterr().err


def test_different_calls_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def operation(number: int, name: str) -> dict[str, Any]:
        return {
            "sequence": number,
            "name": name,
            "dtype": "",
            "shape": [],
            "started_s": 1.0,
            "ended_s": 2.0,
            "site": "a.py:3",
        }

    for rank, names in enumerate((["barrier", "all_reduce"], ["barrier", "broadcast"])):
        operations = [operation(number, name) for number, name in enumerate(names, 1)]
        group = {"group": "tp:0", "ranks": [0, 1, 2], "failure": None, "operations": operations}
        content = {"rank": rank, "pid": 1, "now_s": 3.0, "groups": [group]}
        (tmp_path / f"rank-{rank}-1.json").write_text(json.dumps(content))
    assert main(["debug", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "no record of ranks [2]" in text
    assert "different calls at number 2: ranks [0]: all_reduce; ranks [1]: broadcast" in text
    assert "at a.py:3" in text


def _different(which: str, route: str) -> tuple[str, str]:
    own = {"PARALLEL_STATE_DEBUG": "on"} if os.environ["RANK"] == "0" else {}
    with environment(**own, **_settings(route)), world(2):
        group = ps.get_tp_group()
        group.all_reduce(torch.ones(4))
        first = group.rank_in_group == 0
        calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "size": (lambda: group.all_reduce(torch.ones(10)), lambda: group.all_reduce(torch.ones(20))),
            "shape": (lambda: group.all_reduce(torch.ones(2, 3)), lambda: group.all_reduce(torch.ones(3, 2))),
            "dtype": (lambda: group.all_reduce(torch.ones(4)), lambda: group.all_reduce(torch.ones(4).int())),
            "op": (lambda: group.all_reduce(torch.ones(4)), lambda: group.all_reduce(torch.ones(4), "max")),
            "operation": (lambda: group.all_reduce(torch.ones(4)), lambda: group.barrier()),
            "src": (lambda: group.broadcast(torch.ones(4), 0), lambda: group.broadcast(torch.ones(4), 1)),
        }
        told = attempt(calls[which][0 if first else 1])
        return told.kind, told.text


@pytest.mark.parametrize("route", ["shared memory", "connections"])
@pytest.mark.parametrize("which", ["size", "shape", "dtype", "op", "operation", "src"])
def test_calls_are_compared_in_debug_mode(pools: Pools, which: str, route: str) -> None:
    for kind, text in pools(2).run(_different, which, route, timeout_s=DEADLINE_S):
        assert kind == "CollectiveMismatchError", text
        assert text.count("test_records.py:") == 2, text
        assert "mismatched" in text
