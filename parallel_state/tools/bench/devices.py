"""Helpers of the benchmarks: sharing GPUs between ranks, timing, CUDA graphs."""

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
    """Makes ranks share GPUs if there are more ranks than GPUs. Each rank calls this before CUDA starts.

    Returns a description of the sharing, or "".
    """
    place, gpus = environment.detect(rendezvous=False), torch.cuda.device_count()
    ranks = place.local_world_size or place.world_size
    if gpus == 0 or ranks <= gpus:
        return ""
    version = nccl_library.load().version
    if not group_topology.share_gpus(place.local_rank, ranks, gpus, version):
        return ""
    return f"{gpus} GPU{'' if gpus == 1 else 's'}, shared by {group_topology.describe_sharing(version)}: slow"


def describe(device: torch.device) -> dict[str, Any]:
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
    """Measures durations: on a GPU by CUDA events on the current stream, elsewhere by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def finish(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object]) -> float:
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


class Captured:
    """A call captured in a CUDA graph. `replay()` uses the inputs' current values and writes `outputs`. On the CPU,
    `replay()` repeats the call.
    """

    standing_in = False
    """True while `captured` runs a call on the CPU instead of capturing it."""

    def __init__(self, call: Callable[[], Any], outputs: Any, graph: Any) -> None:
        self.outputs = outputs
        self._call = call
        self._graph = graph

    def replay(self) -> Any:
        if self._graph is not None:
            self._graph.replay()
            return self.outputs
        for old, new in zip(tree_leaves(self.outputs), tree_leaves(self._call()), strict=True):
            if isinstance(old, Tensor) and old is not new:
                old.copy_(new)
        return self.outputs


def captured(call: Callable[[], Any], stream: Any) -> Captured:
    """Captures `call` in a CUDA graph on `stream`, a stream of `graph_capture()`. If `stream` is None (CPU), only makes
    the call.

    The inputs must keep their addresses. Make one call on this stream before, because first calls can't be captured.
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
        with torch.cuda.graph(graph, stream=stream):
            try:
                outputs = call()
            except BaseException as error:
                failure = error
                raise
    except BaseException as error:
        if failure is None or failure is error:
            raise
        raise failure from error  # torch's error about the broken capture would hide the cause
    return Captured(call, outputs, graph)
