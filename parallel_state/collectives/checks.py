"""Checks a call's arguments against its group, before anything is sent.

torch.compile traces these functions, so they format a text only when they raise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from device_communicators.base.errors import InvalidArgumentError, UnsupportedError, int_advice
from device_communicators.base.torch_internals import (
    base_of,
    check_symbolic,
    in_forward_mode,
    in_transform,
    is_wrapped_tensor,
    is_zero_tensor,
)
from device_communicators.calls.memory import dtype_refusal
from device_communicators.calls.reductions import TREE_SUM, reduction_refusal
from device_communicators.routing.communicator import REDUCE_OPS, GroupContext

_MOST_ELEMENTS = 1 << 58
"""A larger number of elements can overflow torch's 64-bit count of bytes."""
Transfer: TypeAlias = tuple[str, Tensor, int]


def must_hold(condition: Any) -> bool:
    """Returns `condition`. If torch.compile doesn't know its value, returns True, and the compiled code checks
    `condition`.
    """
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    if not guard_or_true(condition):
        return False
    check_symbolic(condition)
    return True


def same_sizes(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(must_hold(a == b) for a, b in zip(one, other, strict=True))


def wrong(context: GroupContext, operation: str, name: str, must: str, found: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name} of {operation} on {context} must {must}, but {found}")


def check_tensor(context: GroupContext, operation: str, x: object, *, needs_values: bool = True) -> None:
    """Raises unless `x` is a dense tensor. `needs_values`: also raises for meta tensors, except in simulated or fake
    groups.
    """
    if not isinstance(x, Tensor):
        raise InvalidArgumentError(
            f"{operation} on {context} takes a torch.Tensor, but got a {type(x).__name__}; for other values use calls "
            "on objects, such as broadcast_object"
        )
    # torch.compile can't read the layout in the backward of an autograd.Function (regions).
    if torch.compiler.is_compiling():
        return
    refusal = dtype_refusal(x.dtype)
    if x.layout != torch.strided or x.is_nested or refusal is not None:
        found = "a nested one" if x.is_nested else refusal or f"layout {x.layout}"
        raise InvalidArgumentError(f"{operation} on {context} takes a dense tensor, but got {found}")
    if x.is_meta and needs_values and not (context.simulated or context.fake):
        raise InvalidArgumentError(
            f"{operation} on {context} takes a tensor with values, but got a meta tensor; materialize it first "
            "(to_empty, or create it on another device), or use parallel_state.simulate to check shapes only"
        )


def check_started(context: GroupContext, operation: str, x: object) -> None:
    check_no_transform(context, operation)
    check_tensor(context, operation, x)


def check_no_transform(context: GroupContext, operation: str) -> None:
    if in_transform():
        raise InvalidArgumentError(
            f"{operation} on {context} can't be called inside a function that torch.func transforms (grad, vmap, …), "
            f"because tensors inside have no memory of their own; call {operation} outside, or use a blocking tensor "
            "collective"
        )


def check_writable(context: GroupContext, operation: str, x: Tensor) -> None:
    """Raises unless a call can overwrite `x`. Conjugated and negated views are valid: torch's `copy_` writes them."""
    if torch.compiler.is_compiling():
        return
    if not x.is_contiguous() and any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride(), strict=True)):
        raise InvalidArgumentError(
            f"{operation} on {context} writes to its tensor, so the tensor's elements must not share memory, but shape "
            f"{list(x.shape)} has strides {list(x.stride())}; clone() the expanded tensor first"
        )
    if is_zero_tensor(x):
        raise InvalidArgumentError(
            f"{operation} on {context} writes to its tensor, but this is torch's efficient zero tensor, which has no "
            "memory; clone() the tensor first"
        )


def check_out(context: GroupContext, operation: str, out: Tensor, x: Tensor, shape: Sequence[int]) -> None:
    check_tensor(context, f"out= of {operation}", out)
    if not torch.compiler.is_compiling() and is_wrapped_tensor(x) and not is_wrapped_tensor(out):
        raise InvalidArgumentError(
            f"out= of {operation} on {context} was created outside the function that torch.func transforms, so the "
            "result can't be written to this tensor; don't pass out=, or create the tensor inside the function"
        )
    check_writable(context, operation, out)
    if not torch.compiler.is_compiling():
        if torch.is_grad_enabled() and any(
            y is not None and y.is_leaf and y.requires_grad for y in (out, base_of(out))
        ):
            raise InvalidArgumentError(
                f"out= of {operation} on {context} can't be a leaf that requires a gradient, or a view of such a leaf; "
                f"pass out.detach(), or call {operation} under torch.no_grad()"
            )
        if out.is_inference() and not torch.is_inference_mode_enabled():
            raise InvalidArgumentError(
                f"out= of {operation} on {context} is an inference tensor, which can be written only in inference "
                f"mode; call {operation} under torch.inference_mode(), or pass a normal tensor"
            )
    if not same_sizes(out.shape, shape) or out.dtype != x.dtype or out.device != x.device:
        must = f"have shape {list(shape)}, {x.dtype} and device {x.device}"
        found = f"has shape {list(out.shape)}, {out.dtype} and device {out.device}"
        raise wrong(context, operation, "out=", must, found)


def has_tangent(*inputs: Tensor) -> bool:
    return in_forward_mode() and any(forward_ad.unpack_dual(x).tangent is not None for x in inputs)


def check_no_gradient(context: GroupContext, operation: str, advice: str, *inputs: Tensor) -> None:
    requires = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if requires or has_tangent(*inputs):
        found = "requires a gradient" if requires else "has a tangent"
        raise InvalidArgumentError(
            f"{operation} on {context} isn't differentiable, but an input {found}; {advice}, "
            f"or call {operation} under torch.no_grad()"
        )


ReduceOpName: TypeAlias = Literal["sum", "avg", "max", "min", "product"]
ReduceOp: TypeAlias = "ReduceOpName | dist.ReduceOp.RedOpType | dist.ReduceOp"
Order: TypeAlias = Literal["rank", "tree"]
NotAsync: TypeAlias = Literal[False]
_TORCH_NAMES: dict[str, ReduceOpName] = {"SUM": "sum", "AVG": "avg", "MAX": "max", "MIN": "min", "PRODUCT": "product"}


def check_reduce_op(context: GroupContext, operation: str, reduce_op: object, order: object = "rank") -> ReduceOpName:
    name = _name_of_op(context, operation, reduce_op)
    if order == "rank":
        return name
    if order != "tree":
        raise wrong(context, operation, "order", "be 'rank' or 'tree'", f"is {order!r}")
    if name != "sum":
        raise InvalidArgumentError(
            f"op of {operation} on {context} with order='tree' must be 'sum', but is {name!r}; leave out order="
        )
    if context.size & (context.size - 1):
        raise InvalidArgumentError(
            f"{operation} on {context} with order='tree' needs 1, 2, 4, 8, … ranks, but the group has {context.size}; "
            "leave out order=, or use another group size"
        )
    return TREE_SUM  # type: ignore[return-value]  # methods don't accept it as `op`


def _name_of_op(context: GroupContext, operation: str, reduce_op: object) -> ReduceOpName:
    if isinstance(reduce_op, str):
        if reduce_op in REDUCE_OPS:
            return reduce_op  # type: ignore[return-value]
    elif isinstance(reduce_op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):  # ints also compare equal to them
        for torchs, name in _TORCH_NAMES.items():
            if reduce_op == getattr(dist.ReduceOp, torchs, None):
                return name
    must = f"be one of {', '.join(map(repr, REDUCE_OPS))}, or torch's ReduceOp of that name"
    raise wrong(context, operation, "op", must, f"is {reduce_op!r}")


def refuse_async(context: GroupContext, operation: str) -> NoReturn:
    raise InvalidArgumentError(
        f"{operation} on {context} is blocking and takes no async_op; call {operation}_async, whose handle's "
        "wait() returns the tensor"
    )


def check_reducible(context: GroupContext, operation: str, x: Tensor, reduce_op: str) -> None:
    refusal = reduction_refusal(x.dtype, reduce_op) if x.is_cpu else None
    if refusal is not None:
        raise UnsupportedError(f"{operation} on {context} isn't supported: {refusal}")


def check_rank(context: GroupContext, operation: str, name: str, rank: object) -> None:
    """Raises unless `rank`, the argument `name` of the call `operation`, is a rank *in the group*."""
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 or rank >= context.size:
        hint = int_advice(rank)
        if isinstance(rank, int) and rank in context.ranks:
            hint = f"; global rank {rank} is rank {context.ranks.index(rank)} of this group"
        raise wrong(context, operation, name, f"be a rank in the group, 0 … {context.size - 1}", f"is {rank!r}{hint}")


def _check_peer(context: GroupContext, operation: str, name: str, rank: int) -> int:
    if type(rank) is not int or not 0 <= rank < len(context.ranks):
        check_rank(context, operation, name, rank)
    if rank == context.rank:
        raise InvalidArgumentError(
            f"{name} of {operation} on {context} is this rank itself; a rank can't send to itself"
        )
    return rank


def destination(context: GroupContext, operation: str, dst: int | None) -> int:
    return _check_peer(context, operation, "dst", (context.rank + 1) % context.size if dst is None else dst)


def source(context: GroupContext, operation: str, src: int | None) -> int:
    return _check_peer(context, operation, "src", (context.rank - 1) % context.size if src is None else src)


def normal_dim(context: GroupContext, operation: str, x: Tensor, dim: int) -> int:
    return normal_dim_of(context, operation, x.dim(), dim)


def normal_dim_of(context: GroupContext, operation: str, dims: int, dim: int) -> int:
    dims = dims if dims > 0 else 1
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < -dims or dim >= dims:
        must = f"be in {-dims} … {dims - 1}, as the tensor has {dims} dims"
        raise wrong(context, operation, "dim", must, f"is {dim!r}")
    return dim + dims if dim < 0 else dim


def check_divisible(context: GroupContext, operation: str, x: Tensor, dim: int) -> None:
    if x.dim() == 0 or not must_hold(x.shape[dim] % context.size == 0):
        raise InvalidArgumentError(
            f"dim {dim} of a tensor for {operation} on {context} must be divisible by {context.size}, "
            f"but the shape is {list(x.shape)}; pad the tensor, or use the variant that takes sizes (such as "
            "all_gatherv or reduce_scatterv)"
        )


def check_sizes(context: GroupContext, operation: str, name: str, sizes: Sequence[int]) -> None:
    check_lengths(context, operation, name, sizes)
    _check_elements(context, operation, name, sizes, sum(sizes))
    if len(sizes) != context.size:
        raise wrong(context, operation, name, f"have one size per rank, {context.size}", f"has {len(sizes)}")


def check_lengths(context: GroupContext, operation: str, name: str, lengths: object) -> None:
    if not isinstance(lengths, (list, tuple)):
        raise wrong(context, operation, name, "be a list or tuple of ints", f"is a {type(lengths).__name__}")
    for length in lengths:
        if not isinstance(length, (int, torch.SymInt)) or isinstance(length, bool) or not must_hold(length >= 0):
            raise wrong(context, operation, name, "be non-negative ints", f"is {list(lengths)}")


def check_shape(context: GroupContext, operation: str, name: str, shape: Sequence[int]) -> None:
    check_lengths(context, operation, name, shape)
    _check_elements(context, operation, name, shape, math.prod(shape))


def _check_elements(context: GroupContext, operation: str, name: str, lengths: Sequence[int], count: int) -> None:
    if not torch.compiler.is_compiling() and count >= _MOST_ELEMENTS:
        raise wrong(context, operation, name, f"have fewer than {_MOST_ELEMENTS} elements", f"is {list(lengths)}")


def check_device(context: GroupContext, operation: str, device: object) -> None:
    try:
        if isinstance(device, torch.device) or (isinstance(device, str) and torch.device(device)):
            return
    except RuntimeError:
        pass
    raise wrong(context, operation, "device", "be a torch.device", f"is {device!r}")


def check_dtype(context: GroupContext, operation: str, dtype: object) -> None:
    if not isinstance(dtype, torch.dtype):
        raise wrong(context, operation, "dtype", "be a torch.dtype", f"is {dtype!r}")
    refusal = dtype_refusal(dtype)
    if refusal is not None:
        found = f"{dtype} is a dtype of {refusal}"
        raise wrong(context, operation, "dtype", "be a dtype of dense tensors", found)


def check_total(context: GroupContext, operation: str, name: str, total: int, x: Tensor, dim: int) -> None:
    if x.dim() == 0 or not must_hold(x.shape[dim] == total):
        found = f"the sum is {total} and the tensor's shape {list(x.shape)}"
        raise wrong(context, operation, name, f"add up to the size of dim {dim} of the tensor", found)


def check_norm(context: GroupContext, operation: str, x: Tensor, residual: object, weight: object, eps: object) -> None:
    check_tensor(context, operation, x)
    if not isinstance(eps, (int, float, torch.SymFloat)) or isinstance(eps, bool):
        raise wrong(context, operation, "eps", "be a float", f"is {eps!r}")
    for name, tensor, shape in (("residual", residual, x.shape), ("weight", weight, x.shape[-1:])):
        if not isinstance(tensor, Tensor) or tensor.shape != shape or tensor.dtype != x.dtype or x.dim() == 0:
            found = f"{list(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
            must = f"be a {x.dtype} tensor of shape {list(shape)}, to fit x of shape {list(x.shape)}"
            raise wrong(context, operation, name, must, f"is {found}")


def check_scale(context: GroupContext, operation: str, scale: object) -> None:
    """Raises unless `scale` is one float32 element. Doesn't check its value: reading from a device blocks the host."""
    if not isinstance(scale, Tensor) or scale.numel() != 1 or scale.dtype != torch.float32:
        found = f"{list(scale.shape)} {scale.dtype}" if isinstance(scale, Tensor) else f"a {type(scale).__name__}"
        raise wrong(context, operation, "scale", "be a torch.float32 tensor of one element", f"is {found}")


def check_transfer(context: GroupContext, operation: Transfer | dist.P2POp) -> Transfer:
    method = "batch_isend_irecv"
    if isinstance(operation, dist.P2POp):
        if operation.peer not in context.ranks:
            what, must = "the peer of a P2POp", "be a global rank of this group"
            raise wrong(context, method, what, must, f"is {operation.peer}")
        operation = operation.op.__name__, operation.tensor, context.ranks.index(operation.peer)
    if not isinstance(operation, (tuple, list)) or len(operation) != 3:
        must = "be ('isend', tensor, dst), ('irecv', tensor, src) or a P2POp"
        raise wrong(context, method, "an operation", must, f"is {operation!r}")
    name, x, peer = operation
    if name not in ("isend", "irecv"):
        raise wrong(context, method, "an operation", "be isend or irecv", f"is {name!r}")
    check_tensor(context, method, x)
    if name == "irecv":
        check_writable(context, method, x)
        check_no_gradient(context, method, "receive into a tensor without one", x)
        return name, x, source(context, method, peer)
    return name, x, destination(context, method, peer)
