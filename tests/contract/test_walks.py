from __future__ import annotations

import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import parallel_state as ps
from device_communicators.cpu import native
from tests.contract.test_objects import Pools
from tests.hosts import HostRanks
from tests.workers import WorkerPool

OnHosts = Callable[[Sequence[int]], HostRanks]
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("parallel_state", "device_communicators")
MOST_STOPS = 8
DEADLINE_S = 60.0

try:
    has_ops = native.load().has_ops
except native.NativeUnavailableError:
    has_ops = False
pytestmark = pytest.mark.skipif(not has_ops, reason="the library has no ops")


def _walks() -> dict[str, list[tuple[str, str]]]:
    text = (
        (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Walks")[2].partition("\n## ")[0]
    )
    return {
        section.partition("\n")[0]: re.findall(r"^\d+\. `([^`]+)`: `([^`]+)`", section, flags=re.MULTILINE)
        for section in text.split("\n### ")[1:]
    }


def _files_of_package(names: Iterable[str]) -> list[str]:
    found: dict[str, None] = {}
    for name in names:
        path = Path(name)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES:
            found[str(path.relative_to(ROOT))] = None
    return list(found)


def _way_into_the_library(call: Callable[[], Any], prefix: str) -> list[str]:
    """Returns the files on the Python stack at the first library call, and its name, which starts with `prefix`."""
    found: list[str] = []

    def note(frame: FrameType | None, event: str, argument: Any) -> None:
        name = getattr(argument, "__name__", "")
        if event != "c_call" or not name.startswith(prefix) or found:
            return
        files: list[str] = []
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        found.extend([*_files_of_package(reversed(files)), name])

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def _all_reduce() -> list[str]:
    group, x = ps.get_tp_group(), torch.ones(2048)
    for _ in range(3):
        group.all_reduce(x)
    return _way_into_the_library(lambda: group.all_reduce(x), "ps_direct_")


def _recv_tensor_dict() -> list[str]:
    group = ps.get_tp_group()
    for number in range(2):
        if group.rank_in_group == 0:
            group.send_tensor_dict({"hidden": torch.ones(4, 8)}, 1)
        elif number == 0:
            group.recv_tensor_dict(0)
        else:
            return _way_into_the_library(lambda: group.recv_tensor_dict(0), "ps_")
    return []


def _death() -> list[str]:
    ps.init_distributed_environment()
    ps.initialize_model_parallel(2)
    group, x = ps.get_tp_group(), torch.ones(2048)
    group.all_reduce(x)
    if group.rank_in_group == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.all_reduce(x)
    except ps.PeerDiedError as error:
        return _files_of_package(frame.filename for frame in traceback.extract_tb(error.__traceback__))
    return []


def _python_stops(title: str) -> list[str]:
    return [file for file, _ in _walks()[title] if file.endswith(".py") and file != "parallel_state/state.py"]


def test_a_walk_has_few_stops_and_names_what_exists() -> None:
    walks = _walks()
    assert len(walks) == 4
    for title, stops in walks.items():
        assert 2 < len(stops) <= MOST_STOPS, title
        for file, function in stops:
            source = (ROOT / file).read_text(encoding="utf-8")
            defined = rf"def {re.escape(function)}\(" if file.endswith(".py") else rf"\b{re.escape(function)}\("
            assert re.search(defined, source), f"{title}: {file} has no {function}"


def _check_all_reduce(title: str, way: list[str]) -> None:
    assert way == [*_python_stops(title), "ps_direct_all_reduce"]
    assert _walks()[title][len(way)][1] == way[-1]


def test_an_all_reduce_passes_these_files(pools: Pools) -> None:
    _check_all_reduce("all_reduce on one host", pools(2).run(_all_reduce, tp=2)[0])


@pytest.mark.slow
def test_an_all_reduce_on_two_hosts_passes_these_files(on_hosts: OnHosts) -> None:
    _check_all_reduce("all_reduce on two hosts", on_hosts((0, 1)).run(_all_reduce, tp=2)[0])


def test_a_tensor_dict_passes_these_files(pools: Pools) -> None:
    _, way = pools(2).run(_recv_tensor_dict, tp=2, timeout_s=DEADLINE_S)
    walk = _walks()["A tensor dict is received"]
    assert way[:-1] == _python_stops("A tensor dict is received")
    assert [function for file, function in walk if file.endswith("messages_api.cpp")] == way[-1:]


def test_a_death_passes_these_files() -> None:
    ranks = WorkerPool(2)
    try:
        way = ranks.survivors(_death, timeout_s=DEADLINE_S)[0]
    finally:
        ranks.kill()
    assert way[:3] == ["parallel_state/groups/coordinator.py", *_python_stops("A rank dies")]
