"""Row 32 of docs/failures.md: calls in a forked child of a rank fail at once, and don't disturb the rank."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import torch

import parallel_state as ps
from tests.contract.attempts import Outcome, attempt
from tests.failure.calls import calls_on
from tests.failure.ranks import Ranks

DEADLINE_S = 60.0
AT_ONCE_S = 0.01
LARGE = 100_000


def _in_child(function: Callable[[], Any]) -> Any:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            with open(writing, "wb") as file:
                pickle.dump(function(), file)
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        result = pickle.load(file)
    os.waitpid(pid, 0)
    return result


def _tries(group: ps.GroupCoordinator, pending: Any) -> dict[str, list[Outcome]]:
    calls = calls_on(group) | {
        "all_reduce of much": lambda: group.all_reduce(torch.ones(LARGE)),
        "the op": lambda: torch.ops.parallel_state.all_reduce(torch.ones(4), torch.zeros(1), "sum", group.unique_name),
        "handle": pending.wait,
        "destroy": group.destroy,
        "destroy_model_parallel": ps.destroy_model_parallel,
        "destroy_distributed_environment": ps.destroy_distributed_environment,
        "init_distributed_environment": ps.init_distributed_environment,
        "initialize_model_parallel": lambda: ps.initialize_model_parallel(2),
        "create_parallel_groups": lambda: ps.create_parallel_groups(ps.get_world_group(), {"tp": 2}),
        "another group": lambda: ps.get_group("model"),
    }
    return {name: [attempt(call) for _ in range(3)] for name, call in calls.items()}


def _use_in_child() -> dict[str, Any]:
    ps.init_distributed_environment(timeout=5.0)
    ps.initialize_model_parallel(4)
    group = ps.get_tp_group()
    large = group.all_reduce(torch.ones(LARGE))
    everyone = sum(group.all_gather_object(1))
    pending = group.irecv(large.shape, large.dtype, (group.rank_in_group - 1) % 4)

    def use() -> dict[str, Any]:
        nonlocal large
        tried = _tries(group, pending)
        sums = large.sum().item()
        del large
        numbers = ps.get_tp_group().rank_in_group, ps.get_world_size(), ps.get_tensor_model_parallel_rank()
        grandchild = _in_child(lambda: attempt(group.barrier))
        return {"tried": tried, "sum": sums, "numbers": numbers, "grandchild": grandchild, "pid": os.getpid()}

    facts = _in_child(use)
    group.send(torch.full((LARGE,), float(group.rank_in_group)), (group.rank_in_group + 1) % 4)
    pending.wait()
    facts["then"] = [
        everyone,
        group.all_reduce(torch.ones(LARGE)).sum().item() / LARGE,
        large.sum().item() / LARGE,
        len(group.all_gather_object(os.getpid())),
    ]
    ps.destroy_distributed_environment()
    facts["free"] = _in_child(_alone)
    return facts


def _alone() -> float:
    os.environ.update(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    ps.init_distributed_environment()
    ps.initialize_model_parallel()
    total = ps.get_tp_group().all_reduce(torch.ones(1)).item()
    ps.destroy_distributed_environment()
    return total


def test_row_32_fork_after_init_and_use_in_the_child(ranks: Ranks) -> None:
    for rank, facts in enumerate(ranks.run(_use_in_child, timeout_s=DEADLINE_S)):
        assert len(facts["tried"]) > 20
        for name, outcomes in facts["tried"].items():
            for outcome in outcomes:
                assert outcome.kind == "ForkedError", (name, outcome)
                assert f"process {facts['pid']}, which was forked from a rank" in outcome.text
            assert min(outcome.seconds for outcome in outcomes) < AT_ONCE_S, (name, outcomes)
        assert "group 'tp:" in facts["tried"]["all_reduce"][0].text
        assert facts["grandchild"].kind == "ForkedError"
        assert facts["numbers"] == (rank, 4, rank), "numbers may be asked for"
        assert facts["sum"] == 4.0 * LARGE
        assert facts["then"] == [4, 4.0, 4.0, 4]
        assert facts["free"] == 1.0
