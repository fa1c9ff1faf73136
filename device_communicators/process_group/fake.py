"""torch's `fake` backend: one process, whose group answers for ranks that don't exist, for any size of tensor alike.

What can be made of this rank's tensors is copied from them, as torch does: an all-reduce and a broadcast leave a tensor
as it is, whatever is reduced, an all-gather repeats it. What only a peer could give (a receive, another rank's scatter)
is zeros, where torch leaves an output as it was, since ours are new tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from device_communicators.process_group.plain import PlainProcessGroup
from device_communicators.routing.communicator import DONE, Work


class FakeGroupCommunicator(PlainProcessGroup):
    """Calls torch's FakeProcessGroup, whose works are done when it returns."""

    name = "fake"

    def __str__(self) -> str:
        return "torch's fake backend, which imagines the other ranks"

    def _watched(self, work: object, *_: object) -> Work:
        return DONE

    def _finish(self, wide: Tensor, wide_op: str, narrow: Tensor | None) -> None:
        super()._finish(wide, "sum" if wide_op == "avg" else wide_op, narrow)  # nothing was added up

    def reduce_scatterv(self, x: Tensor, dim: int, sizes: Sequence[int], reduce_op: str) -> Tensor:
        return x.split(list(sizes), dim)[self.context.rank].contiguous().clone()

    def flat_all_gatherv(self, outs: Sequence[Tensor], x: Tensor) -> None:
        for out in outs:
            out.copy_(x) if out.shape == x.shape else out.zero_()
        super().flat_all_gatherv(outs, x)

    def flat_scatter(self, out: Tensor, x: Tensor | None, src: int) -> None:
        super().flat_scatter(out.zero_(), x, src)

    def flat_all_to_all(self, out: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> None:
        if out.shape == x.shape and len({*output_splits, *input_splits}) == 1:
            output_splits, input_splits = [], []  # torch copies then, and else repeats the first rows
        if x.numel() == 0:
            out.zero_()
        else:
            super().flat_all_to_all(out, x, output_splits, input_splits)

    def isend(self, x: Tensor, dst: int, tag: int) -> Work:
        return DONE

    def irecv_(self, out: Tensor, src: int, tag: int) -> Work:
        out.zero_()
        return DONE

    def barrier(self) -> None:
        self.context.device_group.barrier().wait()
