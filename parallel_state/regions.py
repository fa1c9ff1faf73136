"""Megatron's tensor- and sequence-parallel regions: the entry and exit of the sharded part of a layer.

The ranks compute *one* loss together, unlike with plain collectives: the gradient of a replicated tensor is already
complete on every rank. The backward passes of higher-order gradients call the same collectives, also under torch.func.

Every rank of `group` (default: the tensor-parallel group) must call the function. The dim of a slice must be divisible
by the group's size. The result may be changed in place; the input is never changed.

After Shoeybi et al., arXiv:1909.08053, and Korthikanti et al., arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from device_communicators.base.torch_internals import below_autograd, in_transform
from device_communicators.routing.registry import find_route
from parallel_state.collectives import checks, ops
from parallel_state.groups.coordinator import GroupCoordinator
from parallel_state.state import get_tp_group

_OPS = torch.ops.parallel_state


def copy_to_tensor_model_parallel_region(x: Tensor, group: GroupCoordinator | None = None) -> Tensor:
    """Returns a copy of `x`; the backward sums gradients over the group. Use before a column-parallel layer."""
    return _run("copy_region", _copy, x, group)


def reduce_from_tensor_model_parallel_region(x: Tensor, group: GroupCoordinator | None = None) -> Tensor:
    """Returns the sum over the group; the backward passes gradients on unchanged. Use after a row-parallel layer."""
    return _run("reduce_region", _reduce, x, group)


def scatter_to_tensor_model_parallel_region(x: Tensor, group: GroupCoordinator | None = None) -> Tensor:
    """Returns this rank's slice of the last dim; the backward concatenates gradients."""
    return _run("scatter_region", _scatter, x, group, -1)


def gather_from_tensor_model_parallel_region(x: Tensor, group: GroupCoordinator | None = None) -> Tensor:
    """Concatenates the ranks' slices along the last dim; the backward returns this rank's slice of the gradient."""
    return _run("gather_region", _gather, x, group, -1, False)


def scatter_to_sequence_parallel_region(x: Tensor, group: GroupCoordinator | None = None) -> Tensor:
    """Returns this rank's slice of dim 0; the backward concatenates gradients."""
    return _run("scatter_region", _scatter, x, group, 0)


def gather_from_sequence_parallel_region(
    x: Tensor, tensor_parallel_output_grad: bool = True, group: GroupCoordinator | None = None
) -> Tensor:
    """Concatenates the ranks' slices along dim 0; the backward reduce-scatters gradients.

    Pass `tensor_parallel_output_grad=False` if every rank has the complete gradient, because no sharded layer follows.
    The backward then only slices the gradient.
    """
    return _run("gather_region", _gather, x, group, 0, tensor_parallel_output_grad)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, group: GroupCoordinator | None = None) -> Tensor:
    """Sums over the group, and returns this rank's slice of dim 0. The backward concatenates gradients."""
    return _run("reduce_scatter_region", _reduce_scatter, x, group, 0)


def all_gather_last_dim_from_tensor_parallel_region(x: Tensor, group: GroupCoordinator | None = None) -> Tensor:
    """Concatenates the ranks' slices along the last dim; the backward reduce-scatters gradients."""
    return _run("gather_region", _gather, x, group, -1, True)


def reduce_scatter_last_dim_to_tensor_parallel_region(x: Tensor, group: GroupCoordinator | None = None) -> Tensor:
    """Sums over the group, and returns this rank's slice of the last dim. The backward concatenates gradients."""
    return _run("reduce_scatter_region", _reduce_scatter, x, group, -1)


def _run(name: str, kernel: Callable[..., Tensor], x: Tensor, group: GroupCoordinator | None, *args: Any) -> Tensor:
    group = get_tp_group() if group is None else group
    checks.check_tensor(group.context, name, x)
    if args:
        dim = checks.normal_dim(group.context, name, x, args[0])
        if "scatter" in name:
            checks.check_divisible(group.context, name, x, dim)
        args = (dim, *args[1:])
    if group.world_size == 1:
        return x
    # The slice, of the result or of its gradient, depends on the rank.
    is_ranked = torch.is_grad_enabled() and (name == "scatter_region" or (name == "gather_region" and not args[-1]))
    return _with_gradient(name, kernel, x, group._token, *args, group._ranked_key if is_ranked else group._key)


def _with_gradient(name: str, kernel: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """Calls the differentiable op `name`, or `kernel`, which returns the same result, if no gradient is needed.

    Compiler passes recognise the ops that `kernel` calls, such as `all_reduce`.
    """
    return getattr(_OPS, name)(x, *args) if torch.is_grad_enabled() else kernel(x, *args)


def _copy(x: Tensor, token: Tensor, group: str) -> Tensor:
    find_route(group).check_usable()
    return x.clone()


def _reduce(x: Tensor, token: Tensor, group: str) -> Tensor:
    return _OPS.all_reduce(x, token, "sum", group)


def _scatter(x: Tensor, token: Tensor, dim: int, group: str) -> Tensor:
    route = find_route(group)
    route.check_usable()
    context = route.context
    size = x.shape[dim] // context.size
    return x.narrow(dim, context.rank * size, size).clone(memory_format=torch.contiguous_format)


def _gather(x: Tensor, token: Tensor, dim: int, reduce_grad: bool, group: str) -> Tensor:
    return _OPS.all_gather(x, token, dim, group)


def _reduce_scatter(x: Tensor, token: Tensor, dim: int, group: str) -> Tensor:
    return _OPS.reduce_scatter(x, token, dim, "sum", group)


def _grad_gather(grad: Tensor, token: Tensor, dim: int, reduce_grad: bool, group: str) -> Tensor:
    if reduce_grad:
        return _with_gradient("reduce_scatter_region", _reduce_scatter, grad, token, dim, group)
    return _with_gradient("scatter_region", _scatter, grad, token, dim, group)


def _define(
    name: str, arguments: str, kernel: Callable[..., Tensor], fake: Callable[..., Tensor], formula: Any
) -> None:
    def autograd(x: Tensor, *args: Any) -> Tensor:
        ops.refuse_tangent(name, args[-1], x)
        # Within a torch.func transform, the next level may need the op's gradient as well.
        below = getattr(_OPS, name) if in_transform() else kernel
        if x.requires_grad and torch.is_grad_enabled():
            return ops.differentiable(below, formula, x, *args)
        with below_autograd():
            return below(x, *args)

    ops.define(name, f"Tensor x, Tensor(a!) token, {arguments}str group", "Tensor", kernel, fake, autograd)


_define("copy_region", "", _copy, ops.fake_same,
        lambda grad, *args: _with_gradient("reduce_region", _reduce, grad, *args))  # fmt: skip
_define("reduce_region", "", _reduce, ops.fake_same,
        lambda grad, *args: _OPS.copy_region(grad, *args) if torch.is_grad_enabled() else grad)  # fmt: skip
_define("scatter_region", "int dim, ", _scatter, ops.fake_reduce_scatter,
        lambda grad, token, dim, group: _with_gradient("gather_region", _gather, grad, token, dim, False, group),
        )  # fmt: skip
_define("gather_region", "int dim, bool reduce_grad, ", _gather, ops.fake_all_gather, _grad_gather)
_define("reduce_scatter_region", "int dim, ", _reduce_scatter, ops.fake_reduce_scatter,
        lambda grad, token, dim, group: _with_gradient("gather_region", _gather, grad, token, dim, True, group),
        )  # fmt: skip
