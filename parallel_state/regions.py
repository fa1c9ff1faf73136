"""Megatron's tensor- and sequence-parallel regions: where activations enter and leave the sharded part of a layer.

    region                                    forward              backward
    copy_to_tensor_model_parallel_region      x                    all-reduce
    reduce_from_tensor_model_parallel_region  all-reduce           gradient as it is
    scatter_to_tensor_model_parallel_region   own slice, last dim  all-gather, last dim
    gather_from_tensor_model_parallel_region  all-gather, last dim own slice, last dim
    scatter_to_sequence_parallel_region       own slice, dim 0     all-gather, dim 0
    gather_from_sequence_parallel_region      all-gather, dim 0    reduce-scatter, dim 0 (or own slice)
    reduce_scatter_to_sequence_parallel_region  reduce-scatter, dim 0   all-gather, dim 0
    all_gather_last_dim_from_tensor_parallel_region    all-gather, last dim      reduce-scatter, last dim
    reduce_scatter_last_dim_to_tensor_parallel_region  reduce-scatter, last dim  all-gather, last dim

They differ from the gradients of the plain ops in one thing: here the ranks compute *one* loss together, so the
gradient that arrives at a replicated tensor is already whole on every rank, and is not summed again.
Shapes: `[tokens, hidden]` or any other with the dim named above. Every rank of the group calls them; `group` defaults
to the tensor-parallel one. After Shoeybi et al., arXiv:1909.08053, and Korthikanti et al., arXiv:2205.05198.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel_state import checks
from parallel_state.coordinator import GroupCoordinator
from parallel_state.state import get_tp_group


def copy_to_tensor_model_parallel_region(x: Tensor, group: GroupCoordinator | None = None) -> Tensor:
    """`x` itself; its gradient is summed over the group. Before a column-parallel layer."""
    group = get_tp_group() if group is None else group
    return x if group.world_size == 1 else _Copy.apply(x, group)


def reduce_from_tensor_model_parallel_region(x: Tensor, group: GroupCoordinator | None = None) -> Tensor:
    """The sum over the group; its gradient passes as it is. After a row-parallel layer."""
    group = get_tp_group() if group is None else group
    return x if group.world_size == 1 else _Reduce.apply(x, group)


def scatter_to_tensor_model_parallel_region(x: Tensor, group: GroupCoordinator | None = None) -> Tensor:
    """This rank's slice of the last dim, which must be divisible by the group's size."""
    return _scatter(x, -1, group)


def gather_from_tensor_model_parallel_region(x: Tensor, group: GroupCoordinator | None = None) -> Tensor:
    """The ranks' slices joined along the last dim."""
    group = get_tp_group() if group is None else group
    return x if group.world_size == 1 else _Gather.apply(x, group, -1, False)


def scatter_to_sequence_parallel_region(x: Tensor, group: GroupCoordinator | None = None) -> Tensor:
    """This rank's slice of dim 0, which must be divisible by the group's size."""
    return _scatter(x, 0, group)


def gather_from_sequence_parallel_region(
    x: Tensor, tensor_parallel_output_grad: bool = True, group: GroupCoordinator | None = None
) -> Tensor:
    """The ranks' slices joined along dim 0. With `tensor_parallel_output_grad`, the default, a sharded layer follows:
    each rank's gradient is a part, and they are reduced; without, it is whole on every rank, and is only cut."""
    group = get_tp_group() if group is None else group
    return x if group.world_size == 1 else _Gather.apply(x, group, 0, tensor_parallel_output_grad)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, group: GroupCoordinator | None = None) -> Tensor:
    """This rank's slice of dim 0 of the sum over the group."""
    group = get_tp_group() if group is None else group
    return x if group.world_size == 1 else _ReduceScatter.apply(x, group, 0)


def all_gather_last_dim_from_tensor_parallel_region(x: Tensor, group: GroupCoordinator | None = None) -> Tensor:
    """The ranks' slices joined along the last dim; the gradient is reduce-scattered."""
    group = get_tp_group() if group is None else group
    return x if group.world_size == 1 else _Gather.apply(x, group, x.dim() - 1, True)


def reduce_scatter_last_dim_to_tensor_parallel_region(x: Tensor, group: GroupCoordinator | None = None) -> Tensor:
    """This rank's slice of the last dim of the sum over the group; the gradient is all-gathered."""
    group = get_tp_group() if group is None else group
    return x if group.world_size == 1 else _ReduceScatter.apply(x, group, x.dim() - 1)


def _scatter(x: Tensor, dim: int, group: GroupCoordinator | None) -> Tensor:
    group = get_tp_group() if group is None else group
    dim = checks.normal_dim(group.context, "scatter region", x, dim)
    checks.check_divisible(group.context, "scatter region", x, dim)
    return x if group.world_size == 1 else _Scatter.apply(x, group, dim)


def _own_slice(x: Tensor, group: GroupCoordinator, dim: int) -> Tensor:
    size = x.shape[dim] // group.world_size
    return x.narrow(dim, group.rank_in_group * size, size).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: GroupCoordinator) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.group.all_reduce(grads[0]), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: GroupCoordinator) -> Tensor:
        return group.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: GroupCoordinator, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _own_slice(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.group.all_gather(grads[0], ctx.dim), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: GroupCoordinator, dim: int, reduce_grad: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.reduce_grad = group, dim, reduce_grad
        return group.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.reduce_grad:
            return ctx.group.reduce_scatter(grads[0], ctx.dim), None, None, None
        return _own_slice(grads[0], ctx.group, ctx.dim), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: GroupCoordinator, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.reduce_scatter(x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.group.all_gather(grads[0], ctx.dim), None, None
