"""Runs operations over torch.distributed process groups (gloo, NCCL, or any backend).

Tensors on the group's device use its device group; CPU tensors use its gloo group. Operations that only move data send
bytes, and so support every dtype. Reductions convert dtypes that no backend supports to wider dtypes.

Blocking calls set `asyncOp` to False. With the default, True, NCCL would run them on a stream of torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from device_communicators.base.torch_internals import all_gather_base, reduce_scatter_base
from device_communicators.calls.memory import as_bytes
from device_communicators.calls.reductions import REDUCING, finish_reduction, reducible, reduction_refusal
from device_communicators.calls.user_call import begin_sending
from device_communicators.calls.work import DONE, ContinuedWork, Work
from device_communicators.routing.communicator import Communicator, Request
from device_communicators.routing.waiting import Watched, WatchedByThread

_REDUCE_OPS: dict[str, Any] = {
    "sum": c10d.ReduceOp.SUM, "max": c10d.ReduceOp.MAX, "min": c10d.ReduceOp.MIN, "product": c10d.ReduceOp.PRODUCT,
    "avg": c10d.ReduceOp.SUM,  # divided afterwards, because some backends lack AVG
}  # fmt: skip
T = TypeVar("T")


class PlainProcessGroup(Communicator):
    def refusal(self, request: Request) -> str | None:
        if request.operation in REDUCING and request.dtype is not None:
            return reduction_refusal(request.dtype, request.reduce_op)
        return None

    def _group(self, x: Tensor) -> Any:
        return self.context.cpu_group if x.device.type == "cpu" else self.context.device_group

    def _watched(self, work: Any, x: Tensor, operation: str, kind: type[Watched | WatchedByThread] = Watched) -> Work:
        if work is None:
            return DONE
        return kind(work, self.context, operation) if x.device.type == "cpu" else work

    def _finish(self, wide: Tensor, wide_op: str, narrow: Tensor | None) -> None:
        finish_reduction(wide, wide_op, narrow, self.context.size)

    def flat_all_reduce_(self, x: Tensor, reduce_op: str) -> None:
        self.iall_reduce_(x, reduce_op, is_async=False).wait()

    def iall_reduce_(self, x: Tensor, reduce_op: str, is_async: bool = True) -> Work:
        if x.numel() == 0:
            return DONE
        wide, wide_op, narrow = reducible(x, reduce_op)
        options = _options(c10d.AllreduceOptions, is_async, reduceOp=_REDUCE_OPS[wide_op])
        work = self._watched(self._group(x).allreduce([wide], options), x, "all_reduce")
        return ContinuedWork(work, lambda: self._finish(wide, wide_op, narrow))

    def flat_reduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> None:
        self.ireduce_scatter(out, x, reduce_op, is_async=False).wait()

    def ireduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str, is_async: bool = True) -> Work:
        if x.numel() == 0:
            return DONE
        wide_out, wide_op, narrow = reducible(out, reduce_op)
        wide_x, _, _ = reducible(x, reduce_op)
        options = _options(c10d.ReduceScatterOptions, is_async, reduceOp=_REDUCE_OPS[wide_op])
        work = reduce_scatter_base(self._group(x), wide_out, wide_x, options)
        watched = self._watched(work, x, "reduce_scatter", WatchedByThread)
        return ContinuedWork(watched, lambda: self._finish(wide_out, wide_op, narrow))

    def flat_all_gather(self, out: Tensor, x: Tensor) -> None:
        self.iall_gather(out, x, is_async=False).wait()

    def iall_gather(self, out: Tensor, x: Tensor, is_async: bool = True) -> Work:
        if x.numel() == 0:
            return DONE
        options = _options(c10d.AllgatherOptions, is_async)
        return self._watched(all_gather_base(self._group(x), as_bytes(out), as_bytes(x), options), x, "all_gather")

    def flat_all_gatherv(self, outs: Sequence[Tensor], x: Tensor) -> None:
        # One broadcast per rank sends the exact bytes. An all-gather would need padded tensors.
        outs[self.context.rank].copy_(x)
        works = [self.ibroadcast_(out, src, is_async=False) for src, out in enumerate(outs)]
        for work in works:
            work.wait()

    def flat_gather(self, out: Tensor | None, x: Tensor, dst: int) -> None:
        if x.numel() == 0:
            return
        options = _options(c10d.GatherOptions, rootRank=dst)
        outs = [] if out is None else [[as_bytes(block) for block in out.unbind(0)]]
        self._watched(self._group(x).gather(outs, [as_bytes(x)], options), x, "gather").wait()

    def flat_scatter(self, out: Tensor, x: Tensor | None, src: int) -> None:
        options = _options(c10d.ScatterOptions, rootRank=src)
        blocks = [] if x is None else [[as_bytes(block) for block in x.unbind(0)]]
        self._watched(self._group(out).scatter([as_bytes(out)], blocks, options), out, "scatter").wait()

    def flat_all_to_all(self, out: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> None:
        row_bytes = x.dtype.itemsize * x[0:1].numel() if x.shape[0] else x.dtype.itemsize * out[0:1].numel()
        work = self._group(x).alltoall_base(
            as_bytes(out),
            as_bytes(x),
            [rows * row_bytes for rows in output_splits],
            [rows * row_bytes for rows in input_splits],
            _options(c10d.AllToAllOptions),
        )
        self._watched(work, x, "all_to_all").wait()

    def flat_broadcast_(self, x: Tensor, src: int) -> None:
        self.ibroadcast_(x, src, is_async=False).wait()

    def ibroadcast_(self, x: Tensor, src: int, is_async: bool = True) -> Work:
        if x.numel() == 0:
            return DONE
        options = _options(c10d.BroadcastOptions, is_async, rootRank=src)
        return self._watched(self._group(x).broadcast([as_bytes(x)], options), x, "broadcast")

    def isend(self, x: Tensor, dst: int, tag: int) -> Work:
        return self._transfer("send", x, dst, tag)

    def irecv_(self, out: Tensor, src: int, tag: int) -> Work:
        return self._transfer("recv", out, src, tag)

    def _transfer(self, operation: str, x: Tensor, peer: int, tag: int) -> Work:
        if x.numel() == 0:
            return DONE
        if x.is_cpu:
            self.context.check_cpu_group(operation)
        data = as_bytes(x)
        begin_sending()
        work = getattr(self._group(x), operation)([data], peer, tag)
        return WatchedByThread(work, self.context, operation, peer) if x.is_cpu else work

    def barrier(self) -> None:
        Watched(self.context.cpu_group.barrier(), self.context, "barrier").wait()


def _options(kind: Callable[[], T], is_async: bool = False, **values: Any) -> T:
    options = kind()
    for name, value in {"asyncOp": is_async, **values}.items():
        setattr(options, name, value)
    return options
