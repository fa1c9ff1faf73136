from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import parallel_state as ps
from parallel_state import GroupCoordinator
from tests.contract.attempts import Outcome, attempt, environment, whose, world
from tests.hosts import HostRanks
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 60.0

over = GroupCoordinator.from_process_group


@contextmanager
def default_group(backend: str | None, name: str) -> Iterator[Any]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group(backend, store=dist.PrefixStore(name, agent), rank=rank, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _new_name() -> str:
    return uuid.uuid4().hex


def _sum_by_torch(process_group: Any) -> float:
    x = torch.ones(1)
    dist.all_reduce(x, group=process_group)
    return x.item()


def _carries_everything(backend: str | None, name: str) -> dict[str, Any]:
    with default_group(backend, name) as everyone:
        rank, size = dist.get_rank(), dist.get_world_size()
        first, second = over(everyone, name="mine"), over(everyone, allow_pickle=True, timeout=20)
        ends = dist.new_group([0, size - 1])
        alone = [dist.new_group([each]) for each in range(size)][rank]
        single = over(alone)
        facts: dict[str, Any] = {
            "ranks": (whose(first), whose(second), whose(single)),
            "names": (first.unique_name.partition(":")[0], first.unique_name == second.unique_name),
            "timeouts": (first.context.timeout_s, second.context.timeout_s),
            "theirs": all(
                group is given
                for coordinator, given in ((first, everyone), (second, everyone), (single, alone))
                for group in (coordinator.device_group, coordinator.cpu_group, coordinator.as_process_group())
            ),
            "carried": first.explain().splitlines()[1].strip(),
            "object": first.broadcast_object({"rank": rank}, src=1),
            "pickled": second.broadcast_object(threading.Thread if rank == 0 else None) is threading.Thread,
        }
        handle = first.isend(torch.tensor([rank]), first.next_rank_in_group)
        facts["received"] = first.recv([1], torch.int64).item()
        handle.wait()
        y, after, before = torch.zeros(1, dtype=torch.int64), (rank + 1) % size, (rank - 1) % size
        transfers = [dist.P2POp(dist.isend, torch.tensor([rank]), after), dist.P2POp(dist.irecv, y, before)]
        for each in first.batch_isend_irecv(transfers):
            each.wait()
        facts["in a batch"] = y.item()
        part = first.make_sub_group([1, 2])
        facts["part"] = None if part is None else whose(part)
        if part is not None:
            part.destroy()
        if rank in (0, size - 1):
            pair = over(ends)
            facts["ends"] = whose(pair)
            pair.destroy()
            facts["ends stay"] = _sum_by_torch(ends)
        else:
            facts["ends"] = attempt(over, ends)
        for group in (first, second, single):
            group.destroy()
            group.destroy()
        facts["destroyed"] = attempt(getattr, first, "device_group").kind
        facts["stays"] = _sum_by_torch(everyone)
        ps.initialize_model_parallel(2, 2)
        beside = over(ps.get_tp_group().device_group)
        facts["beside"] = whose(beside) == whose(ps.get_tp_group())
        beside.destroy()
        facts["tp stays"] = whose(ps.get_tp_group())
        ps.destroy_distributed_environment()
    facts["threads"] = [thread.name for thread in threading.enumerate() if "parallel_state" in thread.name]
    return facts


@pytest.mark.parametrize("backend", ["gloo", "parallel_state", None])
def test_it_is_a_whole_group_that_leaves_the_given_one_alone(pools: Pools, backend: str | None) -> None:
    for rank, facts in enumerate(pools(4).run(_carries_everything, backend, _new_name(), timeout_s=DEADLINE_S)):
        ends = facts.pop("ends")
        if rank in (0, 3):
            assert ends == [0, 3] and facts.pop("ends stay") == 2.0
        else:
            assert ends.kind == "InvalidArgumentError" and f"rank {rank} is not in the group" in ends.text
        assert facts.pop("carried").startswith("1. shared_memory")
        assert facts == {
            "ranks": ([0, 1, 2, 3], [0, 1, 2, 3], [rank]),
            "names": ("mine", False),
            "timeouts": (60.0, 20.0),
            "theirs": True,
            "object": {"rank": 1},
            "pickled": True,
            "received": (rank - 1) % 4,
            "in a batch": (rank - 1) % 4,
            "part": [1, 2] if rank in (1, 2) else None,
            "destroyed": "GroupDestroyedError",
            "stays": 4.0,
            "beside": True,
            "tp stays": [rank // 2 * 2, rank // 2 * 2 + 1],
            "threads": [],
        }


def _crossing(name: str) -> list[int]:
    with environment(PARALLEL_STATE_SHARED_MEMORY="off"), default_group("gloo", name) as everyone:
        first, second = over(everyone), over(everyone)
        assert "shared_memory: not used" in first.explain()
        if dist.get_rank() == 0:
            handles = [group.isend(torch.tensor([number]), 1) for number, group in ((1, first), (2, second))]
            own = dist.isend(torch.tensor([3]), 1)
            for handle in (*handles, own):
                assert handle is not None
                handle.wait()
            found = []
        else:
            x = torch.zeros(1, dtype=torch.int64)
            dist.recv(x, 0)
            found = [x.item(), second.recv([1], torch.int64, 0).item(), first.recv([1], torch.int64, 0).item()]
        for group in (first, second):
            group.destroy()
    return found


def test_coordinators_over_one_group_stay_apart(pools: Pools) -> None:
    assert pools(2).run(_crossing, _new_name(), timeout_s=DEADLINE_S) == [[], [3, 2, 1]]


def _refused(name: str) -> dict[str, Outcome]:
    found = {"before": attempt(over, dist.group.WORLD)}
    with default_group("gloo", name) as everyone:
        found["none"] = attempt(over, None)
        found["device"] = attempt(over, everyone, device="meta")
        one = [dist.new_group([each]) for each in range(dist.get_world_size())][dist.get_rank()]
        found["cpu_group"] = attempt(over, everyone, cpu_group=one)
        dist.destroy_process_group(one)
        found["destroyed"] = attempt(over, one)
        group = over(everyone)
        found["works"] = Outcome(str(whose(group)), "", 0)
    found["too late"] = attempt(group.destroy)
    return found


def test_what_is_no_group_is_refused(pools: Pools) -> None:
    for found in pools(2).run(_refused, _new_name(), timeout_s=DEADLINE_S):
        assert found["before"].kind == "GroupNotInitializedError" and "init_process_group" in found["before"].text
        for name, text in {
            "none": "torch.distributed.group.WORLD, but is None",
            "device": "must support tensors on meta, but supports cpu",
            "cpu_group": "must be a gloo group of global ranks [0, 1]",
            "destroyed": "it was destroyed or created directly",
        }.items():
            assert found[name].kind == "InvalidArgumentError" and text in found[name].text, found[name]
        assert found["works"].kind == "[0, 1]"
        assert found["too late"].kind == "ok", found["too late"]


def _without_one(name: str) -> Outcome | None:
    with environment(PARALLEL_STATE_START_TIMEOUT_S="1"), default_group("gloo", name) as everyone:
        outcome = attempt(over, everyone) if dist.get_rank() != 1 else None
        store = dist.distributed_c10d._get_default_store()
        store.set(f"late/{dist.get_rank()}", "")
        store.wait([f"late/{rank}" for rank in range(dist.get_world_size())])
    return outcome


def test_a_rank_that_does_not_come(pools: Pools) -> None:
    outcomes = pools(4).run(_without_one, _new_name(), timeout_s=DEADLINE_S)
    pools(4).kill()
    assert outcomes[1] is None
    for outcome in (outcomes[0], outcomes[2], outcomes[3]):
        assert outcome is not None
        assert outcome.kind == "RendezvousError" and "must call from_process_group()" in outcome.text, outcome
        assert outcome.seconds < 10


def _one_dies(backend: str, name: str) -> Outcome:
    with default_group(backend, name) as everyone:
        group = over(everyone)
        group.barrier()
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return attempt(group.all_reduce, torch.ones(3))


@pytest.mark.parametrize("backend", ["gloo", "parallel_state"])
def test_a_rank_that_dies_is_named(pools: Pools, backend: str) -> None:
    found = pools(4).survivors(_one_dies, backend, _new_name(), timeout_s=DEADLINE_S)
    assert sorted(found) == [0, 2, 3]
    for outcome in found.values():
        assert outcome.kind == "PeerDiedError" and outcome.suspect_ranks == (1,) and outcome.seconds < 5, outcome


def _two_pairs(name: str, death: bool) -> Any:
    with default_group("gloo", name) as everyone:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        rank = dist.get_rank()
        outer = over(everyone)
        pair = over(pairs[rank // 2], name="pair", within=outer)
        if death:
            outer.barrier()
            if rank == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            # Only rank 2 waits for the killed rank. Ranks 0 and 1 wait for each other.
            return attempt(pair.recv, [3], torch.float32) if rank == 0 else attempt(pair.all_reduce, torch.ones(3))
        memory, everyones = pair.context.host_memory, outer.context.host_memory
        assert memory is not None and everyones is not None
        found = {
            "ranks": whose(pair),
            "waits": memory.waiting == everyones.waiting,
            "others": attempt(
                over, pairs[rank // 2], within=over(dist.new_group([rank], use_local_synchronization=True))
            ),
        }
        pair.destroy()
        found["outer stays"] = whose(outer)
        outer.destroy()
        found["destroyed"] = attempt(over, pairs[rank // 2], within=outer).kind
    return found


def test_a_group_within_another_one_shares_its_watch(pools: Pools) -> None:
    for rank, found in enumerate(pools(4).run(_two_pairs, _new_name(), False, timeout_s=DEADLINE_S)):
        others = found.pop("others")
        assert (
            others.kind == "InvalidArgumentError"
            and "within= must be a GroupCoordinator that contains global ranks" in others.text
        )
        ranks = [[0, 1], [2, 3]][rank // 2]
        assert found == {
            "ranks": ranks, "waits": True, "outer stays": [0, 1, 2, 3], "destroyed": "GroupDestroyedError"
        }  # fmt: skip


def test_a_death_within_another_group_is_named(pools: Pools) -> None:
    found = pools(4).survivors(_two_pairs, _new_name(), True, timeout_s=DEADLINE_S)
    assert sorted(found) == [0, 1, 2]
    for outcome in found.values():
        assert outcome.kind == "PeerDiedError" and outcome.suspect_ranks == (3,) and outcome.seconds < 1, outcome


def _over_hosts() -> tuple[list[str], float]:
    with world() as everyone:
        group = over(everyone.device_group)
        found = [name for name in ("hierarchical", "process_group") if f". {name}:" in group.explain()]
        total = group.all_reduce(torch.tensor([float(group.rank)])).item()
        group.destroy()
    return found, total


def test_it_goes_over_hosts(on_hosts: Callable[[Sequence[int]], HostRanks]) -> None:
    for found, total in on_hosts([0, 1, 0, 1]).run(_over_hosts, timeout_s=DEADLINE_S):
        assert found == ["hierarchical", "process_group"] and total == 6.0


def test_it_takes_a_fake_group() -> None:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        group = over(dist.group.WORLD)
        assert group.ranks == [0, 1, 2, 3] and group.all_gather(torch.ones(2), 0).shape == (8,)
        group.destroy()
    finally:
        dist.destroy_process_group()
