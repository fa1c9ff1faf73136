"""Passes local expert ids to the kernel of vLLM's CPU engine.

vLLM 0.32 and 0.33 pass global ids to `cpu_fused_moe`, which has only this rank's experts.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def install() -> bool:
    """Patches vLLM's `CPUUnquantizedExperts`, so that its kernel gets local ids. Returns False if vLLM lacks this
    class.
    """
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
    """Returns arguments of vLLM's `apply`, with local expert ids. Experts of other ranks get weight 0.

    `weights` and `ids` are `[tokens, top_k]`. `expert_map` has each expert's local id, or -1. If the
    weights were `applied_to_input`, this rank's experts get weight 1.
    """
    local = expert_map[ids.long()]
    weights = torch.ones_like(weights) if applied_to_input else weights
    return {
        "topk_weights": weights.masked_fill(local < 0, 0),
        "topk_ids": local.clamp(min=0).to(ids.dtype),
        "apply_router_weight_on_input": False,
    }
