"""Training under every partitioner, activation budget and checkpoint policy of torch: equal gradients, order
kept. A partitioner cuts AOTAutograd's graph in two."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
from functorch.compile import default_partition, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import parallel_state as ps
from tests.extent import LONG

PARTITIONERS = {"min-cut": min_cut_rematerialization_partition, "default": default_partition}
IN_GRAPH = (False, True) if LONG else (False,)
"""True for inductor: its graph changes its inputs itself. With other backends the graph's caller does."""
RECOMPUTING = (None, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
BUDGETS = (1.0, 0.7, 0.3, 0.0)
REPEATS_BY_BUDGET = torch.torch_version.TorchVersion(torch.__version__) < "2.15"
"""Older torch fails on a saved node with several results. With it, a budget may repeat a collective."""


def _layer(x: Tensor, w: Tensor) -> Tensor:
    tp = ps.get_tp_group()
    h = tp.all_reduce(torch.relu(x @ w))
    tp.barrier()
    tp.all_gather(w, 0)
    h = ps.reduce_from_tensor_model_parallel_region(torch.sin(h) @ w)
    tp.send(h.detach(), 1)
    y = tp.all_gather(h.sin(), 0) * 2
    tp.broadcast_(torch.ones(3), 0)
    z = tp.reduce_scatter(y, 0).sin()
    tp.barrier()
    return z


def _plain(x: Tensor, w: Tensor) -> Tensor:
    return _layer(x, w).square().sum()


def _pointwise(x: Tensor, w: Tensor) -> Tensor:
    tp = ps.get_tp_group()
    return tp.all_gather(tp.all_gather(torch.relu(x * w[:4]), 0).sin(), 1).cos().sum()


def _checkpointed(policy: CheckpointPolicy | None) -> Callable[[Tensor, Tensor], Tensor]:
    options: dict[str, Any] = {}
    if policy is not None:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: policy)

    def function(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(_layer, x, w, use_reentrant=False, **options)
        return x.square().sum()

    return function


@contextmanager
def _log() -> Iterator[list[str]]:
    with ps.simulate(0, 2, tensor_model_parallel_size=2).use():
        route, log = ps.get_tp_group().route, list[str]()
        run = route.run

        def logged(operation: str, *args: Any, **options: Any) -> Any:
            log.append(operation)
            return run(operation, *args, **options)

        route.run = logged  # type: ignore[method-assign]
        yield log


def _run(
    function: Callable[[Tensor, Tensor], Tensor], log: list[str]
) -> tuple[tuple[Tensor, ...], list[str], list[str]]:
    x = torch.linspace(-1, 1, 32).view(4, 8).cos().requires_grad_()
    w = torch.linspace(-1, 2, 64).view(8, 8).sin().requires_grad_()
    log.clear()
    loss = function(x, w)
    forward = list(log)
    log.clear()
    return torch.autograd.grad(loss, (x, w)), forward, list(log)


def _check(
    function: Callable[[Tensor, Tensor], Tensor],
    plain: Callable[[Tensor, Tensor], Tensor],
    partitioner: str,
    budget: float = 1.0,
    *,
    repeats: bool = False,
) -> None:
    with _log() as log:
        expected, forward, backward = _run(plain, log)
        for in_graph in IN_GRAPH:
            torch._dynamo.reset()
            backend = aot_autograd(
                fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=PARTITIONERS[partitioner],
                keep_inference_input_mutations=in_graph,
            )  # fmt: skip
            with torch._functorch.config.patch(activation_memory_budget=budget):
                found = _run(torch.compile(function, fullgraph=True, backend=backend), log)
            torch.testing.assert_close(found[0], expected)
            assert found[1] == forward
            if repeats:
                remaining = iter(found[2])
                assert all(operation in remaining for operation in backward), (
                    "the backward's own operations must keep their order"
                )
                repeated = Counter(found[2]) - Counter(backward)
                assert repeated
                assert repeated <= Counter(forward)
            elif budget == 0:
                assert found[2] == forward[: len(found[2]) - len(backward)] + backward
            elif budget == 1 or not REPEATS_BY_BUDGET:
                assert found[2] == backward


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
def test_activation_budgets(budget: float) -> None:
    for function in (_plain, _pointwise):
        _check(function, function, "min-cut", budget)


def test_default_partitioner() -> None:
    _check(_plain, _plain, "default")


def _two_layers(x: Tensor, w: Tensor) -> Tensor:
    return _layer(_layer(x, w), w).square().sum()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Trying to unsafely apply AC")
@pytest.mark.parametrize("policy", [None, *CheckpointPolicy], ids=lambda policy: policy and policy.name)
def test_checkpoint_policies(policy: CheckpointPolicy | None) -> None:
    for partitioner in PARTITIONERS:
        _check(_checkpointed(policy), _two_layers, partitioner, repeats=policy in RECOMPUTING)
