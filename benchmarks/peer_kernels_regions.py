"""For `peer_kernels`: ranks that are regions and tensors of this one process, and the machine that runs their kernels.

A kernel *alone* is rank 0's, with all that it waits for already there. The other ranks' kernels run before, one after
the other, with the abort word set: each sends or stages its data, looks for its peers in vain, and ends without having
kept its epoch. The flags that a barrier waits for are then written by the host. Rank 0 finds everything there, and
after its epochs have been set back it can do the same again. So its call must take one epoch: `takes_one_epoch`.

What is timed and compared is `peer_kernels_team`. Not run on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from measure.devices import Clock
from torch import Tensor

from device_communicators.cuda.driver import (
    MAX_BLOCKS,
    MAX_RANKS,
    PACKETS_OFFSET,
    PART_PACKETS,
    REGION_ALIGNMENT,
    REGION_BYTES,
    STAGE_BYTES,
    Call,
    Launcher,
    read_report,
)
from device_communicators.peer.device import HostWords

EPOCH = 8
"""What has gone before: not the first epochs, in which a block clears the next slot."""
DEADLINE_S = 20.0
"""Nobody waits long here, but for a sanitizer."""
_REPORT, _ABORT, _IGNORED_REPORT, _ALWAYS_ABORT, _WORDS = 0, 16, 32, 48, 64
_PACKET_BYTES = 16

Launch = Callable[[int], None]
"""Puts a kernel on the stream of that number."""


class Machine(Protocol):
    """A GPU, or the CPU in its place."""

    device: torch.device
    kernels: Launcher
    clock: Clock

    def words(self, count: int) -> HostWords: ...
    def stream(self) -> int: ...
    def capture_stream(self) -> Any: ...
    def together(self, launches: Sequence[Launch]) -> None:
        """All at once; each has what the current stream did before, and the current stream waits for all."""


class GpuMachine:
    """The current CUDA device."""

    def __init__(self) -> None:
        from device_communicators.peer.kernels import PeerKernels

        self.device = torch.device("cuda", torch.cuda.current_device())
        self.kernels: Launcher = PeerKernels.load(torch.cuda.current_device())
        self.clock = Clock(self.device)
        self._streams = [torch.cuda.Stream(self.device) for _ in range(MAX_RANKS)]
        self._capture_stream = torch.cuda.Stream(self.device)

    def words(self, count: int) -> HostWords:
        return HostWords(count)

    def stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def capture_stream(self) -> Any:
        return self._capture_stream

    def together(self, launches: Sequence[Launch]) -> None:
        current = torch.cuda.current_stream(self.device)
        streams = self._streams[: len(launches)]
        for stream in streams:
            stream.wait_stream(current)
        for stream, launch in zip(streams, launches, strict=True):
            launch(int(stream.cuda_stream))
        for stream in streams:
            current.wait_stream(stream)


class EmulatedMachine:
    """The kernels on the CPU, ranks that run at once as threads. Times mean nothing."""

    def __init__(self) -> None:
        from tests.cuda_on_cpu import CpuKernels

        self.device = torch.device("cpu")
        self.kernels: Launcher = CpuKernels()
        self.clock = Clock(self.device)
        self._pool = ThreadPoolExecutor(MAX_RANKS)

    def words(self, count: int) -> HostWords:
        return HostWords(count, pinned=False)

    def stream(self) -> int:
        return 0

    def capture_stream(self) -> Any:
        return None

    def together(self, launches: Sequence[Launch]) -> None:
        list(self._pool.map(lambda launch: launch(0), launches))


class Regions:
    """`sets` groups of `size` ranks, each with regions of its own, so that one after the other can be called."""

    def __init__(self, machine: Machine, size: int, sets: int) -> None:
        self.machine, self.size, self.sets = machine, size, sets
        whole = torch.zeros(sets * size * REGION_BYTES + REGION_ALIGNMENT, dtype=torch.uint8, device=machine.device)
        start = -whole.data_ptr() % REGION_ALIGNMENT
        self._memory = whole[start : start + sets * size * REGION_BYTES].view(sets, size, REGION_BYTES)
        control = self._memory[..., :PACKETS_OFFSET].view(torch.int32)
        self._epochs, self._flags = control[..., :MAX_BLOCKS], control[..., MAX_BLOCKS:]
        self._words = machine.words(_WORDS)
        self._words[_ALWAYS_ABORT] = 1

    def call(self, which: int, rank: int, *, arriving: bool = False, **fields: Any) -> Call:
        """Of a rank of one set. Tensors stand for their addresses. `arriving`: for `arrive`."""
        call = Call(rank=rank, size=self.size, deadline_ns=int(DEADLINE_S * 1e9))
        for peer in range(self.size):
            call.regions[peer] = self._memory[which, peer].data_ptr()
        call.report = self._words.address + 8 * (_IGNORED_REPORT if arriving else _REPORT)
        call.abort = self._words.address + 8 * (_ALWAYS_ABORT if arriving else _ABORT)
        for name, value in fields.items():
            setattr(call, name, value.data_ptr() if isinstance(value, Tensor) else value)
        return call

    def clear(self) -> None:
        """As before the first call, but for the epochs' number."""
        self._memory.zero_()
        self._epochs.fill_(EPOCH)

    def arrive(self, kernel: str, blocks: int, threads: int, call: Callable[[int, int], Call]) -> None:
        """Everything that rank 0 waits for in this call is there. `call(set, rank)` is a peer's, `arriving`."""
        self.clear()
        for which in range(self.sets):
            for rank in range(1, self.size):
                self.machine.kernels.launch(kernel, blocks, threads, call(which, rank), self.machine.stream())
        self._flags[:, 0].fill_(EPOCH + 1)
        self.machine.clock.finish()

    def rewind(self, blocks: int, members: int) -> None:
        """Before rank 0 does its call again in each set. `members`: of a team of the norm's blocks, else 1.

        What the members of a team tell each other goes, so that they wait for each other every time.
        """
        self._epochs[:, 0].fill_(EPOCH)
        if members > 1:
            own = self._memory[:, 0, PACKETS_OFFSET : PACKETS_OFFSET + 2 * MAX_BLOCKS * MAX_RANKS * PART_PACKETS * 16]
            parts = own.view(self.sets, 2, MAX_BLOCKS, MAX_RANKS, 2, MAX_BLOCKS, _PACKET_BYTES)
            parts[:, (EPOCH + 1) % 2, :blocks, 0, :, :members].zero_()

    def problem(self) -> str | None:
        """What a kernel that gave up has reported. Synchronized before."""
        report = read_report(self._words[_REPORT])
        return None if report is None else f"a kernel gave up: {report}"


def takes_one_epoch(how: str, nbytes: int, blocks: int) -> bool:
    """Whether a kernel that moves so many bytes with so many blocks does it at one go."""
    unit, most = (8, PART_PACKETS) if how == "push" else (16, STAGE_BYTES // 16)
    things = math.ceil(nbytes / unit)
    return math.ceil(things / blocks) <= most
