"""The fusion pass on two tensor-parallel ranks of transformers' Llama."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import parallel_state as ps
from tests.compile.test_compile import _log_of
from tests.extent import LONG
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
NORM = "all_reduce_add_rms_norm"
LAYERS = 2


class _RowParallel(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return ps.get_tp_group().all_reduce(self.linear(x))


def _llama(dtype: torch.dtype) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(3)
    model = LlamaForCausalLM(config)
    torch.manual_seed(10 + ps.get_tensor_model_parallel_rank())
    for layer in model.model.layers:
        for each in (layer.self_attn, layer.mlp):
            for weight in each.parameters():
                nn.init.normal_(weight, std=0.2)
        layer.self_attn.o_proj = _RowParallel(layer.self_attn.o_proj)
        layer.mlp.down_proj = _RowParallel(layer.mlp.down_proj)
    return model.to(dtype).eval()


def _options(backend: str, fusion: ps.AllReduceFusionPass | None) -> dict[str, Any]:
    if backend == "inductor":
        return {"options": {"post_grad_custom_pre_pass": fusion}} if fusion else {}
    return {"backend": fusion.aot_eager if fusion else backend}


def _without_kept_graphs(body: Callable[..., Any], *args: Any) -> Any:
    """Runs `body` without torch's cached graphs, which would bypass the pass. Cached C++ kernels stay in use."""
    import torch._functorch.config
    import torch._inductor.config

    with (
        torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
    ):
        return body(*args)


def _with_graphs_kept_as(tag: str, body: Callable[..., Any], *args: Any) -> Any:
    """Runs `body` with a graph cache of this rank: a rank that finds its peer's graph doesn't run the pass."""
    with torch.compiler.config.patch(cache_key_tag=f"{tag}-{os.environ['RANK']}"):
        return body(*args)


def _llama_body(backend: str, dtype: torch.dtype) -> tuple[str, list[tuple[str, str]]]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, fusion = _llama(dtype), ps.AllReduceFusionPass()
    compiled = torch.compile(model, fullgraph=True, **_options(backend, fusion))
    with torch.no_grad():
        for tokens in (5, 9, 12) if LONG else (5,):
            ids = torch.randint(64, (2, tokens), generator=torch.Generator().manual_seed(tokens))
            expected = model(ids).logits
            with _log_of(ps.get_tp_group()) as log:
                found = compiled(ids).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 0.05)
    assert not torch._dynamo.utils.counters["graph_break"]
    return str(fusion.report), log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("aot_eager", torch.float32), pytest.param("inductor", torch.bfloat16, marks=pytest.mark.long)],
    ids=str,
)
def test_llama_on_two_ranks(pools: Pools, backend: str, dtype: torch.dtype) -> None:
    """A norm follows every all_reduce: of this layer, the next one, or the model."""
    pytest.importorskip("transformers", "5.23", exc_type=ImportError)
    for report, log in pools(2).run(_without_kept_graphs, _llama_body, backend, dtype, tp=2, timeout_s=400):
        assert "0 of" not in report and "kept" not in report, report
        assert log == [("tp", NORM)] * (2 * LAYERS), report


def _among_others(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    tp = ps.get_tp_group()
    tp.all_reduce(x, "max")
    total = tp.all_reduce(x.sin())
    tp.barrier()
    late = tp.all_gather(residual, 0)[: x.shape[0]] * 2
    total = total + late
    y = total + tp.all_reduce(x * 2)
    tp.broadcast(x, 1)
    normed = torch.nn.functional.rms_norm(y, (16,), weight, 1e-6)
    quantised = (normed.float() / 0.01).clamp(-448, 448)
    tp.all_reduce(x, "min")
    return quantised, y, torch.nn.functional.rms_norm(total, (16,), weight, 1e-6)


def _order_body(backend: str) -> None:
    tp = ps.get_tp_group()
    x = torch.arange(64.0).view(4, 16).cos() + tp.rank_in_group
    residual, weight = torch.arange(64.0).view(4, 16).sin(), torch.rand(16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        with _log_of(tp) as eager_log:
            expected = _among_others(x, residual, weight)
        fused_log = [("tp", NORM) if i == 4 else call for i, call in enumerate(eager_log)]
        fusion = ps.AllReduceFusionPass()
        # The second run uses inductor's cache. The run without the pass must not.
        for each, wanted in ((fusion, fused_log), (ps.AllReduceFusionPass(), fused_log), (None, eager_log)):
            torch._dynamo.reset()
            compiled = torch.compile(_among_others, fullgraph=True, **_options(backend, each))
            with _log_of(tp) as log:
                found = compiled(x, residual, weight)
            assert log == wanted
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other)
    assert fusion.report.count == 1
    assert "computed from the result of the all_reduce" in str(fusion.report)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_order_of_collectives_stays(pools: Pools, backend: str) -> None:
    pools(2).run(_with_graphs_kept_as, uuid.uuid4().hex, _order_body, backend, tp=2, timeout_s=300)
