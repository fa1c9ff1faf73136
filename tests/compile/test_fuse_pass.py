from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import parallel_state as ps
from parallel_state import simulated_group
from tests import fp8
from tests.compile.fuse_cases import (
    HIDDEN,
    LEFT,
    NORMS,
    OTHER_QUANTISATIONS,
    Function,
    fused_norm,
    group_in_use,
    llama_norm,
    quantised,
    quantised_by_promotion,
    quantised_by_reciprocal,
)


def _inputs(dtype: torch.dtype = torch.float32, tokens: int = 5) -> list[Tensor]:
    torch.manual_seed(5)
    x, residual = torch.randn(tokens, HIDDEN).to(dtype), torch.randn(tokens, HIDDEN).to(dtype)
    return [x, residual, (torch.rand(HIDDEN) + 0.5).to(dtype), torch.tensor([0.01])]


def _backend(fusion: ps.AllReduceFusionPass, graph: str) -> Function:
    if graph == "aten":
        return fusion.aot_eager
    from torch._inductor.decomposition import select_decomp_table

    def compiler(module: torch.fx.GraphModule, _: Any) -> Any:
        fusion(module.graph)
        module.graph.lint()
        module.recompile()
        return module

    return aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table(), keep_inference_input_mutations=True)


def _same(found: Any, expected: Any) -> None:
    for one, other in zip(*(each if isinstance(each, tuple) else (each,) for each in (found, expected)), strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        if one.dtype == torch.float8_e4m3fn:
            steps = [torch.tensor(fp8.bytes_of(each).astype(int)) for each in (one, other)]
            magnitudes = [torch.where(each > 127, 128 - each, each) for each in steps]
            assert (magnitudes[0] - magnitudes[1]).abs().max() <= 1
        else:
            eps = torch.finfo(one.dtype).eps
            torch.testing.assert_close(one, other, rtol=2 * eps, atol=2 * eps)


def _compile(function: Function, inputs: list[Tensor], graph: str = "aten") -> tuple[ps.FusionReport, dict[str, int]]:
    torch._dynamo.reset()
    fusion = ps.AllReduceFusionPass()
    with ps.simulate(1, 2, tensor_model_parallel_size=2).use(), torch.no_grad():
        expected = function(*[each.clone() for each in inputs])
        compiled = torch.compile(function, backend=_backend(fusion, graph), fullgraph=True)
        before = {name: traffic.calls for name, traffic in group_in_use().traffic().items()}
        _same(compiled(*[each.clone() for each in inputs]), expected)
        after = {name: traffic.calls for name, traffic in group_in_use().traffic().items()}
    calls = {name: count - before.get(name, 0) for name, count in after.items()}
    return fusion.report, {name: count for name, count in calls.items() if count}


GRAPHS = ("aten", "inductor's")
EITHER = [(graph,) for graph in GRAPHS]


DTYPES_AND_GRAPHS = (
    (torch.float32, "inductor's"), (torch.bfloat16, "aten"), (torch.float32, "aten"), (torch.bfloat16, "inductor's"),
    *((torch.float16, graph) for graph in GRAPHS),
)  # fmt: skip
"""float16, which casts like bfloat16, is in long runs only."""


def _in_turn(cases: Sequence[tuple[Any, ...]], others: Sequence[tuple[Any, ...]], count: int = 1) -> list[Any]:
    chosen = []
    for number, case in enumerate(cases):
        now = {(number * count + turn) % min(4, len(others)) for turn in range(count)}
        for at, other in enumerate(others):
            name = "-".join(str(getattr(each, "__name__", each)) for each in (*case, *other))
            chosen.append(pytest.param(*case, *other, marks=() if at in now else pytest.mark.long, id=name))
    return chosen


NORM, QUANTISED = "all_reduce_add_rms_norm", "all_reduce_add_rms_norm_static_fp8_quant"


@pytest.mark.parametrize(("norm", "dtype", "graph"), _in_turn([(norm,) for norm in NORMS], DTYPES_AND_GRAPHS, 2))
def test_norms_are_fused(norm: Function, dtype: torch.dtype, graph: str) -> None:
    def after(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        y = group_in_use().all_reduce(x) + residual
        return norm(y, weight), y

    def before(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        return norm(residual + group_in_use().all_reduce(x * 2), weight)

    def in_place(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        y = group_in_use().all_reduce(x.view(1, -1, HIDDEN))
        y += residual.view(1, -1, HIDDEN)
        return norm(y, weight).squeeze(0), y

    for function in (after, before, in_place):
        report, calls = _compile(function, _inputs(dtype), graph)
        assert report.count == 1, report
        assert calls == {NORM: 1}


def test_float64_is_fused_where_the_norm_is_in_float64() -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        return fused_norm(group_in_use().all_reduce(x) + residual, weight)

    assert _compile(function, _inputs(torch.float64))[1] == {NORM: 1}


@pytest.mark.parametrize("norm", NORMS)
def test_a_graph_for_any_number_of_tokens_is_fused(norm: Function) -> None:
    """The second number of tokens makes sizes symbolic in the shapes that the pass compares."""

    def function(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        y = residual + group_in_use().all_reduce(x)
        return norm(y, weight), y

    torch._dynamo.reset()
    fusion = ps.AllReduceFusionPass()
    with ps.simulate(1, 2, tensor_model_parallel_size=2).use(), torch.no_grad():
        compiled = torch.compile(function, backend=fusion.aot_eager, fullgraph=True)
        for tokens in (5, 9, 12):
            _same(compiled(*_inputs(tokens=tokens)), function(*_inputs(tokens=tokens)))
    assert fusion.report.count == 2, fusion.report
    assert not fusion.report.kept


@pytest.mark.parametrize(
    ("norm", "quantise", "dtype", "graph"),
    _in_turn(
        list(itertools.product(NORMS, (quantised, quantised_by_reciprocal, quantised_by_promotion))), DTYPES_AND_GRAPHS
    ),
)
def test_quantisation_is_fused(norm: Function, quantise: Function, dtype: torch.dtype, graph: str) -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        y = residual + group_in_use().all_reduce(x)
        return quantise(norm(y, weight), scale * 2), y

    report, calls = _compile(function, _inputs(dtype), graph)
    assert calls == {QUANTISED: 1}, report
    assert QUANTISED in str(report)


@pytest.mark.parametrize(("quantise", "graph"), _in_turn([(each,) for each in OTHER_QUANTISATIONS], EITHER))
def test_other_quantisations_stay_behind_the_fused_norm(quantise: Function, graph: str) -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        return quantise(llama_norm(residual + group_in_use().all_reduce(x), weight), scale * 10)

    assert _compile(function, _inputs(), graph)[1] == {NORM: 1}


@pytest.mark.parametrize(("function", "graph"), _in_turn([(each,) for each in LEFT], EITHER))
def test_what_is_left_alone(function: Function, graph: str) -> None:
    report, calls = _compile(function, _inputs(), graph)
    assert report.count == 0
    assert LEFT[function] in report.kept[0], report
    assert NORM not in calls and QUANTISED not in calls


def _late_residual(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    total = group_in_use().all_reduce(x)
    group_in_use().barrier()
    group_in_use().all_reduce(x, "max")
    late = residual * 3 + x.sin()
    return llama_norm(total + late, weight + late[0]), group_in_use().all_gather(late, 0)


def test_what_the_op_needs_is_moved_before_it_and_no_collective_moves() -> None:
    for graph in GRAPHS:
        report, calls = _compile(_late_residual, _inputs(), graph)
        assert report.count == 1
        assert calls == {NORM: 1, "barrier": 1, "all_reduce": 1, "all_gather": 1}


def test_a_chain_of_layers_and_a_sum_of_two() -> None:
    def layers(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        for _ in range(3):
            residual = residual + group_in_use().all_reduce(x)
            x = torch.tanh(llama_norm(residual, weight))
        return x, residual

    def of_two(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        return llama_norm(group_in_use().all_reduce(x) + group_in_use().all_reduce(residual), weight)

    report, calls = _compile(layers, _inputs(), "inductor's")
    assert calls == {NORM: 3}, report
    report, calls = _compile(of_two, _inputs(), "inductor's")
    assert calls == {"all_reduce": 1, NORM: 1}, report


def test_inputs_that_the_code_changes() -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        residual += group_in_use().all_reduce(x)
        normed = llama_norm(residual, weight)
        residual.mul_(2)
        weight.add_(1)
        return normed, residual * 1, weight * 1

    assert _compile(function, _inputs())[1] == {NORM: 1}


def test_other_strides() -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        y = residual.t().contiguous().t() + group_in_use().all_reduce(x)
        return llama_norm(y, weight), y

    report, calls = _compile(function, _inputs(), "inductor's")
    assert calls == {"all_reduce": 1}
    assert "other strides" in report.kept[0]


def test_a_training_step_keeps_its_parts() -> None:
    torch._dynamo.reset()
    for norm in NORMS:
        fusion = ps.AllReduceFusionPass()
        group = simulated_group([0, 1], 0)
        x, residual, weight, _ = (each.requires_grad_() for each in _inputs())

        def function(x: Tensor, residual: Tensor, weight: Tensor, group: Any = group, norm: Any = norm) -> Tensor:
            return norm(residual + group.all_reduce(x), weight)

        expected = torch.autograd.grad(function(x, residual, weight).square().sum(), (x, residual, weight))
        found = torch.compile(function, backend=fusion.aot_eager, fullgraph=True)(x, residual, weight)
        for one, other in zip(torch.autograd.grad(found.square().sum(), (x, residual, weight)), expected, strict=True):
            torch.testing.assert_close(one, other)
        assert fusion.report.count == 0
        assert "backward" in fusion.report.kept[0]


def test_the_report_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "parallel_state.compile.fusion_pass"):
        _compile(_late_residual, _inputs())
    assert "1 of 2 all-reduces fused" in caplog.text
    assert "all_reduce_add_rms_norm of [5, 32] torch.float32 on tp" in caplog.text
    assert "the all_reduce computes max, not sum" in caplog.text


def test_twice_is_fine_and_a_graph_without_all_reduces_too() -> None:
    torch._dynamo.reset()
    reports = []

    def compiler(module: torch.fx.GraphModule, _: Any) -> Any:
        reports.extend(ps.fuse_all_reduce_rms_norm(module.graph).count for _ in range(2))
        module.recompile()
        return module

    with ps.simulate(0, 2, tensor_model_parallel_size=2).use(), torch.no_grad():
        for function in (_late_residual, lambda *inputs: inputs[0] * 2):
            torch.compile(function, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)(*_inputs())
    assert reports == [1, 0, 0, 0]


def test_what_changes_a_tensor_in_place_before_the_norm_is_in_the_way() -> None:
    """Functional graphs have no in-place ops, but another pass may add one."""
    reasons = []

    def compiler(module: torch.fx.GraphModule, _: Any) -> Any:
        graph = module.graph
        add = next(node for node in graph.nodes if node.target is torch.ops.aten.add.Tensor)
        with graph.inserting_before(add):
            graph.call_function(torch.ops.aten.mul_.Tensor, (add.args[1], 2))
        reasons.extend(ps.fuse_all_reduce_rms_norm(graph).kept)
        return module

    def function(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        return llama_norm(group_in_use().all_reduce(x) + residual, weight)

    torch._dynamo.reset()
    with ps.simulate(0, 2, tensor_model_parallel_size=2).use(), torch.no_grad():
        torch.compile(function, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)(*_inputs())
    assert len(reasons) == 1
    assert "changes a tensor in place" in reasons[0]


def test_the_id_by_which_inductor_caches_is_that_of_the_sources() -> None:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    one, other = ps.AllReduceFusionPass(), ps.AllReduceFusionPass()
    assert isinstance(one, CustomGraphPass)
    assert one.uuid() == other.uuid()
    assert len(one.uuid()) == 64
