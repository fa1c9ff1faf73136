"""Defines the interface to a rank's GPU. Tests without a GPU replace `PeerDevice`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from device_communicators.cuda import nccl_library
from device_communicators.cuda.streams import CudaStreams
from device_communicators.machine.group_topology import GroupTopology, agree_on_topology, uuid_of
from device_communicators.machine.topology import read_topology
from device_communicators.peer.kernels import Launcher, PeerKernels
from device_communicators.peer.memory import IpcSharing, SharingMethod, SymmetricSharing, run_on_all_ranks
from device_communicators.routing.communicator import GroupContext


def versions() -> dict[str, str]:
    """Returns the versions of the driver, NCCL and torch, by name. Measured times are valid only for equal versions."""
    try:
        nccl = nccl_library.version_text(nccl_library.load().version)
    except nccl_library.NcclUnavailableError:
        nccl = "none"
    return {"driver": read_topology().driver_version or "none", "nccl": nccl, "torch": torch.__version__}


def arch_of(device: torch.device) -> str:
    return "{}.{}".format(*torch.cuda.get_device_capability(device))


class HostWords:
    """64-bit words in host memory that the GPU reads and writes at the same address."""

    def __init__(self, count: int, *, pinned: bool = True) -> None:
        self._memory = torch.zeros(count, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self.address = self._memory.data_ptr()
        self._words = (ctypes.c_uint64 * count).from_address(self.address)

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value


class PeerDevice:
    ways: Sequence[SharingMethod] = (SymmetricSharing, IpcSharing)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.streams = CudaStreams(device)

    def arch(self) -> str:
        return arch_of(self._device)

    def versions(self) -> dict[str, str]:
        return versions()

    def topology(self, context: GroupContext) -> GroupTopology:
        """Returns how the group's GPUs are connected. Every rank must call this."""
        read: list[Any] = []
        run_on_all_ranks(context, "topology", lambda: read.extend((read_topology(), uuid_of(self._device))))
        return agree_on_topology(context, *read)

    def words(self, count: int) -> HostWords:
        return HostWords(count)

    def kernels(self) -> Launcher:
        return PeerKernels.load(torch.cuda.current_device() if self._device.index is None else self._device.index)


def start(context: GroupContext, device: PeerDevice | None = None) -> PeerDevice:
    """Starts CUDA. Returns `device`, or a new device if None. Every rank must call this. If CUDA fails on one rank, all
    ranks raise NotSharedError.
    """
    found: list[PeerDevice] = [] if device is None else [device]
    run_on_all_ranks(context, "start CUDA", lambda: found.append(PeerDevice(context.device)) if not found else None)
    return found[0]
