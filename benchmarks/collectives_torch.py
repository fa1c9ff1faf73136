"""The candidates of `collectives` that live in torch: this library, torch.distributed, vLLM's CPU ops.

Belongs here: how each of them is called, as its users call it. What does not: loops, checks and inputs, which are in
`measure.tensors`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
from measure.tensors import Exchange, TensorTeam
from torch import Tensor

import parallel_state as ps

OURS = (
    "op, in place",
    "op",
    "coordinator, in place",
    "coordinator",
    "symmetric op, in place",
)
# Newer versions of torch have new names, and warn of the old ones.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def make(name: str, settings: dict[str, Any]) -> TorchTeam:
    return TorchTeam(settings)


class TorchTeam(TensorTeam):
    """Ranks of this library; their default group is torch.distributed's."""

    measures_copies = True

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        ps.init_distributed_environment(backend="gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        ps.initialize_model_parallel(self.size)
        self.group = ps.get_tp_group()
        use_once(self.group)
        self.vllm = None
        if settings["vllm"] is not None and self.size in (2, 3, 4, 8):  # others its ops don't know
            self.vllm = peers.vllm_group(Path(settings["vllm"]), self.rank, [list(range(self.size))])

    def about(self) -> str:
        """The route that this library takes."""
        return self.group.explain()

    def exchanges(self, operation: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Exchange]:
        found = self._ours(operation, shape)
        found["gloo"] = Exchange(_of_torch(operation, shape, self.size, self.rank))
        if self.vllm is not None:
            found.update(_of_vllm(self.vllm, operation))
        return found

    def _ours(self, operation: str, shape: tuple[int, ...]) -> dict[str, Exchange]:
        group, size = self.group, self.size
        equal = [shape[0] // size] * size
        in_place: dict[str, Callable[[Tensor], Tensor]] = {
            "all_reduce": group.all_reduce_,
            "broadcast": lambda x: group.broadcast_(x, 0),
        }
        functional: dict[str, Callable[[Tensor], Any]] = {
            "all_reduce": group.all_reduce,
            "all_gather": lambda x: group.all_gather(x, -1),
            "reduce_scatter": lambda x: group.reduce_scatter(x, 0),
            "broadcast": lambda x: group.broadcast(x, 0),
            "all_to_all": group.all_to_all,
            "barrier": lambda x: group.barrier() or x,
        }
        arguments = {
            "dim": {"all_gather": len(shape) - 1}.get(operation, 0),
            "output_splits": equal,
            "input_splits": equal,
        }
        found = {"coordinator": Exchange(functional[operation])}
        if operation != "barrier":
            found["op"] = Exchange(ours_by_op(group, operation, arguments))
        if operation in in_place:
            op = ours_by_op(group, operation + "_", arguments)
            found["op, in place"] = Exchange(op)
            found["coordinator, in place"] = Exchange(in_place[operation])
            if hasattr(group, "empty"):
                found["symmetric op, in place"] = Exchange(op, _symmetric(group))
        return {name: found[name] for name in OURS if name in found}


def use_once(group: ps.GroupCoordinator) -> None:
    """A collective and a message: with the first ones a group counts its cores, and ranks are pinned to one later."""
    group.all_reduce(torch.ones(1, device=group.device))
    group.broadcast_object(0)


def ours_by_op(group: ps.GroupCoordinator, name: str, given: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """The registered op as a function of its tensor; the other arguments by their names in its schema."""
    op = getattr(torch.ops.parallel_state, name)
    values = {"token": group._token, "reduce_op": "sum", "src": 0, "group": group._key, **given}
    after = [values[argument.name] for argument in op.default._schema.arguments[1:]]
    if name.endswith("_"):

        def in_place(x: Tensor) -> Tensor:
            op(x, *after)
            return x

        return in_place
    return lambda x: op(x, *after)


def _symmetric(group: ps.GroupCoordinator) -> Callable[..., Tensor]:
    def empty(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return group.empty(shape, dtype)  # type: ignore[attr-defined]

    return empty


def _of_torch(operation: str, shape: tuple[int, ...], size: int, rank: int) -> Callable[[Tensor], Tensor]:
    """torch.distributed itself, as somebody without this library would call it."""

    def all_reduce(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def all_gather(x: Tensor) -> Tensor:
        out = x.new_empty((size * shape[0], *shape[1:]))
        _ALL_GATHER(out, x)
        return out.view(size, *shape).movedim(0, -2).reshape(*shape[:-1], size * shape[-1])

    def reduce_scatter(x: Tensor) -> Tensor:
        out = x.new_empty(x.numel() // size)
        _REDUCE_SCATTER(out, x)
        return out

    def broadcast(x: Tensor) -> Tensor:
        dist.broadcast(x, 0)
        return x

    def all_to_all(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out

    def barrier(x: Tensor) -> Tensor:
        dist.barrier()
        return x

    return locals()[operation]


def _of_vllm(group: Any, operation: str) -> dict[str, Exchange]:
    """What it has of its own on a CPU; the rest of its calls are torch.distributed's."""
    if operation == "all_gather":
        return {"vLLM": Exchange(lambda x: group.all_gather(x, -1))}
    if operation != "all_reduce":
        return {}
    handle = group.device_communicator.dist_module.handle
    op = torch.ops._C.shm_allreduce

    def all_reduce(x: Tensor) -> Tensor:
        op(handle, x)
        return x

    return {"vLLM op, in place": Exchange(all_reduce), "vLLM coordinator, in place": Exchange(group.all_reduce)}
