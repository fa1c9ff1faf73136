"""The ranks of `tune`: each kernel in peer memory as a candidate, beside who carries it otherwise.

`Joined` is a team whose ranks are already there, as torchrun's are: each rank asks itself, and all gather the answers,
so that all make the same choices. Not run on a GPU.
"""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from measure.teams import TeamError
from measure.tensors import Exchange, TensorTeam
from measure.worker import Timing
from torch import Tensor
from tune import FUSED, ORDERS, OTHER

import parallel_state as ps
from device_communicators import Communicator, Request
from device_communicators.peer_communicator import PeerMemoryCommunicator
from device_communicators.peer_device import PeerDevice
from device_communicators.peer_thresholds import ALGORITHMS, Thresholds
from device_communicators.symmetric_memory import DTYPES as SYMMETRIC_DTYPES
from device_communicators.symmetric_memory import SymmetricMemoryCommunicator

_EVERYTHING = 1 << 40
UNBOUNDED = Thresholds(
    "any", 8, *[_EVERYTHING] * 9, multimem=True, measured=False, source="for who measures them"
)  # fmt: skip
CALLS_IN_A_GRAPH = 20
HIDDEN = 4096
"""The longest row of a norm."""
_OURS = ("peer_memory", "symmetric_memory")


def _add_norm(communicator: Communicator, x: Tensor) -> Tensor:
    """What is checked is the sum: norms differ in their last bits, and were proven when the group was made."""
    rows = x.view(-1, math.gcd(x.numel(), HIDDEN))
    residual = torch.zeros_like(rows)
    return communicator.all_reduce_add_rms_norm(rows, residual, torch.ones_like(rows[0]), 1e-6)[1].view(x.shape)


CALLS: dict[str, Callable[[Communicator, Tensor], Tensor]] = {
    "all_reduce": lambda communicator, x: communicator.all_reduce(x, "sum"),
    "all_gather": lambda communicator, x: communicator.all_gather(x, 1),
    "reduce_scatter": lambda communicator, x: communicator.reduce_scatter(x, 0, "sum"),
    FUSED: _add_norm,
}


def other_of(route: Iterable[Communicator], device_type: str) -> Communicator:
    """Who carries the tensors of this device where none of ours does."""
    request = Request("all_reduce", torch.bfloat16, device_type, 1, "sum")
    for each in route:
        if each.name not in _OURS and each.refusal(request) is None:
            return each
    raise RuntimeError(f"there is nothing to compare with: no communicator carries tensors on {device_type}")


def make(name: str, settings: dict[str, Any]) -> TuneTeam:
    return TuneTeam(settings)


class TuneTeam(TensorTeam):
    """One rank."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        on_gpu = not settings["emulate"]
        ps.init_distributed_environment(backend="nccl" if on_gpu else "gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        ps.initialize_model_parallel(self.size)
        self.group = ps.get_tp_group()
        self.device = self.group.device
        context = self.group.context
        self._peers: PeerMemoryCommunicator
        if on_gpu:
            self._cuda = PeerDevice(self.device)
            self._peers = PeerMemoryCommunicator(context, self._cuda, UNBOUNDED)
        else:
            from tests.peer_stand_in import StandInPeerMemory

            self._peers = stand_in = StandInPeerMemory(context, thresholds=UNBOUNDED)
            self._cuda = stand_in.device
        problem = self._peers.admit()
        if problem is not None:
            raise RuntimeError(f"there is nothing to measure: {problem}")
        self._symmetric: SymmetricMemoryCommunicator | None = None
        if on_gpu:
            symmetric = SymmetricMemoryCommunicator(context, self._cuda, thresholds=UNBOUNDED)
            if symmetric.admit() is None:
                self._symmetric = symmetric
        self._other = other_of(self.group.route.communicators, self.device.type)
        self._graphs: dict[str, Any] = {}

    def about(self) -> dict[str, str]:
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "no GPU"
        return {"arch": self._cuda.arch(), "gpu": gpu}

    def exchanges(self, operation: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Exchange]:
        self._graphs.clear()
        call = CALLS[operation]
        found = {name: self._chosen(call, name) for name in ORDERS[operation] if name not in ("symmetric", OTHER)}
        symmetric, other = self._symmetric, self._other
        if operation == "all_reduce" and symmetric is not None and dtype in SYMMETRIC_DTYPES:
            found["symmetric"] = lambda x: call(symmetric, x)
        found[OTHER] = lambda x: call(other, x)
        return {name: Exchange(each) for name, each in found.items()}

    def _chosen(self, call: Callable[[Communicator, Tensor], Tensor], name: str) -> Callable[[Tensor], Tensor]:
        """The call with thresholds by which it has this kernel at every size."""
        kinds = {"all_gather_push": "push", "reduce_scatter_push": "push", "fused": "fused"}
        kinds.update({each: each for each in ALGORITHMS})
        never = {bound: 0 for bound, kind in kinds.items() if kind != name}
        admission = replace(self._peers.group.admission, pinned=None, thresholds=replace(UNBOUNDED, **never))

        def chosen(x: Tensor) -> Tensor:
            self._peers.group.admission = admission
            return call(self._peers, x)

        return chosen

    def _answer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._operation != FUSED:
            return super()._answer(shape, dtype)
        return sum(self._pattern(rank, shape, dtype).float() for rank in range(self.size)).to(dtype)

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def run(self, name: str, calls: int) -> Timing:
        return self._replay(name, calls) if self.device.type == "cuda" else super().run(name, calls)

    def _replay(self, name: str, calls: int) -> Timing:
        """`calls` calls as replays of a graph that has CALLS_IN_A_GRAPH of them."""
        graph = self._graphs.get(name)
        if graph is None:
            call, x = self._prepared[name]
            with torch.inference_mode():  # in which `prepare` has made the tensors
                x.copy_(self._source)
                call(x)
                self.finish()
                graph = self._graphs[name] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for _ in range(CALLS_IN_A_GRAPH):
                        call(x)
        replays = -(-calls // CALLS_IN_A_GRAPH)
        graph.replay()
        self.finish()
        started = time.perf_counter()
        for _ in range(replays):
            graph.replay()
        self.finish()
        return Timing(elapsed_s=(time.perf_counter() - started) / replays / CALLS_IN_A_GRAPH * calls)

    def close(self) -> None:
        self._graphs.clear()
        self._peers.close()
        if self._symmetric is not None:
            self._symmetric.close()
        ps.destroy_distributed_environment()


class Joined:
    """As a `measure.teams.Team`, from within one of its ranks: every rank asks the same, at the same time."""

    name = "tune"

    def __init__(self, settings: dict[str, Any]) -> None:
        ps.register_type(Timing)
        self._team = TuneTeam(settings)
        self.rank, self.size = self._team.rank, self._team.size
        self.pids = [os.getpid()]

    def __enter__(self) -> Joined:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._team.close()

    def ask(self, method: str, *arguments: Any, timeout_s: float = 120.0) -> list[Any]:
        """What every rank's `method` returned, in rank order."""
        try:
            mine = ("done", getattr(self._team, method)(*arguments))
        except Exception:
            mine = ("failed", traceback.format_exc())
        answers: list[Any] = self._team.group.all_gather_object(mine)
        for rank, (kind, value) in enumerate(answers):
            if kind == "failed":
                raise TeamError(f"{self.name}: {method} failed on rank {rank}\n{value}")
        return [value for _, value in answers]
