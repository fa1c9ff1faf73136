"""The devices of ranks that all run a benchmark themselves: shared where there are fewer, waited for, timed.

Belongs here: what differs between a GPU and the CPU. What is timed is the benchmark's. Not run on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from device_communicators.cuda import nccl_library
from device_communicators.machine import gpu_sharing
from device_communicators.machine.topology_reading import read_topology
from parallel_state.startup import environment


def share_gpus() -> str:
    """Before CUDA starts in this rank: what lets it share a GPU, where there are fewer than ranks; in words."""
    place, gpus = environment.detect(rendezvous=False), torch.cuda.device_count()
    ranks = place.local_world_size or place.world_size
    if gpus == 0 or ranks <= gpus:
        return ""
    version = nccl_library.load().version
    if not gpu_sharing.share_gpus(place.local_rank, ranks, gpus, version):
        return ""
    return f"{gpus} GPU{'' if gpus == 1 else 's'}, shared by {gpu_sharing.means(version)}: slow"


def describe(device: torch.device) -> dict[str, Any]:
    """What a result depends on, besides what `report.machine` says."""
    if device.type != "cuda":
        return {"device": "cpu"}
    properties, library = torch.cuda.get_device_properties(device), nccl_library.load()
    return {
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "visible": torch.cuda.device_count(),
        "driver": read_topology().driver_version,
        "cuda": torch.version.cuda,
        "nccl": nccl_library.version_text(library.version),
    }


class Clock:
    """Times calls as the device sees them: by events of a GPU's current stream, by the host's clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def finish(self) -> None:
        """Waits until the device is done."""
        if self._on_gpu:
            torch.cuda.synchronize()

    def release(self) -> None:
        """Gives memory back that nobody uses any more, once the device is done."""
        self.finish()
        if self._on_gpu:
            torch.cuda.empty_cache()

    def seconds(self, run: Callable[[], object]) -> float:
        """From the first thing that `run` has the device do to the last."""
        if not self._on_gpu:
            started = time.perf_counter()
            run()
            return time.perf_counter() - started
        first, last = self._events
        first.record()
        run()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def host_seconds(self, call: Callable[[], object], calls: int) -> list[float]:
        """From the entry of each call to its return; what the device does meanwhile isn't waited for."""
        found = []
        for _ in range(calls):
            started = time.perf_counter()
            call()
            found.append(time.perf_counter() - started)
        self.finish()
        return found
