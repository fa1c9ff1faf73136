"""The registered ops, `torch.ops.parallel_state.*`: the boundary that torch.compile sees.

Each op finds its group's route by name and hands the tensors down; arguments were checked by the coordinator.
What belongs here: schemas, fake kernels, autograd formulas. What does not: choosing, moving, checking.

**Why a token.** A compiler may drop an op whose result nobody uses, and reorder two that share no data; either makes
ranks disagree and hang. Effect tokens keep such ops, but inductor before 2.15 still reorders them. So every op says
that it writes one tensor that all ops of a device share: each is then ordered after the one before and none is dead,
on every version. Nothing ever writes the token's byte.

**Two registrations.** The compiled library (`csrc/bindings.cpp`) brings CPU and autograd kernels of its own for the ops
of every layer, which go before those that are registered here. What they don't carry they hand to the op's twin in
`parallel_state_python`: the same schema, always this module's kernels.

Ops that fuse a collective with what comes after it are in `fused_ops`.

**Gradients** are those of the sum of all ranks' losses: all_gather ↔ reduce_scatter, all_to_all ↔ all_to_all,
all_reduce(sum) ↔ all_reduce(sum). Tensor-parallel layers want Megatron's conventions instead: see `regions`.
An op whose gradient would be lost raises. A backward is a collective as well: where the input of one rank requires a
gradient, the inputs of all must (a receiver of a broadcast passes `torch.empty(..., requires_grad=True)`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.library import Library
from torch.utils._python_dispatch import _disable_current_modes

from device_communicators.errors import InvalidArgumentError
from device_communicators.host_calls import leave_to_interpreter
from device_communicators.routing.registry import find_route
from parallel_state.collectives.transforms import OpFunction, batch_kernel

_LIBRARY = Library("parallel_state", "DEF")
_TWINS = Library("parallel_state_python", "DEF")
_TOKENS: dict[torch.device, Tensor] = {}


def ordering_token(device: torch.device) -> Tensor:
    """The one-byte tensor through which the compiler sees the order of all ops on `device`."""
    token = _TOKENS.get(device)
    if token is None:
        with torch.inference_mode(False), _disable_current_modes():  # it outlives a FakeTensorMode of the caller's
            token = _TOKENS[device] = torch.zeros(1, dtype=torch.uint8, device=device)
        # As torch._dynamo.mark_static_address does, whose import takes a second: a compiled graph that writes an input
        # whose address may change is not put into a CUDA graph (mode="reduce-overhead").
        token._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    return token


# Kernels, one per op, named after it. `x` is the tensor that is counted and by which a communicator is picked.


def all_reduce(x: Tensor, token: Tensor, reduce_op: str, group: str) -> Tensor:
    return find_route(group).run("all_reduce", x, x, reduce_op, reduce_op=reduce_op)


def all_reduce_(x: Tensor, token: Tensor, reduce_op: str, group: str) -> None:
    find_route(group).run("all_reduce_", x, x, reduce_op, reduce_op=reduce_op)


def all_gather(x: Tensor, token: Tensor, dim: int, group: str) -> Tensor:
    return find_route(group).run("all_gather", x, x, dim)


def all_gatherv(x: Tensor, token: Tensor, dim: int, sizes: Sequence[int], group: str) -> Tensor:
    return find_route(group).run("all_gatherv", x, x, dim, sizes)


def reduce_scatter(x: Tensor, token: Tensor, dim: int, reduce_op: str, group: str) -> Tensor:
    return find_route(group).run("reduce_scatter", x, x, dim, reduce_op, reduce_op=reduce_op)


def reduce_scatterv(x: Tensor, token: Tensor, dim: int, sizes: Sequence[int], reduce_op: str, group: str) -> Tensor:
    return find_route(group).run("reduce_scatterv", x, x, dim, sizes, reduce_op, reduce_op=reduce_op)


def gather(x: Tensor, token: Tensor, dim: int, dst: int, group: str) -> Tensor:
    return find_route(group).run("gather", x, x, dim, dst)


def scatter(
    x: Tensor | None,
    token: Tensor,
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    dim: int,
    src: int,
    group: str,
) -> Tensor:
    out = torch.empty(size, dtype=dtype, device=device)
    find_route(group).run("scatter", out, x, out, dim, src)
    return out


def all_to_all(
    x: Tensor, token: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: str
) -> Tensor:
    return find_route(group).run("all_to_all", x, x, output_splits, input_splits)


def broadcast(x: Tensor, token: Tensor, src: int, group: str) -> Tensor:
    return find_route(group).run("broadcast", x, x, src)


def broadcast_(x: Tensor, token: Tensor, src: int, group: str) -> None:
    find_route(group).run("broadcast_", x, x, src)


def send(x: Tensor, token: Tensor, dst: int, group: str) -> None:
    find_route(group).run("send", x, x, dst)


def recv(token: Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device, src: int, group: str) -> Tensor:
    out = torch.empty(size, dtype=dtype, device=device)
    find_route(group).run("recv", out, out, src)
    return out


def empty(token: Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device, group: str) -> Tensor:
    find_route(group)  # raises for a group that is no more
    return torch.empty(size, dtype=dtype, device=device)


def broadcast_list(x: Sequence[Tensor], token: Tensor, form: str, src: int, group: str) -> None:
    route = find_route(group)
    if route.context.rank != src:
        raise InvalidArgumentError(
            f"broadcast_list on {route.context} only reads its tensors, which rank {src} alone may do; "
            "use broadcast_list_, which fills them"
        )
    route.messenger.broadcast_list(x, form, src)


def broadcast_list_(x: Sequence[Tensor], token: Tensor, form: str, src: int, group: str) -> None:
    find_route(group).messenger.broadcast_list(x, form, src)


def send_list(x: Sequence[Tensor], token: Tensor, form: str, dst: int, group: str) -> None:
    find_route(group).messenger.send_list(x, form, dst)


def recv_list_(x: Sequence[Tensor], token: Tensor, form: str, src: int, group: str) -> None:
    find_route(group).messenger.recv_list(x, form, src)


def barrier(token: Tensor, group: str) -> None:
    find_route(group).run("barrier", None)


# Fake kernels: shapes only. They look the group up as well, so a shape error shows when a model is traced.


def _fake_same(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_nothing(*_: Any) -> None:
    return None


def _fake_all_gather(x: Tensor, token: Tensor, dim: int, group: str) -> Tensor:
    size = find_route(group).context.size
    return x.new_empty((size,)) if x.dim() == 0 else x.new_empty(_resized(x, dim, x.shape[dim] * size))


def _fake_all_gatherv(x: Tensor, token: Tensor, dim: int, sizes: Sequence[int], group: str) -> Tensor:
    return x.new_empty(_resized(x, dim, sum(sizes)))


def _fake_reduce_scatter(x: Tensor, token: Tensor, dim: int, reduce_op: str, group: str) -> Tensor:
    return x.new_empty(_resized(x, dim, x.shape[dim] // find_route(group).context.size))


def _fake_reduce_scatterv(
    x: Tensor, token: Tensor, dim: int, sizes: Sequence[int], reduce_op: str, group: str
) -> Tensor:
    return x.new_empty(_resized(x, dim, sizes[find_route(group).context.rank]))


def _fake_gather(x: Tensor, token: Tensor, dim: int, dst: int, group: str) -> Tensor:
    if find_route(group).context.rank != dst:
        return x.new_empty((0,))
    return _fake_all_gather(x, token, dim, group)


def _fake_scatter(
    x: Tensor | None,
    token: Tensor,
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    dim: int,
    src: int,
    group: str,
) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _fake_all_to_all(
    x: Tensor, token: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: str
) -> Tensor:
    return x.new_empty(_resized(x, 0, sum(output_splits)))


def _fake_recv(
    token: Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device, src: int, group: str
) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _fake_empty(token: Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device, group: str) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _resized(x: Tensor, dim: int, size: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = size
    return shape


def _in_fake_mode(
    mode: FakeTensorMode, op: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Under a FakeTensorMode of the caller's own the token is the one real tensor of a call; the mode wants a fake."""
    tokens = _TOKENS.values()
    fakes = [
        mode.from_tensor(arg, static_shapes=True) if any(arg is token for token in tokens) else arg for arg in args
    ]
    return mode.__torch_dispatch__(op, types, tuple(fakes), kwargs or {})


# Gradients. A formula takes the gradient of the op's output and the op's arguments after `x`; it gives that of `x`.

_OPS = torch.ops.parallel_state
Formula = Callable[..., Tensor]


def _grad_all_reduce(grad: Tensor, token: Tensor, reduce_op: str, group: str) -> Tensor:
    return _OPS.all_reduce(grad, token, reduce_op, group)


def _grad_all_gather(grad: Tensor, token: Tensor, dim: int, group: str) -> Tensor:
    return _OPS.reduce_scatter(grad, token, dim, "sum", group)


def _grad_all_gatherv(grad: Tensor, token: Tensor, dim: int, sizes: Sequence[int], group: str) -> Tensor:
    return _OPS.reduce_scatterv(grad, token, dim, sizes, "sum", group)


def _grad_reduce_scatter(grad: Tensor, token: Tensor, dim: int, reduce_op: str, group: str) -> Tensor:
    return _OPS.all_gather(_averaged(grad, reduce_op, group), token, dim, group)


def _grad_reduce_scatterv(
    grad: Tensor, token: Tensor, dim: int, sizes: Sequence[int], reduce_op: str, group: str
) -> Tensor:
    return _OPS.all_gatherv(_averaged(grad, reduce_op, group), token, dim, sizes, group)


def _grad_all_to_all(
    grad: Tensor, token: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: str
) -> Tensor:
    return _OPS.all_to_all(grad, token, input_splits, output_splits, group)


def _grad_broadcast(grad: Tensor, token: Tensor, src: int, group: str) -> Tensor:
    total = _OPS.all_reduce(grad, token, "sum", group)
    if find_route(group).context.rank == src:
        return total
    # Zeros, but with a graph: the backward of this is a collective, in which `src` would wait for the others.
    return total.masked_fill(torch.ones((), dtype=torch.bool, device=total.device), 0)


def _averaged(grad: Tensor, reduce_op: str, group: str) -> Tensor:
    return grad / find_route(group).context.size if reduce_op == "avg" else grad


class _Differentiable(OpFunction):
    """One function for every op that has a formula."""

    @staticmethod
    def forward(ctx: Any, op: Callable[..., Any], formula: Formula, x: Tensor, *args: Any) -> Any:
        ctx.formula, ctx.args = formula, args
        return OpFunction.below(op, x, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, ctx.formula(grads[0], *ctx.args), *(None for _ in ctx.args)


def differentiable(kernel: Callable[..., Any], formula: Formula, x: Tensor, *args: Any) -> Any:
    """Calls a kernel whose gradient is `formula`, in the op's own kernel on the Autograd key."""
    return _Differentiable.apply(kernel, formula, x, *args)


def has_tangent(*inputs: Tensor) -> bool:
    """Returns True where forward mode (jvp, jacfwd) follows an input."""
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in inputs)


def refuse_tangent(name: str, group: str, *inputs: Tensor) -> None:
    if has_tangent(*inputs):
        raise InvalidArgumentError(
            f"{name} on {find_route(group).context} has no forward-mode gradient, but its input has a tangent; "
            "use reverse mode (jacrev), or pass the primal alone"
        )


def _autograd_kernel(name: str, formula: Formula | None, advice: str) -> Callable[..., Any]:
    """What runs on the Autograd key: straight down without a gradient, else the formula, else an error."""
    in_place = name.endswith("_")

    def kernel(x: Tensor | None, *args: Any) -> Any:
        op = getattr(_OPS, name).default
        if x is not None:
            refuse_tangent(name, args[-1], x)
        if x is None or not (x.requires_grad and torch.is_grad_enabled()):
            with torch._C._AutoDispatchBelowAutograd():
                result = op(x, *args)
            if in_place and x is not None:  # transports write past torch; a formula that saved `x` must notice
                torch.autograd.graph.increment_version(x)
            return result
        # The reduce op of those that have one stands before the group's name.
        if formula is None or (name.startswith(("all_reduce", "reduce_scatter")) and args[-2] not in ("sum", "avg")):
            raise InvalidArgumentError(
                f"{name} on {find_route(args[-1]).context} has no gradient for these arguments, but its input "
                f"requires one; {advice}, or call it under torch.no_grad()"
            )
        return differentiable(op, formula, x, *args)

    return kernel


def _refusing_kernel(name: str, advice: str) -> Callable[..., Any]:
    """As `_autograd_kernel` for an op on a list of tensors: there is no formula."""
    in_place = name.endswith("_")

    def kernel(x: Sequence[Tensor], *args: Any) -> None:
        tangent = has_tangent(*x)
        if tangent or (torch.is_grad_enabled() and any(y.requires_grad for y in x)):
            raise InvalidArgumentError(
                f"{name} on {find_route(args[-1]).context} has no gradient, but one of its tensors "
                f"{'has a tangent' if tangent else 'requires one'}; {advice}, or call it under torch.no_grad()"
            )
        with torch._C._AutoDispatchBelowAutograd():
            getattr(_OPS, name).default(x, *args)
        if in_place:
            for y in x:
                torch.autograd.graph.increment_version(y)

    return kernel


_SUM_OR_AVG = "differentiable are sum and avg"
_DETACH = "detach the tensor first and send the gradient back yourself"

_SCATTER_ARGUMENTS = (
    "Tensor? x, Tensor(a!) token, SymInt[] size, ScalarType dtype, Device device, int dim, int src, str group"
)

# name, arguments, result, kernel, fake kernel, gradient formula, what to do where there is none
_TABLE: tuple[tuple[str, str, str, Callable[..., Any], Callable[..., Any], Formula | None, str], ...] = (
    ("all_reduce", "Tensor x, Tensor(a!) token, str reduce_op, str group", "Tensor",
     all_reduce, _fake_same, _grad_all_reduce, _SUM_OR_AVG),
    ("all_reduce_", "Tensor(a!) x, Tensor(b!) token, str reduce_op, str group", "()",
     all_reduce_, _fake_nothing, None, "use all_reduce, which has a gradient"),
    ("all_gather", "Tensor x, Tensor(a!) token, int dim, str group", "Tensor",
     all_gather, _fake_all_gather, _grad_all_gather, ""),
    ("all_gatherv", "Tensor x, Tensor(a!) token, int dim, SymInt[] sizes, str group", "Tensor",
     all_gatherv, _fake_all_gatherv, _grad_all_gatherv, ""),
    ("reduce_scatter", "Tensor x, Tensor(a!) token, int dim, str reduce_op, str group", "Tensor",
     reduce_scatter, _fake_reduce_scatter, _grad_reduce_scatter, _SUM_OR_AVG),
    ("reduce_scatterv", "Tensor x, Tensor(a!) token, int dim, SymInt[] sizes, str reduce_op, str group", "Tensor",
     reduce_scatterv, _fake_reduce_scatterv, _grad_reduce_scatterv, _SUM_OR_AVG),
    ("gather", "Tensor x, Tensor(a!) token, int dim, int dst, str group", "Tensor",
     gather, _fake_gather, None, "use all_gather, which has a gradient on every rank"),
    ("scatter", _SCATTER_ARGUMENTS, "Tensor", scatter, _fake_scatter, None, "use broadcast and take a slice"),
    ("all_to_all", "Tensor x, Tensor(a!) token, SymInt[] output_splits, SymInt[] input_splits, str group", "Tensor",
     all_to_all, _fake_all_to_all, _grad_all_to_all, ""),
    ("broadcast", "Tensor x, Tensor(a!) token, int src, str group", "Tensor",
     broadcast, _fake_same, _grad_broadcast, ""),
    ("broadcast_", "Tensor(a!) x, Tensor(b!) token, int src, str group", "()",
     broadcast_, _fake_nothing, None, "use broadcast, which has a gradient"),
    ("send", "Tensor x, Tensor(a!) token, int dst, str group", "()", send, _fake_nothing, None, _DETACH),
    ("recv", "Tensor(a!) token, SymInt[] size, ScalarType dtype, Device device, int src, str group", "Tensor",
     recv, _fake_recv, None, ""),
    ("empty", "Tensor token, SymInt[] size, ScalarType dtype, Device device, str group", "Tensor",
     empty, _fake_empty, None, ""),
    ("broadcast_list", "Tensor[] x, Tensor(a!) token, str form, int src, str group", "()",
     broadcast_list, _fake_nothing, None, _DETACH),
    ("broadcast_list_", "Tensor(a!)[] x, Tensor(b!) token, str form, int src, str group", "()",
     broadcast_list_, _fake_nothing, None, _DETACH),
    ("send_list", "Tensor[] x, Tensor(a!) token, str form, int dst, str group", "()",
     send_list, _fake_nothing, None, _DETACH),
    ("recv_list_", "Tensor(a!)[] x, Tensor(b!) token, str form, int src, str group", "()",
     recv_list_, _fake_nothing, None, _DETACH),
    ("barrier", "Tensor(a!) token, str group", "()", barrier, _fake_nothing, None, ""),
)  # fmt: skip

OP_NAMES: list[str] = []
"""Of all registered ops."""


def define(
    name: str, arguments: str, result: str, kernel: Callable[..., Any], fake: Callable[..., Any],
    autograd: Callable[..., Any] | None,
) -> None:  # fmt: skip
    """Registers one op, and its twin. `autograd` runs on the Autograd key; None for an op that takes no input."""
    OP_NAMES.append(name)
    leave_to_interpreter(kernel)
    for library in (_LIBRARY, _TWINS):
        library.define(f"{name}({arguments}) -> {result}", tags=[torch.Tag.pt2_compliant_tag])
        library.impl(name, kernel, "CompositeExplicitAutograd")
        if autograd is not None:
            leave_to_interpreter(autograd)
            library.impl(name, autograd, "Autograd")
    torch.library.register_fake(f"parallel_state::{name}", fake, lib=_LIBRARY)
    mapped = batch_kernel(getattr(_OPS, name).default)
    if mapped is not None:
        leave_to_interpreter(mapped[1])
        _LIBRARY.impl(name, mapped[1], mapped[0])
    torch.library.register_torch_dispatch(f"parallel_state::{name}", FakeTensorMode, _in_fake_mode, lib=_LIBRARY)


for _name, _arguments, _result, _kernel, _fake, _formula, _advice in _TABLE:
    _autograd: Callable[..., Any] | None = None
    if "[] x" in _arguments:
        _autograd = _refusing_kernel(_name, _advice)
    elif _name not in ("recv", "empty", "barrier"):
        _autograd = _autograd_kernel(_name, _formula, _advice)
    define(_name, _arguments, _result, _kernel, _fake, _autograd)
