"""The real communicator and kernels on the CPU: regions in files that ranks map, and streams that are numbers."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from device_communicators import GroupContext
from device_communicators.machine.group_topology import GroupTopology, RankGpu, Vote
from device_communicators.peer.communicator import ALIGNMENT, PeerMemoryCommunicator
from device_communicators.peer.device import HostWords, PeerDevice
from device_communicators.peer.kernels import Launcher
from tests.helpers import nccl_stand_in
from tests.helpers.cuda_on_cpu import CpuKernels

FOLDER, LIBRARY, ARCH = "STAND_IN_PEERS_DIR", "STAND_IN_PEERS_KERNELS", "STAND_IN_PEERS_ARCH"


class FileWay:
    def __init__(self, name: str = "files", fails: str | None = None) -> None:
        self.name = name
        self.fails = fails
        self.closed = 0

    def __call__(self, context: GroupContext, size_bytes: int) -> _Files:
        if self.fails == "allocate":
            raise RuntimeError("out of memory, says the stand-in\nand more of it")
        return _Files(self, context, size_bytes)


class _Files:
    def __init__(self, way: FileWay, context: GroupContext, size_bytes: int) -> None:
        self._way = way
        self._rank = context.rank
        self._size_bytes = size_bytes
        self._path = Path(os.environ[FOLDER]) / f"region-{os.getpid()}-{id(self):x}"
        self._path.write_bytes(b"")
        os.truncate(self._path, size_bytes)
        self._maps: list[mmap.mmap] = []

    def offer(self) -> Any:
        if self._way.fails == "offer":
            raise OSError("can't be offered")
        return str(self._path)

    def map(self, offers: Sequence[Any]) -> Sequence[int]:
        if self._way.fails == "map":
            raise RuntimeError("can't be mapped")
        addresses = []
        for offer in offers:
            with open(offer, "r+b") as file:
                self._maps.append(mmap.mmap(file.fileno(), self._size_bytes))
            addresses.append(ctypes.addressof(ctypes.c_char.from_buffer(self._maps[-1])))
        return addresses

    def close(self) -> None:
        self._way.closed += 1
        self._path.unlink(missing_ok=True)
        self._maps.clear()


class Streams(nccl_stand_in.Streams):
    def __init__(self) -> None:
        super().__init__()
        self.stream = nccl_stand_in.CURRENT
        self.waits: list[tuple[int, int]] = []

    def current(self) -> int:
        return self.stream

    def wait_for(self, stream: int, earlier: int) -> None:
        self.waits.append((stream, earlier))


class Kernels(CpuKernels):
    def __init__(self, deaf: bool = False, max_blocks: int = 2) -> None:
        super().__init__(max_blocks, library=Path(os.environ[LIBRARY]))
        self.launched: list[str] = []
        self.fails_at: str | None = None
        self._zeros = torch.zeros(1 << 16) if deaf else None

    def launch(self, name: str, blocks: int, threads: int, call: Any, stream: int = 0) -> None:
        self.launched.append(name)
        if name == self.fails_at:
            raise RuntimeError("nothing can be launched, says the stand-in")
        if call.input % ALIGNMENT or call.output % ALIGNMENT:
            raise ValueError(f"{name} was given {call.input:x} and {call.output:x}, which a GPU can't move as vectors")
        if self._zeros is not None:
            call.input = self._zeros.data_ptr()
        super().launch(name, blocks, threads, call, stream)


class Device(PeerDevice):
    """Set its attributes before the communicator is made."""

    def __init__(self) -> None:
        self.streams: Any = Streams()
        self.ways = (FileWay(),)
        self.problem: str | None = None
        self.deaf = False
        self.max_blocks = 2
        self.fails_at: str | None = None
        self.shared: tuple[tuple[int, ...], ...] = ()
        self.without_words = False
        self.torch = "2.11.0"
        self.connected = Vote(True, "says the stand-in")
        self.mesh = Vote(True, "says the stand-in")
        self.made: Kernels | None = None

    def arch(self) -> str:
        return os.environ.get(ARCH, "9.0")

    def versions(self) -> dict[str, str]:
        return {"driver": "580.1", "nccl": "2.28.9", "torch": self.torch}

    def topology(self, context: GroupContext) -> GroupTopology:
        gpus = (RankGpu(None, None),) * context.size
        return GroupTopology(gpus, self.shared, None, self.mesh, self.connected)

    def words(self, count: int) -> HostWords:
        if self.without_words:
            raise RuntimeError("no pinned memory, says the stand-in")
        return HostWords(count, pinned=False)

    def kernels(self) -> Launcher:
        if self.problem is not None:
            raise RuntimeError(self.problem)
        self.made = Kernels(self.deaf, self.max_blocks)
        self.made.fails_at = self.fails_at
        return self.made


class StandInPeerMemory(PeerMemoryCommunicator):
    def __init__(self, context: GroupContext, device: Device | None = None, thresholds: Any = None) -> None:
        self.device = device or Device()
        os.environ.setdefault("PARALLEL_STATE_PEER_MEMORY", "on")
        super().__init__(context, self.device, thresholds)
