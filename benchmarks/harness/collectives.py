"""Teams (the processes of one library) that run collectives of this library, gloo and vLLM. *produced* loops write each
call's input and read its output, as a model's layers do; *tight* loops don't. `COPIES` is a loop of these writes and
reads alone, to subtract.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import parallel_state as ps
from device_communicators.base.torch_internals import schema_of
from harness import peers
from parallel_state.tools.bench.collectives import (
    Call,
    Exchange,
    Prepared,
    TensorTeam,
    ours_by_method,
    ping_pong,
    torch_by_call,
)
from parallel_state.tools.bench.rounds import GLOO, OWN, PING_PONG

COPIES = "(copies alone)"
VLLM = "vLLM"
TREE = "coordinator, in place, tree order"
OURS = ("op, in place", "op", "coordinator, in place", "coordinator", "symmetric op, in place", TREE)
_PAGE = 4096


class LoopTeam(TensorTeam):
    measures_copies = False

    def prepare(self, values: dict[str, Any]) -> list[str]:
        """Prepares a case and returns the names of the calls to time. `values`: the case, with `loop` (see the
        module), and optionally `offset`: bytes from a page's start to the input.
        """
        self._tight, self._offset = values["loop"] == "tight", values.get("offset")
        super().prepare(values)
        if not self._tight:
            self._zero = False
            with torch.inference_mode():
                self._sink = torch.empty_like(self._expected)
                if self.measures_copies:
                    self._prepared[COPIES] = Prepared(lambda x: self._expected, torch.empty_like(self._source))
        return list(self._prepared)

    def allocated(self, exchange: Exchange, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._offset is None:
            return super().allocated(exchange, shape, dtype)
        room = super().allocated(exchange, (math.prod(shape) + 2 * _PAGE // dtype.itemsize,), dtype)
        ahead = (self._offset - room.data_ptr()) % _PAGE // dtype.itemsize
        return room[ahead : ahead + math.prod(shape)].view(shape)

    def loop(self) -> Callable[[Call, Tensor, int], float]:
        return self._run_tight if self._tight else self._run_produced

    def _run_produced(self, call: Call, x: Tensor, calls: int) -> float:
        source, sink = self._source, self._sink
        started = time.perf_counter()
        for _ in range(calls):
            x.copy_(source)
            sink.copy_(call(x))
        self.finish()
        return time.perf_counter() - started


def load(name: str, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if name == VLLM:
        peers.load_vllm(Path(settings["vllm"]))


def make(name: str, settings: dict[str, Any]) -> LoopTeam:
    team = TEAMS[name](settings)
    team.only = settings.get("only")
    return team


class OwnTeam(LoopTeam):
    measures_copies = True

    def __init__(self, settings: dict[str, Any]) -> None:
        self.group = start_ours()
        self.rank, self.size = self.group.rank_in_group, self.group.world_size

    def about(self) -> str:
        return self.group.explain()

    def exchanges(self, operation: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Exchange]:
        group = self.group
        call, in_place = ours_by_method(group, operation)
        found = {"coordinator": Exchange(call)}
        if operation != "barrier":
            found["op"] = Exchange(ours_by_op(group, operation, dim=len(shape) - 1))
        if in_place:
            op = ours_by_op(group, operation + "_")
            found["op, in place"] = Exchange(op)
            found["coordinator, in place"] = Exchange(in_place)
            found["symmetric op, in place"] = Exchange(op, lambda shape, dtype, device: group.empty(shape, dtype))
        if operation == "all_reduce" and self.size & (self.size - 1) == 0:
            found[TREE] = Exchange(lambda x: group.all_reduce_(x, order="tree"))
        return {name: found[name] for name in OURS if name in found}


class TorchTeam(LoopTeam):
    def __init__(self, settings: dict[str, Any]) -> None:
        self.rank, self.size, self._group = start_torch()

    def about(self) -> str:
        return f"torch {torch.__version__}, gloo"

    def exchanges(self, operation: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Exchange]:
        return {GLOO: Exchange(torch_by_call(operation, self._group, self.size))}


class VllmTeam(LoopTeam):
    def __init__(self, settings: dict[str, Any]) -> None:
        self.rank, self.size, _ = start_torch()
        self.group = peers.vllm_group(Path(settings["vllm"]), self.rank, [list(range(self.size))])
        self.group.all_reduce(torch.ones(1, dtype=torch.bfloat16))

    def about(self) -> str:
        return peers.VLLM

    def close(self) -> None:
        self.group.destroy()

    def exchanges(self, operation: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Exchange]:
        return _of_vllm(self.group, operation)


TEAMS: dict[str, Callable[[dict[str, Any]], LoopTeam]] = {OWN: OwnTeam, GLOO: TorchTeam, VLLM: VllmTeam}


def start_ours(*sizes: int) -> ps.GroupCoordinator:
    ps.init_distributed_environment(backend="gloo")
    ps.initialize_model_parallel(*(sizes or (ps.get_world_group().world_size,)))
    group = ps.get_tp_group()
    use_once(group)
    return group


def start_torch() -> tuple[int, int, Any]:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(size)))
    dist.all_reduce(torch.ones(1), group=group)
    return rank, size, group


def use_once(group: ps.GroupCoordinator) -> None:
    """Makes the group's first calls, in which ranks count their available cores. Call this before `pin`."""
    group.all_reduce(torch.ones(1, device=group.device))
    group.broadcast_object(0)


def count_of(operation: str, size_bytes: int, dtype: torch.dtype, ranks: int) -> int:
    count = max(1, size_bytes // dtype.itemsize // ranks) * ranks
    return count // ranks if operation == "all_gather" else count


def ours_by_op(group: ps.GroupCoordinator, name: str, key: str | None = None, dim: int = 0) -> Call:
    if name == PING_PONG:
        ops, token, route = torch.ops.parallel_state, group._token, key or group._key
        return ping_pong(
            group.rank_in_group,
            lambda x, dst: ops.send(x, token, dst, route),
            lambda x, src: ops.recv(token, x.shape, x.dtype, x.device, src, route),
        )
    op = getattr(torch.ops.parallel_state, name)
    values = {"token": group._token, "reduce_op": "sum", "src": 0, "dim": dim, "group": key or group._key}
    if name == "all_to_all":

        def all_to_all(x: Tensor) -> Tensor:
            return op(x, values["token"], None, None, values["group"])

        return all_to_all
    after = [values[argument.name] for argument in schema_of(op.default).arguments[1:]]
    if name.endswith("_"):

        def in_place(x: Tensor) -> Tensor:
            op(x, *after)
            return x

        return in_place
    return lambda x: op(x, *after)


def _of_vllm(group: Any, operation: str) -> dict[str, Exchange]:
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
