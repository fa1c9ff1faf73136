"""The registered ops, `torch.ops.parallel_state.*`: schemas, kernels, fake kernels and gradient formulas.

**Why a token.** A compiler may drop an op whose result is unused, and may reorder ops that share no data. Ranks would
then make different calls and hang. So each op declares that it writes to the token, a tensor that all ops of a device
share. torch's effect tokens don't keep the order: inductor before 2.15 reorders such ops.

**Two registrations.** Each op exists in two namespaces. In `parallel_state`, frequent ops have C++ kernels
(`csrc/bindings.cpp`). These kernels pass unsupported calls to the same op in `parallel_state_python`, which has this
module's kernels.

**Gradients** are those of the sum of all ranks' losses. The ops of the module `regions` have Megatron's gradients
instead. A backward is a collective: if one rank's input requires a gradient, the inputs of all ranks must (a receiver
of a broadcast passes `torch.empty(..., requires_grad=True)`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.fx.node import has_side_effect
from torch.library import Library

from device_communicators.base.errors import InvalidArgumentError
from device_communicators.base.torch_internals import (
    FakeTensorMode,
    FunctionalTensorMode,
    SingleLevelFunction,
    apply_in_level,
    below_autograd,
    disable_current_modes,
    in_transform,
    is_view,
    leave_to_interpreter,
    mark_static_address,
    order_in_graph,
    schema_of,
    with_gradients,
)
from device_communicators.calls.interruption import raise_interruption
from device_communicators.calls.memory import DEFERRED_KEYS, with_values
from device_communicators.calls.reductions import FP8, TREE_SUM
from device_communicators.routing.registry import find_route
from parallel_state.collectives import checks
from parallel_state.collectives.transforms import batch_kernel

_LIBRARY = Library("parallel_state", "DEF")
_TWINS = Library("parallel_state_python", "DEF")
_OPS = torch.ops.parallel_state
_TOKENS: dict[torch.device, Tensor] = {}
OP_NAMES: list[str] = []
_SUMS = ("sum", "avg", TREE_SUM)

Formula = Callable[..., Tensor]
"""Maps the gradient of the output, and the op's arguments after `x`, to the gradient of `x`."""
Kernel = TypeVar("Kernel", bound=Callable[..., Any])
Splits: TypeAlias = "Sequence[int] | None"
"""Number of rows for each rank; None if equal for all."""


def ordering_token(device: torch.device) -> Tensor:
    token = _TOKENS.get(device)
    if token is None:
        with torch.inference_mode(False), disable_current_modes():  # the token outlives the caller's FakeTensorMode
            token = _TOKENS[device] = torch.zeros(1, dtype=torch.uint8, device=device)
        mark_static_address(token)
    return token


def define(
    name: str, arguments: str, returns: str, kernel: Callable[..., Any], fake: Callable[..., Any],
    autograd: Callable[..., Any] | None,
) -> None:  # fmt: skip
    OP_NAMES.append(name)
    leave_to_interpreter(kernel)
    for library in (_LIBRARY, _TWINS):
        library.define(f"{name}({arguments}) -> {returns}", tags=[torch.Tag.pt2_compliant_tag])
        library.impl(name, kernel, "CompositeExplicitAutograd")
        if autograd is not None:
            leave_to_interpreter(autograd)
            library.impl(name, autograd, "Autograd")
        if (deferred := _deferred_kernel(getattr(getattr(torch.ops, library.ns), name).default)) is not None:
            for key in DEFERRED_KEYS:
                library.impl(name, deferred, key)
    torch.library.register_fake(f"parallel_state::{name}", fake, lib=_LIBRARY)
    mapped = batch_kernel(getattr(_OPS, name).default)
    if mapped is not None:
        leave_to_interpreter(mapped[1])
        _LIBRARY.impl(name, mapped[1], mapped[0])
    torch.library.register_torch_dispatch(f"parallel_state::{name}", FakeTensorMode, _in_fake_mode, lib=_LIBRARY)
    if "!) token" in arguments:
        torch.library.register_torch_dispatch(
            f"parallel_state::{name}", FunctionalTensorMode, order_in_graph, lib=_LIBRARY
        )
        has_side_effect(getattr(_OPS, name).default)  # keeps the last op of a graph: its token has no reader


def _deferred_kernel(op: Any) -> Callable[..., None] | None:
    """Returns the kernel of `op` for lazily conjugated, negated or zeroed tensors (torch's DEFERRED_KEYS).

    The kernel computes the tensors' values, calls `op`, and copies results back into the arguments that `op` writes.
    Torch's default kernel copies back only if `op` returns tensors. If `op` writes only its `token`, that kernel
    suffices, and this function returns None.
    """
    infos = [(each.name, each.alias_info) for each in schema_of(op).arguments]
    written = [at for at, (name, info) in enumerate(infos) if info is not None and info.is_write and name != "token"]

    def kernel(*args: Any) -> None:
        held = [_with_values(arg) for arg in args]
        with below_autograd():
            op(*held)
            for at in written:
                for target, result in zip(_tensors_in(args[at]), _tensors_in(held[at]), strict=True):
                    if result is not target:
                        target.copy_(result)

    leave_to_interpreter(kernel)
    return kernel if written else None


def _with_values(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return [_with_values(each) for each in arg]
    return with_values(arg) if isinstance(arg, Tensor) else arg


def _tensors_in(arg: Any) -> Sequence[Tensor]:
    return [arg] if isinstance(arg, Tensor) else arg


def register(
    arguments: str,
    returns: str = "Tensor",
    *,
    fake: Callable[..., Any] = lambda *_: None,
    formula: Formula | None = None,
    advice: str = "",
    autograd: Callable[..., Any] | None = None,
) -> Callable[[Kernel], Kernel]:
    """Returns a decorator that registers a kernel as an op with the schema `(arguments) -> returns`.

    `fake`: the kernel for fake tensors. `autograd`: the autograd kernel, by default made from `formula`, which computes
    the input's gradient. `advice`: text of the error for inputs with a gradient that the op would lose; says what to
    use instead.
    """

    def decorate(kernel: Kernel) -> Kernel:
        name, on_autograd = kernel.__name__, autograd
        if on_autograd is None and ("[] x" in arguments or arguments.count("Tensor") > 2):
            on_autograd = _refusing_kernel(name, advice)
        elif on_autograd is None and " x," in arguments:
            on_autograd = _autograd_kernel(name, formula, advice)
        define(name, arguments, returns, kernel, fake, on_autograd)
        return kernel

    return decorate


def _in_fake_mode(
    mode: FakeTensorMode, op: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    tokens = {id(token) for token in _TOKENS.values()}
    fakes = (mode.from_tensor(arg, static_shapes=True) if id(arg) in tokens else arg for arg in args)
    return mode.__torch_dispatch__(op, types, tuple(fakes), kwargs or {})


class _Differentiable(SingleLevelFunction):
    """The autograd function of all ops. Nested torch.func transforms call it once for each level."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return apply_in_level(super().apply, args) if in_transform() else super().apply(*args)

    @staticmethod
    def forward(ctx: Any, op: Callable[..., Any], formula: Formula, x: Tensor, *args: Any) -> Any:
        ctx.formula, ctx.args = formula, args
        with below_autograd():
            if in_transform():
                return with_gradients(op, (x, *args))
            result = op(x, *args)
        # torch forbids in-place changes of a view; `data` isn't one.
        return result.data if type(result) is Tensor and is_view(result) else result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, ctx.formula(grads[0], *ctx.args), *(None for _ in ctx.args)


def differentiable(kernel: Callable[..., Any], formula: Formula, x: Tensor, *args: Any) -> Any:
    return _Differentiable.apply(kernel, formula, x, *args)


def refuse_tangent(name: str, group: str, *inputs: Tensor) -> None:
    if checks.has_tangent(*inputs):
        raise InvalidArgumentError(
            f"{name} on {find_route(group).context} has no forward-mode gradient (jvp, jacfwd), but its input has a "
            "tangent; use reverse mode (grad, jacrev), or pass the input without its tangent"
        )


def _autograd_kernel(name: str, formula: Formula | None, advice: str) -> Callable[..., Any]:
    in_place = name.endswith("_")

    def kernel(x: Tensor | None, *args: Any) -> Any:
        op = getattr(_OPS, name).default
        if x is not None:
            refuse_tangent(name, args[-1], x)
        if x is None or not (x.requires_grad and torch.is_grad_enabled()):
            with below_autograd():
                result = op(x, *args)
            if in_place and x is not None:  # transports bypass torch; autograd must detect that a saved `x` changed
                torch.autograd.graph.increment_version(x)
            return result
        if formula is None or (name.startswith(("all_reduce", "reduce_scatter")) and args[-2] not in _SUMS):
            raise InvalidArgumentError(
                f"{name} on {find_route(args[-1]).context} isn't differentiable with these arguments, but its input "
                f"requires a gradient; {advice}, or call {name} under torch.no_grad()"
            )
        return differentiable(op, formula, x, *args)

    return kernel


def _refusing_kernel(name: str, advice: str) -> Callable[..., Any]:
    def kernel(x: Tensor | Sequence[Tensor], token: Tensor, *args: Any) -> Any:
        inputs = [x, *(each for each in args if isinstance(each, Tensor))] if isinstance(x, Tensor) else x
        if inputs is x:  # from the kernel in C++: otherwise this would wait again
            raise_interruption()
        checks.check_no_gradient(find_route(args[-1]).context, name, advice, *inputs)
        with below_autograd():
            result = getattr(_OPS, name).default(x, token, *args)
        for each in inputs if name.endswith("_") else args[:1] if name.endswith("_into") else ():
            torch.autograd.graph.increment_version(each)
        return result

    return kernel


def _apart(x: Tensor, out: Tensor) -> Tensor:
    """Returns `x`, or a copy if it overlaps `out`: peers read `x` while this rank writes `out`."""
    return x.clone() if x.untyped_storage().data_ptr() == out.untyped_storage().data_ptr() else x


def fake_same(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_given(*args: Any) -> Tensor:
    at = next(i for i, arg in enumerate(args) if isinstance(arg, torch.dtype))
    return torch.empty(args[at - 1], dtype=args[at], device=args[at + 1])


def fake_all_gather(x: Tensor, token: Tensor, dim: int, *args: Any) -> Tensor:
    size = find_route(args[-1]).context.size
    return x.new_empty((size,)) if x.dim() == 0 else x.new_empty(_resized(x, dim, x.shape[dim] * size))


def fake_reduce_scatter(x: Tensor, token: Tensor, dim: int, *args: Any) -> Tensor:
    return x.new_empty(_resized(x, dim, x.shape[dim] // find_route(args[-1]).context.size))


def fake_all_to_all(x: Tensor, token: Tensor, outputs: Splits, *args: Any) -> Tensor:
    return x.new_empty(x.shape if outputs is None else _resized(x, 0, sum(outputs)))


def _rank_in(group: str) -> int:
    return find_route(group).context.rank


def _resized(x: Tensor, dim: int, size: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = size
    return shape


def _grad_all_gatherv(grad: Tensor, token: Tensor, dim: int, sizes: Sequence[int], group: str) -> Tensor:
    return _OPS.reduce_scatterv(grad, token, dim, sizes, "sum", group)


def _grad_reduce_scatterv(grad: Tensor, token: Tensor, dim: int, sizes: Sequence[int], op: str, group: str) -> Tensor:
    return _OPS.all_gatherv(_averaged(grad, op, group), token, dim, sizes, group)


def _grad_all_to_all(grad: Tensor, token: Tensor, outputs: Splits, inputs: Splits, group: str) -> Tensor:
    return _OPS.all_to_all(grad, token, inputs, outputs, group)


def _grad_broadcast(grad: Tensor, token: Tensor, src: int, group: str) -> Tensor:
    total = _OPS.all_reduce(grad, token, "sum", group)
    if _rank_in(group) == src:
        return total
    # Zeros that keep the graph: the backward of this is a collective, so all ranks must take part.
    return total.masked_fill(torch.ones((), dtype=torch.bool, device=total.device), 0)


def _splits(x: Tensor, outputs: Splits, inputs: Splits, group: str) -> tuple[Sequence[int], Sequence[int]]:
    size = find_route(group).context.size
    if outputs is None and inputs is None and len(x) % size == 0:
        return [len(x) // size] * size, [len(x) // size] * size
    if outputs is None or inputs is None or not len(outputs) == len(inputs) == size:
        raise InvalidArgumentError(
            f"the op all_to_all needs two lists of {size} numbers: the rows to receive from each rank, and to send to "
            f"each rank. Both may be None if x has a multiple of {size} rows. The op got {outputs} and {inputs} for x "
            f"of {len(x)} rows; nothing was sent"
        )
    return outputs, inputs


def _averaged(grad: Tensor, reduce_op: str, group: str) -> Tensor:
    return grad / find_route(group).context.size if reduce_op == "avg" else grad


def _autograd_add_rms_norm(
    x: Tensor, token: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str
) -> tuple[Tensor, Tensor]:
    refuse_tangent("all_reduce_add_rms_norm", group, x, residual, weight)
    if torch.is_grad_enabled() and (x.requires_grad or residual.requires_grad or weight.requires_grad):
        total = _OPS.all_reduce(x, token, "sum", group) + residual
        return torch.nn.functional.rms_norm(total, (total.shape[-1],), weight, eps), total
    with below_autograd():
        return _OPS.all_reduce_add_rms_norm(x, token, residual, weight, eps, group)


# `run` counts the bytes of its second argument and picks a communicator by it.

_SUM_OR_AVG = "only sum and avg are differentiable"
_NO_OUT = "don't pass out="
_DETACH = "detach the tensor first and send the gradient back yourself"
QUANTIZE_YOURSELF = "quantize the result of all_reduce_add_rms_norm yourself"


@register("Tensor x, Tensor(a!) token, str reduce_op, str group",
          fake=fake_same, formula=lambda grad, *args: _OPS.all_reduce(grad, *args), advice=_SUM_OR_AVG)  # fmt: skip
def all_reduce(x: Tensor, token: Tensor, reduce_op: str, group: str) -> Tensor:
    return find_route(group).run("all_reduce", x, x, reduce_op, reduce_op=reduce_op)


@register("Tensor(a!) x, Tensor(b!) token, str reduce_op, str group", "()",
          advice="use all_reduce, which has a gradient")  # fmt: skip
def all_reduce_(x: Tensor, token: Tensor, reduce_op: str, group: str) -> None:
    find_route(group).run("all_reduce_", x, x, reduce_op, reduce_op=reduce_op)


@register("Tensor x, Tensor(a!) token, int dim, str group", fake=fake_all_gather,
          formula=lambda grad, token, dim, group: _OPS.reduce_scatter(grad, token, dim, "sum", group))  # fmt: skip
def all_gather(x: Tensor, token: Tensor, dim: int, group: str) -> Tensor:
    return find_route(group).run("all_gather", x, x, dim)


@register("Tensor x, Tensor(a!) token, int dim, SymInt[] sizes, str group",
          fake=lambda x, token, dim, sizes, group: x.new_empty(_resized(x, dim, sum(sizes))),
          formula=_grad_all_gatherv)  # fmt: skip
def all_gatherv(x: Tensor, token: Tensor, dim: int, sizes: Sequence[int], group: str) -> Tensor:
    return find_route(group).run("all_gatherv", x, x, dim, sizes)


@register("Tensor x, Tensor(a!) token, int dim, str reduce_op, str group",
          fake=fake_reduce_scatter, advice=_SUM_OR_AVG,
          formula=lambda grad, token, dim, op, group: _OPS.all_gather(_averaged(grad, op, group), token, dim, group),
          )  # fmt: skip
def reduce_scatter(x: Tensor, token: Tensor, dim: int, reduce_op: str, group: str) -> Tensor:
    return find_route(group).run("reduce_scatter", x, x, dim, reduce_op, reduce_op=reduce_op)


@register("Tensor x, Tensor(a!) token, int dim, SymInt[] sizes, str reduce_op, str group",
          fake=lambda x, token, dim, sizes, op, group: x.new_empty(_resized(x, dim, sizes[_rank_in(group)])),
          formula=_grad_reduce_scatterv, advice=_SUM_OR_AVG)  # fmt: skip
def reduce_scatterv(x: Tensor, token: Tensor, dim: int, sizes: Sequence[int], reduce_op: str, group: str) -> Tensor:
    return find_route(group).run("reduce_scatterv", x, x, dim, sizes, reduce_op, reduce_op=reduce_op)


@register("Tensor x, Tensor(a!) token, int dim, int dst, str group",
          fake=lambda x, token, dim, dst, group: (
              fake_all_gather(x, token, dim, group) if _rank_in(group) == dst else x.new_empty((0,))),
          advice="use all_gather, which has a gradient on every rank")  # fmt: skip
def gather(x: Tensor, token: Tensor, dim: int, dst: int, group: str) -> Tensor:
    return find_route(group).run("gather", x, x, dim, dst)


@register("Tensor? x, Tensor(a!) token, SymInt[] size, ScalarType dtype, Device device, int dim, int src, str group",
          fake=_fake_given, advice="use broadcast and take a slice")  # fmt: skip
def scatter(
    x: Tensor | None, token: Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device, dim: int, src: int,
    group: str,
) -> Tensor:  # fmt: skip
    out = torch.empty(size, dtype=dtype, device=device)
    find_route(group).run("scatter", out, x, out, dim, src)
    return out


@register("Tensor x, Tensor(a!) token, SymInt[]? output_splits, SymInt[]? input_splits, str group",
          fake=fake_all_to_all, formula=_grad_all_to_all)  # fmt: skip
def all_to_all(x: Tensor, token: Tensor, output_splits: Splits, input_splits: Splits, group: str) -> Tensor:
    """Sends rows of `x` to each rank, and returns the received rows. `token` orders the group's ops in a graph.

    `output_splits`: numbers of rows received from each rank. `input_splits`: numbers of rows sent to each rank. None
    means equal numbers.
    """
    return find_route(group).run("all_to_all", x, x, *_splits(x, output_splits, input_splits, group))


@register("Tensor x, Tensor(a!) token, Tensor(b!) out, int dim, str group", "()", advice=_NO_OUT)
def all_gather_into(x: Tensor, token: Tensor, out: Tensor, dim: int, group: str) -> None:
    find_route(group).run("all_gather", x, _apart(x, out), dim, out)


@register("Tensor x, Tensor(a!) token, Tensor(b!) out, int dim, str reduce_op, str group", "()",
          advice=_NO_OUT)  # fmt: skip
def reduce_scatter_into(x: Tensor, token: Tensor, out: Tensor, dim: int, reduce_op: str, group: str) -> None:
    args = (_apart(x, out), dim, reduce_op, out)
    find_route(group).run("reduce_scatter", x, *args, reduce_op=reduce_op)


@register("Tensor x, Tensor(a!) token, Tensor(b!) out, SymInt[]? output_splits, SymInt[]? input_splits, str group",
          "()", advice=_NO_OUT)  # fmt: skip
def all_to_all_into(
    x: Tensor, token: Tensor, out: Tensor, output_splits: Splits, input_splits: Splits, group: str
) -> None:
    args = (_apart(x, out), *_splits(x, output_splits, input_splits, group), out)
    find_route(group).run("all_to_all", x, *args)


@register("Tensor x, Tensor(a!) token, int src, str group", fake=fake_same, formula=_grad_broadcast)
def broadcast(x: Tensor, token: Tensor, src: int, group: str) -> Tensor:
    return find_route(group).run("broadcast", x, x, src)


@register("Tensor(a!) x, Tensor(b!) token, int src, str group", "()",
          advice="use broadcast, which has a gradient")  # fmt: skip
def broadcast_(x: Tensor, token: Tensor, src: int, group: str) -> None:
    find_route(group).run("broadcast_", x, x, src)


@register("Tensor x, Tensor(a!) token, int dst, str group", "()", advice=_DETACH)
def send(x: Tensor, token: Tensor, dst: int, group: str) -> None:
    find_route(group).run("send", x, x, dst)


@register("Tensor(a!) token, SymInt[] size, ScalarType dtype, Device device, int src, str group", fake=_fake_given)
def recv(token: Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device, src: int, group: str) -> Tensor:
    raise_interruption()  # from the kernel in C++: otherwise this would wait again
    out = torch.empty(size, dtype=dtype, device=device)
    find_route(group).run("recv", out, out, src)
    return out


@register("Tensor token, SymInt[] size, ScalarType dtype, Device device, str group", fake=_fake_given)
def empty(token: Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device, group: str) -> Tensor:
    find_route(group)  # raises
    return torch.empty(size, dtype=dtype, device=device)


@register("Tensor[] x, Tensor(a!) token, str form, int src, str group", "()", advice=_DETACH)
def broadcast_list(x: Sequence[Tensor], token: Tensor, form: str, src: int, group: str) -> None:
    route = find_route(group)
    if route.context.rank != src:
        raise InvalidArgumentError(
            f"broadcast_list on {route.context} only reads its tensors, so only rank {src} may call it; "
            "on the other ranks call broadcast_list_, which fills its tensors"
        )
    route.messenger.broadcast_list(x, form, src)


@register("Tensor(a!)[] x, Tensor(b!) token, str form, int src, str group", "()", advice=_DETACH)
def broadcast_list_(x: Sequence[Tensor], token: Tensor, form: str, src: int, group: str) -> None:
    find_route(group).messenger.broadcast_list(x, form, src)


@register("Tensor[] x, Tensor(a!) token, str form, int dst, str group", "()", advice=_DETACH)
def send_list(x: Sequence[Tensor], token: Tensor, form: str, dst: int, group: str) -> None:
    find_route(group).messenger.send_list(x, form, dst)


@register("Tensor(a!)[] x, Tensor(b!) token, str form, int src, str group", "()", advice=_DETACH)
def recv_list_(x: Sequence[Tensor], token: Tensor, form: str, src: int, group: str) -> None:
    raise_interruption()
    find_route(group).messenger.recv_list(x, form, src)


@register("Tensor(a!) token, str group", "()")
def barrier(token: Tensor, group: str) -> None:
    find_route(group).run("barrier", None)


@register("Tensor x, Tensor(a!) token, Tensor residual, Tensor weight, float eps, str group", "(Tensor, Tensor)",
          fake=lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)), autograd=_autograd_add_rms_norm)  # fmt: skip
def all_reduce_add_rms_norm(
    x: Tensor, token: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str
) -> tuple[Tensor, Tensor]:
    return find_route(group).run("all_reduce_add_rms_norm", x, x, residual, weight, eps, reduce_op="sum")


@register("Tensor x, Tensor(a!) token, Tensor residual, Tensor weight, Tensor scale, float eps, str group",
          "(Tensor, Tensor)", fake=lambda x, *_: (x.new_empty(x.shape, dtype=FP8), x.new_empty(x.shape)),
          advice=QUANTIZE_YOURSELF)  # fmt: skip
def all_reduce_add_rms_norm_static_fp8_quant(
    x: Tensor, token: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float, group: str
) -> tuple[Tensor, Tensor]:
    operation = "all_reduce_add_rms_norm_static_fp8_quant"
    return find_route(group).run(operation, x, x, residual, weight, scale, eps, reduce_op="sum")


@register("Tensor x, Tensor(a!) token, Tensor residual, Tensor weight, float eps, str group",
          "(Tensor, Tensor, Tensor)", advice=QUANTIZE_YOURSELF,
          fake=lambda x, *_: (x.new_empty(x.shape, dtype=FP8),
                              x.new_empty((*x.shape[:-1], 1), dtype=torch.float32), x.new_empty(x.shape)))  # fmt: skip
def all_reduce_add_rms_norm_dynamic_per_token_fp8_quant(
    x: Tensor, token: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    operation = "all_reduce_add_rms_norm_dynamic_per_token_fp8_quant"
    return find_route(group).run(operation, x, x, residual, weight, eps, reduce_op="sum")
