"""torch.distributed process groups (gloo, NCCL, any backend): carries everything, always there, last in every route.

Tensors of the group's device go over its device group, CPU tensors over its gloo group, so that a CPU tensor never
meets NCCL. What only moves (gather, broadcast, send, …) moves as bytes, so every dtype travels; what is reduced is
widened where no backend knows the dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
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
from device_communicators.waiting import Watched, WatchedByThread

_REDUCE_OPS: dict[str, Any] = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.SUM,  # divided afterwards: not every backend has AVG
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
    "product": ReduceOp.PRODUCT,
}
_NATIVE = frozenset(
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64]
)
_WIDENED = {
    torch.int16: torch.int32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}
_COMPLEX = {torch.complex64, torch.complex128}
_BOOL_OPS = {"sum": "max", "max": "max", "min": "min", "product": "min"}
"""On bytes that are 0 or 1, `or` is max and `and` is min."""

_REDUCTIONS = (
    "all_reduce",
    "all_reduce_",
    "iall_reduce_",
    "reduce_scatter",
    "ireduce_scatter",
    "reduce_scatterv",
    "all_reduce_add_rms_norm",
)


def reduction_refusal(dtype: torch.dtype, reduce_op: str | None) -> str | None:
    """Why `reduce_op` of `dtype` has no defined result here, or None."""
    if dtype in _NATIVE or dtype in _WIDENED:
        if reduce_op == "avg" and not dtype.is_floating_point:
            return f"avg needs a floating-point dtype, not {dtype}; sum and divide as you mean it"
        return None
    if dtype in _COMPLEX:
        return None if reduce_op in ("sum", "avg") else f"{reduce_op} of {dtype} is not defined"
    if dtype == torch.bool:
        return None if reduce_op in _BOOL_OPS else f"{reduce_op} of {dtype} is not defined"
    return f"{dtype} can't be reduced; reducible are {_names(_NATIVE | _WIDENED.keys() | _COMPLEX | {torch.bool})}"


class ProcessGroupCommunicator(Communicator):
    """The group's pair of torch process groups."""

    name = "process_group"

    def refusal(self, request: Request) -> str | None:
        if request.operation in _REDUCTIONS and request.dtype is not None:
            return reduction_refusal(request.dtype, request.reduce_op)
        return None

    def __str__(self) -> str:
        name = self.context.device_group.name()
        if self.context.device.type == "cpu":
            return f"torch.distributed over {name}, every tensor"
        return f"torch.distributed, {self.context.device.type} tensors over {name}, CPU tensors over gloo"

    def _group(self, x: Tensor) -> Any:
        return self.context.cpu_group if x.device.type == "cpu" else self.context.device_group

    def _watched(self, work: Any, x: Tensor, operation: str, kind: type[Watched] = Watched) -> Work:
        """A device's work is waited for by its stream and not by the host."""
        return kind(work, self.context, operation) if x.device.type == "cpu" else work

    def _pair_group(self, x: Tensor, operation: str) -> Any:
        """Two ranks alone can't make the gloo group of more: the others would never come."""
        if x.device.type == "cpu" and self.context.size > 2 and not self.context.cpu_group_is_made:
            raise GroupNotInitializedError(
                f"{operation} on {self.context} needs the gloo group beside the device group, which all ranks of the "
                "group make together at its first use; call barrier() on every rank once before"
            )
        return self._group(x)

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
        return self._watched(self._pair_group(x, "send").send([as_bytes(x)], dst, tag), x, "send", WatchedByThread)

    def irecv_(self, out: Tensor, src: int, tag: int) -> Work:
        if out.numel() == 0:
            return DONE
        work = self._pair_group(out, "recv").recv([as_bytes(out)], src, tag)
        return self._watched(work, out, "recv", WatchedByThread)

    def barrier(self) -> None:
        Watched(self.context.cpu_group.barrier(), self.context, "barrier").wait()


def as_bytes(x: Tensor) -> Tensor:
    """A flat view of contiguous `x`."""
    flat = x.view(-1)
    if flat.stride(0) != 1:  # one element is contiguous whatever its stride, but can't be viewed as bytes
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)


def reducible(x: Tensor, reduce_op: str) -> tuple[Tensor, str, Tensor | None]:
    """`x` in a dtype that backends reduce, the op to use on it, and where to copy the result if it isn't a view."""
    if x.dtype == torch.float16 and reduce_op == "avg":  # the sum may be too large where the average is not
        return x.float(), reduce_op, x
    if x.dtype in _NATIVE:
        return x, reduce_op, None
    if x.dtype == torch.bool:
        return x.view(torch.uint8), _BOOL_OPS[reduce_op], None
    if x.dtype in _COMPLEX:
        return torch.view_as_real(x), reduce_op, None
    return x.to(_WIDENED[x.dtype]), reduce_op, x


def _names(dtypes: Any) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
