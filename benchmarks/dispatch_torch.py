"""The candidates of `dispatch`: ways to come from a model's line to the place where bytes would move."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from collectives_torch import ours_by_op, use_once
from measure.worker import Timing, timed
from torch import Tensor

import parallel_state as ps

_LIBRARY = torch.library.Library("dispatch_benchmark", "DEF")
_GROUPS: dict[str, Any] = {}


def make(name: str, settings: dict[str, Any]) -> DispatchTeam:
    return DispatchTeam(settings)


class DispatchTeam:
    """One or two ranks."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        ps.init_distributed_environment(backend="gloo")
        if not dist.is_initialized():  # one rank needs no default group, but torch.distributed does
            dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        ps.initialize_model_parallel(self.size)
        self.group = ps.get_tp_group()
        use_once(self.group)
        self.vllm = None
        if settings["vllm"] is not None:
            self.vllm = peers.vllm_group(Path(settings["vllm"]), self.rank, [list(range(self.size))])
        if self.size == 1:
            _define_noops()

    def prepare(self, values: dict[str, Any]) -> list[str]:
        self.mode = values["mode"]
        count = values["bytes"] // 2
        with _modes(self.mode):
            self.x = torch.zeros(count, dtype=torch.bfloat16)
        if self.mode == "requires_grad":
            self.x.requires_grad_()
        self.calls = {**self._ours(), **self._peers(), **(_NOOPS if self.size == 1 else {})}
        if self.mode == "requires_grad":
            self.calls = {name: call for name, call in self.calls.items() if "in place" not in name}
        return list(self.calls)

    def _ours(self) -> dict[str, Callable[[Tensor], Any]]:
        found = {"coordinator": self.group.all_reduce, "coordinator, in place": self.group.all_reduce_}
        if self.size > 1:
            found["op"] = ours_by_op(self.group, "all_reduce", {})
            found["op, in place"] = ours_by_op(self.group, "all_reduce_", {})
        return found

    def _peers(self) -> dict[str, Callable[[Tensor], Any]]:
        world = dist.group.WORLD

        def through_torch(x: Tensor) -> Tensor:
            dist.all_reduce(x)
            return x

        def through_functional(x: Tensor) -> Tensor:
            return functional.wait_tensor(functional.all_reduce(x, "sum", world))

        found = {"torch.distributed, in place": through_torch, "functional collective": through_functional}
        if self.vllm is not None:
            name = self.vllm.unique_name
            found["vLLM coordinator, in place"] = self.vllm.all_reduce
            if self.size > 1:
                op = torch.ops.vllm.all_reduce
                found["vLLM op by name, in place"] = lambda x: op(x, group_name=name)
        return found

    def check(self, name: str) -> str | None:
        with _modes(self.mode):
            x = torch.full_like(self.x, self.rank + 1.0)
            if self.mode == "requires_grad":
                x.requires_grad_()
            try:
                y = self.calls[name](x)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            expected = torch.full_like(self.x, sum(range(1, self.size + 1)))
            return None if y is not None and torch.equal(y, expected) else f"{name}: wrong on rank {self.rank}"

    def run(self, name: str, calls: int) -> Timing:
        call, x = self.calls[name], self.x
        with _modes(self.mode):
            return timed(lambda: call(x), calls)


def _modes(mode: str) -> contextlib.AbstractContextManager[Any]:
    return {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad}.get(mode, torch.enable_grad)()


# Ways that do nothing: what is left of each is its own cost.


def _plain(x: Tensor) -> Tensor:
    return x


def _noop_in_place(x: Tensor, group: str) -> None:
    if group not in _GROUPS:
        raise KeyError(group)


def _noop(x: Tensor, group: str) -> Tensor:
    if group not in _GROUPS:
        raise KeyError(group)
    return torch.empty_like(x).copy_(x)


_NOOPS: dict[str, Callable[[Tensor], Any]] = {}


def _define_noops() -> None:
    """An op registered in Python that looks its group up by name, and the same by torch's custom_op."""
    _GROUPS["tp:0"] = object()
    _LIBRARY.define("noop_(Tensor(a!) x, str group) -> ()")
    _LIBRARY.impl("noop_", _noop_in_place, "CPU")
    _LIBRARY.define("noop(Tensor x, str group) -> Tensor")
    _LIBRARY.impl("noop", _noop, "CPU")
    decorated = torch.library.custom_op("dispatch_benchmark::decorated", _noop, mutates_args=())
    namespace = torch.ops.dispatch_benchmark

    def in_place(x: Tensor) -> Tensor:
        namespace.noop_(x, "tp:0")
        return x

    _NOOPS["plain function"] = _plain
    _NOOPS["no-op in Python, in place"] = in_place
    _NOOPS["no-op in Python, copies"] = lambda x: namespace.noop(x, "tp:0")
    _NOOPS["no-op by custom_op, copies"] = lambda x: decorated(x, "tp:0")
    _NOOPS["no-op of torch (aten.clone)"] = torch.ops.aten.clone
    _NOOPS["no-op of torch, in place (aten.squeeze_)"] = torch.ops.aten.squeeze_
