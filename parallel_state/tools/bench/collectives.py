"""Collectives of tensors as candidates: how each library is called, inputs, answers, and the loops that time them.

*tight*: the same call again and again on one buffer. No cache line moves but those of the exchange itself, which
flatters what works on shared buffers.
*produced*: each call's input is written and its output read, as between the layers of a model. The two copies are timed
as well; a candidate without a call, `COPIES`, is what to subtract.

Each library has processes of its own, so that one that can't run here (vLLM's ops without AVX-512) fails alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import parallel_state as ps
from device_communicators.base.torch_internals import schema_of
from parallel_state.tools.bench import peers
from parallel_state.tools.bench.worker import Timing, WrongAnswer

Call = Callable[[Tensor], Tensor]
COPIES = "(copies alone)"
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
PING_PONG = "ping_pong"
"""No collective: rank 1 sends back what rank 0 sends it, two messages one after the other."""
_PAGE = 4096
ROWS = 4  # of the matrix that all_gather gathers along its last dim: sequences of a decode batch


class Exchange(NamedTuple):
    """Does an operation in one way: takes a rank's input and gives its output, which may be the same tensor."""

    call: Call
    empty: Callable[..., Tensor] = torch.empty
    """Allocates its input, as torch.empty does."""


class _Prepared(NamedTuple):
    call: Call
    x: Tensor


class TensorTeam:
    """A team, as `worker` asks it, of one runtime: subclasses give its `Exchange`s by operation."""

    rank: int
    size: int
    device = torch.device("cpu")
    measures_copies = False
    only: Sequence[str] | None = None
    """The candidates that are wanted; None: all."""

    def exchanges(self, operation: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Exchange]:
        raise NotImplementedError

    def finish(self) -> None:
        """Waits for what the device still does."""

    def added_as(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype, of as many bytes, by which the runtime adds the operation's elements."""
        return dtype

    def prepare(self, values: dict[str, Any]) -> list[str]:
        """`values`: operation, bytes (that a rank holds), dtype, loop; offset: bytes behind a page's start."""
        self._operation, self._tight = values["operation"], values["loop"] == "tight"
        dtype = getattr(torch, values["dtype"])
        count = max(1, values["bytes"] // dtype.itemsize // (ROWS * self.size)) * ROWS * self.size
        gathers = self._operation == "all_gather"
        shape = (ROWS, count // ROWS) if gathers else (count,)
        kind, kind_of_x = (self.added_as(dtype), self.device), (dtype, self.device)
        with torch.inference_mode():
            self._source = given(count, self.rank, *kind).view(dtype).view(shape)
            expected = answer(self._operation, count, self.rank, self.size, *kind).view(dtype)
            self._expected = beside(expected, self.size, shape) if gathers else expected
            self._sink = torch.empty_like(self._expected)
            self._zero = self._operation == "all_reduce" and self._tight  # in place, anything else would grow
            self._prepared = {
                name: _Prepared(exchange.call, _allocated(exchange.empty, shape, *kind_of_x, values.get("offset")))
                for name, exchange in self.exchanges(self._operation, shape, dtype).items()
                if self.only is None or name in self.only
            }
            if self.measures_copies and not self._tight:
                self._prepared[COPIES] = _Prepared(lambda x: self._expected, torch.empty_like(self._source))
        return list(self._prepared)

    def check(self, name: str) -> str | None:
        """Counts an error that all ranks raise as a wrong answer; one that raises alone leaves the others waiting."""
        call, x = self._prepared[name]
        with torch.inference_mode():
            x.copy_(self._source)
            try:
                y = call(x)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            self.finish()
            if y.shape == self._expected.shape and torch.equal(y, self._expected):
                return None
        text = f"{self._operation} of {list(x.shape)} × {x.dtype} on rank {self.rank} of {self.size} is wrong"
        wrong = int((y != self._expected).sum()) if y.shape == self._expected.shape else self._expected.numel()
        return WrongAnswer.of(wrong, text)

    def run(self, name: str, calls: int) -> Timing:
        call, x = self._prepared[name]
        with torch.inference_mode():
            if self._zero:
                x.zero_()
            else:
                x.copy_(self._source)
            loop = self._run_tight if self._tight else self._run_produced
            loop(call, x, max(1, calls // 10))
            return Timing(elapsed_s=loop(call, x, calls))

    def _run_tight(self, call: Call, x: Tensor, calls: int) -> float:
        started = time.perf_counter()
        for _ in range(calls):
            call(x)
        self.finish()
        return time.perf_counter() - started

    def _run_produced(self, call: Call, x: Tensor, calls: int) -> float:
        source, sink = self._source, self._sink
        started = time.perf_counter()
        for _ in range(calls):
            x.copy_(source)
            sink.copy_(call(x))
        self.finish()
        return time.perf_counter() - started


def _allocated(
    empty: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, offset: int | None
) -> Tensor:
    if offset is None:
        return empty(shape, dtype=dtype, device=device)
    room = empty((math.prod(shape) + 2 * _PAGE // dtype.itemsize,), dtype=dtype, device=device)
    ahead = (offset - room.data_ptr()) % _PAGE // dtype.itemsize
    return room[ahead : ahead + math.prod(shape)].view(shape)


OWN, GLOO, VLLM = "parallel_state", "gloo", "vLLM"
"""Names of teams."""
OURS = ("op, in place", "op", "coordinator, in place", "coordinator", "symmetric op, in place")
# Newer versions of torch have new names, and warn of the old ones.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def load(name: str, settings: dict[str, Any]) -> None:
    """Imports what the team needs, so that its start-up time has none of it."""
    torch.set_num_threads(1)
    if name == VLLM:
        peers.load_vllm(Path(settings["vllm"]))


def make(name: str, settings: dict[str, Any]) -> TensorTeam:
    team = TEAMS[name](settings)
    team.only = settings.get("only")
    return team


class OwnTeam(TensorTeam):
    """Ranks of this library."""

    measures_copies = True

    def __init__(self, settings: dict[str, Any]) -> None:
        self.group = start_ours()
        self.rank, self.size = self.group.rank_in_group, self.group.world_size

    def about(self) -> str:
        """Returns the route that this library takes."""
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
        return {name: found[name] for name in OURS if name in found}


class TorchTeam(TensorTeam):
    """Ranks of torch.distributed over gloo, without this library."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.rank, self.size, self._group = start_torch()

    def about(self) -> str:
        return f"torch {torch.__version__}, gloo"

    def exchanges(self, operation: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Exchange]:
        return {GLOO: Exchange(torch_by_call(operation, self._group, self.size))}


class VllmTeam(TensorTeam):
    """Ranks of vLLM's own coordinator, with its shared-memory ops."""

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


TEAMS: dict[str, Callable[[dict[str, Any]], TensorTeam]] = {OWN: OwnTeam, GLOO: TorchTeam, VLLM: VllmTeam}


def start_ours(*sizes: int) -> ps.GroupCoordinator:
    """Starts this library's default group and groups of these sizes (default: one of all ranks), and uses one once."""
    ps.init_distributed_environment(backend="gloo")
    ps.initialize_model_parallel(*(sizes or (ps.get_world_group().world_size,)))
    group = ps.get_tp_group()
    use_once(group)
    return group


def start_torch() -> tuple[int, int, Any]:
    """Starts torch.distributed as engines do: the default group, another one of all ranks, a collective over it."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(size)))
    dist.all_reduce(torch.ones(1), group=group)
    return rank, size, group


def use_once(group: ps.GroupCoordinator) -> None:
    """Makes a collective and a message: a group counts its cores with the first ones, and ranks are pinned later."""
    group.all_reduce(torch.ones(1, device=group.device))
    group.broadcast_object(0)


def ours_by_method(group: ps.GroupCoordinator, operation: str) -> tuple[Call, Call | None]:
    """Returns the coordinator's call, and the one in place where there is one. all_gather is along the last dim."""

    def barrier(x: Tensor) -> Tensor:
        group.barrier()
        return x

    functional: dict[str, Call] = {
        "all_reduce": group.all_reduce,
        "all_gather": lambda x: group.all_gather(x, -1),
        "reduce_scatter": lambda x: group.reduce_scatter(x, 0),
        "broadcast": lambda x: group.broadcast(x, 0),
        "all_to_all": lambda x: group.all_to_all(x),
        "barrier": barrier,
        PING_PONG: ping_pong(
            group.rank_in_group, group.send, lambda x, src: group.recv(x.shape, x.dtype, src)),
    }  # fmt: skip
    in_place: dict[str, Call] = {"all_reduce": group.all_reduce_, "broadcast": lambda x: group.broadcast_(x, 0)}
    return functional[operation], in_place.get(operation)


def ours_by_op(group: ps.GroupCoordinator, name: str, key: str | None = None, dim: int = 0) -> Call:
    """Returns the registered op as a function of its tensor. `key`: of the route, by default the group's."""
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


def ping_pong(rank: int, send: Callable[[Tensor, int], object], receive: Callable[[Tensor, int], Tensor]) -> Call:
    """Returns the call of PING_PONG; `receive` gets a tensor like the one to come."""

    def call(x: Tensor) -> Tensor:
        if rank == 0:
            send(x, 1)
            return receive(x, 1)
        if rank == 1:
            found = receive(x, 0)
            send(found, 0)
            return found
        return x

    return call


def beside(gathered: Tensor, size: int, shape: tuple[int, ...]) -> Tensor:
    """Puts parts of one shape, which lie behind each other, beside each other along the last dim."""
    return gathered.view(size, *shape).movedim(0, -2).reshape(*shape[:-1], size * shape[-1])


def torch_by_call(operation: str, group: Any, size: int) -> Call:
    """Returns c10d's call as somebody without this library would make it; all_gather is along the last dim."""

    def all_reduce(x: Tensor) -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    def all_gather(x: Tensor) -> Tensor:
        out = x.new_empty((size * x.shape[0], *x.shape[1:]))
        _ALL_GATHER(out, x, group=group)
        return out if x.ndim == 1 else beside(out, size, x.shape)

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

    def barrier(x: Tensor) -> Tensor:
        dist.barrier(group=group)
        return x

    def receive(x: Tensor, src: int) -> Tensor:
        out = torch.empty_like(x)
        dist.recv(out, src, group=group)
        return out

    if operation == PING_PONG:
        return ping_pong(dist.get_rank(), lambda x, dst: dist.send(x, dst, group=group), receive)
    call: Call = locals()[operation]
    return call


# Inputs and answers: small integers, exact in bf16, as are their sums of up to 16 ranks.


def count_of(operation: str, size_bytes: int, dtype: torch.dtype, ranks: int) -> int:
    """Returns the elements that a rank gives, for a size as nccl-tests count it."""
    count = max(1, size_bytes // dtype.itemsize // ranks) * ranks
    return count // ranks if operation == "all_gather" else count


def _ramp(count: int, start: int, factor: int, more: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`(start + i) % 7 * factor + more`, made of pieces, as whole numbers would take four times the memory."""
    period = ((torch.arange(7) + start) % 7 * factor + more).to(dtype).to(device)
    return period.repeat(-(-count // 7))[:count].contiguous()


def given(count: int, rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns what a rank gives."""
    return _ramp(count, 0, 1, rank, dtype, device)


def answer(operation: str, count: int, rank: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns what a rank gets where each gives `given(count, …)`, one-dimensional."""
    ramp, part, ones = partial(_ramp, dtype=dtype, device=device), count // size, sum(range(size))
    return {
        "all_reduce": lambda: ramp(count, 0, size, ones),
        "reduce_scatter": lambda: ramp(part, rank * part, size, ones),
        "all_gather": lambda: torch.cat([ramp(count, 0, 1, each) for each in range(size)]),
        "broadcast": lambda: ramp(count, 0, 1, 0),
        "all_to_all": lambda: torch.cat([ramp(part, rank * part, 1, each) for each in range(size)]),
        "barrier": lambda: ramp(count, 0, 1, rank),
        PING_PONG: lambda: ramp(count, 0, 1, 0 if rank < 2 else rank),
    }[operation]()


def _of_vllm(group: Any, operation: str) -> dict[str, Exchange]:
    """Returns what vLLM has of its own on a CPU; the rest of its calls are torch.distributed's."""
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
