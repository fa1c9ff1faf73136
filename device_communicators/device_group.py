"""A device's tensors over the group's torch process group, as torch has it: NCCL for CUDA.

Whether all ranks are in the same call is compared in debug mode only: it would cost a copy to the host.
"""

from __future__ import annotations

from device_communicators.base import Request
from device_communicators.plain_process_group import PlainProcessGroup


class DeviceGroupCommunicator(PlainProcessGroup):
    """Every tensor that is not on the CPU."""

    name = "device_group"

    def refusal(self, request: Request) -> str | None:
        return "a CPU tensor" if request.device_type == "cpu" else super().refusal(request)

    def __str__(self) -> str:
        return f"torch.distributed over {self.context.device_group.name()}, {self.context.device.type} tensors"
