from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parallel_state as ps
from device_communicators.c10d import creation
from parallel_state.process_groups import joining
from tests.contract.attempts import environment, world
from tests.contract.test_c10d import torch_world
from tests.contract.test_process_groups import _slow_connections, check_slow_connections
from tests.contract.test_state import _join
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]


def _target_of(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:  # the descriptor of the listing itself
        return ""


def _between_own_calls(backend: str) -> tuple[str, str, str]:
    with environment(PARALLEL_STATE_CPU_BACKEND=backend), world(2):
        tp = ps.get_tp_group()
        for step in range(20):
            x = torch.full((1 + 1000 * step,), float(tp.rank_in_group + 1))
            first = tp.all_reduce(x)
            started = dist.all_reduce(second := x.clone(), group=tp.device_group, async_op=True)
            third = tp.all_reduce(x)
            dist.all_reduce(fourth := x.clone(), group=tp.cpu_group)
            fifth = tp.all_reduce(x)
            started.wait()
            for total in (first, second, third, fourth, fifth):
                assert total.eq(3).all(), (step, total)
        assert tp.cpu_group is tp.device_group
        boards = [each for each in os.listdir("/proc/self/fd") if _target_of(each).startswith("/memfd:ps-control")]
        assert len(boards) == ps.get_world_group().world_size, "torch's groups must not map control memory of their own"
        everyone = torch.ones(1)
        dist.all_reduce(everyone, group=ps.get_world_group().cpu_group)
        assert everyone.item() == ps.get_world_group().world_size
        return tuple(str(dist.get_backend(group)) for group in (tp.device_group, ps.get_world_group().cpu_group, None))


@pytest.mark.parametrize("backend", ["parallel_state", "gloo"])
def test_calls_of_torch_between_calls_of_the_group(pools: Pools, backend: str) -> None:
    for told in pools(4).run(_between_own_calls, backend, timeout_s=120.0):
        assert told == (backend, backend, "gloo")


def _over_ours(body: Callable[..., Any], *args: Any) -> Any:
    with environment(PARALLEL_STATE_CPU_BACKEND="parallel_state"):
        return body(*args)


def test_making_a_group_has_the_start_s_timeout(pools: Pools) -> None:
    check_slow_connections(pools(2).run(_over_ours, _slow_connections, timeout_s=120.0))


@pytest.mark.parametrize("backend", ["gloo", None])
def test_a_default_group_that_was_joined_is_the_world_s(pools: Pools, backend: str | None) -> None:
    for told in pools(2).run(_over_ours, _join, f"cpu backend/{uuid.uuid4()}", backend, timeout_s=120.0):
        assert told["joined"]
        assert told["stays"]


@pytest.mark.parametrize(("backend", "compiles"), [("parallel_state", True), ("gloo", False)])
def test_it_is_compiled_before_any_deadline_starts(
    monkeypatch: pytest.MonkeyPatch, backend: str, compiles: bool
) -> None:
    calls: list[bool] = []
    monkeypatch.setenv("PARALLEL_STATE_CPU_BACKEND", backend)
    monkeypatch.setattr(creation, "load", lambda: calls.append(True))
    joining.prepare(2)
    assert calls == [True] * compiles


def _in_the_programs_world() -> tuple[bool, bool, str]:
    with environment(PARALLEL_STATE_CPU_BACKEND="parallel_state"), torch_world("gloo"):
        ps.initialize_model_parallel(2)
        world, tp = ps.get_world_group(), ps.get_tp_group()
        total = torch.ones(1)
        dist.all_reduce(total, group=tp.cpu_group)
        assert total.item() == 2
        kept = world.device_group is world.cpu_group is dist.group.WORLD
        found = kept, tp.cpu_group is tp.device_group, str(dist.get_backend(tp.cpu_group))
        ps.destroy_distributed_environment()
        return found


def test_a_default_group_of_the_program_stays_the_world_s(pools: Pools) -> None:
    assert pools(4).run(_in_the_programs_world, timeout_s=120.0) == [(True, True, "parallel_state")] * 4
