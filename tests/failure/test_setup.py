"""Rows 13, 14, 30 of docs/failures.md: ranks that request different groups, groups made or destroyed twice,
use after destruction."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import torch

import parallel_state as ps
from device_communicators.base import settings
from tests.contract.attempts import Outcome, attempt, environment, world
from tests.failure.calls import calls_on
from tests.failure.over_torch import torch_world
from tests.failure.ranks import Ranks

TIMEOUT_S = 5.0
DEADLINE_S = 60.0
AT_ONCE_S = 0.01


def _different_sizes() -> tuple[Outcome, Outcome, float]:
    ps.init_distributed_environment(timeout=TIMEOUT_S)
    told = attempt(ps.initialize_model_parallel, 2 if ps.get_rank() == 0 else 4)
    none = attempt(ps.get_tp_group)
    ps.initialize_model_parallel(4)  # the error came before anything was made, so the ranks are still in step
    total = ps.get_tp_group().all_reduce(torch.ones(1)).item()
    ps.destroy_distributed_environment()
    return told, none, total


def test_row_13_different_sizes(ranks: Ranks) -> None:
    for rank, (told, none, total) in enumerate(ranks.run(_different_sizes, timeout_s=DEADLINE_S)):
        assert told.kind == "ConfigMismatchError", told
        assert "tp=2 × dp=2 × pp=1 on rank 0" in told.text
        assert "tp=4 × dp=1 × pp=1 on rank 1" in told.text
        assert f"this is rank {rank}" in told.text
        assert told.seconds < TIMEOUT_S
        assert none.kind == "GroupNotInitializedError"
        assert total == 4.0


OF_ONE_RANK = {
    "PARALLEL_STATE_TIMEOUT_S": "7",
    "PARALLEL_STATE_HEARTBEAT_S": "0.5",
    "PARALLEL_STATE_HEARTBEAT_LIMIT_S": "9",
    "PARALLEL_STATE_BACKEND": "parallel_state",
    "PARALLEL_STATE_CPU_BACKEND": "parallel_state",
}


def _settings_of_one_rank(joins: bool) -> dict[str, Outcome]:
    told, rank = {}, int(os.environ["RANK"])
    for name, value in OF_ONE_RANK.items():
        if joins and name == "PARALLEL_STATE_BACKEND":
            continue
        with torch_world(backend="gloo") if joins else nullcontext():
            with environment(**({name: value} if rank == 2 else {})):
                told[name] = attempt(ps.init_distributed_environment)
            ps.destroy_distributed_environment()
    with environment(PARALLEL_STATE_HEARTBEAT_S="0.5" if rank == 2 else None):
        told["backend"] = attempt(lambda: torch_world().__enter__())
    return told


def test_row_13_a_setting_that_must_be_equal(ranks: Ranks) -> None:
    assert set(OF_ONE_RANK) == {each.name for each in settings.ALL if each.equal}
    for joins in (False, True):
        for outcomes in ranks.run(_settings_of_one_rank, joins, timeout_s=DEADLINE_S):
            for name, told in outcomes.items():
                where = f"{name}, {'joined' if joins else 'own world'}: {told}"
                assert told.kind == "ConfigMismatchError", where
                assert ("PARALLEL_STATE_HEARTBEAT_S" if name == "backend" else name) in told.text, where
                assert "on rank 0" in told.text and "on rank 2" in told.text, where
                assert told.seconds < TIMEOUT_S, where


def _different_order() -> dict[str, Outcome]:
    with world(2, timeout=TIMEOUT_S):
        late = ps.get_rank() == 3
        world_group = ps.get_world_group()
        first, second = ([0, 1], [0, 1, 2]) if not late else ([0, 1, 2], [0, 1])
        told = {
            "axes": attempt(ps.create_parallel_groups, world_group, {"tp": 2}, "tp-dp-pp" if not late else "dp-tp-pp"),
            "sub-groups": attempt(world_group.make_sub_group, first),
            "sub-groups' second": attempt(world_group.make_sub_group, second),
            "division": attempt(
                ps.init_model_parallel_group, [[0, 1], [2, 3]] if not late else [[2, 3], [0, 1]], 0, "gloo"
            ),
        }
        return told | {"works": attempt(lambda: ps.get_tp_group().all_reduce(torch.ones(1)).item())}


def test_row_14_different_group_order(ranks: Ranks) -> None:
    both = {
        "axes": ("tp=2 × dp=2 × pp=1 on rank 0", "dp=2 × tp=2 × pp=1 on rank 3"),
        "sub-groups": ("[0, 1] on rank 0", "[0, 1, 2] on rank 3"),
        "sub-groups' second": ("[0, 1, 2] on rank 0", "[0, 1] on rank 3"),
        "division": ("[0, 1], [2, 3] on rank 0", "[2, 3], [0, 1] on rank 3"),
    }
    for outcomes in ranks.run(_different_order, timeout_s=DEADLINE_S):
        assert outcomes.pop("works").text == "2.0"
        for name, told in outcomes.items():
            assert told.kind == "ConfigMismatchError", (name, told)
            assert all(side in told.text for side in both[name]), (name, told)
            assert told.seconds < TIMEOUT_S


def _double_init_and_use_after_destroy() -> dict[str, Any]:
    ps.init_distributed_environment(timeout=TIMEOUT_S)
    ps.initialize_model_parallel(4)
    group = ps.get_tp_group()
    twice = [attempt(ps.init_distributed_environment), attempt(ps.initialize_model_parallel, 4)]
    works = group.all_reduce(torch.ones(1)).item()
    again = []
    for destroy in (group.destroy, ps.destroy_model_parallel, ps.destroy_distributed_environment):
        again += [attempt(destroy), attempt(destroy)]
    calls = calls_on(group)
    first = {name: attempt(call) for name, call in calls.items()}
    second = {name: attempt(call) for name, call in calls.items()}
    getters = {name: attempt(getattr(ps, f"get_{name}_group")) for name in ("tp", "pp", "dp", "world")}
    return {"twice": twice, "works": works, "again": again, "after": (first, second), "getters": getters}


def test_row_30_double_init_destroy_twice_use_after_destroy(ranks: Ranks) -> None:
    for facts in ranks.run(_double_init_and_use_after_destroy, timeout_s=DEADLINE_S):
        for outcome in facts["twice"]:
            assert outcome.kind == "AlreadyInitializedError", outcome
            assert "() first" in outcome.text
            assert outcome.seconds < AT_ONCE_S
        assert facts["works"] == 4.0, "the second init changed nothing"
        assert [outcome.kind for outcome in facts["again"]] == ["ok"] * 6
        for outcomes in zip(*(each.items() for each in facts["after"]), strict=True):
            for name, outcome in outcomes:
                assert outcome.kind == "GroupDestroyedError", (name, outcome)
                assert "group 'tp:" in outcome.text
                assert "destroyed" in outcome.text
            assert min(outcome.seconds for _, outcome in outcomes) < AT_ONCE_S
        for name, outcome in facts["getters"].items():
            assert outcome.kind == "GroupNotInitializedError", (name, outcome)
