"""Runs a `GroupCoordinator`'s tensor calls in compiled code, and those that the fast path in C++ (`direct`) declined.

A function checks its arguments, and in a group of one rank returns at once. Otherwise the function calls the registered
op (in compiled code or with gradients) or the `Route`, which chooses a transport. `token`: see the module `ops`.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from device_communicators.base.errors import InvalidArgumentError, RemoteError
from device_communicators.base.host_calls import host_call
from device_communicators.base.torch_internals import dispatch_modes, in_transform, mark_written
from device_communicators.calls.memory import copy_values, dense, is_dense
from device_communicators.calls.reductions import add_rms_norm, quantize
from device_communicators.routing.communicator import GroupContext, merge_blocks
from device_communicators.routing.route import Route
from device_communicators.routing.started import TensorHandle
from parallel_state.collectives import checks, ops
from parallel_state.collectives.direct import DIRECT

_OPS = torch.ops.parallel_state
_ALL_REDUCE, _ALL_REDUCE_IN_PLACE = _OPS.all_reduce.default, _OPS.all_reduce_.default
_BROADCAST, _BROADCAST_IN_PLACE = _OPS.broadcast.default, _OPS.broadcast_.default
_ALL_GATHER, _REDUCE_SCATTER = _OPS.all_gather.default, _OPS.reduce_scatter.default
_ALL_TO_ALL = _OPS.all_to_all.default
# `_OPS.all_reduce(…)` would look up the overload in each call.
Exchange = Callable[..., Tensor]
"""Exchanges rows of `x` between all ranks: takes `x`, the row counts to receive and to send, and optionally `out`."""


def is_single_rank(route: Route) -> bool:
    if len(route.context.ranks) > 1:
        return False
    if route.closed:
        route.check_usable()  # raises
    return True


def _is_single_rank_reducing(route: Route, operation: str, x: Tensor, op: str = "sum") -> bool:
    """Raises UnsupportedError if a larger group couldn't reduce `x`. Else returns True if the group has one rank."""
    if not is_single_rank(route):
        return False
    if not is_dynamo_compiling():
        checks.check_reducible(route.context, operation, x, op)
    return True


def _can_bypass_dispatcher(x: Tensor) -> bool:
    return not is_dynamo_compiling() and DIRECT.straight(x) is x


def all_reduce(route: Route, token: Tensor, x: Tensor, op: checks.ReduceOp, order: checks.Order) -> Tensor:
    checks.check_tensor(route.context, "all_reduce", x)
    op = checks.check_reduce_op(route.context, "all_reduce", op, order)
    if _is_single_rank_reducing(route, "all_reduce", x, op):
        return x
    if order == "rank" and _can_bypass_dispatcher(x):
        return route.run("all_reduce", x, x, op, reduce_op=op)
    return _ALL_REDUCE(x, token, op, route.key)


def all_reduce_(route: Route, token: Tensor, x: Tensor, op: checks.ReduceOp, order: checks.Order) -> Tensor:
    checks.check_tensor(route.context, "all_reduce_", x)
    checks.check_writable(route.context, "all_reduce_", x)
    op = checks.check_reduce_op(route.context, "all_reduce_", op, order)
    if _is_single_rank_reducing(route, "all_reduce_", x, op):
        return x
    if order == "rank" and _can_bypass_dispatcher(x):
        route.run("all_reduce_", x, x, op, reduce_op=op)
        mark_written(x)
    else:
        _ALL_REDUCE_IN_PLACE(x, token, op, route.key)
    return x


def all_gather(route: Route, token: Tensor, x: Tensor, dim: int, out: Tensor | None) -> Tensor:
    context = route.context
    checks.check_tensor(context, "all_gather", x)
    dim = checks.normal_dim(context, "all_gather", x, dim)
    if out is not None:
        size = len(context.ranks)
        shape = [n * size if at == dim else n for at, n in enumerate(x.shape)] or [size]
        checks.check_out(context, "all_gather", out, x, shape)
        if _can_write_into(route, out, x):
            _OPS.all_gather_into(x, token, out, dim, route.key)
            return out
    if is_single_rank(route):
        gathered = x if x.dim() else x.reshape(1)
    elif _can_bypass_dispatcher(x):
        gathered = route.run("all_gather", x, x, dim)
    else:
        gathered = _ALL_GATHER(x, token, dim, route.key)
    return gathered if out is None else out.copy_(gathered)


def _scattered(context: GroupContext, x: Tensor, dim: int) -> list[int]:
    return [n // len(context.ranks) if at == dim else n for at, n in enumerate(x.shape)]


def _can_write_into(route: Route, out: Tensor, x: Tensor) -> bool:
    if is_single_rank(route) or not out.is_contiguous():
        return False
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        return False
    return torch.compiler.is_compiling() or not in_transform()


def all_gatherv(route: Route, token: Tensor, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    context = route.context
    checks.check_tensor(context, "all_gatherv", x)
    dim = checks.normal_dim(context, "all_gatherv", x, dim)
    checks.check_sizes(context, "all_gatherv", "sizes", sizes)
    checks.check_total(context, "all_gatherv", "sizes[this rank]", sizes[context.rank], x, dim)
    if is_single_rank(route):
        return x
    return _OPS.all_gatherv(x, token, dim, list(sizes), route.key)


def reduce_scatter(
    route: Route, token: Tensor, x: Tensor, dim: int, op: checks.ReduceOp, out: Tensor | None, order: checks.Order
) -> Tensor:
    context = route.context
    checks.check_tensor(context, "reduce_scatter", x)
    op = checks.check_reduce_op(context, "reduce_scatter", op, order)
    dim = checks.normal_dim(context, "reduce_scatter", x, dim)
    checks.check_divisible(context, "reduce_scatter", x, dim)
    if out is not None:
        checks.check_out(context, "reduce_scatter", out, x, _scattered(context, x, dim))
        if _can_write_into(route, out, x):
            _OPS.reduce_scatter_into(x, token, out, dim, op, route.key)
            return out
    if _is_single_rank_reducing(route, "reduce_scatter", x, op):
        scattered = x
    elif order == "rank" and _can_bypass_dispatcher(x):
        scattered = route.run("reduce_scatter", x, x, dim, op, reduce_op=op)
    else:
        scattered = _REDUCE_SCATTER(x, token, dim, op, route.key)
    return scattered if out is None else out.copy_(scattered)


def reduce_scatterv(
    route: Route, token: Tensor, x: Tensor, dim: int, sizes: Sequence[int], op: checks.ReduceOp
) -> Tensor:
    context = route.context
    checks.check_tensor(context, "reduce_scatterv", x)
    op = checks.check_reduce_op(context, "reduce_scatterv", op)
    dim = checks.normal_dim(context, "reduce_scatterv", x, dim)
    checks.check_sizes(context, "reduce_scatterv", "sizes", sizes)
    checks.check_total(context, "reduce_scatterv", "sizes", sum(sizes), x, dim)
    if _is_single_rank_reducing(route, "reduce_scatterv", x, op):
        return x
    return _OPS.reduce_scatterv(x, token, dim, list(sizes), op, route.ranked_key)


def gather(route: Route, token: Tensor, x: Tensor, dst: int, dim: int) -> Tensor | None:
    context = route.context
    checks.check_tensor(context, "gather", x)
    checks.check_rank(context, "gather", "dst", dst)
    dim = checks.normal_dim(context, "gather", x, dim)
    if is_single_rank(route):
        return x if x.dim() else x.reshape(1)
    gathered = _OPS.gather(x, token, dim, dst, route.ranked_key)
    return gathered if context.rank == dst else None


def scatter(
    route: Route,
    token: Tensor,
    messenger: Any,
    x: Tensor | None,
    src: int,
    dim: int,
    size: Sequence[int] | None,
    dtype: torch.dtype | None,
) -> Tensor:
    context = route.context
    checks.check_rank(context, "scatter", "src", src)
    is_src = context.rank == src
    if (size is None) != (dtype is None):
        raise InvalidArgumentError(
            f"scatter on {context} needs both size and dtype, or neither; pass the same on every rank"
        )
    if size is None or dtype is None:
        size, dtype = _agree_on_slice(messenger, context, x, src, dim)
    elif is_src:
        checks.check_tensor(context, "scatter", x)
    checks.check_shape(context, "scatter", "size", size)
    checks.check_dtype(context, "scatter", dtype)
    dim = checks.normal_dim_of(context, "scatter", len(size), dim)
    if x is not None and is_src:
        checks.check_divisible(context, "scatter", x, checks.normal_dim(context, "scatter", x, dim))
        mine = _scattered(context, x, dim)
        if not checks.same_sizes(size, mine) or dtype != x.dtype:
            must, found = f"be those of a slice of x, {mine} and {x.dtype}", f"are {list(size)} and {dtype}"
            raise checks.wrong(context, "scatter", "size and dtype", must, found)
        if is_single_rank(route):
            return x
    return _OPS.scatter(x if is_src else None, token, list(size), dtype, context.device, dim, src, route.key)


@host_call("pass size= and dtype= of the slice on every rank, which needs no message of the host", "scatter")
def _agree_on_slice(
    messenger: Any, context: GroupContext, x: Tensor | None, src: int, dim: int
) -> tuple[list[int], torch.dtype]:
    form: object = None
    wrong: InvalidArgumentError | None = None
    if context.rank == src:
        try:
            checks.check_tensor(context, "scatter", x)
            whole = cast(Tensor, x)
            dim = checks.normal_dim(context, "scatter", whole, dim)
            checks.check_divisible(context, "scatter", whole, dim)
            checks.check_no_gradient(context, "scatter", "use broadcast and take a slice", whole)
            form = _scattered(context, whole, dim), whole.dtype
        except InvalidArgumentError as error:
            form, wrong = str(error), error
    if len(context.ranks) > 1:
        form = messenger.broadcast(form, src, "scatter")
    if wrong is not None:
        raise wrong
    if isinstance(form, str):
        raise RemoteError(
            f"scatter on {context} failed, because its source, rank {src}, could not send: {form}",
            rank=context.ranks[src],
        )
    return form  # type: ignore[return-value]


def all_to_all(
    route: Route,
    token: Tensor,
    x: Tensor,
    scatter_dim: int,
    gather_dim: int,
    outputs: Sequence[int] | None,
    inputs: Sequence[int] | None,
    out: Tensor | None,
) -> Tensor:
    def exchange(x: Tensor, outputs: ops.Splits, inputs: ops.Splits, out: Tensor | None = None) -> Tensor:
        if out is not None:
            rows = x.shape[0] if outputs is None else sum(outputs)
            checks.check_out(route.context, "all_to_all", out, x, [rows, *x.shape[1:]])
            if _can_write_into(route, out, x):
                _OPS.all_to_all_into(x, token, out, outputs, inputs, route.key)
                return out
        received = x if is_single_rank(route) else _ALL_TO_ALL(x, token, outputs, inputs, route.key)
        return received if out is None else out.copy_(received)

    return all_to_all_by(exchange, route.context, x, scatter_dim, gather_dim, outputs, inputs, out)


def all_to_all_by(
    exchange: Exchange,
    context: GroupContext,
    x: Tensor,
    scatter_dim: int,
    gather_dim: int,
    outputs: Sequence[int] | None,
    inputs: Sequence[int] | None,
    out: Tensor | None = None,
) -> Tensor:
    checks.check_tensor(context, "all_to_all", x)
    if type(scatter_dim) is not int or scatter_dim != 0:
        scatter_dim = checks.normal_dim(context, "all_to_all", x, scatter_dim)
    if type(gather_dim) is not int or gather_dim != 0:
        gather_dim = checks.normal_dim(context, "all_to_all", x, gather_dim)
    if outputs is not None or inputs is not None:
        outputs, inputs = _check_splits(context, x, scatter_dim, gather_dim, outputs, inputs)
        return exchange(x, outputs, inputs, out)
    checks.check_divisible(context, "all_to_all", x, scatter_dim)
    size = len(context.ranks)
    if scatter_dim == 0 and gather_dim == 0:
        return exchange(x, None, None, out)
    if out is not None:
        shape = _scattered(context, x, scatter_dim)
        shape[gather_dim] *= size
        checks.check_out(context, "all_to_all", out, x, shape)
        return out.copy_(all_to_all_by(exchange, context, x, scatter_dim, gather_dim, None, None))
    if size == 1:
        return exchange(x, None, None)
    shape = list(x.shape)
    blocks = x.reshape(*shape[:scatter_dim], size, shape[scatter_dim] // size, *shape[scatter_dim + 1 :])
    blocks = blocks.movedim(scatter_dim, 0).contiguous()
    received = exchange(blocks, None, None)
    # For dims of length 1, flatten returns a view with other strides.
    return received.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1).contiguous()


def _check_splits(
    context: GroupContext,
    x: Tensor,
    scatter_dim: int,
    gather_dim: int,
    outputs: Sequence[int] | None,
    inputs: Sequence[int] | None,
) -> tuple[list[int], list[int]]:
    if scatter_dim != 0 or gather_dim != 0:
        raise InvalidArgumentError(
            f"all_to_all on {context} with split sizes works along dim 0, but scatter_dim is {scatter_dim} "
            f"and gather_dim {gather_dim}; make that dim the first one with x.movedim(), and leave both out"
        )
    if inputs is None or outputs is None or x.dim() == 0:
        checks.check_divisible(context, "all_to_all", x, 0)
    equal = [x.shape[0] // len(context.ranks)] * len(context.ranks)
    inputs = equal if inputs is None else inputs
    outputs = equal if outputs is None else outputs
    checks.check_sizes(context, "all_to_all", "input_split_sizes", inputs)
    checks.check_sizes(context, "all_to_all", "output_split_sizes", outputs)
    checks.check_total(context, "all_to_all", "input_split_sizes", sum(inputs), x, 0)
    return list(outputs), list(inputs)


def broadcast(route: Route, token: Tensor, x: Tensor, src: int) -> Tensor:
    checks.check_tensor(route.context, "broadcast", x)
    checks.check_rank(route.context, "broadcast", "src", src)
    if is_single_rank(route):
        return x
    # The gradient on `src` differs from that on other ranks.
    return _BROADCAST(x, token, src, route.ranked_key if torch.is_grad_enabled() else route.key)


def broadcast_(route: Route, token: Tensor, x: Tensor, src: int) -> Tensor:
    checks.check_tensor(route.context, "broadcast_", x)
    checks.check_writable(route.context, "broadcast_", x)
    checks.check_rank(route.context, "broadcast_", "src", src)
    if not is_single_rank(route):
        _BROADCAST_IN_PLACE(x, token, src, route.key)
    return x


def flag_value(context: GroupContext, flag: object) -> bool:
    try:
        value = bool(flag) if isinstance(flag, (numbers.Number, Tensor)) or hasattr(flag, "dtype") else None
    except (RuntimeError, ValueError, NotImplementedError):  # not exactly one element, or no value
        value = None
    if value is None:
        raise checks.wrong(context, "broadcast_flag", "flag", "be a bool", f"is a {type(flag).__name__}")
    return value


def barrier(route: Route, token: Tensor) -> None:
    if not is_single_rank(route):
        _OPS.barrier(token, route.key)


def empty(
    route: Route, token: Tensor, size: Sequence[int], dtype: torch.dtype | None, device: torch.device | None
) -> Tensor:
    context = route.context
    checks.check_shape(context, "empty", "size", size)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    checks.check_dtype(context, "empty", dtype)
    device = context.device if device is None else device
    checks.check_device(context, "empty", device)
    if is_single_rank(route):
        return torch.empty(list(size), dtype=dtype, device=device)
    if not is_dynamo_compiling() and route.has_memory:
        made = _try_registered(route, size, dtype, torch.device(device))
        if made is not None:
            return made
    return _OPS.empty(token, list(size), dtype, device, route.key)


def _try_registered(route: Route, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
    own = route.context.device
    is_groups = device.type == own.type and device.index in (None, own.index)
    return route.allocate(size, dtype) if is_groups and not dispatch_modes() else None  # tracers use the op


def send(route: Route, token: Tensor, x: Tensor, dst: int | None) -> None:
    checks.check_tensor(route.context, "send", x)
    _OPS.send(x, token, checks.destination(route.context, "send", dst), route.key)


def recv(
    route: Route,
    token: Tensor,
    size: Sequence[int],
    dtype: torch.dtype,
    src: int | None,
    device: torch.device | None,
) -> Tensor:
    context = route.context
    src = checks.source(context, "recv", src)
    checks.check_shape(context, "recv", "size", size)
    checks.check_dtype(context, "recv", dtype)
    device = context.device if device is None else device
    checks.check_device(context, "recv", device)
    return _OPS.recv(token, list(size), dtype, device, src, route.key)


def batch_isend_irecv(route: Route, operations: Sequence[checks.Transfer | dist.P2POp]) -> list[TensorHandle]:
    context = route.context
    checks.check_no_transform(context, "batch_isend_irecv")
    if not isinstance(operations, (list, tuple)):
        kind = type(operations).__name__
        raise checks.wrong(context, "batch_isend_irecv", "operations", "be a list of transfers", f"is a {kind}")
    found = [checks.check_transfer(context, each) for each in operations]
    handles: dict[int, TensorHandle] = {}
    for at in _starting_order(context.rank, found):
        name, x, peer = found[at]
        flat, tag = dense(x.detach()), context.tag(0)
        if name == "isend":
            handles[at] = TensorHandle(route.start("isend", flat, peer, tag), x, keep=flat)
        else:
            handle = route.start("irecv_", flat, peer, tag)
            handles[at] = TensorHandle(handle, x, None if is_dense(x) else functools.partial(copy_values, x, flat))
    return [handles[at] for at in range(len(found))]


def _starting_order(own: int, operations: Sequence[checks.Transfer]) -> list[int]:
    """Returns the indices of `operations` in the order in which this rank, `own`, starts them.

    On the CPU receives start first, because a send can wait for its receiver. A device runs transfers one by one, so
    all ranks order the pairs of ranks in the same way, and the lower rank of a pair sends first.
    """

    def place(at: int) -> tuple[int, ...]:
        name, x, peer = operations[at]
        if x.is_cpu:
            return (0, name == "isend")
        return (1, min(own, peer), max(own, peer), (name == "irecv") == (own < peer))

    return sorted(range(len(operations)), key=place)


def all_reduce_async(route: Route, x: Tensor, op: checks.ReduceOp, order: checks.Order) -> TensorHandle:
    checks.check_started(route.context, "all_reduce_async", x)
    op = checks.check_reduce_op(route.context, "all_reduce_async", op, order)
    if _is_single_rank_reducing(route, "all_reduce_async", x, op):
        return TensorHandle(None, x.detach())
    out = x.detach().clone(memory_format=torch.contiguous_format)
    return TensorHandle(route.start("iall_reduce_", out, op, reduce_op=op), out)


def all_gather_async(route: Route, x: Tensor, dim: int) -> TensorHandle:
    checks.check_started(route.context, "all_gather_async", x)
    dim = checks.normal_dim(route.context, "all_gather_async", x, dim)
    x = x.detach()
    if is_single_rank(route):
        return TensorHandle(None, x if x.dim() else x.reshape(1))
    flat = dense(x)
    out = x.new_empty((len(route.context.ranks), *x.shape))
    handle = route.start("iall_gather", out, flat, dim=dim)
    return TensorHandle(handle, out, lambda: merge_blocks(out, dim, x.dim()), keep=flat)


def reduce_scatter_async(route: Route, x: Tensor, dim: int, op: checks.ReduceOp, order: checks.Order) -> TensorHandle:
    context = route.context
    checks.check_started(context, "reduce_scatter_async", x)
    op = checks.check_reduce_op(context, "reduce_scatter_async", op, order)
    dim = checks.normal_dim(context, "reduce_scatter_async", x, dim)
    checks.check_divisible(context, "reduce_scatter_async", x, dim)
    if _is_single_rank_reducing(route, "reduce_scatter_async", x, op):
        return TensorHandle(None, x.detach())
    rows = dense(x.detach().movedim(dim, 0))
    out = x.new_empty((rows.shape[0] // len(context.ranks), *rows.shape[1:]))
    handle = route.start("ireduce_scatter", out, rows, op, reduce_op=op, dim=dim)
    return TensorHandle(handle, out, lambda: out.movedim(0, dim).contiguous(), keep=rows)


def broadcast_async(route: Route, x: Tensor, src: int) -> TensorHandle:
    checks.check_started(route.context, "broadcast_async", x)
    checks.check_rank(route.context, "broadcast_async", "src", src)
    if is_single_rank(route):
        return TensorHandle(None, x.detach())
    out = x.detach().clone(memory_format=torch.contiguous_format)
    return TensorHandle(route.start("ibroadcast_", out, src), out)


# The norm, including the weight, is computed in float32 (for float64 in float64) from the rounded `y`. Quantized
# output is float8_e4m3fn of the norm *after its rounding to the dtype*. Values beyond ±448, and infinities, become
# ±448; NaN stays NaN. vLLM rounds the norm once more before the weight.


def all_reduce_add_norm(
    route: Route, token: Tensor, operation: str, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *scale: Tensor
) -> Any:
    checks.check_norm(route.context, operation, x, residual, weight, eps)
    for each in scale:
        checks.check_scale(route.context, operation, each)
    if not _is_single_rank_reducing(route, operation, x):
        return getattr(_OPS, operation)(x, token, residual, weight, *scale, eps, route.key)
    if operation == "all_reduce_add_rms_norm":
        return add_rms_norm(x, residual, weight, eps)
    checks.check_no_gradient(route.context, operation, ops.QUANTIZE_YOURSELF, x, residual, weight, *scale)
    normed, y = add_rms_norm(x, residual, weight, eps)
    return (*quantize(normed, *scale), y)
