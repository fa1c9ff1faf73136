from __future__ import annotations

import dataclasses
import itertools
import re
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel_state as ps
from parallel_state import ParallelGroups, simulate, simulated_group
from tests.contract.attempts import attempt, whose, world
from tests.references import SGLANG, VLLM
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 60.0
SOON_S = 10.0
AXES = ("tp", "pp", "dp")


def _divided(tp: int, pp: int, order: str) -> dict[str, Any]:
    with world(tp, pp, order=order):
        groups = ps.get_parallel_groups()
        facts: dict[str, Any] = {}
        for axis in AXES:
            group = getattr(groups, axis)
            total = group.all_reduce(torch.tensor([2.0**group.rank])).item()
            facts[axis] = (group.ranks, whose(group), total, group.rank_in_group, group.world_size)
        facts["layout"] = str(groups.layout)
        facts["coordinator"] = groups.is_coordinator
        facts["root"] = groups.root is groups.world is ps.get_world_group()
    return facts


@pytest.mark.parametrize(
    ("order", "pipeline", "data"),
    [
        ("tp-dp-pp", [[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("tp-pp-dp", [[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_eight_ranks_in_both_orders(pools: Pools, order: str, pipeline: list[list[int]], data: list[list[int]]) -> None:
    expected = {"tp": [[0, 1], [2, 3], [4, 5], [6, 7]], "pp": pipeline, "dp": data}
    for rank, facts in enumerate(pools(8).run(_divided, 2, 2, order, timeout_s=DEADLINE_S)):
        for axis, lists in expected.items():
            (mine,) = [ranks for ranks in lists if rank in ranks]
            assert facts[axis] == (mine, mine, sum(2.0**peer for peer in mine), mine.index(rank), 2), axis
        assert facts["layout"] == " × ".join(f"{axis}=2" for axis in order.split("-"))
        assert facts["coordinator"] == (rank == 0)
        assert facts["root"]


GETTERS = {
    "get_tensor_model_parallel_group": lambda g: g.tp,
    "get_tensor_model_parallel_world_size": lambda g: g.tp.world_size,
    "get_tensor_model_parallel_rank": lambda g: g.tp.rank_in_group,
    "get_tensor_model_parallel_src_rank": lambda g: g.tp.ranks[0],
    "get_tp_global_ranks": lambda g: g.tp.ranks,
    "get_pipeline_model_parallel_group": lambda g: g.pp,
    "get_pipeline_model_parallel_world_size": lambda g: g.pp.world_size,
    "get_pipeline_model_parallel_rank": lambda g: g.pp.rank_in_group,
    "get_pp_global_ranks": lambda g: g.pp.ranks,
    "get_pipeline_model_parallel_first_rank": lambda g: g.pp.ranks[0],
    "get_pipeline_model_parallel_last_rank": lambda g: g.pp.ranks[-1],
    "get_pipeline_model_parallel_next_rank": lambda g: g.pp.ranks[(g.pp.rank_in_group + 1) % g.pp.world_size],
    "get_pipeline_model_parallel_prev_rank": lambda g: g.pp.ranks[g.pp.rank_in_group - 1],
    "is_pipeline_first_stage": lambda g: g.pp.rank_in_group == 0,
    "is_pipeline_last_stage": lambda g: g.pp.rank_in_group == g.pp.world_size - 1,
    "get_data_parallel_group": lambda g: g.dp,
    "get_data_parallel_world_size": lambda g: g.dp.world_size,
    "get_data_parallel_rank": lambda g: g.dp.rank_in_group,
    "get_data_parallel_src_rank": lambda g: g.dp.ranks[0],
    "get_dp_global_ranks": lambda g: g.dp.ranks,
    "get_world_size": lambda g: g.world.world_size,
    "get_rank": lambda g: g.world.rank,
    "is_initialized": lambda g: True,
    "is_unitialized": lambda g: False,
    "model_parallel_is_initialized": lambda g: True,
    "get_world_group": lambda g: g.world,
    "get_tp_group": lambda g: g.tp,
    "get_pp_group": lambda g: g.pp,
    "get_dp_group": lambda g: g.dp,
    "try_get_world_group": lambda g: g.world,
    "try_get_tp_group": lambda g: g.tp,
    "try_get_pp_group": lambda g: g.pp,
    "try_get_dp_group": lambda g: g.dp,
    "get_parallel_groups": lambda g: g,
    "is_global_first_rank": lambda g: g.world.rank == 0,
}
FACTS = {
    "world_size": lambda group: group.world_size,
    "rank": lambda group: group.rank_in_group,
    "src_rank": lambda group: group.ranks[0],
    "global_ranks": lambda group: group.ranks,
}
OTHERS = {
        "get_pp_indices", "is_registered", "get_node_count", "get_nodes", "is_local_first_rank", "is_rank_zero",
        "try_get_current_groups", "get_device_mesh", "get_group", "get_group_rank", "get_group_ranks", "try_get_group",
        "get_virtual_pipeline_model_parallel_rank", "get_virtual_pipeline_model_parallel_world_size",
        "is_rank_in_embedding_group", "is_rank_in_position_embedding_group", "get_all_ranks",
        "get_process_environment",
        "get_amax_reduction_group", "get_data_parallel_group_gloo", "get_expert_data_parallel_group_gloo",
}  # fmt: skip


def _getters_of_the_table() -> dict[str, tuple[str, str]]:
    promised: dict[str, tuple[str, str]] = {}
    for axis in ps.AXES:
        promised[f"get_{axis.name}_group"] = promised[f"try_get_{axis.name}_group"] = (axis.name, "group")
        promised |= {f"get_{axis.name}_{fact}": (axis.name, fact) for fact in FACTS}
        long_names = {f"get_{axis.long_name}_{fact}": (axis.name, fact) for fact in ("group", *FACTS)}
        promised |= {name: fact for name, fact in long_names.items() if name in ps.__all__}
    return promised


def _long_names() -> dict[str, str]:
    pairs = {}
    for axis in ps.AXES:
        for prefix, fact in [("get", fact) for fact in ("group", *FACTS)] + [("try_get", "group")]:
            pairs[f"{prefix}_{axis.long_name}_{fact}"] = f"{prefix}_{axis.name}_{fact}"
    return {long: short for long, short in pairs.items() if long != short}


def test_long_names_are_those_of_other_engines() -> None:
    megatron = find_spec("megatron")
    if megatron is None:
        pytest.skip("megatron-core is not installed")
    (core,) = [
        path for root in megatron.submodule_search_locations or [] for path in Path(root).glob("core/parallel_state.py")
    ]
    theirs = "".join((core.read_text(), VLLM.read(), SGLANG.read()))
    known = set(re.findall(r"^(?:def )?((?:try_)?get_\w+)(?:\(| *=)", theirs, re.MULTILINE))
    ours = _long_names().keys() & set(ps.__all__)
    assert ours == _long_names().keys() & known
    assert len(ours) > 20


def test_a_long_name_that_went_says_the_short_one() -> None:
    gone = {long: short for long, short in _long_names().items() if long not in ps.__all__}
    assert len(gone) == 131
    for long, short in gone.items():
        assert short in ps.__all__
        with pytest.raises(ps.RenamedError, match=rf"Use {short}$"):
            getattr(ps, long)
    with pytest.raises(ImportError, match=r"Use get_cp_src_rank$"):
        exec("from parallel_state import get_context_parallel_src_rank")
    assert not hasattr(ps, "get_context_parallel_src_rank")
    with pytest.raises(AttributeError, match="has no attribute 'get_nothing'"):
        ps.get_nothing  # noqa: B018


def test_every_getter_is_named() -> None:
    named = {name for name in ps.__all__ if name.startswith(("get_", "try_get_", "is_", "model_parallel_is"))}
    assert named == GETTERS.keys() | _getters_of_the_table().keys() | OTHERS


ROOMY = {"cp": 2, "ep": 2, "etp": 1, "dp_replicate": 2, "dcp": 2}
"""On 48 ranks with tp = 2 and pp = 3, every kind of group differs."""


@pytest.mark.parametrize("rank", [0, 5, 22, 47])
def test_every_getter_of_the_table(rank: int) -> None:
    groups = simulate(rank, 48, 2, 3, ranks_per_node=8, **ROOMY)
    with groups.use():
        for name, (axis, fact) in _getters_of_the_table().items():
            ranks = groups.layout.group_of(rank, axis)
            getter = getattr(ps, name)
            if not ranks:
                assert name.startswith("try_get_") is (attempt(getter).kind == "ok"), name
                continue
            group = groups.get(axis)
            assert group.ranks == ranks, axis
            expected = group if fact == "group" else FACTS[fact](group)
            assert getter() == expected, name


@pytest.mark.parametrize("vp_stage", [None, 0, 1])
def test_megatrons_flags(vp_stage: int | None) -> None:
    groups = simulate(22, 48, 2, 3, virtual_pipeline_model_parallel_size=2, **ROOMY)
    get = groups.get
    with groups.use():
        assert ps.get_data_parallel_group(with_context_parallel=True) is get("dp_cp")
        assert ps.get_data_parallel_group(True, True).ranks == get("fsdp").ranks
        assert ps.get_data_parallel_world_size(True) == get("dp_cp").world_size == 8
        assert ps.get_data_parallel_world_size(True, True) == get("fsdp").world_size == 4
        assert ps.get_data_parallel_rank(True) == get("dp_cp").rank_in_group
        assert ps.get_data_parallel_src_rank(True) == get("dp_cp").ranks[0]
        assert attempt(ps.get_data_parallel_group, False, True).kind == "InvalidArgumentError"
        assert ps.get_tensor_and_data_parallel_group() is get("tp_dp")
        assert ps.get_tensor_and_data_parallel_group(with_context_parallel=True) is get("tp_dp_cp")
        assert ps.get_expert_data_parallel_group() is get("edp")
        assert ps.get_expert_data_parallel_group(partial_expert_data_parallel=True).ranks == get("efsdp").ranks
        assert ps.get_expert_data_parallel_world_size() == get("edp").world_size == 8
        assert ps.get_expert_data_parallel_world_size(True) == get("efsdp").world_size == 4
        assert ps.get_expert_data_parallel_rank(True) == get("efsdp").rank_in_group
        assert ps.get_intra_distributed_optimizer_instance_group().ranks == get("replica").ranks
        assert ps.get_inter_distributed_optimizer_instance_group().ranks == get("dp_replicate").ranks
        scales = {(cp, tp): ps.get_amax_reduction_group(cp, tp) for cp in (False, True) for tp in (False, True)}
        names = {(False, False): "tp_dp", (True, False): "tp_dp_cp", (False, True): "tp", (True, True): "tp_cp"}
        assert scales == {flags: get(name) for flags, name in names.items()}
        facts = groups.layout.coordinates(22)
        ep = groups.get("ep").rank_in_group
        assert ps.get_all_ranks() == "_".join(map(str, (facts["tp"], get("dp").rank_in_group, facts["cp"], 1, ep)))
        assert ps.get_virtual_pipeline_model_parallel_world_size() == 2
        assert ps.get_virtual_pipeline_model_parallel_rank() == 0
        assert not ps.is_pipeline_first_stage(False, vp_stage)
        assert attempt(ps.is_pipeline_first_stage, False, 2).kind == "ok", (
            "a middle rank must not check the stage number"
        )
        assert not ps.is_rank_in_embedding_group()


def test_optimizer_instances_by_megatrons_getters() -> None:
    sizes = {"context_parallel_size": 2, "num_distributed_optimizer_instances": 3}
    with simulate(13, 24, 2, **sizes).use():
        assert ps.get_data_parallel_group(True, True).ranks == [9, 11, 13, 15]
        assert ps.get_data_parallel_rank(True, True) == 2
        assert ps.get_expert_data_parallel_group(partial_expert_data_parallel=True).ranks == [9, 11, 13, 15]
        assert ps.get_intra_distributed_optimizer_instance_group().ranks == list(range(8, 16))
        assert ps.get_inter_distributed_optimizer_instance_group().ranks == [5, 13, 21]
        assert "inter_dist_opt" in ps.get_parallel_groups().groups, "a group with a given size is made at start"


@pytest.mark.parametrize("rank", [0, 7])
def test_virtual_stages(rank: int) -> None:
    with simulate(rank, 8, 2, 4, virtual_pipeline_model_parallel_size=2).use():
        assert [ps.is_pipeline_first_stage(False, stage) for stage in (0, 1)] == [rank == 0, False]
        assert [ps.is_pipeline_last_stage(False, stage) for stage in (0, 1)] == [False, rank == 7]
        assert [ps.is_rank_in_embedding_group(False, stage) for stage in (0, 1)] == [rank == 0, rank == 7]
        assert ps.is_rank_in_embedding_group()
        assert ps.is_rank_in_position_embedding_group() == (rank == 0)
        ps.set_virtual_pipeline_model_parallel_rank(1)
        assert ps.get_virtual_pipeline_model_parallel_rank() == 1
        assert (ps.is_pipeline_first_stage(), ps.is_pipeline_first_stage(False)) == (rank == 0, False)
        assert (ps.is_pipeline_last_stage(), ps.is_pipeline_last_stage(False)) == (rank == 7, rank == 7)
        for wrong in (2, -1):
            assert attempt(ps.set_virtual_pipeline_model_parallel_rank, wrong).kind == "InvalidArgumentError"
            assert attempt(ps.is_pipeline_last_stage, False, wrong).kind == ("InvalidArgumentError" if rank else "ok")


def test_virtual_stages_need_a_pipeline() -> None:
    with pytest.raises(ps.LayoutError, match="above 1"):
        simulate(0, 8, 2, virtual_pipeline_model_parallel_size=2)
    with pytest.raises(ps.LayoutError, match="positive"):
        simulate(0, 8, 2, 4, virtual_pipeline_model_parallel_size=0)
    with simulate(0, 8, 2, 4).use():
        assert ps.get_virtual_pipeline_model_parallel_world_size() is None
        assert ps.get_virtual_pipeline_model_parallel_rank() is None
        assert ps.is_pipeline_first_stage(ignore_virtual=False)
        assert attempt(ps.set_virtual_pipeline_model_parallel_rank, 0).kind == "InvalidArgumentError"


@pytest.mark.parametrize("rank", range(12))
def test_every_getter_says_what_the_group_says(rank: int) -> None:
    groups = simulate(rank, 12, 2, 3)
    assert [getattr(groups, axis).world_size for axis in AXES] == [2, 3, 2]
    assert groups.tp.ranks == groups.layout.group_of(rank, "tp")
    assert groups.pp.ranks == [rank % 4, rank % 4 + 4, rank % 4 + 8]
    with groups.use():
        for name, told in GETTERS.items():
            found, expected = getattr(ps, name)(), told(groups)
            same = (
                found is expected if isinstance(expected, (ps.GroupCoordinator, ParallelGroups)) else found == expected
            )
            assert same, (name, found, expected)
        assert ps.is_local_first_rank()
        assert ps.get_tp_group().first_global_rank == groups.tp.ranks[0]
        assert ps.get_pp_group().last_global_rank == groups.pp.ranks[-1]


def test_getters_give_lists_of_their_own() -> None:
    with simulate(0, 4, 2, 2).use():
        for name in GETTERS:
            if name.endswith("global_ranks"):
                getattr(ps, name)().append(99)
                assert 99 not in getattr(ps, name)()


def test_nothing_is_there_before_init() -> None:
    for name in GETTERS:
        if name.startswith("try_get_"):
            assert getattr(ps, name)() is None
        elif name in ("is_initialized", "model_parallel_is_initialized"):
            assert getattr(ps, name)() is False
        elif name == "is_unitialized":
            assert ps.is_unitialized()
        elif name != "is_global_first_rank":
            with pytest.raises(ps.GroupNotInitializedError, match="first"):
                getattr(ps, name)()
    assert ps.try_get_current_groups() is None
    with pytest.raises(ps.GroupNotInitializedError, match=r"enter `with groups.use\(\):` first"):
        ps.current_groups()


def _aliases_of_operations() -> list[bool]:
    with world(4):
        tp, rank = ps.get_tp_group(), ps.get_rank()
        x = torch.arange(8.0).view(2, 4) * (rank + 1)
        batch = {"x": x, "n": rank} if rank == 0 else None
        gathered, expected = ps.tensor_model_parallel_gather(x), tp.gather(x, 0, -1)
        wide = ps.tensor_model_parallel_all_gather(x)
        return [
            torch.equal(ps.tensor_model_parallel_all_reduce(x), torch.arange(8.0).view(2, 4) * 10),
            torch.equal(wide, torch.cat([torch.arange(8.0).view(2, 4) * (r + 1) for r in range(4)], -1)),
            torch.equal(ps.tensor_model_parallel_all_gather(x, 0), tp.all_gather(x, 0)),
            torch.equal(ps.tensor_model_parallel_reduce_scatter(wide), tp.reduce_scatter(wide, -1)),
            torch.equal(ps.tensor_model_parallel_reduce_scatter(wide.T.contiguous(), 0), tp.reduce_scatter(wide.T, 0)),
            (gathered is None) == (expected is None) == (rank != 0),
            gathered is None or torch.equal(gathered, wide),
            (ps.tensor_model_parallel_gather(x, 2, 0) is not None) == (rank == 2),
            ps.broadcast_tensor_dict(batch)["n"] == 0,
            ps.broadcast_tensor_dict({"n": rank}, 3)["n"] == 3,
        ]


def test_aliases_of_operations(pools: Pools) -> None:
    assert pools(4).run(_aliases_of_operations, timeout_s=DEADLINE_S) == [[True] * 10] * 4


def test_a_tensor_dict_before_init_is_returned() -> None:
    tensors = {"x": torch.ones(1)}
    assert ps.broadcast_tensor_dict(tensors) is tensors


def test_groups_in_use_are_those_of_the_thread() -> None:
    first, second = simulate(0, 4, 2), simulate(3, 8, 4, 2)
    seen: dict[str, Any] = {}
    inside, checked = threading.Event(), threading.Event()

    def other() -> None:
        seen["before"] = ps.try_get_tp_group()
        with second.use():
            inside.set()
            checked.wait(SOON_S)
            seen["within"] = ps.get_tp_group()
        seen["after"] = ps.try_get_tp_group()

    thread = threading.Thread(target=other)
    thread.start()
    with first.use() as used:
        assert used is first
        assert inside.wait(SOON_S)
        assert ps.get_tp_group() is first.tp
        assert ps.current_groups() is ps.try_get_current_groups() is ps.get_parallel_groups() is first
        with second.use():
            assert ps.get_world_size() == 8
        assert ps.get_world_size() == 4
        checked.set()
        thread.join(SOON_S)
        with pytest.raises(ZeroDivisionError), second.use():
            raise ZeroDivisionError
        assert ps.get_tp_group() is first.tp
    assert seen == {"before": None, "within": second.tp, "after": None}
    assert ps.try_get_current_groups() is None


def test_what_groups_must_be() -> None:
    """Rank 0 of the world reports for all of its groups, so it must be rank 0 of each."""
    groups = simulate(0, 4, 2)
    for axis in AXES:
        with pytest.raises(ps.LayoutError, match="the first rank of each of its groups"):
            dataclasses.replace(groups, groups={**groups.groups, axis: simulated_group([1, 0], 0)})
    for rank, axis in itertools.product(range(1, 4), AXES):
        mine = simulate(rank, 4, 2)
        other = {**mine.groups, axis: simulated_group([0, rank], rank)}
        assert not dataclasses.replace(mine, groups=other).is_coordinator
    with pytest.raises(dataclasses.FrozenInstanceError):
        groups.world = groups.pp  # type: ignore[misc]
    assert groups.root is groups.world
    assert groups.layout == ps.resolve_layout(4, {"tp": 2})
    groups.close()
    groups.close()
    with pytest.raises(ps.GroupDestroyedError):
        groups.tp.all_reduce(torch.ones(1))
    assert groups.world.all_reduce(torch.ones(1)).item() == 4.0


def test_a_simulated_world_makes_no_process_groups() -> None:
    groups = simulate(0, 4, 2)
    with pytest.raises(ps.GroupNotInitializedError, match="simulate"):
        ps.create_parallel_groups(groups.world, {"tp": 2, "pp": 1, "dp": None}, "tp-dp-pp")
    with groups.use(), pytest.raises(ps.GroupNotInitializedError, match="simulated"):
        ps.init_model_parallel_group([[0, 1], [2, 3]], 0, "gloo")
    with pytest.raises(ps.GroupNotInitializedError, match="simulated"):
        _ = groups.tp.device_group


def _patched() -> dict[str, Any]:
    with world(4) as everyone:
        own, rank = ps.get_tp_group(), ps.get_rank()
        draft = ps.init_model_parallel_group([[0, 1], [2, 3]], rank, "gloo")
        with ps.patch_tensor_parallel_group(draft):
            facts: dict[str, Any] = {
                "patched": (
                    ps.get_tp_group() is draft,
                    ps.get_tensor_model_parallel_world_size(),
                    whose(ps.get_tp_group()),
                ),
                "nested": attempt(ps.patch_tensor_parallel_group(own).__enter__).kind,
                "others": ps.get_pp_group().world_size,
            }
        facts["restored"] = ps.get_tp_group() is own
        with pytest.raises(ZeroDivisionError), ps.patch_tensor_parallel_group(draft):
            raise ZeroDivisionError
        with ps.patch_tensor_parallel_group(draft):
            facts["again"] = ps.get_tp_group() is draft
        other = ps.create_parallel_groups(everyone, {"tp": 2, "pp": 2, "dp": None}, "tp-dp-pp")
        with other.use():
            with ps.patch_tensor_parallel_group(draft):
                facts["in a thread's groups"] = (ps.get_tp_group() is draft, ps.get_pp_group() is other.pp)
            facts["thread's restored"] = ps.get_tp_group() is other.tp
        facts["process-wide untouched"] = ps.get_tp_group() is own
        with ps.patch_tensor_parallel_group(draft):
            ps.destroy_model_parallel()
        facts["destroyed within"] = ps.try_get_tp_group()
    facts["without groups"] = attempt(ps.patch_tensor_parallel_group(draft).__enter__).kind
    return facts


def test_patch_tensor_parallel_group(pools: Pools) -> None:
    for rank, facts in enumerate(pools(4).run(_patched, timeout_s=DEADLINE_S)):
        assert facts == {
            "patched": (True, 2, [rank // 2 * 2, rank // 2 * 2 + 1]),
            "nested": "AlreadyInitializedError",
            "others": 1,
            "restored": True,
            "again": True,
            "in a thread's groups": (True, True),
            "thread's restored": True,
            "process-wide untouched": True,
            "destroyed within": None,
            "without groups": "GroupNotInitializedError",
        }
