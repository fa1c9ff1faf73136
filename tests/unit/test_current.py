from __future__ import annotations

import _thread
import asyncio
import contextvars
import gc
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import parallel_state as ps

DEADLINE_S = 60.0
PAIR, EIGHT = ps.simulate(1, 4, 2, 2), ps.simulate(5, 8, 8)


@pytest.fixture(autouse=True)
def _none_are_left() -> Iterator[None]:
    start = threading.Thread.start
    yield
    assert ps.try_get_current_groups() is None
    assert threading.Thread.start is start


def in_thread(function: Any) -> list[Any]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    return results


def test_two_tasks_of_one_thread() -> None:
    async def task(groups: ps.ParallelGroups) -> list[float]:
        seen = []
        with groups.use():
            for _ in range(5):
                await asyncio.sleep(0)
                assert ps.try_get_current_groups() is groups
                seen.append(ps.get_tp_group().all_reduce(torch.ones(())).item())
        assert ps.try_get_current_groups() is None
        return seen

    async def both() -> list[list[float]]:
        return list(await asyncio.gather(task(PAIR), task(EIGHT)))

    assert asyncio.run(both()) == [[2.0] * 5, [8.0] * 5]


def test_a_task_and_a_call_in_a_thread_inherit() -> None:
    async def look() -> Any:
        return ps.try_get_current_groups()

    async def main() -> list[Any]:
        with PAIR.use():
            inner = asyncio.create_task(look())
            return [await inner, await asyncio.to_thread(ps.try_get_current_groups)]

    assert asyncio.run(main()) == [PAIR, PAIR]


def test_patches_are_of_a_task() -> None:
    draft = ps.simulated_group([4, 5], 5)

    async def patched() -> int:
        with EIGHT.use(), ps.patch_tensor_parallel_group(draft):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return ps.get_tensor_model_parallel_world_size()

    async def both() -> list[int]:
        return list(await asyncio.gather(patched(), patched()))

    assert asyncio.run(both()) == [2, 2]


def test_a_thread_inherits() -> None:
    with PAIR.use():
        assert in_thread(ps.try_get_current_groups) == [PAIR]
        with EIGHT.use():
            assert in_thread(lambda: in_thread(ps.try_get_current_groups)) == [[EIGHT]]
        assert in_thread(ps.try_get_current_groups) == [PAIR]
    assert in_thread(ps.try_get_current_groups) == [None]


def test_a_thread_keeps_what_it_was_started_with() -> None:
    left, seen = threading.Event(), []

    def run() -> None:
        left.wait(DEADLINE_S)
        seen.append(ps.try_get_current_groups())
        with EIGHT.use():
            seen.append(ps.try_get_current_groups())
        seen.append(ps.try_get_current_groups())

    with PAIR.use():
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
    left.set()
    thread.join(DEADLINE_S)
    assert seen == [PAIR, EIGHT, PAIR]


def test_a_thread_that_runs_already_keeps_its_own() -> None:
    inside, seen = threading.Event(), []
    thread = threading.Thread(
        target=lambda: seen.append((inside.wait(DEADLINE_S), ps.try_get_current_groups())), daemon=True
    )
    thread.start()
    with PAIR.use():
        inside.set()
        thread.join(DEADLINE_S)
    assert seen == [(True, None)]


def test_a_timer_inherits_and_other_variables_do_not() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    seen: list[Any] = []
    timer = threading.Timer(0, lambda: seen.append((ps.try_get_current_groups(), variable.get())))
    variable.set(1)
    with PAIR.use():
        timer.start()
    timer.join(DEADLINE_S)
    assert seen == [(PAIR, 0)]


def test_a_wrapper_of_thread_start_stays() -> None:
    own = threading.Thread.start
    with PAIR.use():
        ours = threading.Thread.start
        threading.Thread.start = lambda thread: ours(thread)  # type: ignore[method-assign]
        assert in_thread(ps.try_get_current_groups) == [PAIR]
    try:
        assert in_thread(ps.try_get_current_groups) == [None]
        with EIGHT.use():
            assert in_thread(ps.try_get_current_groups) == [EIGHT]
    finally:
        threading.Thread.start = ours  # type: ignore[method-assign]
    with EIGHT.use():
        assert in_thread(ps.try_get_current_groups) == [EIGHT]
    assert threading.Thread.start is own


def test_a_worker_of_multiprocessing_s_thread_pool_raises() -> None:
    with PAIR.use():
        pool = ThreadPool(1)
        with pytest.raises(ps.UsageError, match=r"Call `submit\(contextvars.copy_context\(\).run, function\)`"):
            pool.apply(ps.try_get_current_groups)
    with pool:
        with EIGHT.use():
            with pytest.raises(ps.UsageError):
                pool.apply(ps.try_get_current_groups)
            assert pool.apply(contextvars.copy_context().run, (ps.current_groups,)) is EIGHT
        with pytest.raises(ps.UsageError):
            pool.apply(ps.get_tp_group)
    with ThreadPool(1) as before, EIGHT.use():
        assert before.apply(ps.try_get_current_groups) is None


def test_a_thread_below_threading_has_the_process_wide_groups() -> None:
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with PAIR.use():
        _thread.start_new_thread(lambda: found.put(ps.try_get_current_groups()), ())
        assert found.get(timeout=DEADLINE_S) is None


def test_a_worker_of_a_pool_raises() -> None:
    with ThreadPoolExecutor(1) as pool:
        with PAIR.use():
            for get in (ps.try_get_current_groups, ps.get_tp_group, ps.try_get_tp_group):
                with pytest.raises(ps.UsageError, match=r"Call `submit\(contextvars.copy_context\(\).run, function\)`"):
                    pool.submit(get).result(DEADLINE_S)
            assert pool.submit(contextvars.copy_context().run, ps.current_groups).result(DEADLINE_S) is PAIR
        with pytest.raises(ps.UsageError):
            pool.submit(ps.get_tp_group).result(DEADLINE_S)
        with EIGHT.use():
            assert pool.submit(contextvars.copy_context().run, ps.current_groups).result(DEADLINE_S) is EIGHT

        def own() -> Any:
            with EIGHT.use():
                return ps.current_groups()

        assert pool.submit(own).result(DEADLINE_S) is EIGHT


def layer(x: Tensor, seen: list[Any]) -> Tensor:
    seen.append(ps.try_get_current_groups())
    return (x * 2).sin()


def nested(x: Tensor, seen: list[Any]) -> Tensor:
    return checkpoint(layer, x, seen, use_reentrant=False).cos()


class Looks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Any]) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.seen.append(ps.try_get_current_groups())
        return grads[0], None


FORWARDS = {
    "checkpoint": lambda x, seen: checkpoint(layer, x, seen, use_reentrant=False),
    "reentrant checkpoint": lambda x, seen: checkpoint(layer, x, seen, use_reentrant=True),
    "nested checkpoints": lambda x, seen: checkpoint(nested, x, seen, use_reentrant=False),
    "function in a reentrant checkpoint": lambda x, seen: checkpoint(
        lambda x: Looks.apply(layer(x, seen), seen), x, use_reentrant=True
    ),
    "function": lambda x, seen: Looks.apply(x.exp(), seen).exp(),
    "hook": lambda x, seen: (y := x.exp(), y.register_hook(lambda _: seen.append(ps.try_get_current_groups())), y)[2],
}


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
@pytest.mark.parametrize("inside", [None, PAIR, EIGHT], ids=["outside", "inside", "in others"])
@pytest.mark.parametrize("groups", [None, PAIR], ids=["process-wide", "in use"])
def test_a_backward_has_the_groups_of_its_forward(
    forward: Any, inside: ps.ParallelGroups | None, groups: ps.ParallelGroups | None
) -> None:
    seen: list[Any] = []
    x = torch.ones(2, requires_grad=True)

    def run() -> Tensor:
        return forward(x, seen).sum()

    with PAIR.use():
        (x * 2).sum()
    loss = run() if groups is None else _within(groups, run)
    with EIGHT.use():
        (x * 2).sum()
    seen.clear()
    if inside is None:
        loss.backward()
    else:
        _within(inside, loss.backward)
    assert seen
    assert all(found is groups for found in seen)


def _within(groups: ps.ParallelGroups, function: Any) -> Any:
    with groups.use():
        return function()


class Deep(torch.autograd.Function):
    """Runs a backward in each backward, `depth` times. Below some depth autograd uses another thread."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, seen: list[Any]) -> Tensor:
        ctx.depth, ctx.seen = depth, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.seen.append((threading.get_ident(), ps.try_get_current_groups()))
        if ctx.depth:
            with torch.enable_grad():
                Deep.apply(torch.ones(1, requires_grad=True), ctx.depth - 1, ctx.seen).sum().backward()
        return grads[0], None, None


def test_threads_of_autograd() -> None:
    seen: list[Any] = []
    x = torch.ones(1, requires_grad=True)
    loss = _within(PAIR, lambda: Deep.apply(x, 100, seen).sum())
    loss.backward()
    assert len(seen) == 101
    assert {thread for thread, _ in seen} > {threading.get_ident()}, "autograd stayed in this thread"
    assert all(groups is PAIR for _, groups in seen)
    seen.clear()
    Deep.apply(x, 3, seen).sum().backward()
    assert [groups for _, groups in seen] == [None] * 4


def test_a_forward_whose_groups_are_gone() -> None:
    x = torch.ones(2, requires_grad=True)
    groups = ps.simulate(0, 4, 2)
    loss = _within(groups, lambda: checkpoint(product, x, use_reentrant=False).sum())
    del groups
    gc.collect()
    with pytest.raises(ps.GroupNotInitializedError, match="keep a reference to them until the backward pass is done"):
        loss.backward()


def test_many_forwards_are_forgotten_with_an_error() -> None:
    x = torch.ones(2, requires_grad=True)
    first = _within(PAIR, lambda: checkpoint(layer, x, [], use_reentrant=False).sum())
    for _ in range(2100):
        _within(EIGHT, lambda: x * 2)
        x * 2
    last = _within(PAIR, lambda: checkpoint(layer, x, [], use_reentrant=False).sum())
    last.backward()
    with pytest.raises(ps.UsageError, match="around the backward pass as well"):
        first.backward()


def test_tasks_have_those_around_their_backward() -> None:
    """Autograd doesn't record which task made a node. So a backward uses the groups that are current around it."""
    x = torch.ones(2, requires_grad=True)

    async def train(groups: ps.ParallelGroups) -> list[Any]:
        seen: list[Any] = []
        with groups.use():
            await asyncio.sleep(0)
            loss = checkpoint(layer, x, seen, use_reentrant=False).sum()
            await asyncio.sleep(0)
            loss.backward()
        return seen

    async def both() -> list[list[Any]]:
        return list(await asyncio.gather(train(PAIR), train(EIGHT)))

    assert asyncio.run(both()) == [[PAIR, PAIR], [EIGHT, EIGHT]]


def product(x: Tensor) -> Tensor:
    return ps.get_tp_group().all_reduce(x) * x * ps.get_tp_group().world_size


@pytest.mark.slow
def test_compiled_code_follows() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(product, fullgraph=True, backend="eager")
    x = torch.ones(())

    async def task(groups: ps.ParallelGroups) -> list[float]:
        seen = []
        with groups.use():
            for _ in range(3):
                await asyncio.sleep(0)
                seen.append(compiled(x).item())
        return seen

    async def both() -> list[list[float]]:
        return list(await asyncio.gather(task(PAIR), task(EIGHT)))

    for _ in range(2):
        assert asyncio.run(both()) == [[4.0] * 3, [64.0] * 3]
    with PAIR.use():
        assert in_thread(lambda: compiled(x).item()) == [4.0]
        assert compiled(x).item() == 4.0
    with pytest.raises(ps.GroupNotInitializedError, match="initialize_model_parallel"):
        product(x)
    with pytest.raises(Exception, match="initialize_model_parallel"):
        compiled(x)
    with EIGHT.use():
        assert compiled(x).item() == 64.0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
def test_a_compiled_checkpoint_has_the_groups_of_its_forward() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(product, fullgraph=True, backend="eager")
    x = torch.ones(2, requires_grad=True)
    losses = [_within(groups, lambda: checkpoint(compiled, x, use_reentrant=False).sum()) for groups in (PAIR, EIGHT)]
    for loss, groups in zip(losses, (PAIR, EIGHT), strict=True):
        (expected,) = _within(groups, lambda: torch.autograd.grad(product(x).sum(), x))
        (found,) = torch.autograd.grad(loss, x)
        assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_use_within_compiled_code_breaks_the_graph() -> None:
    torch._dynamo.reset()

    def step(x: Tensor) -> Tensor:
        with PAIR.use():
            return product(x) + 1

    compiled = torch.compile(step, backend="eager")
    for _ in range(2):
        assert compiled(torch.ones(())).item() == 5.0
    assert ps.try_get_current_groups() is None
