"""The communicator of vLLM's CPU groups."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.utils import get_cpu_distributed_timeout_or_none

from parallel_state.compat.vllm.group import GroupCoordinator as GroupView
from parallel_state.groups.coordinator import GroupCoordinator


class Communicator(CpuCommunicator):
    """The communicator of a group. Results are new tensors, except that `broadcast` works in place.

    If any rank of the engine exits, even a rank outside this group, all waiting calls raise.
    """

    supports_tensor_dict = True

    def __init__(
        self,
        cpu_group: Any,
        device: torch.device | None = None,
        device_group: Any = None,
        unique_name: str = "",
        use_all2all: bool = False,
    ) -> None:
        DeviceCommunicatorBase.__init__(  # skips CpuCommunicator's init, which sets up vLLM's shared-memory ops
            self, cpu_group, device, device_group, unique_name, use_all2all=use_all2all
        )
        timeout = get_cpu_distributed_timeout_or_none() or timedelta(minutes=30)
        self.group = GroupView.of(
            GroupCoordinator.from_process_group(
                device_group or cpu_group,
                cpu_group=cpu_group,
                device="cpu",
                name=unique_name.partition(":")[0],
                timeout=timeout,
                within=_join(self, timeout),
            )
        )
        if self.use_all2all:
            from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

            self.all2all_manager = AgRsAll2AllManager(cpu_group)

    def recv_tensor_dict(self, src: int) -> dict[str, Any]:
        return self.group.recv_tensor_dict(src) or {}

    def destroy(self) -> None:
        try:
            self.group.destroy()
        finally:
            _leave(self)


def _of_group(name: str) -> Any:
    call = getattr(GroupView, name)
    return functools.wraps(call)(lambda self, *args, **given: call(self.group, *args, **given))


for _name in ("all_reduce", "all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv", "gather", "broadcast",
              "send", "recv", "send_tensor_dict"):  # fmt: skip
    setattr(Communicator, _name, _of_group(_name))

_outer: dict[Any, tuple[GroupCoordinator, set[Communicator]]] = {}
"""torch's default group -> (coordinator of all ranks, communicators that use it)."""


def _join(member: Communicator, timeout: timedelta) -> GroupCoordinator:
    """Adds `member` to the users of the coordinator of all the engine's ranks, and returns this coordinator.

    vLLM's first communicator has all ranks, and creates this coordinator.
    """
    everyone = dist.group.WORLD
    if everyone not in _outer:
        _outer[everyone] = GroupCoordinator.from_process_group(everyone, name="world", timeout=timeout), set()
    outer, members = _outer[everyone]
    members.add(member)
    return outer


def _leave(member: Communicator) -> None:
    for everyone, (outer, members) in list(_outer.items()):
        members.discard(member)
        if not members:
            del _outer[everyone]
            outer.destroy()
