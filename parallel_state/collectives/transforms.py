"""The ops under `torch.vmap`: a collective runs once, on the whole batch.

All ranks must have the same batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from device_communicators.base import torch_internals
from device_communicators.base.errors import InvalidArgumentError
from device_communicators.calls.reductions import REDUCING
from device_communicators.routing.registry import find_route

Rule = Callable[..., tuple[Any, Any]]
"""Maps (op, batch dim of each argument, *arguments) to (result, batch dim of the result)."""


def _elementwise(op: Any, dims: Sequence[Any], x: Tensor, *args: Any) -> tuple[Any, Any]:
    return op(x.movedim(dims[0], 0), *args), 0


def _in_place(op: Any, dims: Sequence[Any], x: Tensor, *args: Any) -> tuple[Any, Any]:
    op(x.movedim(dims[0], 0), *args)  # a view
    return None, None


def _along_dim(op: Any, dims: Sequence[Any], x: Tensor, token: Tensor, dim: int, *args: Any) -> tuple[Any, Any]:
    batch = x.movedim(dims[0], 0)
    return op(batch if batch.dim() > 1 else batch.unsqueeze(1), token, dim + 1, *args), 0


def _rows(op: Any, dims: Sequence[Any], x: Tensor, *args: Any) -> tuple[Any, Any]:
    return op(x.movedim(dims[0], 1), *args), 1


def _with_norm(
    op: Any, dims: Sequence[Any], x: Tensor, token: Tensor, residual: Tensor, weight: Tensor, *args: Any
) -> tuple[Any, Any]:
    if any(dim is not None for dim in dims[3:]):
        raise InvalidArgumentError(
            f"{_name(op)} on {find_route(args[-1]).context} doesn't support torch.vmap over its weight or scale; "
            "call all_reduce and then the norm separately"
        )
    inputs = ((x, dims[0]), (residual, dims[2]))
    size = next(tensor.shape[dim] for tensor, dim in inputs if dim is not None)
    batches = [tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0) for tensor, dim in inputs]
    results = op(batches[0], token, batches[1], weight, *args)
    return results, (0,) * len(results)


_NAMES_BY_RULE: dict[Rule, tuple[str, ...]] = {
    _elementwise: ("all_reduce", "broadcast", "copy_region", "reduce_region"),
    _in_place: ("all_reduce_", "broadcast_"),
    _along_dim: ("all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv", "scatter_region", "gather_region",
                 "reduce_scatter_region"),
    _rows: ("all_to_all",),
    _with_norm: tuple(name for name in REDUCING if name.startswith("all_reduce_add_rms_norm")),
}  # fmt: skip
_RULES = {name: rule for rule, names in _NAMES_BY_RULE.items() for name in names}
_UNMAPPED = ("barrier", "empty")


def _name(op: Any) -> str:
    return str(torch_internals.schema_of(op).name).partition("::")[2]


def batch_kernel(op: Any) -> tuple[str, Callable[..., Any]] | None:
    name = _name(op)
    if name in _UNMAPPED:
        return None
    rule = _RULES.get(name)
    if rule is not None:
        return "FuncTorchBatched", lambda *args: torch_internals.map_op(op, partial(rule, op), args)

    def refuse(*args: Any) -> Any:
        raise InvalidArgumentError(
            f"{name} on {find_route(args[-1]).context} can't be called inside torch.vmap or functions built on it "
            "(jacrev, hessian), because its ranks have different roles, and only some would get the batch dim; make "
            "the call outside, on the whole batch, or use all_gather, broadcast or all_to_all inside"
        )

    return "FuncTorchVmapMode", refuse  # for all calls inside vmap, also those without a mapped tensor
