"""Ranks of the GPU tests. With GPU_TESTS=dry the same tests run on the CPU: NCCL is the stand-in of
tests/native, and a captured graph repeats its calls."""

from __future__ import annotations

import faulthandler
import functools
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch

import parallel_state as ps
from device_communicators import CATALOG, Row, build_route
from device_communicators.base import settings
from device_communicators.cuda import nccl_library
from device_communicators.machine import group_topology
from device_communicators.nccl.communicator import NcclCommunicator
from parallel_state.messages.messenger import Messenger
from parallel_state.tools.bench.devices import Captured
from tests.contract.attempts import environment
from tests.helpers import nccl_stand_in
from tests.workers import WorkerPool, serve

DRY = os.environ.get("GPU_TESTS") == "dry"
BACKEND = "RANKS_BACKEND"
CARRIERS = ("nccl", "device_group")
REPLAYS = 20 if DRY else 1000

LIMIT_S = "GPU_TESTS_LIMIT_S"
"""The variable for the most seconds of a test's body, so that one hang doesn't use up the time of all."""

DRY_NCCL = Row("nccl", "tests.helpers.nccl_stand_in", "StandInNccl")


def capability() -> str:
    """The first GPU's, such as `9.0`. NVML needs no CUDA context, which would use GPU memory."""
    pynvml.nvmlInit()
    try:
        return "{}.{}".format(*pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0)))
    finally:
        pynvml.nvmlShutdown()


def needs_a_gpu(what: str) -> None:
    if DRY:
        pytest.skip(f"a dry run: {what}")


class GpuRanks(WorkerPool):
    """Ranks see one GPU each, shared if there are more ranks than GPUs."""

    stand_in: Path | None = None

    def _environment(self, rank: int) -> dict[str, str]:
        common = {**super()._environment(rank), "PARALLEL_STATE_NCCL": "on", BACKEND: "gloo" if DRY else "nccl"}
        if self.stand_in is not None:
            folder = str(self.stand_in.parent)
            return {**common, nccl_stand_in.LIBRARY: str(self.stand_in), nccl_stand_in.FOLDER: folder}
        gpus = torch.cuda.device_count()
        shared = group_topology.variables_of(rank, self.world_size, gpus, nccl_library.load().version)
        return {**common, group_topology.VISIBLE: group_topology.own_gpu(rank, gpus), **shared}

    def _collect(self, timeout_s: float, grace_s: float) -> tuple[dict[int, Any], dict[int, str]]:
        limit_s = float(os.environ.get(LIMIT_S, "inf"))
        results, errors = super()._collect(min(timeout_s, limit_s), min(grace_s, limit_s))
        late = [
            each for rank, each in enumerate(self._processes) if errors.get(rank, "").startswith("no answer within")
        ]
        for process in late:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGABRT)
        for process in late:
            process.join(timeout=5)
        return results, errors

    def _target(self, rank: int) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return (serve_traced, ()) if self.stand_in is None else (serve_dry, ())

    def run_over(
        self, carrier: str, body: Callable[..., Any], *args: Any, tp: int, pp: int = 1, timeout_s: float = 120.0
    ) -> list[Any]:
        if carrier == "nccl":
            return self.run(_over_nccl, body, args, tp=tp, pp=pp, timeout_s=timeout_s)
        return self.run(_over_torch, body, args, tp, pp, timeout_s=timeout_s)


def _over_nccl(body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    groups = (ps.get_tp_group(), ps.get_pp_group(), ps.get_world_group())
    assert all(nccl_of(group) is not None for group in groups if group.world_size > 1), groups[0].explain()
    return body(*args)


def _over_torch(body: Callable[..., Any], args: tuple[Any, ...], tp: int, pp: int) -> Any:
    with world(tp, pp, nccl="off"):
        groups = (ps.get_tp_group(), ps.get_pp_group(), ps.get_world_group())
        names = {each.name for group in groups for each in group.route.communicators}
        assert "nccl" not in names, names
        return body(*args)


@contextmanager
def world(tp: int = 1, pp: int = 1, *, nccl: str = "on", bind_device: bool = False, **options: Any) -> Iterator[None]:
    with environment(PARALLEL_STATE_NCCL=nccl):
        ps.init_distributed_environment(backend=os.environ[BACKEND], bind_device=bind_device)
        try:
            ps.initialize_model_parallel(tp, pp, **options)
            yield
        finally:
            ps.destroy_distributed_environment()


def device() -> torch.device:
    return ps.get_world_group().device


def on_gpu() -> bool:
    return os.environ[BACKEND] == "nccl"


def synchronize() -> None:
    if on_gpu():
        torch.cuda.synchronize()


def groups_of_several() -> list[ps.GroupCoordinator]:
    tp, pp, everyone = ps.get_tp_group(), ps.get_pp_group(), ps.get_world_group()
    found = [group for group in (tp, pp) if group.world_size > 1]
    return found if everyone.world_size in (1, *(group.world_size for group in found)) else [*found, everyone]


def nccl_of(group: ps.GroupCoordinator) -> NcclCommunicator | None:
    return next((each for each in group.route.communicators if isinstance(each, NcclCommunicator)), None)


def serve_traced(connection: Connection, variables: dict[str, str]) -> None:
    """Serves as a rank. If a signal kills the rank, it writes its threads' stacks, but no core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    serve(connection, variables)


def serve_dry(connection: Connection, variables: dict[str, str]) -> None:
    from parallel_state.groups import coordinator

    def build(context: Any) -> Any:
        return build_route(context, [DRY_NCCL, CATALOG[-1]] if settings.NCCL.get() == "on" else [CATALOG[-1]])

    coordinator.build_route = functools.wraps(build_route)(build)  # type: ignore[attr-defined]
    for name in ("broadcast", "all_gather", "isend", "irecv", "recv"):
        setattr(Messenger, name, _unrecorded(getattr(Messenger, name)))
    serve_traced(connection, variables)


def _unrecorded(call: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `call` fail while a CUDA graph is captured: a graph can't record what the host sends."""

    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        assert not Captured.standing_in, f"{call.__qualname__} within a capture"
        return call(*args, **kwargs)

    return checked
