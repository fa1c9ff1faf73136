"""Our calls of process groups use the same streams as torch's own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from device_communicators import GroupContext
from device_communicators.base.member import Timeout
from device_communicators.calls.work import DONE
from device_communicators.process_group.device import DeviceGroupCommunicator

SIZE = 2
RENAMED = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "alltoall_base": "all_to_all_single",
}


class Recording:
    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []
        for name in ("allreduce", "broadcast", "gather", "scatter"):
            setattr(self, name, self._noting(name))
        for old, new in RENAMED.items():
            setattr(self, old, self._noting(new))
            setattr(self, new, self._noting(new))

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return SIZE

    def _noting(self, name: str) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            options = arguments[-1] if hasattr(arguments[-1], "asyncOp") else None
            is_async = True if options is None else options.asyncOp
            self.calls.append((name, is_async))
            return DONE if is_async else None

        return noted


def _noted(call: Callable[[Recording], object]) -> list[tuple[str, bool]]:
    group = Recording()
    call(group)
    return group.calls


def _ours(group: Recording) -> DeviceGroupCommunicator:
    return DeviceGroupCommunicator(
        GroupContext("tp:0", (0, 1), 0, torch.device("meta"), Timeout(5.0), device_group=group)
    )


X, OUT = torch.empty(SIZE, 3, device="meta"), torch.empty(SIZE, SIZE, 3, device="meta")
ONE = torch.empty(3, device="meta")
BLOCKING: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "all_reduce": (lambda it: it.all_reduce(X, "sum"), lambda g: dist.all_reduce(X, group=g)),
    "all_reduce_": (lambda it: it.all_reduce_(X, "max"), lambda g: dist.all_reduce(X, group=g)),
    "all_gather": (lambda it: it.all_gather(X, 0), lambda g: dist.all_gather_into_tensor(OUT, X, group=g)),
    "reduce_scatter": (
        lambda it: it.reduce_scatter(X, 0, "sum"),
        lambda g: dist.reduce_scatter_tensor(ONE, X, group=g),
    ),
    "broadcast": (lambda it: it.broadcast(X, 1), lambda g: dist.broadcast(X, group=g, group_src=1)),
    "gather": (lambda it: it.gather(X, 0, 1), lambda g: dist.gather(X, group=g, group_dst=1)),
    "scatter": (lambda it: it.scatter(None, X, 0, 1), lambda g: dist.scatter(X, group=g, group_src=1)),
    "all_to_all": (lambda it: it.all_to_all(X, [1, 1], [1, 1]), lambda g: dist.all_to_all_single(X, X, group=g)),
}
STARTED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], object]]] = {
    "iall_reduce_": (lambda it: it.iall_reduce_(X, "sum"), lambda g: dist.all_reduce(X, group=g, async_op=True)),
    "iall_gather": (
        lambda it: it.iall_gather(OUT, X),
        lambda g: dist.all_gather_into_tensor(OUT, X, group=g, async_op=True),
    ),
    "ireduce_scatter": (
        lambda it: it.ireduce_scatter(ONE, X, "sum"),
        lambda g: dist.reduce_scatter_tensor(ONE, X, group=g, async_op=True),
    ),
    "ibroadcast_": (
        lambda it: it.ibroadcast_(X, 1),
        lambda g: dist.broadcast(X, group=g, group_src=1, async_op=True),
    ),
}


@pytest.mark.parametrize("name", BLOCKING)
def test_a_call_that_is_waited_for_runs_where_torchs_own_function_has_it(name: str) -> None:
    ours, torchs = BLOCKING[name]
    found = _noted(lambda group: ours(_ours(group)))
    assert found == _noted(torchs)
    assert {is_async for _, is_async in found} == {False}


def test_an_all_gatherv_is_one_synchronous_broadcast_per_rank_that_has_something() -> None:
    sizes = [2, 0]
    found = _noted(lambda group: _ours(group).all_gatherv(X, 0, sizes))
    assert found == [("broadcast", False)]


@pytest.mark.parametrize("name", STARTED)
def test_a_started_call_is_asynchronous_as_torchs(name: str) -> None:
    ours, torchs = STARTED[name]
    found = _noted(lambda group: ours(_ours(group)).wait())
    assert found == _noted(torchs)
    assert {is_async for _, is_async in found} == {True}
