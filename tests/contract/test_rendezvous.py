from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import parallel_state as ps
from tests.contract.attempts import Outcome, attempt, environment
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 60.0
SLACK_S = 6.0  # beyond a deadline, for a busy machine; a lost name look-up takes 1 s
START_S = 3.0
IN_USE_S = 1.5
AMPLE_S = 40.0
_BLOCKS = itertools.count(os.getpid())

RANK = "RANK"


@contextmanager
def held_port(listen: bool = False) -> Iterator[int]:
    """Unless it listens, a server with SO_REUSEADDR may still bind it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        if listen:
            holder.listen()
        yield holder.getsockname()[1]


@contextmanager
def free_ports(count: int) -> Iterator[str]:
    while True:
        first = 11_000 + 64 * (next(_BLOCKS) % 300)  # the system gives connections ports from 32768 on
        with ExitStack() as tried, suppress(OSError):
            for port in range(first, first + count):
                tried.enter_context(socket.create_server(("127.0.0.1", port)))
            break
    yield f"{first}-{first + count - 1}"


@contextmanager
def start_timeout(seconds: float) -> Iterator[None]:
    with environment(PARALLEL_STATE_START_TIMEOUT_S=str(seconds)):
        yield


def _meet(method: str, sizes: list[int | None], start_s: float) -> tuple[Outcome, Outcome] | None:
    rank = int(os.environ[RANK])
    size = sizes[rank]
    if size is None:
        return None
    with start_timeout(start_s):
        met = attempt(ps.init_distributed_environment, size, rank, method)
        works = attempt(lambda: ps.get_world_group().all_reduce(torch.tensor([float(rank)])).tolist())
        ps.destroy_distributed_environment()
    return met, works


@pytest.mark.parametrize("method", ["tcp", "file"])
def test_explicit_ranks(pools: Pools, method: str, tmp_path: Path) -> None:
    with held_port() as port:
        address = f"tcp://127.0.0.1:{port}" if method == "tcp" else f"file://{tmp_path}/meet"
        for met, works in pools(4).run(_meet, address, [4] * 4, AMPLE_S, timeout_s=DEADLINE_S):
            assert met.kind == "ok", met
            assert works.text == "[6.0]"


def _again_on_one_port(port: int, rounds: int) -> list[tuple[list[int], int]]:
    rank = int(os.environ[RANK])
    found = []
    with start_timeout(AMPLE_S):
        for number in range(rounds):
            ps.init_distributed_environment(4, rank, f"tcp://127.0.0.1:{port}")
            ps.initialize_model_parallel(4 if number % 2 else 2)
            gathered = ps.get_tp_group().all_gather_object((number, rank))
            if number % 4 == rank:
                time.sleep(0.2)  # the others reach the next rendezvous; if rank 0 is late, its old server
            ps.destroy_distributed_environment()
            right = [(number, peer) for peer in range(4) if number % 2 or peer // 2 == rank // 2]
            found.append((gathered == right, len(os.listdir("/proc/self/fd"))))
    return found


def test_worlds_follow_each_other_on_one_port(pools: Pools) -> None:
    with held_port() as port:
        for found in pools(4).run(_again_on_one_port, port, 8, timeout_s=DEADLINE_S):
            assert all(right for right, _ in found)
            assert found[-1][1] <= found[1][1] + 2


def _again_though_groups_are_kept(port: int) -> list[float]:
    rank, kept, totals = int(os.environ[RANK]), [], []
    with start_timeout(AMPLE_S):
        for size in (4, 3, 4):
            if rank >= size:
                continue
            ps.init_distributed_environment(size, rank, f"tcp://127.0.0.1:{port}", local_rank=rank)
            group = ps.get_world_group()
            totals.append(group.all_reduce(torch.ones(1)).item())
            kept += [group.device_group, group, dist.new_group(backend="parallel_state")]
            ps.destroy_distributed_environment()
    return totals


def _at_other_addresses(port: int) -> list[str]:
    kept, told = [], []
    for host in ("127.0.0.1", "127.0.0.2", "127.0.0.1"):
        with start_timeout(AMPLE_S):
            outcome = attempt(ps.init_distributed_environment, 2, int(os.environ[RANK]), f"tcp://{host}:{port}")
        told.append(outcome.kind if outcome.kind == "ok" else outcome.text)
        if outcome.kind == "ok":
            kept.append(ps.get_world_group().device_group)
        ps.destroy_distributed_environment()
    return told


def test_a_kept_group_holds_no_address(pools: Pools) -> None:
    with held_port() as port:
        assert pools(2).run(_at_other_addresses, port, timeout_s=DEADLINE_S) == [["ok"] * 3] * 2


def test_worlds_follow_each_other_though_groups_are_kept(pools: Pools) -> None:
    with held_port() as port:
        found = pools(4).run(_again_though_groups_are_kept, port, timeout_s=DEADLINE_S)
    assert found == [[4.0, 3.0, 4.0]] * 3 + [[4.0, 4.0]]


def _worlds_of_some(port: int) -> list[float]:
    rank = int(os.environ[RANK])
    totals = []
    with start_timeout(AMPLE_S):
        for number, method in enumerate([f"tcp://127.0.0.1:{port}", "env://"]):
            if rank < 2:
                ps.init_distributed_environment(2, rank, method, local_rank=rank)
                totals.append(ps.get_world_group().all_reduce(torch.ones(1)).item())
                ps.destroy_distributed_environment()
            if rank == 3 - number:
                ps.init_distributed_environment(1, 0, local_rank=0)
                ps.destroy_distributed_environment()
            ps.init_distributed_environment(4, rank, method)
            totals.append(ps.get_world_group().all_reduce(torch.ones(1)).item())
            ps.destroy_distributed_environment()
    return totals


def test_a_rank_needs_not_have_been_in_the_earlier_worlds(pools: Pools) -> None:
    with held_port() as port:
        results = pools(4).run(_worlds_of_some, port, timeout_s=DEADLINE_S)
    assert results == [[2.0, 4.0, 2.0, 4.0]] * 2 + [[4.0, 4.0]] * 2


def _leave_the_name_of_a_world(name: str) -> None:
    if os.environ[RANK] == "0":
        agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store = dist.PrefixStore("parallel_state/0", agent)
        assert store.check(["world"]), "the rendezvous no longer uses this key"
        store.set("world", name)
        dist.PrefixStore(name, store).set("rank/1", '[4, "somebody"]')


@pytest.mark.parametrize("library", [True, False])
def test_the_name_of_a_world_whose_first_rank_was_killed(pools: Pools, library: bool) -> None:
    pool = pools(4)
    assert pool.run(_meet, "env://", [4] * 4, AMPLE_S, timeout_s=DEADLINE_S)[0][1].text == "[6.0]"
    with held_port() as port:
        name = json.dumps([3, "127.0.0.1", port, "token", 0]) if library else "left"
        pool.run(_leave_the_name_of_a_world, name, timeout_s=DEADLINE_S)
    for met, works in pool.run(_meet, "env://", [4] * 4, AMPLE_S, timeout_s=DEADLINE_S):
        assert met.kind == "ok", met
        assert works.text == "[6.0]"


@pytest.mark.parametrize(("sizes", "told", "other"), [([2, 4, 4, 4], 2, 4), ([4, 2, None, None], 4, 2)])
@pytest.mark.parametrize("method", ["tcp", "env"])
def test_world_sizes_that_differ(pools: Pools, method: str, sizes: list[int | None], told: int, other: int) -> None:
    with held_port() as port:
        address = f"tcp://127.0.0.1:{port}" if method == "tcp" else "env://"
        results = pools(4).run(_meet, address, sizes, AMPLE_S, timeout_s=DEADLINE_S)
    for rank, result in enumerate(results):
        if sizes[rank] is not None:
            met, works = result
            assert met.kind == "ConfigMismatchError", met
            assert f"rank 0 has {told} and rank 1 {other} (this is rank {rank}, with {sizes[rank]})" in met.text
            assert met.seconds < SLACK_S
            assert works.kind == "GroupNotInitializedError"


def test_a_world_without_us(pools: Pools) -> None:
    results = pools(4).run(_meet, "env://", [2, 2, 4, 4], START_S, timeout_s=DEADLINE_S)
    for rank, (met, works) in enumerate(results):
        if rank < 2:
            assert (met.kind, works.text) == ("ok", "[1.0]")
        else:
            assert met.kind == "RendezvousError"
            assert f"rank {rank} of 4" in met.text
            # It depends on which rank came first.
            assert "rank 0 opened a world of 2 ranks" in met.text or "rank 0 has not opened a world" in met.text
            assert met.suspect_ranks == (0,)
            assert met.seconds < START_S + SLACK_S


@pytest.mark.parametrize("method", ["tcp", "file"])
def test_a_rank_that_does_not_come(pools: Pools, method: str, tmp_path: Path) -> None:
    with held_port() as port:
        address = f"tcp://127.0.0.1:{port}" if method == "tcp" else f"file://{tmp_path}/meet"
        results = pools(4).run(_meet, address, [4, 4, None, 4], START_S, timeout_s=DEADLINE_S)
    for rank in (0, 1, 3):
        met, _ = results[rank]
        assert met.kind == "RendezvousError", met
        assert met.suspect_ranks == (2,), met
        assert all(part in met.text for part in (f"rank {rank} of 4", "ranks [2] did not come within 3 s"))
        assert address.removeprefix("tcp://") in met.text
        assert START_S - 0.5 < met.seconds < START_S + SLACK_S


def test_rank_zero_does_not_come(pools: Pools) -> None:
    with held_port() as port:
        method = f"tcp://localhost:{port}"
        _, *results = pools(4).run(_meet, method, [None, 4, 4, 4], 1.0, timeout_s=DEADLINE_S)
    for met, _ in results:
        assert met.kind == "RendezvousError"
        assert all(part in met.text for part in (f"localhost:{port}", "127.0.0.1", "within 1 s", "refused")), met
        assert met.seconds < 1.0 + SLACK_S


@pytest.mark.parametrize("listener", ["a store", "somebody silent"])
def test_a_port_in_use(pools: Pools, listener: str) -> None:
    with held_port(listen=True) as silent:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = silent if listener == "somebody silent" else store.port
        results = pools(4).run(_meet, f"tcp://127.0.0.1:{port}", [4] * 4, IN_USE_S, timeout_s=DEADLINE_S)
        del store
    for rank, (met, _) in enumerate(results):
        assert met.kind == "RendezvousError", met
        assert f"127.0.0.1:{port}" in met.text
        assert "MASTER_PORT" in met.text
        assert met.seconds < IN_USE_S + SLACK_S
        if rank == 0:
            assert "in use by another process" in met.text


def test_a_port_that_is_given_back(pools: Pools) -> None:
    with held_port() as port, socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        timer = threading.Timer(0.7, listener.close)
        timer.start()
        results = pools(4).run(_meet, f"tcp://127.0.0.1:{port}", [4] * 4, AMPLE_S, timeout_s=DEADLINE_S)
        timer.join()
    for met, works in results:
        assert met.kind == "ok", met
        assert works.text == "[6.0]"


def _unresolvable() -> list[Outcome]:
    rank = int(os.environ[RANK])
    with start_timeout(START_S):
        outcomes = [attempt(ps.init_distributed_environment, 4, rank, "tcp://no-such-host.invalid:1234")]
        with environment(MASTER_ADDR="no-such-host.invalid", TORCHELASTIC_USE_AGENT_STORE=None):
            outcomes.append(attempt(ps.init_distributed_environment))
    return outcomes


def test_a_name_that_does_not_resolve(pools: Pools) -> None:
    for rank, outcomes in enumerate(pools(4).run(_unresolvable, timeout_s=DEADLINE_S)):
        for outcome in outcomes:
            assert outcome.kind == "RendezvousError", outcome
            assert f"rank {rank} " in outcome.text
            assert all(part in outcome.text for part in ("no-such-host.invalid", "does not resolve", "MASTER_ADDR"))
            assert outcome.seconds < START_S + SLACK_S


def _same_rank_twice(port: int) -> tuple[Outcome, float]:
    rank = [0, 1, 1, 3][int(os.environ[RANK])]
    with start_timeout(START_S):
        return attempt(ps.init_distributed_environment, 4, rank, f"tcp://127.0.0.1:{port}"), rank


def test_two_processes_with_one_rank(pools: Pools) -> None:
    with held_port() as port:
        results = pools(4).run(_same_rank_twice, port, timeout_s=DEADLINE_S)
    assert {outcome.kind for outcome, _ in results} == {"RendezvousError"}
    assert results[0][0].suspect_ranks == (2,)
    doubles = [outcome for outcome, rank in results if rank == 1]
    assert sum("another process with this rank has entered rank 0's world" in outcome.text for outcome in doubles) == 1


def _methods(folder: str) -> dict[str, Outcome]:
    methods = [
        "tcp://127.0.0.1",
        "tcp://:1234",
        "tcp://127.0.0.1:port",
        "tcp://127.0.0.1:70000",
        "nosuch://x",
        "file://",
    ]
    methods.append(f"file://{folder}/nothing/here")
    return {method: attempt(ps.init_distributed_environment, 4, int(os.environ[RANK]), method) for method in methods}


def test_methods_that_nobody_knows(pools: Pools, tmp_path: Path) -> None:
    for outcomes in pools(4).run(_methods, str(tmp_path), timeout_s=DEADLINE_S):
        assert len(outcomes) == 7
        for method, outcome in outcomes.items():
            assert outcome.kind == "InvalidArgumentError", (method, outcome)
            assert method in outcome.text
            assert "distributed_init_method" in outcome.text
            assert outcome.seconds < SLACK_S


def _file_again(path: str) -> list[float]:
    totals = []
    with start_timeout(AMPLE_S):
        for number in range(3):
            ps.init_distributed_environment(4, int(os.environ[RANK]), f"file://{path}-{number}")
            totals.append(ps.get_world_group().all_reduce(torch.ones(1)).item())
            ps.destroy_distributed_environment()
    return totals


def test_worlds_that_meet_in_files(pools: Pools, tmp_path: Path) -> None:
    path = str(tmp_path / uuid.uuid4().hex)
    assert pools(4).run(_file_again, path, timeout_s=DEADLINE_S) == [[4.0] * 3] * 4
