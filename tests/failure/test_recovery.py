"""`reinitialize`: after a death the others soon continue as a smaller world in the same processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parallel_state as ps
from tests import hosts
from tests.contract.attempts import attempt, environment
from tests.contract.test_rendezvous import free_ports, held_port
from tests.failure.ranks import Ranks
from tests.failure.worlds import DEADLINE_S, ROUTES, SLACK_S, calls_of_all, kill_me, on_routes, settings_of, some

AGAIN_S = 3.0
TIMEOUT_S = 600.0


def _start(port: int | None) -> None:
    method = "env://" if port is None else f"tcp://127.0.0.1:{port}"
    ps.init_distributed_environment(int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), method, timeout=TIMEOUT_S)
    ps.initialize_model_parallel(2, 2)


def _lose(victim: int) -> tuple[str, float]:
    world, tp = ps.get_world_group(), ps.get_tp_group()
    call = calls_of_all(world)["all_reduce"]
    call()
    tp.all_reduce(torch.ones(3))
    if world.rank == victim:
        kill_me()
    outcome = attempt(call)
    until = time.monotonic() + DEADLINE_S / 2
    while outcome.kind == "ok" and time.monotonic() < until:
        outcome = attempt(call)
    assert outcome.suspect_ranks == (victim,), outcome
    return outcome.kind, outcome.seconds


def _go_on(victim: int, tp: int) -> dict[str, Any]:
    world = ps.get_world_group()
    survivors = [rank for rank in world.ranks if rank != victim]
    began = time.monotonic()
    ps.reinitialize(survivors, tensor_model_parallel_size=tp)
    again_s = time.monotonic() - began
    world = ps.get_world_group()
    for name, call in calls_of_all(world).items():
        if world.world_size % 2 == 0 or name not in ("send and recv", "send_object", "send_tensor_dict"):
            call()
    return {
        "again_s": again_s,
        "rank": world.rank,
        "size": world.world_size,
        "tp": ps.get_tp_group().all_gather_object(world.rank),
        "carrier": world.route.communicators[0].name,
    }


def _losing(victims: list[int], route: str, port: int | None, pending: bool) -> list[Any]:
    with environment(**settings_of(route)):
        _start(port)
        told: list[Any] = []
        for victim in victims:
            if pending:
                _leave_something_pending()
            told += [_lose(victim), _go_on(victim, 1 if len(victims) > 1 or port else 3)]
        began = time.monotonic()
        ps.destroy_distributed_environment()
        told.append(time.monotonic() - began)
        return told


def _leave_something_pending() -> None:
    world = ps.get_world_group()
    after, before = (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size
    threading.Thread(target=attempt, args=(world.recv_object, before), daemon=True).start()
    world.irecv((1 << 20,), torch.float32, after).is_completed()


def _check(results: dict[int, list[Any]], route: str, sizes: list[int]) -> None:
    assert len(results) == sizes[-1]
    for told in results.values():
        *rounds, leaving_s = told
        for (kind, seconds), facts, size in zip(rounds[::2], rounds[1::2], sizes, strict=True):
            assert kind == "PeerDiedError" and seconds < 1.0 + SLACK_S
            assert facts["again_s"] < AGAIN_S + SLACK_S, facts
            assert facts["size"] == size
            assert facts["carrier"] == ("hierarchical" if route == "connections" else "shared_memory")
        assert leaving_s < SLACK_S
    ranks = [told[-2]["rank"] for _, told in sorted(results.items())]
    assert ranks == list(range(sizes[-1]))


@pytest.mark.parametrize("ranks_are", some(["in waits that nobody ends", "idle"], 1))
@pytest.mark.parametrize(("victim", "route"), on_routes([0, 2]))
def test_the_others_go_on_under_a_launchers_store(ranks: Ranks, victim: int, route: str, ranks_are: str) -> None:
    results = ranks.survivors(_losing, [victim], route, None, ranks_are != "idle", timeout_s=DEADLINE_S)
    _check(results, route, [3])
    assert all(told[1]["tp"] == [0, 1, 2] for told in results.values())


@pytest.mark.parametrize(("victim", "route"), on_routes([3, 0]))
def test_the_others_go_on_under_a_store_of_their_own(ranks: Ranks, victim: int, route: str) -> None:
    with held_port() as port:
        results = ranks.survivors(_losing, [victim], route, port, True, timeout_s=DEADLINE_S)
    _check(results, route, [3])


@contextmanager
def neighbour_of_a_stranger() -> Iterator[int]:
    with ExitStack() as tried:
        while True:
            port = tried.enter_context(held_port())
            with suppress(OSError, OverflowError):
                tried.enter_context(socket.create_server(("127.0.0.1", port + 1)))
                break
        yield port


@pytest.mark.parametrize("victims", [[0, 0], [1, 1]], ids=str)
def test_a_stranger_at_the_next_port_does_not_matter(ranks: Ranks, victims: list[int]) -> None:
    """The next world uses a port reserved at the start, not the next number."""
    with neighbour_of_a_stranger() as port:
        results = ranks.survivors(_losing, victims, "shared memory", port, False, timeout_s=DEADLINE_S)
    _check(results, "shared memory", [3, 2])


def _losing_a_host(victims: list[int]) -> list[Any]:
    with environment(PARALLEL_STATE_START_TIMEOUT_S=str(DEADLINE_S)):
        _start(None)
        told = [_lose(victims[0]), _go_on(victims[0], 1)]
        ps.destroy_distributed_environment()
    return told


@pytest.mark.parametrize("placement", [(0, 0, 1, 1), (0, 1, 1, 0)], ids=str)
def test_hosts_go_on_without_the_rank_that_served_the_store(placement: tuple[int, ...]) -> None:
    if (problem := hosts.problem()) is not None:
        pytest.skip(f"two hosts can't be made: {problem}")
    with hosts.Hosts(2) as made, made.ranks(placement) as ranks:
        results = ranks.survivors(_losing_a_host, [0], timeout_s=DEADLINE_S)
    assert sorted(results) == [1, 2, 3]
    for rank, ((kind, seconds), facts) in results.items():
        assert kind == "PeerDiedError" and seconds < 1.0 + SLACK_S
        assert (facts["rank"], facts["size"]) == (rank - 1, 3) and facts["again_s"] < AGAIN_S + SLACK_S


@pytest.mark.parametrize(("victims", "route"), on_routes([[0, 0], [1, 0], [3, 1]]), ids=str)
@pytest.mark.parametrize("served_by", some(["rank 0", "a launcher"], 1))
def test_twice_in_a_row(ranks: Ranks, victims: list[int], route: str, served_by: str) -> None:
    with held_port() as port:
        port_of_ours = port if served_by == "rank 0" else None
        results = ranks.survivors(_losing, victims, route, port_of_ours, False, timeout_s=DEADLINE_S)
    _check(results, route, [3, 2])


def _again_with_ports(port: int, port_range: str) -> Any:
    with environment(PARALLEL_STATE_PORTS=port_range, PARALLEL_STATE_START_TIMEOUT_S=str(DEADLINE_S)):
        _start(port)
        _lose(3)
        told = attempt(ps.reinitialize, [0, 1, 2], 1)
        if told.kind == "ok":
            ps.destroy_distributed_environment()
        return told


@pytest.mark.parametrize("a_rank", [1, 2])
def test_the_next_world_needs_ports_of_its_own(ranks: Ranks, a_rank: int) -> None:
    with held_port() as port, free_ports(4 * a_rank) as port_range:
        results = ranks.survivors(_again_with_ports, port, port_range, timeout_s=DEADLINE_S)
    assert sorted(results) == [0, 1, 2]
    for told in results.values():
        assert told.kind == ("ok" if a_rank == 2 else "RendezvousError"), told
        if a_rank == 1:
            assert "can't listen for the next world" in told.text, told
            assert f"ports {port_range} (PARALLEL_STATE_PORTS)" in told.text and "two ports for each rank" in told.text
            assert set(told.suspect_ranks) < {0, 1, 2}, told


SCRIPT = """
import json, os, signal, sys, time
import torch
import parallel_state as ps
import tests.preload

pids = []
for rank in range(4):  # forks: torch is imported once
    pids.append(os.fork())
    if pids[-1] == 0:
        break
else:
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))
    sys.exit()
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
ps.init_distributed_environment(backend="gloo")
ps.initialize_model_parallel(2, 2)
world = ps.get_world_group()
for _ in range(3):
    world.all_reduce(torch.ones(3))
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        world.all_reduce(torch.ones(3))
except ps.CommunicationError as error:
    lost = error.suspect_ranks
ps.reinitialize([rank for rank in world.ranks if rank not in lost], tensor_model_parallel_size=3)
total = ps.get_tp_group().all_reduce(torch.ones(1)).item()
with open(os.path.join(sys.argv[1], f"{ps.get_rank()}"), "w") as file:
    file.write(f"{total} {time.monotonic()}")
"""
"""Destroys nothing: the process must exit at once all the same."""


@pytest.mark.parametrize("route", some(ROUTES, 1))
def test_processes_end_by_themselves_afterwards(tmp_path: Path, route: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {name: value for name, value in settings_of(route).items() if value is not None}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        stdout=subprocess.PIPE, start_new_session=True,
        env={
            **os.environ, **variables, "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "PYTHONPATH": str(Path(__file__).parents[2]),
            "OMP_NUM_THREADS": "1",
        },
    ) as script:  # fmt: skip
        try:
            printed, _ = script.communicate(timeout=DEADLINE_S)
            ended_s = time.monotonic()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)
    assert json.loads(printed) == [0, -signal.SIGKILL, 0, 0]
    told = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [total for total, _ in told] == ["3.0"] * 3
    assert ended_s - max(float(at) for _, at in told) < 2.0 + SLACK_S
