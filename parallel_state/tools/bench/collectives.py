"""Calls collectives of this library and of torch.distributed for benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import parallel_state as ps
from parallel_state.tools.bench.rounds import OBJECT, PING_PONG, Timing, WrongAnswer

Call = Callable[[Tensor], Tensor]
ROWS = 4


class Exchange(NamedTuple):
    """An implementation to measure: `empty` allocates a rank's input, `call` computes the rank's output from it."""

    call: Call
    empty: Callable[..., Tensor] = torch.empty


class Prepared(NamedTuple):
    call: Call
    x: Tensor


class TensorTeam:
    """One rank's part in measuring one library's collectives, with the methods that `bench/rounds.py` describes.

    `only`: names of the implementations to measure; None means all.
    """

    rank: int
    size: int
    device = torch.device("cpu")
    only: Sequence[str] | None = None

    def exchanges(self, operation: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Exchange]:
        raise NotImplementedError

    def finish(self) -> None:
        """Waits until the device is idle."""

    def added_as(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which the library sums elements of `dtype`: int16 in an MPI without bfloat16."""
        return dtype

    def allocated(self, exchange: Exchange, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return exchange.empty(shape, dtype=dtype, device=self.device)

    def prepare(self, values: dict[str, Any]) -> list[str]:
        self._operation = values["operation"]
        dtype = getattr(torch, values["dtype"])
        count = max(1, values["bytes"] // dtype.itemsize // (ROWS * self.size)) * ROWS * self.size
        gathers = self._operation == "all_gather"
        shape = (ROWS, count // ROWS) if gathers else (count,)
        kind = self.added_as(dtype), self.device
        with torch.inference_mode():
            self._source = given(count, self.rank, *kind).view(dtype).view(shape)
            expected = answer(self._operation, count, self.rank, self.size, *kind).view(dtype)
            self._expected = beside(expected, self.size, shape) if gathers else expected
            self._zero = self._operation == "all_reduce"  # in place, so that non-zero values would grow
            self._prepared = {
                name: Prepared(exchange.call, self.allocated(exchange, shape, dtype))
                for name, exchange in self.exchanges(self._operation, shape, dtype).items()
                if self.only is None or name in self.only
            }
        return list(self._prepared)

    def check(self, name: str) -> str | None:
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
            x.zero_() if self._zero else x.copy_(self._source)
            loop = self.loop()
            loop(call, x, max(1, calls // 10))
            return Timing(elapsed_s=loop(call, x, calls))

    def loop(self) -> Callable[[Call, Tensor, int], float]:
        return self._run_tight

    def _run_tight(self, call: Call, x: Tensor, calls: int) -> float:
        started = time.perf_counter()
        for _ in range(calls):
            call(x)
        self.finish()
        return time.perf_counter() - started


# Newer torch warns about the old names.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def ours_by_method(group: ps.GroupCoordinator, operation: str) -> tuple[Call, Call | None]:
    rank = group.rank_in_group

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
        PING_PONG: ping_pong(rank, group.send, lambda x, src: group.recv(x.shape, x.dtype, src)),
        OBJECT: ping_pong(rank, lambda x, dst: group.send_object(_request(x), dst),
                          lambda x, src: group.recv_object(src)["tensor"]),
    }  # fmt: skip
    in_place: dict[str, Call] = {"all_reduce": group.all_reduce_, "broadcast": lambda x: group.broadcast_(x, 0)}
    return functional[operation], in_place.get(operation)


def ping_pong(
    rank: int, send: Callable[[Tensor, int], object], receive: Callable[[Tensor, int], Tensor], peer: int = 1
) -> Call:
    def call(x: Tensor) -> Tensor:
        if rank == 0:
            send(x, peer)
            return receive(x, peer)
        if rank == peer:
            found = receive(x, 0)
            send(found, 0)
            return found
        return x

    return call


def beside(gathered: Tensor, size: int, shape: tuple[int, ...]) -> Tensor:
    return gathered.view(size, *shape).movedim(0, -2).reshape(*shape[:-1], size * shape[-1])


def torch_by_call(operation: str, group: Any, size: int) -> Call:
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

    def receive_object(x: Tensor, src: int) -> Tensor:
        objects: list[Any] = [None]
        dist.recv_object_list(objects, src, group=group)
        found: Tensor = objects[0]["tensor"]
        return found

    def send_object(x: Tensor, dst: int) -> None:
        dist.send_object_list([_request(x)], dst, group=group)

    if operation == OBJECT:
        return ping_pong(dist.get_rank(), send_object, receive_object)
    if operation == PING_PONG:
        return ping_pong(dist.get_rank(), partial(dist.send, group=group), receive)
    call: Call = locals()[operation]
    return call


# Inputs and expected results: small integers, exact in bf16, as are their sums over up to 16 ranks.


def _ramp(count: int, start: int, factor: int, more: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    period = ((torch.arange(7) + start) % 7 * factor + more).to(dtype).to(device)
    return period.repeat(-(-count // 7))[:count].contiguous()


def given(count: int, rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _ramp(count, 0, 1, rank, dtype, device)


def answer(operation: str, count: int, rank: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    ramp, part, ones = partial(_ramp, dtype=dtype, device=device), count // size, sum(range(size))
    return {
        "all_reduce": lambda: ramp(count, 0, size, ones),
        "reduce_scatter": lambda: ramp(part, rank * part, size, ones),
        "all_gather": lambda: torch.cat([ramp(count, 0, 1, each) for each in range(size)]),
        "broadcast": lambda: ramp(count, 0, 1, 0),
        "all_to_all": lambda: torch.cat([ramp(part, rank * part, 1, each) for each in range(size)]),
        "barrier": lambda: ramp(count, 0, 1, rank),
        PING_PONG: lambda: ramp(count, 0, 1, 0 if rank < 2 else rank),
        OBJECT: lambda: ramp(count, 0, 1, 0 if rank < 2 else rank),
    }[operation]()


def _request(x: Tensor) -> dict[str, Any]:
    return {"step": 12345, "name": "batch", "is_prompt": False, "tensor": x}
