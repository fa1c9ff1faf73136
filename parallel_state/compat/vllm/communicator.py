"""The communicator of vLLM's CPU groups: each over a coordinator of the same ranks. Imports vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from device_communicators.cpu.host_memory import HostMemory
from device_communicators.cpu.native_build import usable_cores
from device_communicators.cpu.native_group import Members
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.registry import unique_name
from parallel_state.coordinator import GroupCoordinator


class Communicator(CpuCommunicator):
    """Carries the collectives and transfers of one of vLLM's groups.

    Ranks are ranks in the group, as in vLLM's own. All results are new tensors, but for `broadcast`, which fills its
    argument. Errors name the ranks that are missing.
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
        DeviceCommunicatorBase.__init__(  # vLLM's own class for CPUs looks for its shared-memory ops next
            self, cpu_group, device, device_group, unique_name, use_all2all=use_all2all
        )
        self.group = _group_over(cpu_group, device_group, unique_name, self.ranks, self.rank_in_group)
        if self.use_all2all:
            from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

            self.all2all_manager = AgRsAll2AllManager(cpu_group)

    def all_reduce(self, input_: Tensor) -> Tensor:
        return self.group.all_reduce(input_)

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        return self.group.all_gather(input_, dim)

    def all_gatherv(self, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None) -> Any:
        if isinstance(input_, Tensor):
            return self.group.all_gatherv(input_, dim, sizes)
        return [self.group.all_gatherv(each, dim, sizes) for each in input_]

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        return self.group.reduce_scatter(input_, dim)

    def reduce_scatterv(self, input_: Tensor, dim: int = -1, sizes: list[int] | None = None) -> Tensor:
        return self.group.reduce_scatterv(input_, dim, sizes)

    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        return self.group.gather(input_, dst, dim)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        return self.group.broadcast_(tensor, src)

    def send(self, tensor: Tensor, dst: int | None = None) -> None:
        self.group.send(tensor, dst)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> Tensor:
        return self.group.recv(size, dtype, src)

    def send_tensor_dict(self, tensor_dict: dict[str, Any], dst: int) -> None:
        self.group.send_tensor_dict(tensor_dict, dst)

    def recv_tensor_dict(self, src: int) -> dict[str, Any]:
        return self.group.recv_tensor_dict(src) or {}

    def destroy(self) -> None:
        _destroy(self.group)


def _group_over(cpu_group: Any, device_group: Any, name: str, ranks: list[int], rank: int) -> GroupCoordinator:
    """Returns a coordinator over process groups that vLLM made; every rank of them calls it."""
    timeout_s = cpu_group._timeout.total_seconds() if hasattr(cpu_group, "_timeout") else 1800.0
    members = Members(unique_name(name.partition(":")[0]), tuple(ranks), rank, timeout_s)
    memory = HostMemory(members, neighbours=_neighbours())
    memory.attach(cpu_group)
    find: Callable[[], Any] = lambda: cpu_group  # noqa: E731
    context = GroupContext(
        name=members.name,
        ranks=members.ranks,
        rank=rank,
        device=torch.device("cpu"),
        timeout_s=timeout_s,
        device_group=device_group,
        make_cpu_group=find,
        host_memory=memory,
    )
    return GroupCoordinator(context)


def _destroy(group: GroupCoordinator) -> None:
    memory = group.context.host_memory
    group.destroy()
    if memory is not None:
        memory.close()


_MOST_CORES = 1024
_NEIGHBOURS: dict[int, tuple[int, ...]] = {}


def _neighbours() -> tuple[int, ...]:
    """Returns the cores, a bit each, of all ranks of the world; they decide how long ranks spin. All ranks call it."""
    if not dist.is_initialized():
        return ()
    size = dist.get_world_size()
    if size not in _NEIGHBOURS:
        mine = torch.zeros(_MOST_CORES, dtype=torch.uint8)
        mine[[core for core in usable_cores() if core < _MOST_CORES]] = 1
        every = torch.empty(size * _MOST_CORES, dtype=torch.uint8)
        dist.all_gather_into_tensor(every, mine)
        masks = every.view(size, _MOST_CORES)
        _NEIGHBOURS[size] = tuple(sum(1 << core for core in row.nonzero().flatten().tolist()) for row in masks)
    return _NEIGHBOURS[size]
