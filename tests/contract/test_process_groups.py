from __future__ import annotations

import gc
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import parallel_state as ps
from device_communicators.base import torch_internals
from parallel_state import GroupOptions
from parallel_state.groups import world as startup
from tests.contract.attempts import Outcome, attempt, environment, whose, world
from tests.contract.test_rendezvous import held_port
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 60.0
SOON_S = 10.0
AXES = ("tp", "pp", "dp")


def _process_groups() -> dict[str, Any]:
    facts: dict[str, Any] = {}
    with world() as everyone:
        for tp, pp in ((4, 1), (1, 4), (2, 1), (1, 1)):
            before = set(dist.distributed_c10d._world.pg_map)
            ps.initialize_model_parallel(tp, pp)
            groups = ps.get_parallel_groups()
            made = len(set(dist.distributed_c10d._world.pg_map) - before)
            for axis in AXES:
                group = getattr(groups, axis)
                facts[f"{tp} {pp} {axis}"] = (
                    group.world_size,
                    group.device_group is group.cpu_group is group.as_process_group(),
                    group.device_group is everyone.device_group is dist.group.WORLD,
                    dist.get_process_group_ranks(group.device_group) == group.ranks,
                    group.device_group.rank() == group.rank_in_group,
                    _sum_by_torch(group.device_group),
                )
            facts[f"{tp} {pp} made"] = made
            ps.destroy_model_parallel()
        facts["default stays"] = dist.is_initialized() and everyone.all_reduce(torch.ones(1)).item()
    return facts


def _sum_by_torch(process_group: Any) -> float:
    x = torch.ones(1)
    dist.all_reduce(x, group=process_group)
    return x.item()


def test_process_groups_are_made_once_and_shared(pools: Pools) -> None:
    """A group of one rank is real, because torch takes None for the world."""
    for rank, facts in enumerate(pools(4).run(_process_groups, timeout_s=DEADLINE_S)):
        for tp, pp in ((4, 1), (1, 4), (2, 1), (1, 1)):
            sizes = {"tp": tp, "pp": pp, "dp": 4 // tp // pp}
            for axis, size in sizes.items():
                assert facts[f"{tp} {pp} {axis}"] == (size, True, size == 4, True, True, float(size)), (rank, axis)
        assert facts["4 1 made"] == facts["1 4 made"] == facts["1 1 made"] == 0
        assert facts["2 1 made"] == 2, "only this rank's tp and dp groups may be made"
        assert facts["default stays"] == 4.0


def _two_layouts() -> dict[str, Any]:
    with world() as everyone:
        wide = ps.create_parallel_groups(everyone, {"tp": 4, "pp": 1, "dp": None}, "tp-dp-pp")
        narrow = ps.create_parallel_groups(everyone, {"tp": 2, "pp": 2, "dp": None}, "tp-dp-pp", timeout=30)
        twin = ps.create_parallel_groups(everyone, {"tp": 2, "pp": 2, "dp": None}, "tp-dp-pp", timeout=30)
        facts = {
            "no globals": ps.try_get_tp_group() is None and not ps.model_parallel_is_initialized(),
            "wide": whose(wide.tp),
            "narrow": (whose(narrow.tp), whose(narrow.pp)),
            "names": len({group.unique_name for groups in (wide, narrow, twin) for group in (groups.tp, groups.pp)}),
            "timeouts": (wide.tp.context.timeout_s, narrow.tp.context.timeout_s),
            "shared": twin.tp.device_group is narrow.tp.device_group,
        }
        narrow.close()
        narrow.close()
        facts["closed"] = attempt(narrow.tp.barrier).kind
        facts["twin stays"] = whose(twin.tp)
        with wide.use():
            facts["used"] = whose(ps.get_tp_group())
        twin.close()
        facts["frozen"] = attempt(setattr, wide, "tp", None).kind
    return facts


def test_two_layouts_at_once(pools: Pools) -> None:
    for rank, facts in enumerate(pools(4).run(_two_layouts, timeout_s=DEADLINE_S)):
        pair, stage = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert facts == {
            "no globals": True,
            "wide": [0, 1, 2, 3],
            "narrow": (pair, stage),
            "names": 6,
            "timeouts": (60.0, 30),
            "shared": True,
            "closed": "GroupDestroyedError",
            "twin stays": pair,
            "used": [0, 1, 2, 3],
            "frozen": "FrozenInstanceError",
        }


def _backends() -> tuple[str, str, float]:
    with world(2, 2, axis_options={"pp": ps.GroupOptions("gloo")}, timeout=20, order="tp-pp-dp"):
        tp, pp = ps.get_tp_group(), ps.get_pp_group()
        return tp.backend, pp.backend, tp.context.timeout_s


def test_backends_and_timeout_of_the_division(pools: Pools) -> None:
    assert pools(4).run(_backends, timeout_s=DEADLINE_S) == [("gloo", "gloo", 20.0)] * 4


def _lists_of_ranks() -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    make = ps.init_model_parallel_group
    refused = {
        "before init": attempt(make, [[0, 1], [2, 3]], 0, "gloo"),
    }
    with world():
        group = make([[0, 3], [1], [2]], rank, "gloo", group_name="ends")
        facts = {"ranks": whose(group), "name": group.unique_name.partition(":")[0], "local": group.local_rank}
        refused |= {
            "one missing": attempt(make, [[0, 1], [2]], 0, "gloo"),
            "one twice": attempt(make, [[0, 1], [1, 2, 3]], 0, "gloo"),
            "one too many": attempt(make, [[0, 1], [2, 3, 4]], 0, "gloo"),
            "not ascending": attempt(make, [[1, 0], [3, 2]], 0, "gloo"),
            "other lists": attempt(make, [[0, 1], [2, 3]] if rank < 2 else [[0, 2], [1, 3]], 0, "gloo"),
        }
        facts["then"] = whose(make([[0, 2], [1, 3]], rank, "gloo"))
    return {**facts, "refused": refused}


def test_groups_by_lists_of_ranks(pools: Pools) -> None:
    for rank, facts in enumerate(pools(4).run(_lists_of_ranks, timeout_s=DEADLINE_S)):
        expected = {
            "before init": ("GroupNotInitializedError", "first"),
            "one missing": ("LayoutError", "lack [3]"),
            "one twice": ("LayoutError", "repeat [1]"),
            "one too many": ("LayoutError", "unknown [4]"),
            "not ascending": ("InvalidArgumentError", "ascending order, but are [1, 0]"),
            "other lists": ("ConfigMismatchError", "[0, 1], [2, 3] on rank 0 and [0, 2], [1, 3] on rank 2"),
        }
        for name, outcome in facts.pop("refused").items():
            assert outcome.kind == expected[name][0], (name, outcome)
            assert expected[name][1] in outcome.text
            assert outcome.seconds < SOON_S
        assert facts == {
            "ranks": [0, 3] if rank in (0, 3) else [rank],
            "name": "ends",
            "local": rank,
            "then": [rank % 2, rank % 2 + 2],
        }


def _sub_groups() -> dict[str, Any]:
    with world(4) as everyone:
        tp, rank = ps.get_tp_group(), ps.get_rank()
        ends, one = tp.make_sub_group([0, 3], name="ends"), tp.make_sub_group([2])
        facts: dict[str, Any] = {
            "ends": None
            if ends is None
            else (whose(ends), ends.rank_in_group, ends.broadcast(tp_rank(ends), 1).item()),
            "one": None if one is None else (one.ranks, one.device_group.size()),
            "refused": [attempt(everyone.make_sub_group, ranks) for ranks in ([], [0, 0], [0, 4], [-1, 0], [1, 0])],
            "different": attempt(everyone.make_sub_group, [0, 1] if rank < 2 else [2, 3]),
            "all": whose(everyone.make_sub_group([0, 1, 2, 3])),
        }
        if ends is not None:
            ends.close()
            facts["closed"] = attempt(ends.barrier).kind
        facts["parent"] = whose(tp)
    return facts


def tp_rank(group: ps.GroupCoordinator) -> torch.Tensor:
    return torch.tensor([float(group.rank)])


def test_sub_groups(pools: Pools) -> None:
    for rank, facts in enumerate(pools(4).run(_sub_groups, timeout_s=DEADLINE_S)):
        assert facts["ends"] == (([0, 3], rank // 3, 3.0) if rank in (0, 3) else None)
        assert facts.get("closed") == ("GroupDestroyedError" if rank in (0, 3) else None)
        assert facts["one"] == (([2], 1) if rank == 2 else None)
        assert [outcome.kind for outcome in facts["refused"]] == ["InvalidArgumentError"] * 5
        for outcome, part in zip(facts["refused"], ("distinct", "distinct", "4", "-1", "ascending"), strict=True):
            assert part in outcome.text, outcome
        assert facts["different"].kind == "ConfigMismatchError"
        assert facts["different"].seconds < SOON_S
        assert facts["all"] == facts["parent"] == [0, 1, 2, 3]


def _sub_groups_of_two_groups() -> tuple[list[int] | None, list[int] | None]:
    with world(4):
        tp = ps.get_tp_group()
        if tp.ranks[0] == 0:
            tp.make_sub_group([1, 2])
        pair = tp.make_sub_group([0, 1])
        uneven = tp.make_sub_group([0, 3] if tp.ranks[0] == 0 else [1, 2, 3])
        return (None if pair is None else whose(pair)), (None if uneven is None else whose(uneven))


def test_sub_groups_of_different_groups_at_once(pools: Pools) -> None:
    found = pools(8).run(_sub_groups_of_two_groups, timeout_s=DEADLINE_S)
    assert [pair for pair, _ in found] == [[0, 1], [0, 1], None, None, [4, 5], [4, 5], None, None]
    assert [uneven for _, uneven in found] == [[0, 3], None, None, [0, 3], None, [5, 6, 7], [5, 6, 7], [5, 6, 7]]


def _world_group_by_hand(name: str) -> dict[str, Any]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(name, agent), rank=rank, world_size=size)
    try:
        refused = attempt(ps.init_world_group, [0, 1], rank, "gloo")
        everyone = ps.init_world_group(list(range(size)), rank, "gloo")
        facts = {
            "refused": refused.kind,
            "same": everyone is ps.get_world_group(),
            "ranks": whose(everyone),
            "local": everyone.local_rank,
            "nodes": attempt(ps.get_node_count).kind,
        }
        ps.initialize_model_parallel(2)
        facts["tp"] = whose(ps.get_tp_group())
        ps.destroy_distributed_environment()
        return {**facts, "stays": dist.is_initialized()}
    finally:
        dist.destroy_process_group()


def test_a_world_group_by_hand(pools: Pools) -> None:
    for rank, facts in enumerate(pools(4).run(_world_group_by_hand, f"by hand/{uuid.uuid4()}", timeout_s=DEADLINE_S)):
        assert facts == {
            "refused": "LayoutError",
            "same": True,
            "ranks": [0, 1, 2, 3],
            "local": rank,
            "nodes": "GroupNotInitializedError",
            "tp": [rank // 2 * 2, rank // 2 * 2 + 1],
            "stays": True,
        }


PAIRED = {name: ps.GroupOptions("cpu:gloo") for name in ("tp", "dp", "cp", "tp_cp", "embedding")}
"""A backend with another name than gloo gets a gloo group beside it, as NCCL does."""


def _paired() -> dict[str, Any]:
    with world(2, 1, context_parallel_size=4, axis_options=PAIRED):
        groups = ps.get_parallel_groups()
        cp, tp, rank = ps.get_cp_group(), ps.get_tp_group(), ps.get_rank()
        before = set(dist.distributed_c10d._world.pg_map)
        refused = [attempt(cp.send_object, 5), attempt(cp.recv_object), attempt(cp.isend_tensor_dict, {})]
        facts: dict[str, Any] = {
            "pairs": [tp.cpu_group is not tp.device_group, tp.cpu_group.name(), cp.backend],
            "refused": [outcome.kind for outcome in refused],
            "advice": all("barrier() on every rank" in outcome.text for outcome in refused),
            "carries tensors": whose(cp),
        }
        cp.barrier()
        facts["made by the barrier"] = len(set(dist.distributed_c10d._world.pg_map) - before)
        facts["its own"] = cp.cpu_group is cp.cpu_group and cp.cpu_group is not cp.device_group
        facts["ranks"] = dist.get_process_group_ranks(cp.cpu_group) == cp.ranks
        facts["messages"] = cp.broadcast_object({"from": rank}, 2)["from"]
        if cp.rank_in_group == 0:
            cp.send_object("over gloo", 3)
        elif cp.rank_in_group == 3:
            facts["sent"] = cp.recv_object(0)
        facts["timeouts"] = {group.context.timeout_s for group in groups.groups.values()}
        ps.destroy_model_parallel()
        facts["left"] = len(dist.distributed_c10d._world.pg_map)
    return facts


def test_the_gloo_group_beside_a_device_group_is_made_at_its_first_use(pools: Pools) -> None:
    for rank, facts in enumerate(pools(8).run(_paired, timeout_s=DEADLINE_S)):
        assert facts.pop("sent", "over gloo") == "over gloo"
        assert facts == {
            "pairs": [True, "gloo", "cpu:gloo"],
            "refused": ["GroupNotInitializedError"] * 3,
            "advice": True,
            "carries tensors": list(range(rank % 2, 8, 2)),
            "made by the barrier": 1,
            "its own": True,
            "ranks": True,
            "messages": 4 + rank % 2,
            "timeouts": {60.0},
            "left": 1,
        }


def _derived() -> dict[str, Any]:
    with world(2, 2, context_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1):
        groups = ps.get_parallel_groups()
        facts: dict[str, Any] = {"at start": list(groups.groups)}
        made = len(groups.world.pool._groups)  # type: ignore[union-attr]
        facts["model"] = whose(ps.get_model_parallel_group())
        facts["again"] = ps.get_model_group() is groups.get("model") is ps.get_group("model")
        facts["one more"] = len(groups.world.pool._groups) - made  # type: ignore[union-attr]
        facts["shared"] = ps.get_tp_ep_group().device_group is ps.get_ep_group().device_group
        embedding = ps.try_get_embedding_group()
        facts["embedding"] = embedding and whose(embedding)
        facts["position"] = attempt(ps.get_position_embedding_group).kind
        rows = [axis.name for axis in ps.AXES if axis.name in groups.layout.names]
        for name in rows:
            groups.try_get(name)
        groups.warm_up()
        facts["all"] = {name: group.ranks for name, group in groups.groups.items()}
        facts["sums"] = all(whose(group) == group.ranks for group in groups.groups.values())
        facts["rows"] = sorted(groups.groups) == sorted(
            name for name in rows if groups.layout.group_of(ps.get_rank(), name)
        )
        lists = {tuple(group.ranks) for group in groups.groups.values() if 1 < group.world_size < 8}
        facts["each set once"] = len(groups.world.pool._groups) == 1 + len(lists)  # type: ignore[union-attr]
        ps.destroy_model_parallel()
        facts["left"] = len(dist.distributed_c10d._world.pg_map)
    return facts


def test_derived_groups_are_made_at_their_first_use(pools: Pools) -> None:
    layout = ps.resolve_layout(8, {"tp": 2, "pp": 2, "cp": 2, "ep": 2, "etp": 1}, ranks_per_node=8)
    for rank, facts in enumerate(pools(8).run(_derived, timeout_s=DEADLINE_S)):
        assert facts["at start"] == ["tp", "cp", "ep", "dp", "pp"]
        assert facts["model"] == layout.group_of(rank, "model")
        assert facts["again"]
        assert facts["one more"] == 1
        assert facts["shared"], "with etp = 1, equal rank sets must share a process group"
        assert facts["embedding"] == layout.group_of(rank, "pp")
        assert facts["position"] == ("ok" if rank < 4 else "GroupNotInitializedError")
        assert facts["all"] == {name: layout.group_of(rank, name) for name in facts["all"]}
        assert facts["sums"] and facts["rows"] and facts["each set once"], facts
        assert facts["left"] == 1


def _uneven_membership() -> list[Any]:
    """Ranks belong to different numbers of groups, so torch's group counters differ."""
    with world(1, 4):
        rank = ps.get_rank()
        facts: list[Any] = [ps.get_parallel_groups().try_get("embedding") is not None]
        if rank == 0:
            _ = ps.get_tp_group().device_group
        pair = ps.get_pp_group().make_sub_group([0, 1])
        last = ps.get_pp_group().make_sub_group([1, 2, 3])
        facts += [None if group is None else whose(group) for group in (pair, last)]
        if last is not None:
            last.destroy()
        again = ps.get_pp_group().make_sub_group([1, 2, 3])
        facts.append(None if again is None else whose(again))
    return facts


def test_members_in_different_numbers_of_groups(pools: Pools) -> None:
    for rank, facts in enumerate(pools(4).run(_uneven_membership, timeout_s=DEADLINE_S)):
        last = [1, 2, 3] if rank else None
        assert facts == [rank in (0, 3), [0, 1] if rank < 2 else None, last, last]


def _two_models() -> dict[str, Any]:
    with world() as everyone:
        mine = [rank for rank in range(8) if (rank < 4) == (everyone.rank < 4)]
        engine = everyone.make_sub_group(list(range(4))) or None
        other = everyone.make_sub_group(list(range(4, 8)))
        engine = engine or other
        assert engine is not None
        sizes = {"tp": 2, "pp": 2} if everyone.rank < 4 else {"tp": 4}
        groups = ps.create_parallel_groups(engine, sizes)
        facts: dict[str, Any] = {
            "world": groups.world.ranks == mine,
            "layout": str(groups.layout),
            "tp": whose(groups.tp),
            "pp": whose(groups.pp),
            "model": whose(groups.get("model")),
        }
        with groups.use():
            facts["stage"] = ps.is_pipeline_first_stage(), ps.is_rank_in_embedding_group()
            facts["mesh"] = ps.get_device_mesh("pp", "tp").mesh.tolist()
        differing = {"tp": 2 if everyone.rank == 5 else 4}
        wrong = attempt(ps.create_parallel_groups, engine, differing) if everyone.rank >= 4 else None
        both = "tp=4 × dp=1 × pp=1 on rank 4 and tp=2 × dp=2 × pp=1 on rank 5"
        facts["wrong"] = wrong and (wrong.kind, both in wrong.text)
        groups.close()
    return facts


def test_two_models_on_parts_of_one_world(pools: Pools) -> None:
    for rank, facts in enumerate(pools(8).run(_two_models, timeout_s=DEADLINE_S)):
        first = rank < 4
        assert facts == {
            "world": True,
            "layout": "tp=2 × dp=1 × pp=2" if first else "tp=4 × dp=1 × pp=1",
            "tp": [rank // 2 * 2, rank // 2 * 2 + 1] if first else [4, 5, 6, 7],
            "pp": [rank % 2, rank % 2 + 2] if first else [rank],
            "model": [0, 1, 2, 3] if first else [4, 5, 6, 7],
            "stage": (rank < 2, True) if first else (True, True),
            "mesh": [[0, 1], [2, 3]] if first else [[4, 5, 6, 7]],
            "wrong": None if first else ("ConfigMismatchError", True),
        }


def _kept() -> dict[str, Any]:
    gc.collect()
    before = len(os.listdir("/proc/self/task"))
    with world(2, 2) as everyone:
        held = [everyone, ps.get_tp_group(), ps.get_pp_group(), ps.get_parallel_groups()]
        ps.get_tp_group().broadcast_object("hello")
        during = len(os.listdir("/proc/self/task"))
        everyone.barrier()
    gc.collect()
    deadline = time.monotonic() + SOON_S
    while len(os.listdir("/proc/self/task")) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    return {
        "grew": during > before,
        "back": len(os.listdir("/proc/self/task")) <= before,
        "told": [attempt(group.barrier).kind for group in held[:3]],
        "divide": attempt(ps.create_parallel_groups, everyone, {"tp": 2}).kind,
        "sub-group": attempt(everyone.make_sub_group, [0]).kind,
        "words": "group 'tp" in repr(held[1]),
    }


def test_a_destroyed_group_that_is_held_keeps_no_process_group(pools: Pools) -> None:
    for facts in pools(4).run(_kept, timeout_s=DEADLINE_S):
        assert facts == {
            "grew": True,
            "back": True,
            "told": ["GroupDestroyedError"] * 3,
            "divide": "GroupDestroyedError",
            "sub-group": "GroupDestroyedError",
            "words": True,
        }


def _made_beside_another() -> dict[str, Any]:
    facts: dict[str, Any] = {}
    with world() as everyone:
        pool = everyone.pool
        assert pool is not None
        kept = pool.acquire(everyone.context.ranks, GroupOptions("gloo", 41.0))
        inside = threading.Event()
        meet = pool.agreement.meet

        def meeting(*args: Any) -> str:
            inside.set()
            return meet(*args)

        def acquire() -> None:
            facts["made"] = pool.acquire(everyone.context.ranks, GroupOptions("gloo", 42.0))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool.agreement, "meet", meeting)
            thread = threading.Thread(target=acquire)
            if everyone.rank == 0:
                thread.start()
                facts["inside"] = inside.wait(SOON_S)
                pool.next_channel((0, 1))
                pool.release(kept)
                everyone.send(torch.ones(1), 1)
            else:
                pool.next_channel((0, 1))
                pool.release(kept)
                everyone.recv([1], torch.float32, 0)
                thread.start()
            thread.join(SOON_S)
        made = facts.pop("made")
        facts["sum"] = _sum_by_torch(made.process_group)
        pool.release(made)
    return facts


def test_the_pool_is_not_locked_while_other_ranks_are_waited_for(pools: Pools) -> None:
    results = pools(2).run(_made_beside_another, timeout_s=DEADLINE_S)
    assert [facts["sum"] for facts in results] == [2.0, 2.0]
    assert results[0]["inside"]


ONE_SIDED = [("alone", 0), ("alone", 1), ("fails", 0), ("fails", 1)]


def _one_sided() -> list[tuple[str, float]]:
    found = []
    with world() as everyone:
        pool = everyone.pool
        assert pool is not None
        for number, (how, rank) in enumerate(ONE_SIDED):
            options, told = GroupOptions("gloo", 5.0 + number / 8), "not asked"
            with environment(PARALLEL_STATE_START_TIMEOUT_S="1"), pytest.MonkeyPatch.context() as patch:
                if how == "fails" and everyone.rank == rank:
                    patch.setattr(torch_internals, "new_group_of_members", _no_descriptor)
                if how == "fails" or everyone.rank == rank:
                    told = attempt(pool.acquire, everyone.context.ranks, options).kind
            everyone.barrier()
            made = pool.acquire(everyone.context.ranks, options)
            found.append((told, _sum_by_torch(made.process_group)))
            pool.release(made)
    return found


def test_a_group_that_failed_on_one_rank_is_made_by_all(pools: Pools) -> None:
    """After different numbers of attempts, the ranks agree on a new name."""
    for rank, found in enumerate(pools(2).run(_one_sided, timeout_s=DEADLINE_S)):
        for (how, other), (told, total) in zip(ONE_SIDED, found, strict=True):
            assert told != "ok"
            assert (told == "not asked") == (how == "alone" and rank != other), (how, other, told)
            assert total == 2.0


def _sub_group_that_fails(failing: int) -> tuple[Outcome, list[float]]:
    with world() as everyone:
        with pytest.MonkeyPatch.context() as patch:
            if everyone.rank == failing:
                patch.setattr(torch_internals, "new_group_of_members", _no_descriptor)
            told = attempt(everyone.make_sub_group, [0, 1])
        again = [group for group in [everyone.make_sub_group([0, 1]) for _ in range(2)] if group is not None]
        sums = [_sum_by_torch(group.device_group) for group in again]
        for group in again:
            group.destroy()
        return told, sums


def _no_descriptor(*_: Any, **__: Any) -> None:
    raise RuntimeError("no descriptor is left")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_sub_group_that_fails_on_one_rank_fails_on_all(pools: Pools, failing: int) -> None:
    for rank, (told, sums) in enumerate(pools(2).run(_sub_group_that_fails, failing, timeout_s=DEADLINE_S)):
        assert told.kind == "CommunicationError", told
        assert "no descriptor is left" in told.text
        assert told.suspect_ranks == (() if rank == failing else (failing,))
        assert told.seconds < SOON_S
        assert sums == [2.0, 2.0]


def _default_group_that_fails(of_torch: int) -> list[Outcome]:
    other = int(os.environ["RANK"]) != of_torch
    try:
        with pytest.MonkeyPatch.context() as patch:
            if other:
                patch.setattr(startup.reachability, "check_all_hosts", _no_descriptor)
            else:
                patch.setattr(dist.distributed_c10d, "ProcessGroupGloo", _no_descriptor)
            told = [attempt(ps.init_distributed_environment, timeout=5)]
        told.append(attempt(ps.init_distributed_environment, timeout=30))
        return [*told, attempt(ps.get_world_group().all_gather_object, 1)]
    finally:
        ps.destroy_distributed_environment()


@pytest.mark.parametrize("of_torch", [0, 1])
def test_a_default_group_that_failed_on_one_rank_is_made_by_all(pools: Pools, of_torch: int) -> None:
    for told in pools(2).run(_default_group_that_fails, of_torch, timeout_s=DEADLINE_S):
        assert told[0].kind in ("RuntimeError", "RendezvousError"), told
        assert [outcome.kind for outcome in told[1:]] == ["ok", "ok"], told


SHORT_S = 1.0


def _slow_connections() -> list[Any]:
    rank, found = int(os.environ["RANK"]), []

    def late(call: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*args: Any, **kwargs: Any) -> Any:
            time.sleep(2 * SHORT_S if rank == 1 else 0.0)
            return call(*args, **kwargs)

        return begin

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(startup.dist, "init_process_group", late(dist.init_process_group))
            patch.setattr(torch_internals, "new_group_of_members", late(torch_internals.new_group_of_members))
            ps.init_distributed_environment(timeout=SHORT_S)
            made = [ps.get_world_group(), ps.get_world_group().make_sub_group([0, 1])]
            made.append(ps.init_model_parallel_group([[0, 1]], 0, "gloo"))
        for group in made:
            assert group is not None
            options = getattr(
                group.cpu_group._get_backend(torch.device("cpu")), "options", None
            )  # only gloo's backend exposes them
            timeout_s = SHORT_S if options is None else options._timeout.total_seconds()
            found.append((timeout_s, _sum_by_torch(group.device_group)))
        sub = made[1]
        assert sub is not None
        dist.barrier()
        if rank == 0:
            found.append(attempt(sub.recv, torch.Size([4]), torch.float32, 1))
        else:
            time.sleep(2 * SHORT_S)
        return found
    finally:
        ps.destroy_distributed_environment()


def check_slow_connections(told: list[Any]) -> None:
    for rank, (*made, late) in enumerate(told):
        if rank == 0:
            assert late.kind == "CollectiveTimeoutError", late
            assert late.seconds < 2 * SHORT_S
        else:
            made.append(late)
        assert made == [(SHORT_S, 2.0)] * 3


def test_connecting_has_the_start_s_timeout(pools: Pools) -> None:
    check_slow_connections(pools(2).run(_slow_connections, timeout_s=DEADLINE_S))


FAKE_SIZES = (8, 1 << 18)
"""Over gloo, only the first fits the message that compares the calls."""


def _on_torchs_fake_backend() -> dict[str, Any]:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    facts: dict[str, Any] = {"differs": []}
    try:
        began = time.monotonic()
        ps.init_distributed_environment()
        ps.initialize_model_parallel(2, 2, warm_up=True)
        facts["seconds"] = time.monotonic() - began
        everyone, tp, pp = ps.get_world_group(), ps.get_tp_group(), ps.get_pp_group()
        facts["ranks"] = [group.ranks for group in (everyone, tp, pp)]
        facts["carriers"] = [[each.name for each in group.route.communicators] for group in (everyone, tp, pp)]
        for group in (everyone, tp, pp):
            for numel in FAKE_SIZES:
                for name, (ours, torchs) in _fake_calls(group, torch.arange(numel, dtype=torch.float32)).items():
                    if not torch.equal(ours(), torchs()):
                        facts["differs"].append((str(group), name, numel))
        facts["objects"] = [tp.broadcast_object("mine", 1), tp.all_gather_object("mine")]
        facts["refused"] = [attempt(tp.broadcast_object, None, 0).kind, attempt(pp.recv_tensor_dict).kind]
        facts["goes on"] = attempt(tp.barrier).kind
        facts["utilities"] = _utilities()
        ps.destroy_distributed_environment()
        facts["utilities without a world"] = _utilities()
    finally:
        ps.destroy_distributed_environment()
        dist.destroy_process_group()
    return facts


def _utilities() -> list[str]:
    ran = []
    for first in (ps.master_first, ps.local_master_first):
        with first():
            ran.append(first.__name__)
    return [*ran, attempt(ps.read_file_dist, os.devnull).kind]


def _fake_calls(group: ps.GroupCoordinator, x: torch.Tensor) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    process_group, size = group.device_group, group.world_size

    def out_of(call: Callable[..., Any], numel: int, *args: Any) -> Callable[[], torch.Tensor]:
        out = torch.zeros(numel)
        return lambda: (call(out, *args, group=process_group), out)[1]

    def in_place(call: Callable[..., Any], *args: Any, **options: Any) -> Callable[[], torch.Tensor]:
        copy = x.clone()
        return lambda: (call(copy, *args, group=process_group, **options), copy)[1]

    first = group.ranks[0]
    gathered = out_of(dist.all_gather_into_tensor, x.numel() * size, x)
    return {
        "all_reduce": (lambda: group.all_reduce(x), in_place(dist.all_reduce)),
        "avg": (lambda: group.all_reduce(x, "avg"), in_place(dist.all_reduce, dist.ReduceOp.AVG)),
        "all_gather": (lambda: group.all_gather(x), gathered),
        "all_gatherv": (lambda: group.all_gatherv(x, sizes=[x.numel()] * size), gathered),
        "reduce_scatter": (
            lambda: group.reduce_scatter(x), out_of(dist.reduce_scatter_tensor, x.numel() // size, x)
        ),
        "broadcast": (lambda: group.broadcast(x, 0), in_place(dist.broadcast, first)),
        "all_to_all": (lambda: group.all_to_all(x), out_of(dist.all_to_all_single, x.numel(), x)),
        "recv": (
            lambda: group.recv(x.shape, x.dtype, 1 - min(group.rank_in_group, 1)),
            out_of(dist.recv, x.numel(), group.ranks[1 - min(group.rank_in_group, 1)]),
        ),
    }  # fmt: skip


def test_torchs_fake_backend(pools: Pools) -> None:
    (facts,) = pools(1).run(_on_torchs_fake_backend, timeout_s=DEADLINE_S)
    assert facts["seconds"] < SOON_S
    assert facts["ranks"] == [[0, 1, 2, 3], [0, 1], [1, 3]]
    assert facts["carriers"] == [["fake"]] * 3
    assert facts["differs"] == []
    assert facts["objects"] == ["mine", ["mine", "mine"]]
    assert facts["refused"] == ["UnsupportedError"] * 2
    assert facts["goes on"] == "ok"
    for when in ("utilities", "utilities without a world"):
        assert facts[when] == ["master_first", "local_master_first", "ok"]


def _started_on_torchs_fake_backend(rank: int) -> tuple[float, list[int], float]:
    began = time.monotonic()
    with held_port() as port:
        ps.init_distributed_environment(8, rank, f"tcp://127.0.0.1:{port}", backend="fake")
    ps.initialize_model_parallel(2, 2)
    group = ps.get_tp_group()
    found = group.ranks, group.all_reduce(torch.ones(2)).sum().item()
    ps.destroy_distributed_environment()
    return time.monotonic() - began, *found


def test_a_world_over_torchs_fake_backend_looks_for_nobody(pools: Pools) -> None:
    for rank in (0, 3):
        ((seconds, ranks, total),) = pools(1).run(_started_on_torchs_fake_backend, rank, timeout_s=DEADLINE_S)
        assert (ranks, total) == ([rank - rank % 2, rank - rank % 2 + 1], 2.0)
        assert seconds < SOON_S
