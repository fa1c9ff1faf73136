"""Collectives of tensors as candidates: how this library and torch.distributed are called, inputs, answers, a loop.

The loop is *tight*: the same call again and again on one buffer. Candidates of further libraries, and the loop that
writes each input and reads each output, are in `benchmarks/harness/`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import parallel_state as ps
from parallel_state.tools.bench.worker import Timing, WrongAnswer

Call = Callable[[Tensor], Tensor]
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
PING_PONG = "ping_pong"
"""No collective: rank 1 sends back what rank 0 sends it, two messages one after the other."""
OBJECT = "object"
"""As PING_PONG, but the tensor is a value in a dict that is sent as an object."""
ROWS = 4  # of the matrix that all_gather gathers along its last dim: sequences of a decode batch


class Exchange(NamedTuple):
    """Does an operation in one way: takes a rank's input and gives its output, which may be the same tensor."""

    call: Call
    empty: Callable[..., Tensor] = torch.empty
    """Allocates its input, as torch.empty does."""


class Prepared(NamedTuple):
    call: Call
    x: Tensor


class TensorTeam:
    """A team, as `worker` asks it, of one runtime: subclasses give its `Exchange`s by operation."""

    rank: int
    size: int
    device = torch.device("cpu")
    only: Sequence[str] | None = None
    """The candidates that are wanted; None: all."""

    def exchanges(self, operation: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Exchange]:
        raise NotImplementedError

    def finish(self) -> None:
        """Waits for what the device still does."""

    def added_as(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype, of as many bytes, by which the runtime adds the operation's elements."""
        return dtype

    def allocated(self, exchange: Exchange, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the input that the exchange is given."""
        return exchange.empty(shape, dtype=dtype, device=self.device)

    def prepare(self, values: dict[str, Any]) -> list[str]:
        """`values`: operation, dtype, and the bytes that a rank holds."""
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
            self._zero = self._operation == "all_reduce"  # in place, anything else would grow
            self._prepared = {
                name: Prepared(exchange.call, self.allocated(exchange, shape, dtype))
                for name, exchange in self.exchanges(self._operation, shape, dtype).items()
                if self.only is None or name in self.only
            }
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
            loop = self.loop()
            loop(call, x, max(1, calls // 10))
            return Timing(elapsed_s=loop(call, x, calls))

    def loop(self) -> Callable[[Call, Tensor, int], float]:
        """Returns the loop that times a call, with its input, so many times; it returns seconds."""
        return self._run_tight

    def _run_tight(self, call: Call, x: Tensor, calls: int) -> float:
        started = time.perf_counter()
        for _ in range(calls):
            call(x)
        self.finish()
        return time.perf_counter() - started


OWN, GLOO = "parallel_state", "gloo"
# Newer versions of torch have new names, and warn of the old ones.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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
        OBJECT: ping_pong(
            group.rank_in_group,
            lambda x, dst: group.send_object(_request(x), dst),
            lambda x, src: group.recv_object(src)["tensor"]),
    }  # fmt: skip
    in_place: dict[str, Call] = {"all_reduce": group.all_reduce_, "broadcast": lambda x: group.broadcast_(x, 0)}
    return functional[operation], in_place.get(operation)


def ping_pong(
    rank: int, send: Callable[[Tensor, int], object], receive: Callable[[Tensor, int], Tensor], peer: int = 1
) -> Call:
    """Returns the call of PING_PONG between rank 0 and `peer`; `receive` gets a tensor like the one to come."""

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

    def receive_object(x: Tensor, src: int) -> Tensor:
        objects: list[Any] = [None]
        dist.recv_object_list(objects, src, group=group)
        found: Tensor = objects[0]["tensor"]
        return found

    if operation == OBJECT:
        return ping_pong(
            dist.get_rank(), lambda x, dst: dist.send_object_list([_request(x)], dst, group=group), receive_object
        )
    if operation == PING_PONG:
        return ping_pong(dist.get_rank(), lambda x, dst: dist.send(x, dst, group=group), receive)
    call: Call = locals()[operation]
    return call


# Inputs and answers: small integers, exact in bf16, as are their sums of up to 16 ranks.


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
        OBJECT: lambda: ramp(count, 0, 1, 0 if rank < 2 else rank),
    }[operation]()


def _request(x: Tensor) -> dict[str, Any]:
    """Returns the object that OBJECT sends."""
    return {"step": 12345, "name": "batch", "is_prompt": False, "tensor": x}
