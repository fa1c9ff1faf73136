"""Ranks on GPUs: as many as a test wants, on however many GPUs there are. Not run on a GPU yet."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from device_communicators import nccl_library
from tests.workers import WorkerPool


def problem() -> str | None:
    """Why these tests can't run here, or None."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device" if torch.version.cuda else "this torch was built without CUDA"
    try:
        nccl_library.load()
    except nccl_library.NcclUnavailableError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = problem()
    for item in items:
        if reason is not None and "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))


def sharing(rank: int, version: int) -> dict[str, str]:
    """What lets several ranks use one GPU: NCCL's own way, or, before it had one, ranks that look like other hosts.

    Traffic then goes over sockets of the loopback interface: slow, but right.
    """
    if version >= nccl_library.MULTI_RANK_GPU:
        return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "1"}
    return {
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_MAX_CTAS": "1",
    }


class GpuRanks(WorkerPool):
    """Ranks that see one GPU each, and share it where there are fewer than ranks."""

    def _environment(self, rank: int) -> dict[str, str]:
        gpus = torch.cuda.device_count()
        shared = sharing(rank, nccl_library.load().version) if self.world_size > gpus else {}
        visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
        own = visible[rank % gpus] if len(visible) >= gpus else str(rank % gpus)
        mine = {"CUDA_VISIBLE_DEVICES": own, "RANKS_BACKEND": "nccl", "PARALLEL_STATE_NCCL": "on"}
        return {**super()._environment(rank), **mine, **shared}


@pytest.fixture(scope="session")
def gpus() -> Iterator[Callable[[int], GpuRanks]]:
    """`gpus(4)` is the pool of four ranks."""
    made: dict[int, GpuRanks] = {}

    def pool(world_size: int) -> GpuRanks:
        if world_size not in made:
            made[world_size] = GpuRanks(world_size)
        return made[world_size]

    yield pool
    for each in made.values():
        each.kill()
