"""Runs calls over the torch process group of a device other than the CPU, and over torch's `fake` backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from device_communicators.calls.work import DONE, Work
from device_communicators.process_group.plain import PlainProcessGroup
from device_communicators.routing.communicator import GroupContext, Request, call_each_once


class DeviceGroupCommunicator(PlainProcessGroup):
    name = "device_group"
    carries_the_device = True

    def __init__(self, context: GroupContext) -> None:
        super().__init__(context)
        self._is_warm = False

    def refusal(self, request: Request) -> str | None:
        return "a CPU tensor" if request.device_type == "cpu" else super().refusal(request)

    def __str__(self) -> str:
        return f"torch.distributed over {self.context.device_group.name()}, for {self.context.device.type} tensors"

    def connect(self, peer: int) -> None:
        """Exchanges a byte with the group's rank `peer`, because torch creates the NCCL communicator of two ranks at
        their first transfer. Both ranks must call this.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=self.context.device)
        steps = [self.send, self.recv] if self.context.rank < peer else [self.recv, self.send]
        for step in steps:
            step(byte, peer)

    @contextmanager
    def capture(self) -> Iterator[None]:
        if self.context.device.type == "cuda" and not self._is_warm and not torch.cuda.is_current_stream_capturing():
            call_each_once(self)
            self._is_warm = True
        yield


class FakeGroupCommunicator(PlainProcessGroup):
    """Calls torch's `fake` backend, whose calls complete at once and exchange no data."""

    name = "fake"

    def __str__(self) -> str:
        return "torch's fake backend, without real peers"

    def _watched(self, work: object, *_: object) -> Work:
        return DONE

    def _finish(self, wide: Tensor, wide_op: str, narrow: Tensor | None) -> None:
        super()._finish(wide, "sum" if wide_op == "avg" else wide_op, narrow)  # no division: nothing was summed

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
            output_splits, input_splits = [], []  # torch then copies `x`; with splits it repeats the first rows
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
