from __future__ import annotations

import gc
import logging
import os
import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parallel_state as ps
from device_communicators.cpu import native
from parallel_state import ProcessEnvironment
from parallel_state.groups import world as startup
from tests.contract.attempts import LAUNCHER, Outcome, attempt, environment, no_launcher
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 60.0
SOON_S = 10.0


def kinds(outcomes: list[Outcome]) -> set[str]:
    return {outcome.kind for outcome in outcomes}


def launcher_variables() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in LAUNCHER}


def _cleared(found: list[Any]) -> None:
    for item in found:
        if isinstance(item, list):
            item.clear()
    found.clear()


def _world_by_env() -> dict[str, Any]:
    before = launcher_variables()
    ps.init_distributed_environment()
    world = ps.get_world_group()
    facts = {
        "rank": (world.rank, world.rank_in_group, world.local_rank, ps.get_rank()),
        "size": (world.world_size, world.size, ps.get_world_size()),
        "ranks": (_cleared(world.ranks), world.ranks),
        "device": str(world.device),
        "sum": world.all_reduce(torch.tensor([float(world.rank)])).tolist(),
        "first": (ps.is_global_first_rank(), ps.is_rank_zero(), ps.is_local_first_rank()),
        "nodes": (_cleared(ps.get_nodes()), ps.get_node_count(), ps.get_nodes()),
        "one group": world.device_group is world.cpu_group is dist.group.WORLD,
        "unchanged": launcher_variables() == before,
    }
    ps.destroy_distributed_environment()
    return {**facts, "ended": not dist.is_initialized() and launcher_variables() == before}


@pytest.mark.slow
def test_a_world_by_torchruns_environment(pools: Pools) -> None:
    for rank, facts in enumerate(pools(4).run(_world_by_env, timeout_s=DEADLINE_S)):
        assert facts == {
            "rank": (rank,) * 4,
            "size": (4, 4, 4),
            "ranks": (None, [0, 1, 2, 3]),
            "device": "cpu",
            "sum": [6.0],
            "first": (rank == 0,) * 3,
            "nodes": (None, 1, [[0, 1, 2, 3]]),
            "one group": True,
            "unchanged": True,
            "ended": True,
        }


def _alone() -> dict[str, Any]:
    with no_launcher():
        before = dict(os.environ)
        first = (ps.is_global_first_rank(), ps.is_rank_zero(), ps.is_local_first_rank())
        sockets = _sockets()
        ps.init_distributed_environment()
        ps.initialize_model_parallel()
        x = torch.ones(3)
        facts = {
            "first": (first, (ps.is_global_first_rank(), ps.is_local_first_rank())),
            "sizes": [ps.get_world_size(), ps.get_tp_group().world_size, ps.get_pp_group().world_size],
            "same tensor": ps.get_tp_group().all_reduce(x) is x,
            "nodes": ps.get_nodes(),
            "listens": len(_sockets() - sockets),
            "exported": {name: os.environ[name] for name in set(os.environ) - set(before)},
        }
        ps.destroy_distributed_environment()
        return {**facts, "taken back": dict(os.environ) == before}


def _sockets() -> set[str]:
    listening = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with open(table, encoding="utf-8") as lines:
            listening |= {f"socket:[{line.split()[9]}]" for line in lines if line.split()[3] == "0A"}
    return {link for link in map(_link, os.listdir("/proc/self/fd")) if link in listening}


def _link(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:  # the descriptor of the listing itself
        return ""


def test_alone_needs_no_address(pools: Pools) -> None:
    for facts in pools(4).run(_alone, timeout_s=DEADLINE_S):
        exported = facts.pop("exported")
        assert facts == {
            "first": ((True, True, True), (True, True)),
            "sizes": [1, 1, 1],
            "same tensor": True,
            "nodes": [[0]],
            "listens": 0,
            "taken back": True,
        }
        assert {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items() <= exported.items()


def _first_before_init() -> tuple[Any, ...]:
    answers = (ps.is_rank_zero(), ps.is_global_first_rank(), ps.is_local_first_rank())
    with environment(LOCAL_RANK=str(int(os.environ["RANK"]) % 2), LOCAL_WORLD_SIZE="2"):
        return answers, ps.is_local_first_rank(), attempt(ps.get_node_count).kind


def test_first_ranks_are_known_before_init(pools: Pools) -> None:
    for rank, (answers, local, nodes) in enumerate(pools(4).run(_first_before_init, timeout_s=DEADLINE_S)):
        assert answers == (rank == 0,) * 3
        assert local == (rank % 2 == 0)
        assert nodes == "GroupNotInitializedError"


def _variables_that_init_adds() -> tuple[dict[str, str], list[str], bool]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with environment(RANK=None, WORLD_SIZE=None, LOCAL_WORLD_SIZE=None):
        before = dict(os.environ)
        ps.init_distributed_environment(size, rank)
        added = {name: value for name, value in os.environ.items() if name not in before}
        os.environ["WORLD_SIZE"] = "99"
        ps.destroy_distributed_environment()
        left = sorted(set(os.environ) - set(before))
        del os.environ["WORLD_SIZE"]
        ended = attempt(ps.init_distributed_environment, size, rank, backend="nonsense")
        return added, left, ended.kind == "InvalidArgumentError" and dict(os.environ) == before


def test_exported_variables_are_taken_back(pools: Pools) -> None:
    for rank, (added, left, clean) in enumerate(pools(4).run(_variables_that_init_adds, timeout_s=DEADLINE_S)):
        assert added == {"RANK": str(rank), "WORLD_SIZE": "4"}
        assert left == ["WORLD_SIZE"]
        assert clean


def _join(name: str, backend: str | None) -> dict[str, Any]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    timeout = timedelta(seconds=SOON_S)
    dist.init_process_group(backend, store=dist.PrefixStore(name, agent), rank=rank, world_size=size, timeout=timeout)
    default = dist.group.WORLD
    init = ps.init_distributed_environment
    refused = [attempt(init, size + 1, rank), attempt(init, size, (rank + 1) % size), attempt(init, backend="mpi")]
    init()
    ps.initialize_model_parallel(2)
    total = ps.get_tp_group().all_reduce(torch.tensor([float(rank)]))
    joined = ps.get_world_group().device_group is default
    ps.destroy_distributed_environment()
    stays = dist.is_initialized() and dist.group.WORLD is default
    flag = torch.ones(1)
    dist.all_reduce(flag)
    dist.destroy_process_group()
    return {"refused": refused, "total": total.item(), "joined": joined, "stays": stays, "sum": flag.item()}


@pytest.mark.parametrize("backend", ["gloo", None])
def test_joins_a_default_group_that_is_there(pools: Pools, backend: str | None) -> None:
    results = pools(4).run(_join, f"join/{uuid.uuid4()}", backend, timeout_s=DEADLINE_S)
    for rank, facts in enumerate(results):
        size, other, backend_refused = facts.pop("refused")
        assert kinds([size, other, backend_refused]) == {"ConfigMismatchError"}
        assert f"rank {rank} of 4" in size.text
        assert f"rank {rank} of 5" in size.text
        assert f"rank {(rank + 1) % 4} of 4" in other.text
        assert "'mpi'" in backend_refused.text
        assert facts == {"total": [1.0, 1.0, 5.0, 5.0][rank], "joined": True, "stays": True, "sum": 4.0}


def test_the_device_of_a_joined_group_without_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    place = ProcessEnvironment(1, 1, 2, 2, None, None, "torchrun")
    assert startup.device_of("undefined", place) == torch.device("cpu")
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert startup.device_of("undefined", place) == torch.device("cuda", 1)
    assert startup.device_of("gloo", place) == torch.device("cpu")
    assert chosen == [1]


def _wrong_arguments() -> dict[str, Outcome]:
    init = ps.init_distributed_environment
    with environment(PARALLEL_STATE_BACKEND="GLOO2"):
        by_setting = attempt(init)
    return {
        "rank without world size": attempt(init, rank=1),
        "world size without rank": attempt(init, 4),
        "rank too large": attempt(init, 2, 2),
        "backend": attempt(init, backend="nonsense"),
        "backend by setting": by_setting,
        "nccl without a GPU": attempt(init, backend="nccl"),
        "timeout zero": attempt(init, timeout=0),
        "timeout negative": attempt(init, timeout=timedelta(seconds=-1)),
        "timeout nan": attempt(init, timeout=float("nan")),
        "timeout without end": attempt(init, timeout=float("inf")),
        "method": attempt(init, distributed_init_method="127.0.0.1:29500"),
        "nothing made": attempt(lambda: (dist.is_initialized(), ps.try_get_world_group())),
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nccl is a right choice")
def test_wrong_arguments_of_init(pools: Pools) -> None:
    parts = {
        "rank without world size": ["pass both world_size and rank, or neither", "-1 and 1"],
        "world size without rank": ["pass both world_size and rank, or neither", "4 and -1"],
        "rank too large": ["at least 1 and rank below it, but they are 2 and 2"],
        "backend": ["backend", "gloo", "'nonsense'"],
        "backend by setting": ["PARALLEL_STATE_BACKEND", "gloo", "'GLOO2'"],
        "nccl without a GPU": ["'nccl'", "gloo"],
        "timeout zero": ["timeout must be a positive number of seconds", "but is 0"],
        "timeout negative": ["timeout must be a positive number of seconds"],
        "timeout nan": ["but is nan"],
        "timeout without end": ["but is inf"],
        "method": ["'env://'", "'tcp://HOST:PORT'", "'127.0.0.1:29500'"],
    }
    for results in pools(4).run(_wrong_arguments, timeout_s=DEADLINE_S):
        assert results.pop("nothing made").text == "(False, None)"
        assert results.keys() == parts.keys()
        for name, outcome in results.items():
            assert outcome.kind == "InvalidArgumentError", (name, outcome)
            assert all(part in outcome.text for part in parts[name]), (name, outcome)
            assert outcome.seconds < SOON_S


def _incomplete_environments() -> dict[str, Outcome]:
    outcomes = {}
    for variables in (
        {"WORLD_SIZE": None},
        {"RANK": None},
        {"RANK": "four"},
        {"RANK": "4"},
        {"WORLD_SIZE": "0"},
        {"MASTER_PORT": None},
        {"MASTER_PORT": "70000"},
        {"MASTER_ADDR": None, "LOCAL_WORLD_SIZE": None},
    ):
        with environment(**variables):
            outcomes[" ".join(f"{k}={v}" for k, v in variables.items())] = attempt(ps.init_distributed_environment)
    return outcomes


def test_an_incomplete_environment(pools: Pools) -> None:
    for outcomes in pools(4).run(_incomplete_environments, timeout_s=DEADLINE_S):
        assert len(outcomes) == 8
        for setting, outcome in outcomes.items():
            name, _, value = setting.split()[0].partition("=")
            assert outcome.kind == "SettingError", (setting, outcome)
            assert name in outcome.text
            assert value == "None" or value in outcome.text
            assert outcome.seconds < SOON_S


def _bad_settings() -> list[Outcome]:
    outcomes = []
    for name in ("PARALLEL_STATE_TIMEOUT_S", "PARALLEL_STATE_START_TIMEOUT_S"):
        with environment(**{name: "soon"}):
            outcomes.append(attempt(ps.init_distributed_environment))
    ps.init_distributed_environment()
    with environment(PARALLEL_STATE_BARRIER_TIMEOUT_S="-1"):
        outcomes.append(attempt(ps.initialize_model_parallel))
        outcomes.append(attempt(ps.get_tp_group))
    ps.initialize_model_parallel(2)
    ps.destroy_distributed_environment()
    return outcomes


def test_a_bad_setting_is_told_by_whoever_reads_it(pools: Pools) -> None:
    for *outcomes, getter in pools(4).run(_bad_settings, timeout_s=DEADLINE_S):
        assert [outcome.kind for outcome in outcomes] == ["SettingError"] * 3
        for outcome, name in zip(outcomes, ("TIMEOUT_S", "START_TIMEOUT_S", "BARRIER_TIMEOUT_S"), strict=True):
            assert outcome.text.startswith(f"PARALLEL_STATE_{name} must be a positive number of seconds")
        assert getter.kind == "GroupNotInitializedError", "the groups of a failed init are gone"


def _unknown_settings() -> list[str]:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("parallel_state").addHandler(handler)
    try:
        with environment(PARALLEL_STATE_TIMEOUT="5"):
            ps.init_distributed_environment()
    finally:
        logging.getLogger("parallel_state").removeHandler(handler)
    ps.destroy_distributed_environment()
    return messages


def test_a_setting_that_nobody_knows_is_warned_about(pools: Pools) -> None:
    for messages in pools(4).run(_unknown_settings, timeout_s=DEADLINE_S):
        assert messages == ["PARALLEL_STATE_TIMEOUT is not a setting of parallel_state and has no effect"]


def _own_default_group(name: str) -> bool:
    ps.init_distributed_environment()
    rank, size = ps.get_rank(), ps.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(name, size), rank=rank, world_size=size)
    try:
        ps.destroy_distributed_environment()
        return dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_default_group_of_the_program_stays(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(_own_default_group, str(tmp_path / "store"), timeout_s=DEADLINE_S) == [True, True]


def _destroyed_in_its_start() -> tuple[Outcome, list[bool], Outcome]:
    variables = dict(os.environ)
    rank, find_hosts = os.environ["RANK"], startup.hosts_of

    def hosts_of(world: ps.GroupCoordinator) -> list[list[int]]:
        ps.destroy_distributed_environment()
        return find_hosts(world)

    startup.hosts_of = hosts_of if rank == "0" else find_hosts
    try:
        told = attempt(ps.init_distributed_environment)
    finally:
        startup.hosts_of = find_hosts
    if rank != "0":
        ps.destroy_distributed_environment()
    undone = [not dist.is_initialized(), dict(os.environ) == variables, attempt(ps.get_world_group).kind != "ok"]
    again = attempt(ps.init_distributed_environment)
    ps.destroy_distributed_environment()
    return told, undone, again


def test_a_handler_that_destroys_the_world_in_its_start(pools: Pools) -> None:
    (told, undone, again), (_, _, of_the_other) = pools(2).run(_destroyed_in_its_start, timeout_s=DEADLINE_S)
    assert told.kind == "GroupDestroyedError" and "the init was undone" in told.text, told
    assert undone == [True] * 3
    assert (again.kind, of_the_other.kind) == ("ok", "ok"), (again, of_the_other)


def _without_a_watch() -> tuple[Outcome, int]:
    native.load()  # opens a pipe for signals
    start, before = threading.Thread.start, len(os.listdir("/proc/self/fd"))

    def fail(thread: threading.Thread) -> None:
        if "control" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    if os.environ["RANK"] == "1":
        threading.Thread.start = fail  # type: ignore[method-assign]
    try:
        told = attempt(ps.init_distributed_environment)
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
    gc.collect()
    return told, len(os.listdir("/proc/self/fd")) - before


def test_a_rank_that_cannot_watch_the_start_tells_the_others(pools: Pools) -> None:
    (of_another, _), (own, new_descriptors) = pools(2).run(_without_a_watch, timeout_s=DEADLINE_S)
    assert own.kind == "ResourceLimitError", own
    assert of_another.suspect_ranks == (1,) and "gave up its start" in of_another.text, of_another
    assert of_another.seconds < SOON_S, of_another
    assert new_descriptors <= 0
