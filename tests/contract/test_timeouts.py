from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parallel_state as ps
from device_communicators.base.torch_internals import backend_of
from tests.contract.attempts import attempt, environment
from tests.contract.test_objects import Pools

SHORT_S, LONG_S = 0.5, 30.0
WAYS = ("assigned", "within", "timedelta")
CALLS = ("all_reduce", "all_reduce_async", "recv", "recv_object", "recv_tensor_dict", "broadcast_object")
ROUTES = {
    "shared memory": {},
    "connections": {"PARALLEL_STATE_SHARED_MEMORY": "off"},
    "gloo": {"PARALLEL_STATE_BUILD": "never"},
}


def _call(group: ps.GroupCoordinator, name: str) -> object:
    x = torch.ones(4)
    calls: dict[str, Any] = {
        "all_reduce": lambda: group.all_reduce(x),
        "all_reduce_async": lambda: group.all_reduce_async(x).wait(),
        "recv": lambda: group.recv((4,), torch.float32, 1),
        "recv_object": lambda: group.recv_object(1),
        "recv_tensor_dict": lambda: group.recv_tensor_dict(1),
        "broadcast_object": lambda: group.broadcast_object(None, 1),
    }
    return calls[name]()


def _end_early(way: str, name: str, route: str, folder: str) -> tuple[str, float, float]:
    with environment(**ROUTES[route]):
        ps.init_distributed_environment(timeout=LONG_S)
        try:
            group = ps.get_world_group()
            group.barrier()
            told = ("", 0.0, 0.0)
            if group.rank == 0:
                if way == "within":
                    with group.within(SHORT_S):
                        told = _told(group, name)
                    assert group.timeout == LONG_S
                else:
                    group.timeout = timedelta(seconds=SHORT_S) if way == "timedelta" else SHORT_S
                    assert group.timeout == SHORT_S
                    told = _told(group, name)
                Path(folder, "done").touch()
            until = time.monotonic() + LONG_S
            while not Path(folder, "done").exists() and time.monotonic() < until:
                time.sleep(0.01)
            return told
        finally:
            ps.destroy_distributed_environment()


def _told(group: ps.GroupCoordinator, name: str) -> tuple[str, float, float]:
    found = attempt(lambda: _call(group, name))
    error = group.route.first_failure
    return found.kind, -1.0 if error is None or error.timeout_s is None else error.timeout_s, found.seconds


@pytest.mark.parametrize("route", ["shared memory", "connections"])
@pytest.mark.parametrize(("number", "name"), list(enumerate(CALLS)))
def test_calls_end_at_the_timeout_that_was_set(
    pools: Pools, tmp_path: Path, number: int, name: str, route: str
) -> None:
    way = WAYS[number % len(WAYS)]
    (kind, timeout_s, took_s), _ = pools(2).run(_end_early, way, name, route, str(tmp_path), timeout_s=LONG_S)
    assert (kind, timeout_s) == ("CollectiveTimeoutError", SHORT_S)
    assert took_s < LONG_S / 2


def _wait_longer(route: str, late_s: float) -> list[float]:
    with environment(**ROUTES[route]):
        ps.init_distributed_environment(timeout=SHORT_S * 3)
        try:
            group = ps.get_world_group()
            timeouts = [group.timeout]
            with ps.extended_deadline(LONG_S):
                timeouts.append(group.timeout)
                made = group.make_sub_group([0, 1], name="inside")
                assert made is not None
                timeouts.append(made.timeout)
                if group.rank == 1:
                    time.sleep(late_s)
                assert group.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
                if group.rank == 1:
                    time.sleep(late_s)
                    group.send_object("late", 0)
                else:
                    assert group.recv_object(1) == "late"
                with ps.extended_deadline(LONG_S), made.within(1.0):
                    timeouts.append(made.timeout)
                made.barrier()
            return [*timeouts, group.timeout, made.timeout]
        finally:
            ps.destroy_distributed_environment()


@pytest.mark.parametrize("route", ["shared memory", "connections"])
def test_an_extended_deadline_holds_for_all_groups_until_it_ends(pools: Pools, route: str) -> None:
    short = SHORT_S * 3
    for found in pools(2).run(_wait_longer, route, 2.0, timeout_s=LONG_S):
        assert found == [short, short + LONG_S, short + LONG_S, 1.0 + 2 * LONG_S, short, short]


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), "1", None, True])
def test_wrong_extensions_are_refused(wrong: Any) -> None:
    with pytest.raises(ps.InvalidArgumentError, match="extended_deadline"):
        ps.extended_deadline(wrong)


def _over_torch() -> None:
    """Rank 1 is late for each call, then never makes the last one."""
    group = dist.new_group(backend="parallel_state", timeout=timedelta(seconds=SHORT_S * 2))
    x, rank = torch.ones(2), dist.get_rank()
    with ps.extended_deadline(LONG_S):
        if rank == 1:
            time.sleep(SHORT_S * 4)
        dist.all_reduce(x, group=group)
        if rank == 1:
            time.sleep(SHORT_S * 4)
            dist.send(x, 0, group=group)
        else:
            dist.recv(x, 1, group=group)
    assert x.tolist() == [2.0, 2.0]
    if rank == 0:
        with pytest.raises(dist.DistBackendError) as raised:
            dist.all_reduce(x, group=group)
        error = ps.error_of(raised.value)
        assert error is not None and error.timeout_s == SHORT_S * 2
        backend = backend_of(group, torch.device("cpu"))
        if hasattr(backend, "get_error"):  # torch 2.13 has it in C++ only
            assert backend.get_error() == torch._C._distributed_c10d.ErrorType.TIMEOUT  # type: ignore[attr-defined]


def test_an_extended_deadline_holds_for_groups_of_torch(pools: Pools) -> None:
    pools(2).run(_over_torch, tp=2, timeout_s=LONG_S)


def _torch_ephemeral() -> tuple[float, float]:
    from torch.distributed.distributed_c10d import _add_ephemeral_timeout_for_all_pgs

    group = dist.new_group(backend="parallel_state", timeout=timedelta(seconds=SHORT_S * 2))
    x = torch.ones(2)
    _add_ephemeral_timeout_for_all_pgs(timedelta(seconds=LONG_S))
    if dist.get_rank() == 1:
        time.sleep(SHORT_S * 4)
    dist.all_reduce(x, group=group)
    started = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(x, group=group)
    return float(x[0]), time.monotonic() - started


@pytest.mark.skipif(not hasattr(dist, "set_timeout"), reason="torch before 2.15 extends NCCL's timeouts only")
def test_an_ephemeral_timeout_of_torch_ends_with_its_first_call(pools: Pools) -> None:
    (first, took_s), (second, _) = pools(2).run(_torch_ephemeral, tp=2, timeout_s=LONG_S)
    assert first == second == 2.0
    assert took_s < LONG_S / 2
