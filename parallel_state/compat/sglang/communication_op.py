"""`sglang.srt.distributed.communication_op`: functions that each call a collective of one group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from parallel_state.compat.sglang.context import get_parallel
from parallel_state.compat.sglang.coordinator import of_groups

_CALLS = {
    "tensor_model_parallel_all_reduce": "tp.all_reduce",
    "tensor_model_parallel_quant_all_reduce": "tp.quant_all_reduce",
    "tensor_model_parallel_fused_allreduce_rmsnorm": "tp.fused_allreduce_rmsnorm",
    "tensor_model_parallel_fused_allreduce_rmsnorm_quant_per_group": "tp.fused_allreduce_rmsnorm_quant_per_group",
    "tensor_model_parallel_gather": "tp.gather",
    "attention_tensor_model_parallel_all_reduce": "attn_tp.all_reduce",
    "attention_tensor_model_parallel_quant_all_reduce": "attn_tp.quant_all_reduce",
    "moe_tensor_model_parallel_all_reduce": "moe_tp.all_reduce",
    "moe_expert_parallel_all_reduce": "moe_ep.all_reduce",
}
globals().update(of_groups(__name__, _CALLS))


def tensor_model_parallel_all_gather(input_: Tensor, dim: int = -1) -> Tensor:
    return get_parallel().tp_group.all_gather(input_, dim)


def broadcast_tensor_dict(tensor_dict: dict[Any, Any] | None = None, src: int = 0) -> dict[Any, Any] | None:
    return get_parallel().tp_group.broadcast_tensor_dict(tensor_dict, src) if dist.is_initialized() else tensor_dict


def attn_cp_tp_broadcast_pyobj(data: list[Any]) -> list[Any]:
    tp, cp = get_parallel().attn_tp_group, get_parallel().attn_cp_group
    if tp.rank_in_group == 0:
        data = cp.broadcast_object(data)
    return tp.broadcast_object(data)
