"""Compares torch.distributed over "parallel_state", over gloo, and over torch's `fake` backend, whose time is the cost
of torch's own layers. A lower bound for "parallel_state" is a call over `fake` followed by this library's op.

`dist` calls work in place, `functional` calls are waited for at once, `compiled` calls run under inductor.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import wait_tensor

import parallel_state as ps
from device_communicators.base.settings import SHARED_MEMORY
from device_communicators.base.torch_internals import register_fake_backend
from harness.collectives import count_of, ours_by_op
from harness.ranks import compilable_of_torch
from harness.timing import timed
from parallel_state.tools.bench.collectives import answer, given, torch_by_call
from parallel_state.tools.bench.rounds import GLOO, OWN, Timing, WrongAnswer

LAYERS = "torch's layers alone"
OP = "op in place"
OP_AND_LAYERS = "op and torch's layers"
CARRIED = "parallel_state over gloo"
BACKENDS = {OWN: "parallel_state", GLOO: "gloo", LAYERS: "fake", CARRIED: "parallel_state"}
ENVIRONMENTS = {CARRIED: {SHARED_MEMORY.name: "0"}}
CALLS = ("dist", "functional", "compiled")
STEPS = ("DDP step", "FSDP2 step")
_WIDTH, _DEPTH, _ROWS = 1024, 20, 16


def load(name: str, settings: dict[str, Any]) -> None:
    import torch.distributed.fsdp

    if settings.get("compiled"):
        import torch._inductor.compile_fx
    register_fake_backend()
    torch.set_num_threads(1)


def make(name: str, settings: dict[str, Any]) -> ThroughTorch:
    return ThroughTorch(name)


class ThroughTorch:
    def __init__(self, name: str) -> None:
        self.name = name
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(BACKENDS[name], rank=self.rank, world_size=self.size)
        self._op: Callable[[Tensor], Tensor] | None = None
        if name == OWN:
            ps.initialize_model_parallel(self.size)
            self._op = ours_by_op(ps.get_tp_group(), "all_reduce_")
            self._layers = dist.new_group(backend=BACKENDS[LAYERS])
        dist.all_reduce(torch.ones(1))
        self._steps: dict[str, Callable[[], float]] = {}
        self._calls: dict[str, Callable[[], Tensor | float]] = {}

    def about(self) -> str:
        without = ", without shared memory" if self.name == CARRIED else ""
        return f"torch {torch.__version__}, torch.distributed over {BACKENDS[self.name]}{without}"

    def prepare(self, values: dict[str, Any]) -> list[str]:
        """Prepares a case and returns the names of the calls to time. `values`: the case, with `kind`, one of CALLS or
        STEPS; for CALLS also `operation`, `dtype`, and `bytes` as nccl-tests define them.
        """
        kind = values["kind"]
        if self.name == CARRIED and kind != "dist":
            return []
        if kind in STEPS:
            self._x = None
            if kind not in self._steps:
                self._steps[kind] = step_of(kind, communicates=self.name != LAYERS)
            self._calls = {self.name: self._steps[kind]}
            return [self.name]
        operation, dtype, device = values["operation"], getattr(torch, values["dtype"]), torch.device("cpu")
        count = count_of(operation, values["bytes"], dtype, self.size)
        self._source = given(count, self.rank, dtype, device)
        self._expected = answer(operation, count, self.rank, self.size, dtype, device)
        self._x = self._source.clone()
        eager = torch_by_call(operation, dist.group.WORLD, self.size)
        functional = compilable_of_torch(operation, dist.group.WORLD)
        if kind == "compiled":
            torch.compiler.reset()
            functional = torch.compile(functional, fullgraph=True)
        calls: dict[str, Callable[[Tensor], Tensor]] = {
            self.name: eager if kind == "dist" else lambda x: wait_tensor(functional(x))
        }
        if self._op is not None and kind == "dist" and operation == "all_reduce":
            calls[OP] = self._op
            calls[OP_AND_LAYERS] = partial(_layers_then, self._op, self._layers)
        self._calls = {name: partial(call, self._x) for name, call in calls.items()}
        return list(self._calls)

    def check(self, name: str) -> str | None:
        if self._x is not None:
            self._x.copy_(self._source)
        found = torch.as_tensor(self._calls[name]())
        if self.name == LAYERS:
            return None
        if self._x is None:
            return None if torch.isfinite(found) else f"the loss is {found}"
        if torch.equal(found, self._expected):
            return None
        return WrongAnswer.of(int((found != self._expected).sum()), f"the answer of rank {self.rank} is wrong")

    def run(self, name: str, calls: int) -> Timing:
        if self._x is not None:
            self._x.zero_()
        return timed(self._calls[name], calls)

    def close(self) -> None:
        dist.destroy_process_group()


def step_of(kind: str, *, communicates: bool = True) -> Callable[[], float]:
    """Returns a function that runs a training step and returns the loss. All ranks create and call it together.
    `communicates`: False if the default group is torch's fake one.
    """
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_DEPTH)))
    if kind == "DDP step":
        model = ddp = nn.parallel.DistributedDataParallel(model)
        if not communicates:  # works of `fake` lack the results that DDP requests
            ddp.register_comm_hook(None, lambda _, bucket: _kept(bucket))
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(_ROWS, _WIDTH)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def _layers_then(op: Callable[[Tensor], Tensor], fake: dist.ProcessGroup, x: Tensor) -> Tensor:
    dist.all_reduce(x, group=fake)
    return op(x)


def _kept(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
