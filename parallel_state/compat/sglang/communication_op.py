"""`sglang.srt.distributed.communication_op`: the collectives of model layers, each of one group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from parallel_state.compat.sglang.context import get_parallel


def tensor_model_parallel_all_reduce(input_: Tensor) -> Tensor:
    """Adds up over the tp group, in place; returns `input_`."""
    return get_parallel().tp_group.all_reduce(input_)


def tensor_model_parallel_quant_all_reduce(input_: Tensor) -> Tensor:
    """Adds up over the tp group, in place; returns `input_`."""
    return get_parallel().tp_group.quant_all_reduce(input_)


def tensor_model_parallel_fused_allreduce_rmsnorm(
    input_: Tensor, residual_inp_: Tensor, weight_: Tensor, eps: float
) -> tuple[Tensor, Tensor] | None:
    """Returns norm and sum of the tp group's fused call."""
    return get_parallel().tp_group.fused_allreduce_rmsnorm(input_, residual_inp_, weight_, eps)


def tensor_model_parallel_fused_allreduce_rmsnorm_quant_per_group(
    input_: Tensor,
    residual_inp_: Tensor,
    weight_: Tensor,
    eps: float,
    group_size: int = 128,
    emit_bf16: bool = False,
    transpose_scale: bool = False,
) -> tuple[Tensor, ...] | None:
    """Returns None: there is no kernel for it, and callers quantise by themselves."""
    return get_parallel().tp_group.fused_allreduce_rmsnorm_quant_per_group(
        input_, residual_inp_, weight_, eps, group_size, emit_bf16, transpose_scale
    )


def tensor_model_parallel_all_gather(input_: Tensor, dim: int = -1) -> Tensor:
    """Concatenates the tp group's tensors along `dim`."""
    return get_parallel().tp_group.all_gather(input_, dim)


def tensor_model_parallel_gather(input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
    """Concatenates on rank `dst` of the tp group; None on the others."""
    return get_parallel().tp_group.gather(input_, dst, dim)


def broadcast_tensor_dict(tensor_dict: dict[Any, Any] | None = None, src: int = 0) -> dict[Any, Any] | None:
    """Returns the dict of the tp group's rank `src`; the dict itself before any init."""
    return get_parallel().tp_group.broadcast_tensor_dict(tensor_dict, src) if dist.is_initialized() else tensor_dict


def attn_cp_tp_broadcast_pyobj(data: list[Any]) -> list[Any]:
    """Returns the objects of the first rank of attention's cp and tp, on each of their ranks."""
    tp, cp = get_parallel().attn_tp_group, get_parallel().attn_cp_group
    if tp.rank_in_group == 0:
        data = cp.broadcast_object(data)
    return tp.broadcast_object(data)


def attention_tensor_model_parallel_all_reduce(input_: Tensor) -> Tensor:
    """Adds up over attention's tp group, in place; returns `input_`."""
    return get_parallel().attn_tp_group.all_reduce(input_)


def attention_tensor_model_parallel_quant_all_reduce(input_: Tensor) -> Tensor:
    """Adds up over attention's tp group, in place; returns `input_`."""
    return get_parallel().attn_tp_group.quant_all_reduce(input_)


def moe_tensor_model_parallel_all_reduce(input_: Tensor) -> Tensor:
    """Adds up over the experts' tp group, in place; returns `input_`."""
    return get_parallel().moe_tp_group.all_reduce(input_)


def moe_expert_parallel_all_reduce(input_: Tensor) -> Tensor:
    """Adds up over the experts' ep group, in place; returns `input_`."""
    return get_parallel().moe_ep_group.all_reduce(input_)
