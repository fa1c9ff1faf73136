"""Runs calls of a simulated group: one process, which computes as if every rank's tensor equalled its own.

Calls that need another rank's data raise UnsupportedError.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from device_communicators.base.errors import UnsupportedError
from device_communicators.calls.reductions import TREE_SUM, divide_, reduction_refusal
from device_communicators.calls.work import DONE, Work
from device_communicators.routing.communicator import Communicator, Request


class SimulatedCommunicator(Communicator):
    name = "simulated"
    adds_in_tree_order = True

    def refusal(self, request: Request) -> str | None:
        if request.dtype is not None and request.reduce_op is not None:
            return reduction_refusal(request.dtype, request.reduce_op)
        return None

    def __str__(self) -> str:
        return "one process stands for all ranks"

    def flat_all_reduce_(self, x: Tensor, reduce_op: str) -> None:
        size = self.context.size
        if x.dtype == torch.bool:
            return
        wide = x.float() if x.is_floating_point() and x.itemsize == 1 else x  # float8 has no arithmetic
        if reduce_op in ("sum", TREE_SUM):
            x.copy_(wide * size)
        elif reduce_op == "avg" and not x.is_floating_point() and not x.is_complex():
            x.copy_(x * size)  # may wrap, like a real sum
            divide_(x, size)
        elif reduce_op == "product":
            x.copy_(wide**size)

    def flat_all_gather(self, out: Tensor, x: Tensor) -> None:
        out.copy_(x.expand_as(out))

    def flat_all_gatherv(self, outs: Sequence[Tensor], x: Tensor) -> None:
        for out in outs:
            if out.shape != x.shape:
                raise UnsupportedError(
                    f"{self.context} is simulated: all ranks have tensors of this rank's shape, {list(x.shape)}, so no "
                    f"result can have shape {list(out.shape)}; pass the same size for each rank"
                )
            out.copy_(x)

    def flat_reduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> None:
        out.copy_(x.view(self.context.size, *out.shape)[self.context.rank])
        self.flat_all_reduce_(out, reduce_op)

    def flat_gather(self, out: Tensor | None, x: Tensor, dst: int) -> None:
        if out is not None:
            self.flat_all_gather(out, x)

    def flat_scatter(self, out: Tensor, x: Tensor | None, src: int) -> None:
        if x is None:
            raise self._needs_peer("scatter", src)
        out.copy_(x[self.context.rank])

    def flat_all_to_all(self, out: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> None:
        mine = x.split(input_splits)[self.context.rank]
        for block, rows in zip(out.split(output_splits), output_splits, strict=True):
            if rows != mine.shape[0]:
                raise UnsupportedError(
                    f"{self.context} is simulated: all ranks act as this one, which sends itself {mine.shape[0]} rows. "
                    f"So all output_split_sizes must be {mine.shape[0]}, but one is {rows}"
                )
            block.copy_(mine)

    def ibroadcast_(self, x: Tensor, src: int) -> Work:
        if src != self.context.rank:
            raise self._needs_peer("broadcast", src)
        return DONE

    def isend(self, x: Tensor, dst: int, tag: int) -> Work:
        return DONE

    def irecv_(self, out: Tensor, src: int, tag: int) -> Work:
        raise self._needs_peer("recv", src)

    def barrier(self) -> None:
        return None

    def _needs_peer(self, operation: str, peer: int) -> UnsupportedError:
        return UnsupportedError(
            f"{operation} from rank {peer} needs that rank, but {self.context} is simulated: "
            f"only rank {self.context.rank} exists"
        )
