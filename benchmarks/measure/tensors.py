"""Collectives of tensors as candidates: inputs, answers, and the two loops that time them.

*tight*: the same call again and again on one buffer. No cache line moves but those of the exchange itself, which
flatters what works on shared buffers.
*produced*: each call's input is written and its output read, as between the layers of a model. The two copies are timed
as well; a candidate without a call, `COPIES`, is what to subtract.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from measure.worker import Timing

COPIES = "(copies alone)"
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
ROWS = 4  # of the matrix that all_gather gathers along its last dim: sequences of a decode batch


class Exchange(NamedTuple):
    """One way to do an operation: takes a rank's input and gives its output, which may be the same tensor."""

    call: Callable[[Tensor], Tensor]
    empty: Callable[..., Tensor] = torch.empty
    """Where its input lies; as torch.empty."""


class _Prepared(NamedTuple):
    call: Callable[[Tensor], Tensor]
    x: Tensor


class TensorTeam:
    """A `worker.Team` of one runtime: gives its `Exchange`s by operation, and has the rest from here."""

    rank: int
    size: int
    device = torch.device("cpu")
    measures_copies = False

    def exchanges(self, operation: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Exchange]:
        raise NotImplementedError

    def finish(self) -> None:
        """Waits for what the device still does."""

    def prepare(self, values: dict[str, Any]) -> list[str]:
        """`values`: operation, bytes (that a rank holds), dtype, loop."""
        self._operation, self._tight = values["operation"], values["loop"] == "tight"
        dtype = getattr(torch, values["dtype"])
        count = max(1, values["bytes"] // dtype.itemsize // (ROWS * self.size)) * ROWS * self.size
        shape = (ROWS, count // ROWS) if self._operation == "all_gather" else (count,)
        with torch.inference_mode():
            self._source = self._pattern(self.rank, shape, dtype)
            self._expected = self._answer(shape, dtype)
            self._sink = torch.empty_like(self._expected)
            self._zero = self._operation == "all_reduce" and self._tight  # in place, anything else would grow
            self._prepared = {
                name: _Prepared(exchange.call, exchange.empty(shape, dtype=dtype, device=self.device))
                for name, exchange in self.exchanges(self._operation, shape, dtype).items()
            }
            if self.measures_copies and not self._tight:
                self._prepared[COPIES] = _Prepared(lambda x: self._expected, torch.empty_like(self._source))
        return list(self._prepared)

    def _pattern(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return (torch.arange(prod(shape), device=self.device) % 7 + rank).to(dtype).view(shape)

    def _answer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        inputs = [self._pattern(rank, shape, dtype) for rank in range(self.size)]
        rows = shape[0] // self.size
        mine = slice(self.rank * rows, (self.rank + 1) * rows)
        if self._operation in ("all_reduce", "reduce_scatter"):
            total = torch.stack([x.float() for x in inputs]).sum(0).to(dtype)
            return total if self._operation == "all_reduce" else total[mine].clone()
        return {
            "all_gather": lambda: torch.cat(inputs, -1),
            "broadcast": lambda: inputs[0],
            "all_to_all": lambda: torch.cat([x[mine] for x in inputs]),
            "barrier": lambda: inputs[self.rank],
        }[self._operation]()

    def check(self, name: str) -> str | None:
        """An error that all ranks raise is a wrong answer as well; one that raises alone leaves the others waiting."""
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
        return f"{self._operation} of {list(x.shape)} × {x.dtype} on rank {self.rank} of {self.size} is wrong"

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

    def _run_tight(self, call: Callable[[Tensor], Tensor], x: Tensor, calls: int) -> float:
        started = time.perf_counter()
        for _ in range(calls):
            call(x)
        self.finish()
        return time.perf_counter() - started

    def _run_produced(self, call: Callable[[Tensor], Tensor], x: Tensor, calls: int) -> float:
        source, sink = self._source, self._sink
        started = time.perf_counter()
        for _ in range(calls):
            x.copy_(source)
            sink.copy_(call(x))
        self.finish()
        return time.perf_counter() - started
