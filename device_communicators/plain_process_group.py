"""torch.distributed process groups (gloo, NCCL, any backend), called as they are.

Tensors of the group's device go over its device group, CPU tensors over its gloo group, so that a CPU tensor never
meets NCCL. What only moves (gather, broadcast, send, …) moves as bytes, so every dtype travels; what is reduced is
widened where no backend knows the dtype. Whether all ranks are in the same call is not asked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOp,
    ReduceScatterOptions,
    ScatterOptions,
)

from device_communicators.base import DONE, Communicator, Request, Then, Work
from device_communicators.errors import GroupNotInitializedError
from device_communicators.reductions import REDUCING, as_bytes, reducible, reduction_refusal
from device_communicators.waiting import Watched, WatchedByThread

_REDUCE_OPS: dict[str, Any] = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.SUM,  # divided afterwards: not every backend has AVG
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
    "product": ReduceOp.PRODUCT,
}


class PlainProcessGroup(Communicator):
    """The group's pair of torch process groups."""

    def refusal(self, request: Request) -> str | None:
        if request.operation in REDUCING and request.dtype is not None:
            return reduction_refusal(request.dtype, request.reduce_op)
        return None

    def _group(self, x: Tensor) -> Any:
        return self.context.cpu_group if x.device.type == "cpu" else self.context.device_group

    def _watched(self, work: Any, x: Tensor, operation: str, kind: type[Watched | WatchedByThread] = Watched) -> Work:
        """A device's work is waited for by its stream and not by the host."""
        return kind(work, self.context, operation) if x.device.type == "cpu" else work

    def check_pair_group(self, x: Tensor, operation: str) -> None:
        """Two ranks alone can't make the gloo group of more: the others would never come."""
        if x.device.type == "cpu" and self.context.size > 2 and not self.context.cpu_group_is_made:
            raise GroupNotInitializedError(
                f"{operation} on {self.context} needs the gloo group beside the device group, which all ranks of the "
                "group make together at its first use; call barrier() on every rank once before"
            )

    def flat_all_reduce_(self, x: Tensor, reduce_op: str) -> None:
        self.iall_reduce_(x, reduce_op).wait()

    def iall_reduce_(self, x: Tensor, reduce_op: str) -> Work:
        if x.numel() == 0:
            return DONE
        wide, wide_op, narrow = reducible(x, reduce_op)
        options = AllreduceOptions()
        options.reduceOp = _REDUCE_OPS[wide_op]
        work = self._watched(self._group(x).allreduce([wide], options), x, "all_reduce")
        return Then(work, lambda: self._finish(wide, wide_op, narrow))

    def flat_reduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> None:
        self.ireduce_scatter(out, x, reduce_op).wait()

    def ireduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> Work:
        if x.numel() == 0:
            return DONE
        wide_out, wide_op, narrow = reducible(out, reduce_op)
        wide_x, _, _ = reducible(x, reduce_op)
        options = ReduceScatterOptions()
        options.reduceOp = _REDUCE_OPS[wide_op]
        work = self._group(x)._reduce_scatter_base(wide_out, wide_x, options)
        watched = self._watched(work, x, "reduce_scatter", WatchedByThread)
        return Then(watched, lambda: self._finish(wide_out, wide_op, narrow))

    def _finish(self, wide: Tensor, wide_op: str, narrow: Tensor | None) -> None:
        if wide_op == "avg":
            wide.div_(self.context.size)
        if narrow is not None:
            narrow.copy_(wide)

    def flat_all_gather(self, out: Tensor, x: Tensor) -> None:
        self.iall_gather(out, x).wait()

    def iall_gather(self, out: Tensor, x: Tensor) -> Work:
        if x.numel() == 0:
            return DONE
        return self._watched(self._group(x)._allgather_base(as_bytes(out), as_bytes(x)), x, "all_gather")

    def flat_all_gatherv(self, outs: Sequence[Tensor], x: Tensor) -> None:
        # One broadcast per rank: the exact bytes, where all-gather would need every rank's tensor padded.
        outs[self.context.rank].copy_(x)
        works = [self.ibroadcast_(out, src) for src, out in enumerate(outs) if out.numel()]
        for work in works:
            work.wait()

    def flat_gather(self, out: Tensor | None, x: Tensor, dst: int) -> None:
        if x.numel() == 0:
            return
        options = GatherOptions()
        options.rootRank = dst
        outs = [] if out is None else [[as_bytes(block) for block in out.unbind(0)]]
        self._watched(self._group(x).gather(outs, [as_bytes(x)], options), x, "gather").wait()

    def flat_scatter(self, out: Tensor, x: Tensor | None, src: int) -> None:
        options = ScatterOptions()
        options.rootRank = src
        blocks = [] if x is None else [[as_bytes(block) for block in x.unbind(0)]]
        self._watched(self._group(out).scatter([as_bytes(out)], blocks, options), out, "scatter").wait()

    def flat_all_to_all(self, out: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> None:
        row_bytes = x.dtype.itemsize * x[0:1].numel() if x.shape[0] else x.dtype.itemsize * out[0:1].numel()
        work = self._group(x).alltoall_base(
            as_bytes(out),
            as_bytes(x),
            [rows * row_bytes for rows in output_splits],
            [rows * row_bytes for rows in input_splits],
            AllToAllOptions(),
        )
        self._watched(work, x, "all_to_all").wait()

    def ibroadcast_(self, x: Tensor, src: int) -> Work:
        if x.numel() == 0:
            return DONE
        options = BroadcastOptions()
        options.rootRank = src
        return self._watched(self._group(x).broadcast([as_bytes(x)], options), x, "broadcast")

    def isend(self, x: Tensor, dst: int, tag: int) -> Work:
        if x.numel() == 0:
            return DONE
        self.check_pair_group(x, "send")
        work = self._group(x).send([as_bytes(x)], dst, tag)
        return WatchedByThread(work, self.context, "send", dst) if x.is_cpu else work

    def irecv_(self, out: Tensor, src: int, tag: int) -> Work:
        if out.numel() == 0:
            return DONE
        self.check_pair_group(out, "recv")
        work = self._group(out).recv([as_bytes(out)], src, tag)
        return WatchedByThread(work, self.context, "recv", src) if out.is_cpu else work

    def barrier(self) -> None:
        Watched(self.context.cpu_group.barrier(), self.context, "barrier").wait()
