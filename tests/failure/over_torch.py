from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import parallel_state  # noqa: F401 - registers the backend
from device_communicators.base.torch_internals import set_timeout

T = TypeVar("T")
OVER_TORCH = "torch.distributed"
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_WORLDS = itertools.count()


@contextmanager
def torch_world(
    port: int | None = None, timeout_s: float = 60.0, backend: str = "parallel_state"
) -> Iterator[OverTorch]:
    """With `port`, rank 0 serves the store and waits for all others; else the test's process does."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_own = port is not None or not os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) if port is None else port
    limit = timedelta(seconds=min(timeout_s, 60.0))
    server = dist.TCPStore(address, port, size, is_own and rank == 0, limit, wait_for_workers=is_own)
    store = dist.PrefixStore(f"world/{next(_WORLDS)}", server)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    try:
        yield OverTorch()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def groups_of(layout: tuple[int, int, int]) -> dict[str, OverTorch]:
    tp, pp, dp = layout
    grid = torch.arange(tp * pp * dp).view(pp, dp, tp)
    found = {}
    for name, lists in {"tp": grid, "dp": grid.transpose(1, 2), "pp": grid.permute(1, 2, 0)}.items():
        for ranks in lists.reshape(-1, lists.shape[-1]).tolist():
            if len(ranks) > 1:
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    found[name] = OverTorch(group)
    return found


class OverTorch:
    def __init__(self, group: Any = None) -> None:
        self.group = dist.group.WORLD if group is None else group
        self.ranks = dist.get_process_group_ranks(self.group)
        self.rank = dist.get_rank()
        self.rank_in_group = dist.get_rank(self.group)
        self.world_size = len(self.ranks)
        self.first_failure: dist.DistBackendError | None = None
        self.route = self
        self._call_timeout: timedelta | None = None

    def set_timeout(self, seconds: float) -> None:
        set_timeout(self.group, seconds)

    timeout = property(None, set_timeout)

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Sets the timeout of each all_reduce in the body; the group's stays."""
        self._call_timeout = timedelta(seconds=seconds)
        try:
            yield
        finally:
            self._call_timeout = None

    def make_sub_group(self, ranks: Iterable[int]) -> OverTorch:
        return OverTorch(dist.new_group([self.ranks[rank] for rank in ranks]))

    def _run(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except dist.DistBackendError as error:
            self.first_failure = self.first_failure or error
            raise

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        return self.all_reduce_(x.clone(), op)

    def all_reduce_(self, x: Tensor, op: str = "sum") -> Tensor:
        within = self._call_timeout
        self._run(
            lambda: self._all_reduce_within(x, within) if within else dist.all_reduce(x, _REDUCE_OPS[op], self.group)
        )
        return x

    def _all_reduce_within(self, x: Tensor, timeout: timedelta) -> None:
        options = dist.AllreduceOptions()
        options.timeout = timeout
        self.group.allreduce([x], options).wait()

    def all_reduce_async(self, x: Tensor) -> Started:
        out = x.clone()
        return Started(self, self._run(lambda: dist.all_reduce(out, group=self.group, async_op=True)), out)

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.world_size * x.shape[0], *x.shape[1:])
        self._run(lambda: dist.all_gather_into_tensor(out, x, self.group))
        return out

    def all_gatherv(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        assert dim == 0
        outs = [x.new_empty(size, *x.shape[1:]) for size in sizes]
        self._run(lambda: dist.all_gather(outs, x, self.group))
        return torch.cat(outs)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0] // self.world_size, *x.shape[1:])
        self._run(lambda: dist.reduce_scatter_tensor(out, x, group=self.group))
        return out

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        return self.broadcast_(x.clone(), src)

    def broadcast_(self, x: Tensor, src: int = 0) -> Tensor:
        self._run(lambda: dist.broadcast(x, self.ranks[src], self.group))
        return x

    def gather(self, x: Tensor, dst: int = 0) -> Tensor | None:
        outs = [torch.empty_like(x) for _ in self.ranks] if self.rank_in_group == dst else None
        self._run(lambda: dist.gather(x, outs, self.ranks[dst], self.group))
        return None if outs is None else torch.cat(outs)

    def scatter(
        self,
        x: Tensor | None,
        src: int = 0,
        dim: int = 0,
        *,
        size: Sequence[int] = (6,),
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        assert dim == 0
        out = torch.empty(*size, dtype=dtype)
        parts = None if x is None else list(x.chunk(self.world_size))
        self._run(lambda: dist.scatter(out, parts, self.ranks[src], self.group))
        return out

    def all_to_all(
        self, x: Tensor, dim: int = 0, *, output_split_sizes: Any = None, input_split_sizes: Any = None
    ) -> Tensor:
        assert dim == 0
        rows = x.shape[0] if output_split_sizes is None else sum(output_split_sizes)
        out = x.new_empty(rows, *x.shape[1:])
        self._run(lambda: dist.all_to_all_single(out, x, output_split_sizes, input_split_sizes, self.group))
        return out

    def barrier(self) -> None:
        self._run(lambda: dist.barrier(self.group))

    def send(self, x: Tensor, dst: int) -> None:
        self._run(lambda: dist.send(x, self.ranks[dst], self.group))

    def recv(self, size: Sequence[int], dtype: torch.dtype, src: int) -> Tensor:
        out = torch.empty(*size, dtype=dtype)
        self._run(lambda: dist.recv(out, self.ranks[src], self.group))
        return out

    def isend(self, x: Tensor, dst: int) -> Started:
        return Started(self, self._run(lambda: dist.isend(x, self.ranks[dst], self.group)), x)

    def irecv(self, size: Sequence[int], dtype: torch.dtype, src: int) -> Started:
        out = torch.empty(*size, dtype=dtype)
        return Started(self, self._run(lambda: dist.irecv(out, self.ranks[src], self.group)), out)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        values = [value]
        self._run(lambda: dist.broadcast_object_list(values, self.ranks[src], self.group))
        return values[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        self._run(lambda: dist.all_gather_object(values, value, self.group))
        return values

    def send_object(self, value: Any, dst: int) -> None:
        self._run(lambda: dist.send_object_list([value], self.ranks[dst], self.group))

    def recv_object(self, src: int) -> Any:
        values: list[Any] = [None]
        self._run(lambda: dist.recv_object_list(values, self.ranks[src], self.group))
        return values[0]


class Started:
    def __init__(self, group: OverTorch, work: Any, out: Tensor) -> None:
        self._group = group
        self._work = work
        self._out = out

    def wait(self) -> Tensor:
        self._group._run(self._work.wait)
        return self._out
