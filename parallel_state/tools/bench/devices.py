"""Devices of ranks that run a benchmark themselves: shared where there are fewer, timed, captured in CUDA graphs.

Belongs here: what differs between a GPU and the CPU. Tests and benchmarks capture through `captured`, so that on a
machine without a GPU the same lines run and are compared with the same answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from device_communicators.base.torch_internals import tree_leaves
from device_communicators.cuda import nccl_library
from device_communicators.machine import group_topology
from device_communicators.machine.topology import read_topology
from parallel_state.startup import environment


def share_gpus() -> str:
    """Lets this rank share a GPU where there are fewer than ranks, before CUDA starts; returns how, in words."""
    place, gpus = environment.detect(rendezvous=False), torch.cuda.device_count()
    ranks = place.local_world_size or place.world_size
    if gpus == 0 or ranks <= gpus:
        return ""
    version = nccl_library.load().version
    if not group_topology.share_gpus(place.local_rank, ranks, gpus, version):
        return ""
    return f"{gpus} GPU{'' if gpus == 1 else 's'}, shared by {group_topology.describe_sharing(version)}: slow"


def describe(device: torch.device) -> dict[str, Any]:
    """Returns what a result depends on, besides what `report.machine` says."""
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
        """Gives unused memory back, once the device is done."""
        self.finish()
        if self._on_gpu:
            torch.cuda.empty_cache()

    def seconds(self, run: Callable[[], object]) -> float:
        """Returns the time from the first thing that `run` has the device do to the last."""
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
        """Returns each call's time from its entry to its return; the device isn't waited for."""
        found = []
        for _ in range(calls):
            started = time.perf_counter()
            call()
            found.append(time.perf_counter() - started)
        self.finish()
        return found


class Captured:
    """`replay()` does a call again, on what its inputs hold now, and leaves the results in `outputs`."""

    standing_in = False
    """True while a call is made on the CPU that a graph would record: tests look at it."""

    def __init__(self, call: Callable[[], Any], outputs: Any, graph: Any) -> None:
        self.outputs = outputs
        self._call = call
        self._graph = graph

    def replay(self) -> Any:
        """Returns `outputs`, which the next replay overwrites."""
        if self._graph is not None:
            self._graph.replay()
            return self.outputs
        for old, new in zip(tree_leaves(self.outputs), tree_leaves(self._call()), strict=True):
            if isinstance(old, Tensor) and old is not new:
                old.copy_(new)
        return self.outputs


def captured(call: Callable[[], Any], stream: Any, pool: Any = None) -> Captured:
    """Captures `call` on `stream`, that of `graph_capture()`: None on the CPU.

    `call` takes its inputs from tensors that stay where they are, and must have been made once on this stream before:
    what starts at a first use (cuBLAS, a communicator) can't be captured. Its results may be in dicts, lists and
    tuples. An exception of the call is raised as it is, or from what torch makes of the capture that it has broken.
    """
    if stream is None:
        Captured.standing_in = True
        try:
            return Captured(call, call(), None)
        finally:
            Captured.standing_in = False
    graph = torch.cuda.CUDAGraph()
    failure: BaseException | None = None
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            try:
                outputs = call()
            except BaseException as error:
                failure = error
                raise
    except BaseException as error:
        if failure is None or failure is error:
            raise
        raise failure from error  # else the end of the broken capture would hide what broke it
    return Captured(call, outputs, graph)
