from __future__ import annotations

import gc
import os
import uuid
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parallel_state as ps
from parallel_state import simulate
from parallel_state.groups import world as startup
from tests.contract.attempts import Outcome, attempt, environment
from tests.extent import LONG
from tests.helpers.doors import token_of
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 60.0
SOON_S = 10.0  # far below the timeout of 60 s, for a busy machine
GETTERS = ("world", "tp", "pp", "dp")


def _twice_and_too_early() -> dict[str, Outcome]:
    outcomes = {"groups before world": attempt(ps.initialize_model_parallel, 2)}
    outcomes["world group before"] = attempt(ps.init_world_group, [0, 1, 2, 3], 0, "gloo")
    ps.init_distributed_environment()
    world = ps.get_world_group()
    outcomes["world twice"] = attempt(ps.init_distributed_environment)
    outcomes["world group twice"] = attempt(ps.init_world_group, [0, 1, 2, 3], 0, "gloo")
    ps.initialize_model_parallel(2)
    tp = ps.get_tp_group()
    outcomes["groups twice"] = attempt(ps.initialize_model_parallel, 2)
    outcomes["still there"] = attempt(lambda: (ps.get_world_group() is world, ps.get_tp_group() is tp))
    outcomes["still work"] = attempt(lambda: tp.all_reduce(torch.ones(1)).item())
    ps.destroy_distributed_environment()
    return outcomes


def test_init_twice_and_too_early(pools: Pools) -> None:
    expected = {
        "groups before world": ("GroupNotInitializedError", "init_distributed_environment() before"),
        "world group before": ("GroupNotInitializedError", "init_world_group"),
        "world twice": ("AlreadyInitializedError", "destroy_distributed_environment() first"),
        "world group twice": ("AlreadyInitializedError", "call destroy_distributed_environment() first"),
        "groups twice": ("AlreadyInitializedError", "destroy_model_parallel() first"),
        "still there": ("ok", "(True, True)"),
        "still work": ("ok", "2.0"),
    }
    for outcomes in pools(4).run(_twice_and_too_early, timeout_s=DEADLINE_S):
        assert {name: outcome.kind for name, outcome in outcomes.items()} == {n: k for n, (k, _) in expected.items()}
        for name, outcome in outcomes.items():
            assert expected[name][1] in outcome.text, outcome


def _misfits() -> dict[str, Outcome]:
    rank = int(os.environ["RANK"])
    ps.init_distributed_environment()
    init = ps.initialize_model_parallel
    outcomes = {
        "3 of 4": attempt(init, 3),
        "8 of 4": attempt(init, 2, 4),
        "zero": attempt(init, 0),
        "product": attempt(lambda: init(2, 1, data_parallel_size=1)),
        "order": attempt(init, 2, order="tp"),
        "order's axes": attempt(init, 2, order="tp-dp-pp-xp"),
        "order's type": attempt(init, 2, order=5 if rank == 1 else "tp-dp-pp"),
        "two or four": attempt(init, 2 if rank == 0 else 4),
        "one is wrong": attempt(init, 3 if rank == 2 else 2),
        "orders": attempt(init, 2, order="tp-pp-dp" if rank == 3 else "tp-dp-pp"),
        "timeouts": attempt(init, 2, timeout=5 + (rank == 1)),
        "axis backend": attempt(init, 2, axis_options={"xp": ps.GroupOptions("gloo")}),
    }
    ps.set_custom_all_reduce(rank != 3)
    outcomes["custom all-reduce"] = attempt(init, 2)
    ps.set_custom_all_reduce(True)
    outcomes["none made"] = attempt(lambda: (ps.model_parallel_is_initialized(), ps.try_get_tp_group()))
    outcomes["then"] = attempt(init, 2, order="tp-pp-dp")
    outcomes["works"] = attempt(lambda: ps.get_tp_group().all_reduce(torch.ones(1)).item())
    ps.destroy_distributed_environment()
    return outcomes


def test_sizes_that_do_not_fit_are_refused_on_every_rank(pools: Pools) -> None:
    parts = {
        "3 of 4": ("LayoutError", ["4 ranks are not divisible by tp=3;", "[1, 2, 4]"]),
        "8 of 4": ("LayoutError", ["4 ranks", "tp=2 × pp=4 = 8"]),
        "zero": ("LayoutError", ["'tp' must be a positive integer", "is 0"]),
        "product": ("LayoutError", ["world size, 4", "is tp=2;", "factor of 2"]),
        "order": ("LayoutError", ["'tp'", "lacks 'dp', whose size is 2"]),
        "order's axes": ("LayoutError", ["'xp', which isn't an axis", "the axes are tp, cp"]),
        "order's type": ("ConfigMismatchError", ["order must be a str", "but is 5", "on rank 1"]),
        "two or four": ("ConfigMismatchError", ["tp=2 × dp=2 × pp=1 on rank 0", "tp=4 × dp=1 × pp=1 on rank 1"]),
        "one is wrong": ("ConfigMismatchError", ["tp=2 × dp=2 × pp=1 on rank 0", "tp=3", "on rank 2"]),
        "orders": ("ConfigMismatchError", ["tp=2 × dp=2 × pp=1 on rank 0", "tp=2 × pp=1 × dp=2 on rank 3"]),
        "timeouts": ("ConfigMismatchError", ["timeout_s", "5.0 on rank 0", "6.0 on rank 1"]),
        "axis backend": ("InvalidArgumentError", ["tp, cp, pcp", "'xp'"]),
        "custom all-reduce": ("ConfigMismatchError", ["custom_all_reduce", "True on rank 0", "False on rank 3"]),
        "none made": ("ok", ["(False, None)"]),
        "then": ("ok", []),
        "works": ("ok", ["2.0"]),
    }
    for rank, outcomes in enumerate(pools(4).run(_misfits, timeout_s=DEADLINE_S)):
        for name, outcome in outcomes.items():
            kind, texts = parts[name]
            assert outcome.kind == kind, (name, outcome)
            assert all(text in outcome.text for text in texts), (name, outcome)
            assert outcome.seconds < SOON_S
            assert kind != "ConfigMismatchError" or f"this is rank {rank}" in outcome.text


def _one_rank_stays_away() -> Outcome | None:
    ps.init_distributed_environment(timeout=2)
    return attempt(ps.initialize_model_parallel, 2) if ps.get_rank() != 3 else None


def test_a_rank_that_never_divides_the_world(pools: Pools) -> None:
    *outcomes, _ = pools(4).run(_one_rank_stays_away, timeout_s=DEADLINE_S)
    for outcome in outcomes:
        assert outcome.kind in ("CollectiveTimeoutError", "PeerDiedError"), outcome
        assert "parallel groups" in outcome.text
        assert outcome.seconds < 2 + SOON_S


def _one_rank_fails_at_the_end() -> tuple[Outcome, list[Outcome]]:
    ps.init_distributed_environment()
    if ps.get_rank() == 3:
        startup.closing_barrier = _fail  # type: ignore[assignment]
    try:
        with environment(PARALLEL_STATE_BARRIER_TIMEOUT_S="1"):
            made = attempt(ps.initialize_model_parallel, 2)
    finally:
        startup.closing_barrier = _closing_barrier
    found = [attempt(getattr(ps, f"get_{axis}_group")) for axis in ("tp", "pp", "dp")]
    ps.destroy_distributed_environment()
    return made, found


_closing_barrier = startup.closing_barrier


def _fail(world: object) -> None:
    raise ZeroDivisionError


def test_a_rank_that_fails_at_the_end_of_the_division(pools: Pools) -> None:
    for rank, (made, found) in enumerate(pools(4).run(_one_rank_fails_at_the_end, timeout_s=DEADLINE_S)):
        if rank == 3:
            assert made.kind == "ZeroDivisionError"
        else:
            assert made.kind == "CommunicationError", made
            assert all(part in made.text for part in ("closing barrier within 1 s", f"rank {rank} ", "Likely"))
            assert made.seconds < 1 + SOON_S
        assert {outcome.kind for outcome in found} == {"GroupNotInitializedError"}


def _ensure() -> dict[str, Outcome]:
    ps.init_distributed_environment()
    ensure = ps.ensure_model_parallel_initialized
    outcomes = {"makes": attempt(ensure, 2, 2)}
    groups = ps.get_parallel_groups()
    outcomes |= {
        "same": attempt(ensure, 2, 2),
        "same with dp": attempt(lambda: ensure(2, 2, data_parallel_size=1)),
        "rest": attempt(lambda: ensure(2, 2, data_parallel_size=-1)),
        "tp differs": attempt(ensure, 4, 2),
        "pp differs": attempt(ensure, 2, 1),
        "dp differs": attempt(lambda: ensure(2, 2, data_parallel_size=2)),
        "stages differ": attempt(lambda: ensure(2, 2, virtual_pipeline_model_parallel_size=2)),
        "order": attempt(lambda: ensure(2, 2, order="megatron")),
        "order differs": attempt(lambda: ensure(2, 2, order="pp-tp-dp")),
        "cp differs": attempt(lambda: ensure(2, 2, context_parallel_size=2)),
        "backend": attempt(lambda: ensure(2, 2, backend="gloo")),
        "backend differs": attempt(lambda: ensure(2, 2, backend="fake")),
        "no backend": attempt(lambda: ensure(2, 2, backend="nonsense")),
        "kept": attempt(lambda: ps.get_parallel_groups() is groups),
    }
    ps.destroy_distributed_environment()
    return outcomes


def test_ensure_model_parallel_initialized(pools: Pools) -> None:
    for outcomes in pools(4).run(_ensure, timeout_s=DEADLINE_S):
        differing = {"tp differs": "tp=4", "pp differs": "pp=1", "dp differs": "dp=2", "cp differs": "cp=2"}
        differing["order differs"] = "order='pp-tp-dp' (the first pp group [0, 1])"
        differing["backend differs"] = "backend='fake' (now: 'gloo')"
        differing["stages differ"] = "virtual_pipeline_model_parallel_size=2 (now: None)"
        for name, asked in differing.items():
            outcome = outcomes.pop(name)
            assert outcome.kind == "ConfigMismatchError"
            assert all(part in outcome.text for part in ("tp=2 × dp=1 × pp=2", asked, "destroy_model_parallel"))
        assert outcomes.pop("kept").text == "True"
        refused = outcomes.pop("no backend")
        assert refused.kind == "InvalidArgumentError"
        assert "must be one of" in refused.text
        assert {name: outcome.kind for name, outcome in outcomes.items()} == dict.fromkeys(outcomes, "ok")
        assert outcomes.keys() == {"makes", "same", "same with dp", "rest", "order", "backend"}


def test_ensure_compares_the_ranks_of_every_kind_of_group() -> None:
    """Orders with equal dense groups can number the ranks of expert layers differently."""
    ensure, sizes = ps.ensure_model_parallel_initialized, {"expert_model_parallel_size": 2}
    with simulate(3, 16, 2, 2, order="tp-ep-dp-pp", **sizes).use():
        for order in ("tp-ep-dp-pp", "megatron", "tp-ep-dp_shard-dp_replicate-pp", "TP-CP-EP-DP-PP"):
            ensure(2, 2, order=order, **sizes)
            ensure(2, order=order)
        for order in ("tp-dp-ep-pp", "tp-pp-dp", "vllm", "tp-cp-ep-pp-dp"):
            with pytest.raises(ps.ConfigMismatchError, match=f"order='{order}'.*destroy_model_parallel"):
                ensure(2, 2, order=order, **sizes)
    with simulate(0, 16, 2, cp=2, dp_replicate=2, order="tp-dp_shard-dp_replicate-cp-ep").use():
        ensure(2, order="tp-dp-cp-ep")
        for order in ("tp-dp_replicate-dp_shard-cp-ep", "tp-dp_shard-cp-ep-dp_replicate"):
            with pytest.raises(ps.ConfigMismatchError, match="order='tp-dp_"):
                ensure(2, order=order)
    with simulate(0, 16, 2, cp=2, num_distributed_optimizer_instances=4).use():
        ensure(2, order="megatron", num_distributed_optimizer_instances=4)
        for others in ({"num_distributed_optimizer_instances": 2}, {"dp_replicate": 4}, {"order": "tp-ep-dp-cp"}):
            with pytest.raises(ps.ConfigMismatchError):
                ensure(2, **others)
    with simulate(0, 16, 2, pcp=4, dcp=4, order="vllm").use():
        ensure(2, dcp=4, order="vllm")
        with pytest.raises(ps.ConfigMismatchError, match="dcp=8"):
            ensure(2, dcp=8, order="vllm")


def _after_destroy() -> dict[str, Any]:
    ps.init_distributed_environment()
    ps.initialize_model_parallel(2, 2)
    tp, world, dp = ps.get_tp_group(), ps.get_world_group(), ps.get_dp_group()
    token, x = token_of(tp), torch.ones(2)

    def op(group: str) -> torch.Tensor:
        return torch.ops.parallel_state.all_reduce(x, token, "sum", group)

    worked = op(tp.unique_name).tolist()
    ps.destroy_model_parallel()
    ps.destroy_model_parallel()
    outcomes = {
        "all_reduce": attempt(tp.all_reduce, x),
        "all_gather": attempt(tp.all_gather, x),
        "barrier": attempt(tp.barrier),
        "broadcast_object": attempt(tp.broadcast_object, 1),
        "send_object": attempt(tp.send_object, 1),
        "broadcast_tensor_dict": attempt(tp.broadcast_tensor_dict, {"x": x}),
        "op": attempt(op, tp.unique_name),
        "op on a group of one": attempt(op, dp.unique_name),
    }
    alive = attempt(lambda: world.all_reduce(x).tolist())
    tp.destroy()
    ps.destroy_distributed_environment()
    ps.destroy_distributed_environment()
    outcomes |= {"world": attempt(world.all_reduce, x), "sub-group": attempt(world.make_sub_group, [0, 1])}
    getters = {f"get_{name}_group": attempt(getattr(ps, f"get_{name}_group")) for name in GETTERS}
    getters["get_parallel_groups"] = attempt(ps.get_parallel_groups)
    name, gone = tp.unique_name, weakref.ref(tp)
    del tp
    gc.collect()
    outcomes["op by the name alone"] = attempt(op, name)
    return {
        "worked": worked,
        "alive": alive.text,
        "freed": gone() is None,
        "outcomes": outcomes,
        "getters": getters,
        "never made": attempt(op, "tp:999"),
        "initialized": (dist.is_initialized(), ps.model_parallel_is_initialized(), ps.is_initialized()),
        "none": [getattr(ps, f"try_get_{name}_group")() for name in GETTERS],
    }


def test_use_after_destroy(pools: Pools) -> None:
    for facts in pools(4).run(_after_destroy, timeout_s=DEADLINE_S):
        assert facts["worked"] == [2.0, 2.0]
        assert facts["alive"] == "[4.0, 4.0]"
        assert facts["freed"]
        for name, outcome in facts["outcomes"].items():
            assert outcome.kind == "GroupDestroyedError", (name, outcome)
            assert "destroyed" in outcome.text
            assert outcome.seconds < SOON_S
        for name, outcome in facts["getters"].items():
            assert outcome.kind == "GroupNotInitializedError", (name, outcome)
            assert "first" in outcome.text
            assert ("init_distributed" if "world" in name else "initialize_model_parallel()") in outcome.text
        assert facts["never made"].kind == "GroupNotInitializedError"
        assert "'tp:999'" in facts["never made"].text
        assert facts["initialized"] == (False, False, False)
        assert facts["none"] == [None] * 4


def _again_with_other_sizes(sizes: list[tuple[int, int]]) -> list[tuple[list[int], list[int], float, str]]:
    found = []
    ps.init_distributed_environment()
    for tp, pp in sizes:
        ps.initialize_model_parallel(tp, pp)
        groups = ps.get_parallel_groups()
        total = groups.tp.all_reduce(torch.tensor([float(ps.get_rank())])).item()
        found.append((groups.tp.ranks, groups.pp.ranks, total, groups.tp.unique_name))
        ps.destroy_model_parallel()
    ps.cleanup_dist_env_and_memory()
    return found


def test_other_sizes_on_the_same_world(pools: Pools) -> None:
    sizes = [(2, 2), (4, 1), (1, 4), (2, 1), (1, 1), (2, 2)]
    for rank, found in enumerate(pools(4).run(_again_with_other_sizes, sizes, timeout_s=DEADLINE_S)):
        for (tp, pp), (tp_ranks, pp_ranks, total, _) in zip(sizes, found, strict=True):
            assert len(tp_ranks) == tp
            assert len(pp_ranks) == pp
            assert rank in tp_ranks
            assert total == sum(tp_ranks)
        assert len({name for *_, name in found}) == len(sizes), "a later group must not reuse a destroyed group's name"


def _again_and_again(times: int, kept_default_group: str | None) -> list[tuple[int, int, int]]:
    if kept_default_group is not None:
        agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store = dist.PrefixStore(kept_default_group, agent)
        dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=4)
    counts = []
    for number in range(times):
        ps.init_distributed_environment()
        ps.initialize_model_parallel(2, 2)
        ps.get_tp_group().all_reduce(torch.ones(1))
        ps.get_pp_group().all_gather_object(number)
        ps.get_dp_group().device_group  # of one rank, created here  # noqa: B018
        ps.destroy_distributed_environment()
        if number in (2, times - 1):
            gc.collect()
            groups = len(dist.distributed_c10d._world.pg_map)
            counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), groups))
    if kept_default_group is not None:
        dist.destroy_process_group()
    return counts


@pytest.mark.parametrize(("times", "joins"), [(30 if LONG else 10, False), (10, True)])
def test_descriptors_and_threads_stay_flat(pools: Pools, times: int, joins: bool) -> None:
    name = f"kept/{uuid.uuid4()}" if joins else None
    for first, last in pools(4).run(_again_and_again, times, name, timeout_s=DEADLINE_S):
        assert last[0] <= first[0] + 2, "descriptors"
        assert last[1] <= first[1] + 1, "threads"
        assert last[2] == first[2] == (1 if joins else 0), "c10d's groups"
