"""The candidates of `collectives_ranks`: each communicator of a group's route alone, the route, torch.distributed.

Belongs here: how each is called, eagerly, compiled and in a CUDA graph, and which answer is right. Times do not.

Sizes are counted as nccl-tests count them: the bytes of an all_reduce's, broadcast's and all_to_all's tensor, of an
all_gather's output and of a reduce_scatter's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import parallel_state as ps
from device_communicators import Route, register_route, unique_name
from parallel_state.collectives.capture_stream import GraphCaptureContext, prepared, side_stream

Call = Callable[[Tensor], Tensor]
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
TORCH = "torch.distributed"
ROUTE = "parallel_state"
_IN_PLACE = ", in place"
# Newer versions of torch have new names, and warn of the old ones.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Way:
    """One carrier of an operation."""

    name: str
    call: Call
    """Gives the result, which may be the input."""
    compilable: Call | None
    """What torch.compile is given; None where there is no such thing."""
    capture: Callable[[], AbstractContextManager[GraphCaptureContext]]
    """Within it CUDA graphs are captured."""


class Ways:
    """Those of one group; every rank makes it."""

    def __init__(self, group: ps.GroupCoordinator) -> None:
        self._group = group
        self._routes: dict[str, Route] = {}
        for each in group.route.communicators:
            # The group's own communicator, under a name by which ops find it alone.
            context = replace(group.context, name=unique_name(f"only_{each.name}"))
            self._routes[each.name] = Route(context, [each], {}, group.route.paths)
            register_route(self._routes[each.name])

    def close(self) -> None:
        """The communicators go on, under the group's name only."""
        for route in self._routes.values():
            route.serve_ops(False)
        self._routes.clear()

    def of(self, operation: str) -> list[Way]:
        """Every way, the same on all ranks."""
        return [*self._ours(operation), *self._torchs(operation)]

    def _ours(self, operation: str) -> Iterator[Way]:
        group, device = self._group, self._group.device
        methods: dict[str, Call] = {
            "all_reduce": group.all_reduce,
            "all_gather": lambda x: group.all_gather(x, 0),
            "reduce_scatter": lambda x: group.reduce_scatter(x, 0),
            "broadcast": lambda x: group.broadcast(x, 0),
            "all_to_all": lambda x: group.all_to_all(x),
        }
        method = methods[operation]
        yield Way(ROUTE, method, method, group.graph_capture)
        in_place: dict[str, Call] = {"all_reduce": group.all_reduce_, "broadcast": lambda x: group.broadcast_(x, 0)}
        if operation in in_place:
            yield Way(ROUTE + _IN_PLACE, in_place[operation], None, group.graph_capture)
        for name, route in self._routes.items():
            op = _op(operation, group._token, route.context.key, group.world_size)
            yield Way(name, op, op, lambda route=route: prepared(route, None, device))

    def _torchs(self, operation: str) -> Iterator[Way]:
        eager, compilable = _of_torch(operation, self._group.device_group, self._group.world_size)
        yield Way(TORCH, eager, compilable, lambda: side_stream(self._group.device))


def _op(operation: str, token: Tensor, key: str, size: int) -> Call:
    """The registered op."""
    ops: Any = torch.ops.parallel_state

    def all_to_all(x: Tensor) -> Tensor:
        splits = [x.shape[0] // size] * size
        return ops.all_to_all(x, token, splits, splits, key)

    return {
        "all_reduce": lambda x: ops.all_reduce(x, token, "sum", key),
        "all_gather": lambda x: ops.all_gather(x, token, 0, key),
        "reduce_scatter": lambda x: ops.reduce_scatter(x, token, 0, "sum", key),
        "broadcast": lambda x: ops.broadcast(x, token, 0, key),
        "all_to_all": all_to_all,
    }[operation]


def _of_torch(operation: str, group: Any, size: int) -> tuple[Call, Call]:
    """As its users call it: c10d's own calls eagerly, functional collectives under the compiler."""

    def all_reduce(x: Tensor) -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    def all_gather(x: Tensor) -> Tensor:
        out = x.new_empty(size * x.shape[0])
        _ALL_GATHER(out, x, group=group)
        return out

    def reduce_scatter(x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0] // size)
        _REDUCE_SCATTER(out, x, group=group)
        return out

    def broadcast(x: Tensor) -> Tensor:
        dist.broadcast(x, group_src=0, group=group)
        return x

    def all_to_all(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    compilable: dict[str, Call] = {
        "all_reduce": lambda x: functional.all_reduce(x, "sum", group),
        "all_gather": lambda x: functional.all_gather_tensor(x, 0, group),
        "reduce_scatter": lambda x: functional.reduce_scatter_tensor(x, "sum", 0, group),
        "broadcast": lambda x: functional.broadcast(x, 0, group),
        "all_to_all": lambda x: functional.all_to_all_single(x, None, None, group),
    }
    return locals()[operation], compilable[operation]


# Inputs and answers: small integers, of which the sums of up to 16 ranks are exact in bf16.


def count_of(operation: str, size_bytes: int, dtype: torch.dtype, ranks: int) -> int:
    """The elements that a rank gives, for a size as nccl-tests count it."""
    count = max(1, size_bytes // dtype.itemsize // ranks) * ranks
    return count // ranks if operation == "all_gather" else count


def _ramp(count: int, start: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`(start + i) % 7`, made of pieces, as whole numbers would take four times the memory."""
    period = ((torch.arange(7) + start) % 7).to(dtype).to(device)
    return period.repeat(-(-count // 7))[:count].contiguous()


def given(count: int, rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a rank gives."""
    return _ramp(count, 0, dtype, device).add_(rank)


def answer(operation: str, count: int, rank: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a rank gets where each gives `given(count, …)`."""
    part, ones = count // size, sum(range(size))
    if operation == "all_reduce":
        return _ramp(count, 0, dtype, device).mul_(size).add_(ones)
    if operation == "reduce_scatter":
        return _ramp(part, rank * part, dtype, device).mul_(size).add_(ones)
    if operation == "all_gather":
        return torch.cat([given(count, each, dtype, device) for each in range(size)])
    if operation == "broadcast":
        return given(count, 0, dtype, device)
    return torch.cat([_ramp(part, rank * part, dtype, device).add_(each) for each in range(size)])
