"""Gives vLLM's kernel for experts on CPUs, under expert parallelism, the ids of this rank's experts.

vLLM 0.32 and 0.33 give `cpu_fused_moe`, which has the weights of a rank's own experts, the ids of all ranks'; it reads
behind their end, and the worker ends with a segmentation fault, whatever the communicator. `apply` gets the map from
global to local ids, and passes it to nobody.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def install() -> bool:
    """Has the CPU's experts take the map into account; returns False where there are none of that shape."""
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts
    except ImportError:
        return False
    theirs = Experts.apply
    if not hasattr(theirs, "__wrapped__"):

        @functools.wraps(theirs)
        def apply(self: Any, *args: Any, **given: Any) -> Any:
            if not args and given.get("expert_map") is not None:
                given |= localized(
                    given["topk_weights"], given["topk_ids"], given["expert_map"], given["apply_router_weight_on_input"]
                )
            return theirs(self, *args, **given)

        Experts.apply = apply
    return True


def localized(weights: Tensor, ids: Tensor, expert_map: Tensor, applied_to_input: bool) -> dict[str, Any]:
    """Returns arguments of `apply` with local ids, `[tokens, top_k]`: experts of other ranks weigh nothing.

    `expert_map`: -1 for those, else the local id. Weights that were applied to the input are ones here.
    """
    local = expert_map[ids.long()]
    weights = torch.ones_like(weights) if applied_to_input else weights
    return {
        "topk_weights": weights.masked_fill(local < 0, 0),
        "topk_ids": local.clamp(min=0).to(ids.dtype),
        "apply_router_weight_on_input": False,
    }
