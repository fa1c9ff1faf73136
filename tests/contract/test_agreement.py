from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import parallel_state as ps
from tests.contract.attempts import Outcome, attempt, environment, whose, world
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 60.0
SOON_S = 10.0


def _wrong_on_one() -> dict[str, Any]:
    with world(4):
        tp, rank = ps.get_tp_group(), ps.get_rank()
        everyone = ps.get_world_group()
        told = {
            "rank": attempt(tp.make_sub_group, [0, 9] if rank == 2 else [0, 1]),
            "twice": attempt(tp.make_sub_group, [0, 0]),
            "lists": attempt(ps.init_model_parallel_group, [[0, 1]] if rank == 1 else [[0, 1], [2, 3]], 0, "gloo"),
            "backend": attempt(ps.init_model_parallel_group, [[0, 1], [2, 3]], 0, "abc" if rank == 3 else "gloo"),
            "picker": attempt(
                ps.create_parallel_groups,
                everyone,
                {"pp": 2},
                get_embedding_ranks=(lambda ranks: [99]) if rank == 0 else None,
            ),
            "picker raises": attempt(
                ps.create_parallel_groups,
                everyone,
                {"pp": 2},
                get_embedding_ranks=(lambda ranks: 1 // 0) if rank == 1 else None,
            ),
            "no bool": attempt(ps.create_parallel_groups, everyone, {"pp": 2}, eager="yes" if rank == 2 else False),
            "no mapping": attempt(ps.create_parallel_groups, everyone, None if rank == 2 else {"pp": 2}),
        }
        then = tp.make_sub_group([0, 1])
        return {"told": told, "then": None if then is None else whose(then)}


def test_one_rank_that_asks_wrongly_is_told_of_by_all(pools: Pools) -> None:
    kinds = dict.fromkeys(("rank", "lists", "backend", "picker", "no bool", "no mapping"), "ConfigMismatchError")
    for rank, facts in enumerate(pools(4).run(_wrong_on_one, timeout_s=DEADLINE_S)):
        for name, outcome in facts["told"].items():
            expected = kinds.get(name, "InvalidArgumentError" if name == "twice" else "ConfigMismatchError")
            if name == "picker raises" and rank == 1:
                expected = "ZeroDivisionError"
            assert outcome.kind == expected, (name, outcome)
            assert outcome.seconds < SOON_S
        assert facts["then"] == ([0, 1] if rank < 2 else None)


def _late() -> list[Outcome]:
    ps.init_distributed_environment(timeout=2)
    try:
        if ps.get_rank() == 3:
            time.sleep(3.0)
        told = []
        for _ in range(4):
            told.append(attempt(ps.initialize_model_parallel, 2))
            if told[-1].kind == "ok":
                break
        return told
    finally:
        ps.destroy_distributed_environment()


def test_a_late_rank_hears_what_was_said_and_a_retry_meets(pools: Pools) -> None:
    for rank, told in enumerate(pools(4).run(_late, timeout_s=DEADLINE_S)):
        assert told[0].kind == "CollectiveTimeoutError", told
        assert told[0].suspect_ranks == (() if rank == 3 else (3,)), told
        assert ("rank 3 came too late" in told[0].text) == (rank == 3), told
        assert told[-1].kind == "ok", told


def _facts_on_one_rank() -> dict[str, Any]:
    with world(2, 2, context_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1):
        groups = ps.get_parallel_groups()
        made = set(groups.groups)
        facts: dict[str, Any] = {}
        if ps.get_rank() == 5:
            facts = {
                "numbers": [
                    ps.get_data_parallel_world_size(True),
                    ps.get_model_rank(),
                    ps.get_expert_data_parallel_rank(),
                    ps.get_dp_cp_src_rank(),
                ],
                "ranks": {name: ps.get_group_ranks(name) for name in groups.layout.names if name[:3] != "pos"},
                "none": attempt(ps.get_position_embedding_world_size).kind,
            }
        facts["made"] = sorted(set(groups.groups) - made)
        return facts


def test_a_number_makes_no_group(pools: Pools) -> None:
    """One rank may ask alone, as in `if rank == 5: print(get_…_world_size())`. A new group would need all ranks."""
    layout = ps.resolve_layout(8, {"tp": 2, "pp": 2, "cp": 2, "ep": 2, "etp": 1}, ranks_per_node=8)
    found = pools(8).run(_facts_on_one_rank, timeout_s=DEADLINE_S)
    assert all(facts["made"] == [] for facts in found)
    facts = found[5]
    ranks = {name: layout.group_of(5, name) for name in facts["ranks"]}
    assert facts["ranks"] == ranks
    assert facts["none"] == "GroupNotInitializedError"
    assert facts["numbers"] == [2, ranks["model"].index(5), ranks["edp"].index(5), ranks["dp_cp"][0]]


def _without_one() -> dict[str, Any]:
    with world(2, 2, timeout=2):
        told = attempt(lambda: whose(ps.get_group("model"))) if ps.get_rank() != 1 else None
        ps.get_world_group().barrier()
        for _ in range(3):
            again = attempt(lambda: whose(ps.get_group("model")))
            if again.kind == "ok":
                break
        return {"first": told and (told.kind, told.suspect_ranks), "again": again.text}


def test_a_group_that_not_all_members_ask_for(pools: Pools) -> None:
    for rank, facts in enumerate(pools(4).run(_without_one, timeout_s=DEADLINE_S)):
        assert facts == {
            "first": None if rank == 1 else ("CollectiveTimeoutError", (1,)),
            "again": "[0, 1, 2, 3]",
        }


def _two_threads() -> dict[str, Any]:
    with world(2, 2, context_parallel_size=2, axis_options={"cp": ps.GroupOptions("cpu:gloo")}):
        found: list[Any] = []
        start = threading.Barrier(2)

        def ask() -> None:
            start.wait(SOON_S)
            found.append((ps.get_group("model"), ps.get_cp_group().cpu_group))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        (model, cpu), (other, other_cpu) = found
        return {"same": model is other and cpu is other_cpu, "ranks": whose(model)}


def test_two_threads_that_ask_for_one_group(pools: Pools) -> None:
    layout = ps.resolve_layout(8, {"tp": 2, "pp": 2, "cp": 2})
    for rank, facts in enumerate(pools(8).run(_two_threads, timeout_s=DEADLINE_S)):
        assert facts == {"same": True, "ranks": layout.group_of(rank, "model")}


def _tensors_of_two() -> dict[str, Any]:
    with world(2, 1, context_parallel_size=4, axis_options={"cp": ps.GroupOptions("cpu:gloo")}):
        cp = ps.get_cp_group()
        told = attempt(cp.send, torch.ones(2), 1) if cp.rank_in_group == 0 else attempt(cp.recv, (2,), torch.float32, 0)
        asked = (
            attempt(cp.isend, torch.ones(2), 1) if cp.rank_in_group == 0 else attempt(cp.irecv, (2,), torch.float32, 0)
        )
        cp.barrier()
        if cp.rank_in_group == 0:
            cp.send(torch.full((2,), 5.0), 1)
        got = cp.recv((2,), torch.float32, 0).tolist() if cp.rank_in_group == 1 else None
        return {"told": (told.kind, asked.kind), "got": got}


def test_a_tensor_between_two_does_not_make_the_gloo_group_of_more(pools: Pools) -> None:
    for rank, facts in enumerate(pools(8).run(_tensors_of_two, timeout_s=DEADLINE_S)):
        assert facts["told"] == ("GroupNotInitializedError",) * 2
        assert facts["got"] == ([5.0, 5.0] if rank in (2, 3) else None)


def _over_lazy_gloo() -> dict[str, list[int]]:
    with environment(TORCH_GLOO_LAZY_INIT="1"), world(2, 2, context_parallel_size=2, eager=True):
        groups = ps.get_parallel_groups().groups
        for group in groups.values():
            if group.world_size > 1:
                dist.barrier(group=group.cpu_group)
        return {name: whose(group) for name, group in groups.items()}


def test_groups_over_a_gloo_that_connects_at_the_first_message(pools: Pools) -> None:
    layout = ps.resolve_layout(8, {"tp": 2, "pp": 2, "cp": 2}, ranks_per_node=8)
    for rank, facts in enumerate(pools(8).run(_over_lazy_gloo, timeout_s=DEADLINE_S)):
        expected = {name: layout.group_of(rank, name) for name in layout.names}
        assert facts == {name: ranks for name, ranks in expected.items() if ranks}
