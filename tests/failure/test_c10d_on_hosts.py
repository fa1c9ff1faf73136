from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from device_communicators.c10d import creation
from tests.contract.cases import reduced
from tests.contract.test_c10d import _collectives
from tests.failure.over_torch import OVER_TORCH, torch_world
from tests.failure.test_killed import killed_in
from tests.failure.trials import late, median_of
from tests.failure.worlds import DEADLINE_S, LONG_TIMEOUT_S
from tests.helpers.host_faults import as_without_descriptors
from tests.hosts import HostRanks, Hosts, problem

STARTED_S = 10.0
reason = problem()
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no hosts can be made here: {reason}")


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    creation.load()


def _average_and_repeat(rank: int, size: int) -> None:
    numbers = torch.tensor([127, -128, 3, -7, 100])
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.int64):
        xs = [(numbers + other).to(dtype) for other in range(size)]
        dist.all_reduce(x := xs[rank].clone(), dist.ReduceOp.AVG)
        assert x.equal(expected := reduced(xs, "avg")), f"{dtype}: {x} is not {expected}"
        dist.reduce_scatter_tensor(x := xs[rank].clone(), torch.cat([xs[rank]] * size), dist.ReduceOp.AVG)
        assert x.equal(expected), f"reduce_scatter of {dtype}: {x} is not {expected}"
    dist.all_reduce_coalesced([x := torch.tensor([rank + 1.0]), x])
    assert x.item() == size * (size + 1) / 2
    group: Any = dist.group.WORLD
    group.allreduce(both := [torch.tensor([2.0 * rank]), torch.tensor([2.0 * rank + 1])]).wait()
    assert [x.item() for x in both] == [size * (2 * size - 1)] * 2
    group.broadcast(both := [torch.tensor([rank]), torch.tensor([rank])]).wait()
    assert [x.item() for x in both] == [0, 0]
    lists = [[torch.empty(1) for _ in range(2 * size)] for _ in range(2)]
    group.allgather(lists, [torch.tensor([2.0 * rank]), torch.tensor([2.0 * rank + 1])]).wait()
    assert [[x.item() for x in each] for each in lists] == [list(range(2 * size))] * 2


def _without_descriptors() -> bool:
    with as_without_descriptors(os.environ["RANK"] == "2"), torch_world() as world:
        rank, size = world.rank, world.world_size
        outs = [torch.empty(3) for _ in range(size)]
        dist.all_gather(outs, torch.full((3,), float(rank)))
        right = [out.tolist() for out in outs] == [[float(each)] * 3 for each in range(size)]
        outs = [torch.empty(1) for _ in range(size)] if rank == 1 else []
        dist.gather(torch.tensor([float(rank)]), outs or None, 1)
        right &= [out.item() for out in outs] == ([0.0, 1.0, 2.0, 3.0] if rank == 1 else [])
        dist.scatter(x := torch.empty(1), [torch.tensor([10.0 * each]) for each in range(size)] if rank == 0 else None)
        dist.all_to_all_single(y := torch.empty(size), torch.full((size,), float(rank)))
        dist.all_reduce(z := torch.tensor([1.0]))
        return right and (x.item(), y.tolist(), z.item()) == (10.0 * rank, [0.0, 1.0, 2.0, 3.0], size)


def test_hosts_whose_first_ranks_alone_are_connected() -> None:
    with Hosts(2) as hosts, hosts.ranks((0, 0, 1, 1)) as ranks:
        assert ranks.run(_without_descriptors, timeout_s=60.0) == [True] * 4


def _compare_with_gloo() -> int:
    with torch_world() as world:
        gloo = dist.new_group(backend="gloo")
        found = []
        for group in (None, gloo):
            torch.manual_seed(world.rank)
            found.append(list(_collectives(group, world.rank, world.world_size)))
        for (name, ours), (_, theirs) in zip(*found, strict=True):
            for mine, reference in zip(ours, theirs, strict=True):
                # torch.testing would import modules for 1 s in each rank.
                same = (mine.shape, mine.dtype) == (reference.shape, reference.dtype)
                rtol, atol = (1e-7, 1e-7) if mine.dtype == torch.float64 else (1.3e-6, 1e-5)
                assert same and torch.allclose(mine, reference, rtol, atol), f"{name}: {mine} is not {reference}"
        # With one rank a host gloo carries all calls, and takes one size only.
        uneven = [torch.empty(rank + 1 if world.world_size > 2 else 1) for rank in range(world.world_size)]
        dist.all_gather(uneven, torch.full((len(uneven[world.rank]),), float(world.rank)))
        assert [out.tolist() for out in uneven] == [[float(rank)] * len(uneven[rank]) for rank in world.ranks]
        _average_and_repeat(world.rank, world.world_size)
        works = [world.isend(torch.full((9,), float(world.rank)), peer) for peer in world.ranks if peer != world.rank]
        for peer in world.ranks:
            if peer != world.rank:
                assert world.recv((9,), torch.float32, peer).eq(peer).all()
        for work in works:
            work.wait()
        received = {peer: torch.empty(3) for peer in world.ranks if peer != world.rank}
        both = [dist.P2POp(dist.isend, torch.full((3,), float(world.rank)), peer) for peer in received]
        both += [dist.P2POp(dist.irecv, x, peer) for peer, x in received.items()]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        assert all(x.eq(peer).all() for peer, x in received.items())
        world.barrier()
        return len(found[0])


def _sum_of_ranks() -> list[float]:
    with torch_world() as world:
        x = torch.full((4,), float(world.rank + 1))
        dist.all_reduce(x)
        return list(x.tolist())


def test_the_address_is_that_on_the_way_to_the_store() -> None:
    """Without GLOO_SOCKET_IFNAME, a host's own name may resolve to loopback."""
    with Hosts(2) as hosts, hosts.ranks((0, 0, 1, 1), GLOO_SOCKET_IFNAME="") as ranks:
        assert ranks.run(_sum_of_ranks, timeout_s=DEADLINE_S) == [[10.0] * 4] * 4


@pytest.mark.parametrize("placement", [(0, 0, 1, 1), (0, 1)], ids=str)
def test_collectives_and_transfers_give_what_gloo_gives(placement: Sequence[int]) -> None:
    with Hosts(2) as hosts, hosts.ranks(placement) as ranks:
        assert min(ranks.run(_compare_with_gloo, timeout_s=3 * DEADLINE_S)) >= 60


def _receives_before_sends(folder: str) -> bool:
    with torch_world() as world:
        work = dist.irecv(x := torch.empty(3), (world.rank + 1) % world.world_size)
        Path(folder, str(world.rank)).touch()
        until = time.monotonic() + STARTED_S
        while len(list(Path(folder).iterdir())) < world.world_size and time.monotonic() < until:
            time.sleep(0.01)
        have_all_started = time.monotonic() < until
        dist.send(torch.ones(3), (world.rank - 1) % world.world_size)
        assert work is not None
        work.wait()
        return have_all_started and x.tolist() == [1.0] * 3


def test_a_receive_starts_before_its_sender_does(tmp_path: Path) -> None:
    """gloo connects two ranks at their first transfer, so our groups connect neighbors."""
    with Hosts(2) as hosts, hosts.ranks((0, 0, 1, 1)) as ranks:
        assert ranks.run(_receives_before_sends, str(tmp_path), timeout_s=3 * DEADLINE_S) == [True] * 4


def _kill(ranks: HostRanks, operation: str, victim: int, folder: Path) -> float:
    folder.mkdir()
    told = ranks.survivors(killed_in, operation, OVER_TORCH, [victim], str(folder), timeout_s=2 * DEADLINE_S)
    assert sorted(told) == [rank for rank in range(4) if rank != victim]
    killed_s = float((folder / str(victim)).read_text())
    latest_s = 0.0
    for rank, (each, _) in told.items():
        assert each.outcome.kind == "PeerDiedError", (rank, each)
        assert each.outcome.suspect_ranks == (victim,), (rank, each)
        assert each.again.kind == "GroupFailedError", (rank, each)
        latest_s = max(latest_s, each.at_s - killed_s)
    return latest_s


@pytest.mark.parametrize(
    ("operation", "victim"), [("all_reduce", 3), ("all_reduce", 2), ("all_to_all", 1), ("send and recv", 3)]
)
def test_a_killed_rank_is_named_on_both_hosts(operation: str, victim: int, tmp_path: Path) -> None:
    def run() -> float:
        with Hosts(2) as hosts, hosts.ranks((0, 0, 1, 1)) as ranks:
            return _kill(ranks, operation, victim, tmp_path / str(time.monotonic_ns()))

    trial: Callable[[], float] = run
    assert not late([(0, median_of(trial, trial()))])


LIMIT_S = 1.5


def _with_its_own_timeout() -> tuple[str, float] | None:
    with torch_world(timeout_s=LONG_TIMEOUT_S) as world:
        world.barrier()
        if world.rank == 3:
            time.sleep(4 * LIMIT_S)
            return None
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=LIMIT_S)
        started = time.monotonic()
        with pytest.raises(dist.DistBackendError) as caught:
            dist.group.WORLD.allreduce([torch.ones(4)], options).wait()
        return type(caught.value).__name__, time.monotonic() - started


def test_a_call_s_own_timeout_is_kept_over_hosts() -> None:
    with Hosts(2) as hosts, hosts.ranks((0, 0, 1, 1)) as ranks:
        *told, late_one = ranks.run(_with_its_own_timeout, timeout_s=2 * DEADLINE_S)
    assert late_one is None
    for kind, seconds in told:
        assert kind == "CollectiveTimeoutError"
        assert seconds < 3 * LIMIT_S
