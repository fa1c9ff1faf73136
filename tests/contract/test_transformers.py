from __future__ import annotations

import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel_state as ps
from tests.contract.attempts import world
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 180.0
"""A rank that must import transformers itself needs 5 s of a core."""


def _on_our_mesh() -> Any:
    """from_pretrained would make its own meshes with these dims."""
    from transformers import LlamaForCausalLM  # slow: the test process doesn't import it
    from transformers.distributed.utils import TransformersDeviceMesh

    class OnOurMesh(LlamaForCausalLM):
        @classmethod
        def prepare_distribute_model(cls, distributed_config: Any, device_map: Any = None) -> tuple[Any, Any, Any]:
            dense = ps.get_device_mesh("pp", "dp_replicate", "fsdp", "tp")
            experts = ps.get_device_mesh("pp", "dp_replicate", "efsdp", "ep")
            # No device_map, which requires accelerate.
            return distributed_config, None, TransformersDeviceMesh(dense, experts)

    return OnOurMesh


LLAMA = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "tie_word_embeddings": False,
}  # fmt: skip


def _tokens() -> torch.Tensor:
    return torch.randint(32, (2, 7), generator=torch.Generator().manual_seed(0))


def _saved(path: str) -> torch.Tensor:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).double().eval()
    model.save_pretrained(path)
    with torch.no_grad():
        return model(_tokens()).logits


def _logits(path: str, order: str) -> dict[str, Any]:
    from transformers.distributed import DistributedConfig

    with world(2, data_parallel_replicate_size=2, order=order):
        config = DistributedConfig(tp_size=2, tp_plan="auto")
        model = _on_our_mesh().from_pretrained(path, distributed_config=config, dtype=torch.float64)
        weight = model.model.layers[0].mlp.down_proj.weight
        with torch.no_grad():
            logits = model(_tokens()).logits
        return {
            "logits": getattr(logits, "full_tensor", lambda: logits)(),
            "local": tuple(weight.to_local().shape),
            "group": weight.device_mesh.get_group() is ps.get_tp_group().device_group,
            "tp": ps.get_tp_group().ranks,
        }


def _version() -> tuple[int, ...]:
    try:
        return tuple(map(int, re.findall(r"\d+", metadata.version("transformers"))[:2]))
    except metadata.PackageNotFoundError:
        return ()


@pytest.mark.slow
@pytest.mark.skipif(_version() < (5, 23), reason="transformers 5.23 or later, whose mesh this is, is not installed")
@pytest.mark.parametrize(("order", "apart"), [("tp-dp-pp", 1), ("dp-tp-pp", 2)])
def test_llama_with_the_plan_of_transformers(pools: Pools, tmp_path: Path, order: str, apart: int) -> None:
    (expected,) = pools(1).run(_saved, str(tmp_path), timeout_s=DEADLINE_S)
    for rank, facts in enumerate(pools(4).run(_logits, str(tmp_path), order, timeout_s=DEADLINE_S)):
        assert facts["tp"][1] - facts["tp"][0] == apart
        assert rank in facts["tp"]
        assert facts["group"]
        assert facts["local"] == (16, 12)
        # float64. Each row-parallel product is the sum of two partial sums.
        torch.testing.assert_close(facts["logits"], expected, rtol=0, atol=1e-13)
