"""A device's tensors over the group's torch process group, as torch has it: NCCL for CUDA.

Whether all ranks are in the same call is compared in debug mode only: it would cost a copy to the host.
The part about captures has not been run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from device_communicators.process_group.plain import PlainProcessGroup
from device_communicators.routing.communicator import GroupContext, Request


class DeviceGroupCommunicator(PlainProcessGroup):
    """Every tensor that is not on the CPU."""

    name = "device_group"
    carries_the_device = True

    def __init__(self, context: GroupContext) -> None:
        super().__init__(context)
        self._is_warm = False

    def refusal(self, request: Request) -> str | None:
        return "a CPU tensor" if request.device_type == "cpu" else super().refusal(request)

    def __str__(self) -> str:
        return f"torch.distributed over {self.context.device_group.name()}, {self.context.device.type} tensors"

    def connect(self, peer: int) -> None:
        """torch has a communicator for each pair of ranks, which it makes at their first transfer."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self.context.device)
        steps = [self.send, self.recv] if self.context.rank < peer else [self.recv, self.send]
        for step in steps:
            step(byte, peer)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """torch makes a group's communicator at its first call, and NCCL connects ranks at the first one of a kind, for
        which a capture is no place."""
        if self.context.device.type == "cuda" and not self._is_warm and not torch.cuda.is_current_stream_capturing():
            x = torch.zeros(self.context.size, device=self.context.device)
            out, parts = torch.empty_like(x), [1] * self.context.size
            self.flat_all_reduce_(x, "sum")
            self.flat_all_gather(out, x[:1])
            self.flat_reduce_scatter(out[:1], x, "sum")
            self.flat_broadcast_(x, 0)
            self.flat_all_to_all(out, x, parts, parts)
            self._is_warm = True
        yield
