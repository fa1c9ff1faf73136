"""Methods on plain CPU tensors bypass torch's dispatcher, unless the caller would notice the difference."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import parallel_state as ps
from device_communicators import CATALOG, build_route, register_route
from device_communicators.base.errors import GroupDestroyedError, InvalidArgumentError
from device_communicators.cpu.first_call import find_wrap
from device_communicators.cpu.plain_tree import tensor_at, type_at
from device_communicators.routing.route import Traffic
from parallel_state.collectives.direct import DIRECT, DirectCalls
from tests.contract.carriers import twin_of
from tests.workers import WorkerPool

Group = ps.GroupCoordinator
Pools = Callable[[int], WorkerPool]
DEADLINE_S = 60.0
NAMES = tuple(DirectCalls.__annotations__)
STRAIGHT = {"all_reduce", "all_reduce, a maximum", "all_reduce_", "all_gather", "all_gather along 0", "reduce_scatter",
            "reduce_scatter, an average"}  # fmt: skip
"""Calls that bypass the op even where Python carries them."""

CALLS: dict[str, Callable[[Group, Tensor], Any]] = {
    "all_reduce": lambda group, x: group.all_reduce(x),
    "all_reduce, a maximum": lambda group, x: group.all_reduce(x, "max"),
    "all_reduce_": lambda group, x: group.all_reduce_(x),
    "all_gather": lambda group, x: group.all_gather(x),
    "all_gather along 0": lambda group, x: group.all_gather(x, dim=0),
    "all_gather into out": lambda group, x: group.all_gather(x, -1, out=x.new_empty(4, 12)),
    "all_gather_into_tensor": lambda group, x: group.all_gather_into_tensor(x.new_empty(8, 6), x),
    "reduce_scatter": lambda group, x: group.reduce_scatter(x),
    "reduce_scatter, an average": lambda group, x: group.reduce_scatter(x, 0, "avg"),
    "reduce_scatter into out": lambda group, x: group.reduce_scatter(x, 1, out=x.new_empty(4, 3)),
    "reduce_scatter_tensor": lambda group, x: group.reduce_scatter_tensor(x.new_empty(2, 6), x),
    "all_to_all": lambda group, x: group.all_to_all(x),
    "all_to_all into out": lambda group, x: group.all_to_all(x, out=torch.empty_like(x)),
    "all_to_all_single": lambda group, x: group.all_to_all_single(torch.empty_like(x), x),
    "broadcast": lambda group, x: group.broadcast(x, 1),
    "broadcast_": lambda group, x: group.broadcast_(x, 1),
    "gather": lambda group, x: group.gather(x, 1),
    "gather along 0": lambda group, x: group.gather(x, 0, dim=0),
    "scatter": lambda group, x: group.scatter(x, 1, -1, size=(4, 3), dtype=x.dtype),
    "barrier": lambda group, x: group.barrier(),
    "send and recv": lambda group, x: (
        group.recv(x.shape, x.dtype, 1) if group.rank_in_group == 0 else group.send(x, 0)),
    "send to the next, recv from the previous": lambda group, x: (
        group.send(x) if group.rank_in_group == 0 else group.recv([4, 6], x.dtype)),
}  # fmt: skip


@contextmanager
def _watched() -> Iterator[list[bool]]:
    went: list[bool] = []

    def watch(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: object) -> Any:
            result = function(*args)
            went.append(result is not NotImplemented)
            return result

        return call

    before = {name: getattr(DIRECT, name) for name in NAMES}
    for name, function in before.items():
        setattr(DIRECT, name, watch(function))
    try:
        yield went
    finally:
        for name, function in before.items():
            setattr(DIRECT, name, function)


@contextmanager
def _off() -> Iterator[None]:
    before = {name: getattr(DIRECT, name) for name in (*NAMES, "straight")}
    for name in before:
        setattr(DIRECT, name, lambda *_: NotImplemented)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(DIRECT, name, function)


def _x(group: Group, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(24).view(4, 6) + 100 * group.rank_in_group).to(dtype)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "as usual": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def _counted(group: Group, call: Callable[[], Any]) -> tuple[Any, list[tuple[str, int, int]]]:
    before = group.route.traffic()
    result = call()
    zero = Traffic()
    changes = [
        (name, each.calls - before.get(name, zero).calls, each.bytes - before.get(name, zero).bytes)
        for name, each in group.route.traffic().items()
    ]
    return result, [change for change in changes if change[1]]


def _plain() -> int:
    group = ps.get_tp_group()
    group.barrier()
    for mode, entered in MODES.items():
        for name, call in CALLS.items():
            what = f"{name} {mode}"
            with entered():
                x, same = _x(group), _x(group)
                with _off():
                    expected, counts = _counted(group, lambda call=call, x=x: call(group, x))  # type: ignore[misc]
                with _watched() as went:
                    found, counted = _counted(group, lambda call=call, x=same: call(group, x))  # type: ignore[misc]
                assert went == [True], what
                assert counted == counts and len(counts) == 1, what
                assert type(found) is type(expected), what
                if expected is None:
                    continue
                assert torch.equal(found, expected), what
                assert found.is_contiguous() and found.is_inference() == expected.is_inference(), what
                assert (found is same) == (expected is x), what
                if not found.is_inference():
                    assert found._version == expected._version, what
    return len(MODES) * len(CALLS)


def test_plain_calls_give_what_the_ops_do(pools: Pools) -> None:
    assert pools(2).run(_plain, tp=2, timeout_s=DEADLINE_S) == [len(MODES) * len(CALLS)] * 2


def _carried_by_python() -> int:
    group = twin_of(ps.get_tp_group())
    group.route = build_route(group.context, CATALOG[-1:])
    register_route(group.route)
    asked: list[bool] = []
    straight = DIRECT.straight
    DIRECT.straight = lambda x: (asked.append(straight(x) is x), straight(x))[1]  # type: ignore[func-returns-value]
    try:
        for mode, entered in MODES.items():
            for name, call in CALLS.items():
                what = f"{name} {mode}"
                with entered():
                    x, same = _x(group), _x(group)
                    with _off():
                        expected, counts = _counted(group, lambda call=call, x=x: call(group, x))  # type: ignore[misc]
                    asked.clear()
                    found, counted = _counted(group, lambda call=call, x=same: call(group, x))  # type: ignore[misc]
                    assert asked == [True] * (name in STRAIGHT), what
                    assert counted == counts, what
                    if expected is None:
                        continue
                    assert torch.equal(found, expected) and type(found) is type(expected), what
                    assert (found is same) == (expected is x) and found.is_inference() == expected.is_inference(), what
                    if found is same and not found.is_inference():
                        assert found._version > 0 < expected._version, what
        for name in STRAIGHT:
            asked.clear()
            with _Sees() as mode_:
                CALLS[name](group, _x(group))
            assert any("parallel_state" in each for each in mode_.seen), name
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                CALLS[name](group, _x(group))
            assert any(each.key.startswith("parallel_state::") for each in profiler.key_averages()), name
            assert asked == [False] * 2, name
        asked.clear()
        wanted = torch.ones(2, requires_grad=True)
        group.all_reduce(wanted * 3).sum().backward()
        assert wanted.grad is not None and wanted.grad.tolist() == [6.0, 6.0]
        with torch.inference_mode(), pytest.raises(InvalidArgumentError, match="op of all_reduce"):
            group.all_reduce(torch.ones(2), "most")
        assert not any(asked)
    finally:
        DIRECT.straight = straight
        group.route.close()
    return len(CALLS)


def test_calls_that_python_carries_go_straight_to_the_route(pools: Pools) -> None:
    assert pools(2).run(_carried_by_python, tp=2, timeout_s=DEADLINE_S) == [len(CALLS)] * 2


class _Sees(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class _SeesFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class _Other(Tensor):
    pass


def _watchers() -> None:
    group = ps.get_tp_group()
    for name, call in CALLS.items():
        with _watched() as went:
            with _Sees() as mode:
                call(group, _x(group))
            assert any("parallel_state" in each for each in mode.seen), name
            with _SeesFunctions() as functions:
                call(group, _x(group))
            assert any("parallel_state" in each for each in functions.seen), name
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                call(group, _x(group))
            assert any(each.key.startswith("parallel_state::") for each in profiler.key_averages()), name
            assert not any(went), name
    with _watched() as went:
        graph = make_fx(lambda x: group.all_reduce(x))(torch.ones(2))
        assert "parallel_state.all_reduce.default" in graph.code
        events: list[Any] = []
        remove = ps.on_operation(events.append)
        group.all_reduce(torch.ones(2))
        remove()
        assert [each.operation for each in events] == ["all_reduce"]
        assert not any(went)
        group.all_reduce(torch.ones(2))
        assert went[-1], "and nothing of it is left behind"
    with FakeTensorMode(), _watched() as went:
        assert isinstance(group.all_gather(torch.ones(2)), FakeTensor) and not any(went)


def test_modes_tracers_and_the_profiler_are_told_of_the_op(pools: Pools) -> None:
    pools(2).run(_watchers, tp=2, timeout_s=DEADLINE_S)


def _others() -> None:
    group, base = ps.get_tp_group(), torch.ones(4)
    with _watched() as went:
        x = torch.ones(2, requires_grad=True)
        group.all_reduce(x * 3).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [6.0, 6.0]
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
            with pytest.raises(InvalidArgumentError, match="forward-mode"):
                group.all_reduce(dual)
        assert torch.func.vmap(group.all_reduce)(torch.ones(3, 2)).tolist() == [[2.0, 2.0]] * 3
        assert torch.func.grad(lambda x: group.all_reduce(x).sum())(torch.ones(2)).tolist() == [2.0, 2.0]
        assert type(group.all_reduce(torch.ones(2).as_subclass(_Other))) is _Other
        turned = torch.ones(2, dtype=torch.complex64).mul_(1j).conj()
        assert group.all_reduce(turned).tolist() == [-2j, -2j]
        assert group.all_reduce(torch.ones(0)).shape == (0,)
        assert group.all_gather(torch.tensor(1.0)).tolist() == [1.0, 1.0]
        every_other = torch.ones(8)[::2]
        assert group.all_reduce_(every_other).tolist() == [2.0] * 4
        assert not any(went)
        assert group.all_reduce(every_other).tolist() == [4.0] * 4
        with torch.no_grad():
            group.all_reduce(x)
        parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        assert group.all_reduce_(parameter) is parameter and type(group.all_reduce(parameter)) is Tensor
        assert went[-4:] == [True] * 4
    leaf = torch.ones(4, requires_grad=True)
    saved = leaf * base
    if group.rank_in_group == 0:
        group.send(base, 1)
    else:
        group.recv((4,), torch.float32, 0)
    saved.sum().backward(retain_graph=True)
    group.all_reduce_(base[1:3])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()
    with torch.no_grad():
        view_of_leaf = leaf[:2]
    with torch.inference_mode():
        inference = torch.ones(4)
    for out in (leaf, view_of_leaf, inference):
        with pytest.raises(InvalidArgumentError, match="out= of all_gather"):
            group.all_gather(torch.ones(len(out) // 2), 0, out=out)


def test_tensors_of_which_torch_keeps_more_than_memory(pools: Pools) -> None:
    pools(2).run(_others, tp=2, timeout_s=DEADLINE_S)


class _Counts(Group):
    def all_gather(self, x: Tensor, times: int = 1) -> Tensor:  # type: ignore[override]
        return super().all_gather(x, 0).repeat(times)


def _groups() -> None:
    group = ps.get_tp_group()
    part = group.make_sub_group(range(2))
    assert part is not None
    part.__class__ = _Counts
    assert part.all_gather(torch.ones(1), 2).tolist() == [1.0] * 4
    assert part.all_gather_into_tensor(torch.empty(2, 1), torch.ones(1)).tolist() == [[1.0], [1.0]]
    part.__class__ = Group
    part.destroy()
    with _watched() as went:
        for call in CALLS.values():
            with pytest.raises(GroupDestroyedError):
                call(part, _x(group))
        assert not any(went)
    with _watched() as went:
        for arguments, say in (
            ({"dim": 2}, "dim of all_gather .* must be in -2 … 1, .*but is 2"),
            ({"dim": True}, "dim of all_gather .*but is True"),
            ({"out": torch.empty(3)}, r"out= of all_gather .*must have shape \[4, 12\]"),
        ):
            with pytest.raises(InvalidArgumentError, match=say):
                group.all_gather(_x(group), **arguments)
        for op in ("most", "\ud800"):
            with pytest.raises(InvalidArgumentError, match=rf"op of all_reduce .*but is {re.escape(repr(op))}"):
                group.all_reduce(_x(group), op)
        with pytest.raises(InvalidArgumentError, match=r"broadcast .*must be a rank in the group, 0 … 1, but is 2"):
            group.broadcast(_x(group), 2)
        with pytest.raises(InvalidArgumentError, match="must be divisible by 2"):
            group.reduce_scatter(torch.ones(3))
        with pytest.raises(InvalidArgumentError, match=r"must be those of a slice of x"):
            if group.rank_in_group == 0:
                group.scatter(_x(group), size=[4, 6], dtype=torch.float32)
            raise InvalidArgumentError("must be those of a slice of x")
        assert group.all_reduce(_x(group), torch.distributed.ReduceOp.SUM).shape == (4, 6)
        assert not any(went)


def test_groups_and_arguments_that_are_left_to_the_op(pools: Pools) -> None:
    pools(2).run(_groups, tp=2, timeout_s=DEADLINE_S)


def test_it_finds_what_it_needs_of_python_and_torch() -> None:
    """Without these offsets in Python's and torch's objects, every call would silently take the slow path."""
    assert type_at() and tensor_at() and find_wrap()
