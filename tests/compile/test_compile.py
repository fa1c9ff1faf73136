"""Collectives under torch.compile(fullgraph=True): equal results, nothing dropped or reordered."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.backends.common
from torch import Tensor, nn
from torch.nn import functional

import parallel_state as ps
from tests.contract.attempts import environment, world
from tests.extent import LONG
from tests.helpers.doors import token_of
from tests.workers import WorkerPool

BACKENDS = ("aot_eager", "inductor")
HIDDEN, HEADS = 16, 4


def _own_backend() -> str:
    return BACKENDS[ps.get_rank().bit_count() % 2]


@contextmanager
def _log_of(*groups: ps.GroupCoordinator) -> Any:
    log: list[tuple[str, str]] = []
    originals = [group.route.run for group in groups]

    def logged(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(operation: str, *args: Any, **kwargs: Any) -> Any:
            log.append((name, operation))
            return run(operation, *args, **kwargs)

        return call

    for group, run in zip(groups, originals, strict=True):
        group.route.serve_ops(False)  # compiled kernels would bypass the route
        group.route.run = logged(group.unique_name.split(":")[0], run)  # type: ignore[method-assign]
    try:
        yield log
    finally:
        for group, run in zip(groups, originals, strict=True):
            group.route.run = run  # type: ignore[method-assign]
            group.route.serve_ops(True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(ps.get_tensor_model_parallel_rank())
        size = ps.get_tensor_model_parallel_world_size()
        self.heads = HEADS // size
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN // size)
        self.out = nn.Linear(HIDDEN // size, HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN // size)
        self.down = nn.Linear(4 * HIDDEN // size, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[0]
        q, k, v = self.qkv(x).view(tokens, 3, self.heads, -1).permute(1, 2, 0, 3)
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(tokens, -1)
        x = x + ps.get_tp_group().all_reduce(self.out(attended))
        return x + ps.tensor_model_parallel_all_reduce(self.down(functional.gelu(self.up(x))))


def _block_body() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    block = Block()
    compiled = torch.compile(block, fullgraph=True, backend=_own_backend(), dynamic=True)
    with torch.inference_mode():
        for tokens in (3, 5, 8, 13):
            x = torch.arange(tokens * HIDDEN, dtype=torch.float32).view(tokens, HIDDEN).sin()
            torch.testing.assert_close(compiled(x), block(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "a new token count recompiled"
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_tensor_parallel_block_compiles_once_for_all_token_counts(pools: Callable[[int], WorkerPool]) -> None:
    pools(2).run(_block_body, tp=2, timeout_s=300)


def _equal_slices_body() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    tp = ps.get_tp_group()
    compiled = torch.compile(tp.all_to_all, fullgraph=True, backend=_own_backend(), dynamic=True)
    for rows in (4, 6, 10):
        x = torch.arange(rows * 3.0).view(rows, 3) + 100 * tp.rank_in_group
        assert torch.equal(compiled(x), tp.all_to_all(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "a new number of rows recompiled"


def test_all_to_all_of_equal_slices_compiles_once_for_all_numbers_of_rows(pools: Callable[[int], WorkerPool]) -> None:
    pools(2).run(_equal_slices_body, tp=2, timeout_s=300)


def _every_op(x: Tensor) -> tuple[Tensor, ...]:
    tp = ps.get_tp_group()
    rank, size = tp.rank_in_group, tp.world_size
    tp.all_reduce(x * 2, "max")
    reduced = tp.all_reduce(x)
    gathered = tp.all_gather(reduced, -1)
    tp.barrier()
    scattered = tp.reduce_scatter(gathered, -1)
    vector = tp.all_gatherv(x[: rank + 1], 0, [r + 1 for r in range(size)])
    share = tp.reduce_scatterv(vector, 0, [r + 1 for r in range(size)])
    if rank == 0:
        tp.send(scattered, 1)
        tp.recv([4, 2], torch.float32, 1)
        tp.send(reduced + 1, 1)
        other = tp.recv([x.shape[0], 3], torch.float32, 1)
    else:
        other = tp.recv([x.shape[0], x.shape[1]], torch.float32, 0)
        tp.send(torch.ones(4, 2), 0)
        other = other + tp.recv([x.shape[0], x.shape[1]], torch.float32, 0)
        tp.send(other[:, :3].contiguous(), 0)
    swapped = tp.all_to_all(gathered.view(size * x.shape[1], x.shape[0]), 0, 1)
    told = tp.broadcast(scattered, 1)
    told = tp.broadcast_(told * 3, 0)
    tp.all_reduce_(told)
    collected = tp.gather(x, 1, 0)
    dealt = tp.scatter(gathered if rank == 0 else None, 0, 1, size=[x.shape[0], x.shape[1]], dtype=torch.float32)
    tp.all_reduce(x, "min")
    return (
        reduced,
        gathered,
        scattered,
        vector,
        share,
        other,
        swapped,
        told,
        dealt,
        x if collected is None else collected,
    )


def _every_op_body(backend: str) -> list[tuple[str, str]]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    tp = ps.get_tp_group()
    compiled = torch.compile(_every_op, fullgraph=True, backend=backend, dynamic=True)
    logs = []
    for tokens in (4, 6, 9):
        x = torch.arange(tokens * 5, dtype=torch.float32).view(tokens, 5).cos() + tp.rank_in_group
        with _log_of(tp) as eager_log:
            expected = _every_op(x)
        with _log_of(tp) as compiled_log:
            found = compiled(x)
        assert compiled_log == eager_log
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        logs.append(eager_log)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    return logs[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_op_compiles_keeps_its_place_and_is_never_dropped(
    pools: Callable[[int], WorkerPool], backend: str
) -> None:
    logs = pools(2).run(_every_op_body, backend, tp=2, timeout_s=300)
    assert len(logs[0]) == len(logs[1]) == 18


def _two_groups(x: Tensor) -> Tensor:
    tp, pp = ps.get_tp_group(), ps.get_pp_group()
    pp.all_reduce(x + 1)
    tp.all_reduce(x + 2)
    if pp.is_first_rank:
        pp.send(x)
    else:
        pp.recv(list(x.shape), x.dtype)
    tp.barrier()
    pp.all_reduce(x + 3)
    return tp.all_gather(x, 0)


def _two_groups_body() -> None:
    torch._dynamo.reset()
    tp, pp = ps.get_tp_group(), ps.get_pp_group()
    x = torch.ones(2, 3) * ps.get_rank()
    with _log_of(tp, pp) as eager_log:
        expected = _two_groups(x)
    compiled = torch.compile(_two_groups, fullgraph=True, backend=_own_backend())
    with _log_of(tp, pp) as compiled_log:
        assert torch.equal(compiled(x), expected)
    assert compiled_log == eager_log == [
        ("pp", "all_reduce"), ("tp", "all_reduce"), ("pp", "send" if pp.is_first_rank else "recv"), ("tp", "barrier"),
        ("pp", "all_reduce"), ("tp", "all_gather"),
    ]  # fmt: skip


def test_ops_of_two_groups_keep_their_order(pools: Callable[[int], WorkerPool]) -> None:
    pools(4).run(_two_groups_body, tp=2, pp=2, timeout_s=300)


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        rank, size = ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()
        up, down = torch.randn(32, HIDDEN) / math.sqrt(HIDDEN), torch.randn(HIDDEN, 32) / math.sqrt(32)
        self.up = nn.Parameter(up.chunk(size, 0)[rank].clone())
        self.down = nn.Parameter(down.chunk(size, 1)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        x = ps.copy_to_tensor_model_parallel_region(x)
        x = functional.gelu(functional.linear(x, self.up))
        return ps.reduce_from_tensor_model_parallel_region(functional.linear(x, self.down))


def _training_body() -> None:
    torch._dynamo.reset()
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(3))
    gradients = []
    for compiled in (False, True):
        x.requires_grad_().grad = None
        model = Trained()
        forward = torch.compile(model, fullgraph=True, backend=_own_backend()) if compiled else model
        forward(x).square().sum().backward()
        gradients.append([x.grad, model.up.grad, model.down.grad])
    for eager, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, eager)


def test_gradients_through_regions_compile(pools: Callable[[int], WorkerPool]) -> None:
    pools(2).run(_training_body, tp=2, timeout_s=300)


def _differentiable(x: Tensor) -> Tensor:
    tp = ps.get_tp_group()
    y = tp.all_gather(x, 0) * 2
    y = tp.reduce_scatter(y, 0).sin()
    y = tp.all_to_all(y, 0, 1)
    y = tp.broadcast(y, 1) + tp.all_reduce(y, "avg")
    return y.square().sum()


def _gradients_body(backend: str) -> None:
    torch._dynamo.reset()
    tp = ps.get_tp_group()
    results = []
    for forward in (_differentiable, torch.compile(_differentiable, fullgraph=True, backend=backend)):
        x = (torch.arange(8.0).view(4, 2).cos() + tp.rank_in_group).requires_grad_()
        forward(x).backward()
        results.append(x.grad)
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_the_ops_compile(pools: Callable[[int], WorkerPool], backend: str) -> None:
    pools(2).run(_gradients_body, backend, tp=2, timeout_s=300)


def _use_body() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: ps.get_tp_group().all_reduce(x), fullgraph=True, backend="aot_eager")
    x = torch.ones(3)
    assert compiled(x).tolist() == [2.0] * 3
    with ps.simulate(0, 8, tensor_model_parallel_size=8).use():
        assert compiled(x).tolist() == [8.0] * 3
    assert compiled(x).tolist() == [2.0] * 3


def test_a_compiled_model_follows_the_groups_in_use(pools: Callable[[int], WorkerPool]) -> None:
    pools(2).run(_use_body, tp=2, timeout_s=120)


def test_a_function_over_more_groups_than_dynamos_limit() -> None:
    found = []
    groups = [ps.simulate(0, size, tensor_model_parallel_size=size) for size in range(2, 14)]
    x = torch.ones(3)
    for limit, fullgraph in ((8, False), (8, True), (len(groups), True)):
        torch._dynamo.reset()
        graphs: list[Any] = []

        def backend(graph: torch.fx.GraphModule, _: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        by_getter = torch.compile(lambda x: ps.get_tp_group().all_reduce(x), fullgraph=fullgraph, backend=backend)
        told = f"all {len(groups)}"
        with torch._dynamo.config.patch(recompile_limit=limit):
            for size, each in enumerate(groups, start=2):
                try:
                    with each.use():
                        assert by_getter(x).tolist() == [float(size)] * 3
                except Exception as error:
                    told = f"{type(error).__name__} at {size - 1}"
                    break
        found.append(f"{told}, {len(graphs)} compiled")
    torch._dynamo.reset()
    assert found == ["all 12, 8 compiled", "FailOnRecompileLimitHit at 9, 8 compiled", "all 12, 12 compiled"]


def _transforms_body() -> None:
    group = ps.get_tp_group()
    x = torch.arange(8, dtype=torch.float64).view(4, 2).cos() + group.rank_in_group

    def layer(x: Tensor) -> Tensor:
        y = ps.copy_to_tensor_model_parallel_region(x).sin()
        y = ps.reduce_from_tensor_model_parallel_region(y) + group.all_reduce(x, "avg")
        return ps.gather_from_sequence_parallel_region(ps.reduce_scatter_to_sequence_parallel_region(y))

    def loss(x: Tensor) -> Tensor:
        return layer(x).square().sum()

    for number, (transformed, given) in enumerate((
        (torch.func.grad(loss), x),
        (torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum()), x),
        (torch.func.vmap(torch.func.grad(loss)), torch.stack([x, 2 * x])),
    )):  # fmt: skip
        backend = _own_backend() if LONG or number == 0 else BACKENDS[0]
        torch._dynamo.reset()
        compiled = torch.compile(transformed, fullgraph=True, backend=backend)
        torch.testing.assert_close(compiled(given), transformed(given))


def test_transforms_of_torch_func_compile(pools: Callable[[int], WorkerPool]) -> None:
    pools(2).run(_transforms_body, tp=2, timeout_s=300)


def _cached_body(backend: str) -> None:
    tp = ps.get_tp_group()
    for _ in range(2):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: tp.broadcast(x * 2, 1).square().sum(), fullgraph=True, backend=backend)
        x = (torch.arange(6.0) + tp.rank_in_group).requires_grad_()
        compiled(x).backward()
        if tp.rank_in_group == 1:
            assert x.grad is not None
            torch.testing.assert_close(x.grad, 8 * tp.world_size * x.detach())
        else:
            assert x.grad is not None
            assert not x.grad.any()
        wide = torch.compile(lambda x: tp.all_gather(x + 1, -1) * 2, fullgraph=True, backend=backend)
        assert wide(torch.ones(3, 4)).shape == (3, 4 * tp.world_size)
        for function in (_uneven, _sliced):
            given = [torch.arange(20.0).view(10, 2) + tp.rank_in_group for _ in range(2)]
            for x, run in zip(given, (function, torch.compile(function, fullgraph=True, backend=backend)), strict=True):
                run(x.requires_grad_()).square().sum().backward()
            torch.testing.assert_close(given[1].grad, given[0].grad)


def _uneven(x: Tensor) -> Tensor:
    tp = ps.get_tp_group()
    sizes = [rank + 1 for rank in range(tp.world_size)]
    collected = tp.gather(x.detach() * 2, 0, 0)
    y = tp.reduce_scatterv(x[: sum(sizes)] * 2, 0, sizes)
    return y.sum() if collected is None else y.sum() + collected.sum()


def _sliced(x: Tensor) -> Tensor:
    x = ps.scatter_to_sequence_parallel_region(x[:8] * 2)
    return ps.gather_from_tensor_model_parallel_region(x.sin())


def test_cached_code_of_another_rank_or_world_size_is_not_used(pools: Callable[[int], WorkerPool]) -> None:
    for world_size in (2, 4):
        pools(world_size).run(_cached_body, "inductor", tp=world_size, timeout_s=300)


def _shared_cache_body(folder: str) -> int:
    """Each rank compiles after the previous one. Returns the number of cache hits. Collectives are replaced,
    because the other ranks don't call."""
    tp = ps.get_tp_group()

    def function(x: Tensor) -> Tensor:
        return tp.all_gather(torch.tanh(tp.all_reduce(x)), 0) * 2

    def alone(operation: str, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x.clone() if operation == "all_reduce" else torch.cat([x] * tp.world_size)

    run, hits = tp.route.run, 0
    x = torch.arange(12.0).view(4, 3) + tp.rank_in_group
    with environment(TORCHINDUCTOR_CACHE_DIR=folder):
        for rank in range(tp.world_size):
            if rank == tp.rank_in_group:
                torch._dynamo.reset()
                torch._dynamo.utils.counters.clear()
                compiled = torch.compile(function, fullgraph=True)
                tp.route.serve_ops(False)
                tp.route.run = alone  # type: ignore[method-assign]
                compiled(x)
                tp.route.run = run  # type: ignore[method-assign]
                tp.route.serve_ops(True)
                hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
            tp.barrier()
        torch.testing.assert_close(compiled(x), function(x))
    return hits


def test_a_rank_finds_the_code_that_another_has_compiled(pools: Callable[[int], WorkerPool], tmp_path: Path) -> None:
    assert pools(2).run(_shared_cache_body, str(tmp_path), tp=2, timeout_s=300) == [0, 1]


def _over_axes(x: Tensor) -> Tensor:
    x = ps.get_cp_group().all_reduce(x) * (1 + ps.get_context_parallel_rank())
    x = ps.get_expert_model_parallel_group().all_reduce(x) / ps.get_ep_world_size()
    if ps.is_pipeline_first_stage(ignore_virtual=False):
        x = x + ps.get_dp_shard_group().all_reduce(x)
    return x + ps.get_group("model").all_reduce(x) + ps.get_data_parallel_world_size(with_context_parallel=True)


def _axes_body() -> str:
    torch._dynamo.reset()
    with world(1, 2, context_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1):
        x = torch.arange(6.0) + ps.get_rank()
        compiled = torch.compile(_over_axes, fullgraph=True, backend="aot_eager")
        try:
            compiled(x)
            told = "nothing"
        except Exception as error:
            told = str(error)
        torch._dynamo.reset()
        with torch.inference_mode():
            expected = _over_axes(x)
            assert torch.equal(compiled(x), expected)
    return told


def test_getters_of_the_axis_table_compile(pools: Callable[[int], WorkerPool]) -> None:
    for told in pools(4).run(_axes_body, timeout_s=120.0):
        assert "eager=True" in told, told


class _OverGetters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return ps.get_tp_group().all_gather(ps.get_tp_group().all_reduce(self.linear(x)), -1)


def test_what_the_ops_claim_to_write_keeps_no_graph_out_of_a_cuda_graph() -> None:
    """`mode="reduce-overhead"` skips graphs that write inputs, except inputs with static addresses."""
    found: list[tuple[set[int], set[int]]] = []

    def look(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        told = torch._guards.TracingContext.get().fw_metadata
        assert told is not None
        found.append((set(told.mutated_inp_runtime_indices), set(told.static_input_indices)))
        return graph.forward

    with ps.simulate(0, 2, tensor_model_parallel_size=2).use(), torch.inference_mode():
        backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=look)
        torch.compile(_OverGetters(), backend=backend, fullgraph=True)(torch.ones(2, 4))
    ((written, staying),) = found
    assert not written, "the token must not count as a mutated input"
    assert len(staying) == 3, "weight, bias and the token, which isn't copied for a CUDA graph"
    marked = torch.zeros(1)
    torch._dynamo.mark_static_address(marked)
    token = token_of(ps.simulated_group([0, 1], 0))
    assert vars(marked)["_dynamo_static_input_type"] == vars(token)["_dynamo_static_input_type"]
