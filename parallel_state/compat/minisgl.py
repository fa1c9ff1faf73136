"""A communicator for mini-sglang: call `minisgl.install()` in each process before its engine starts."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from device_communicators.base.errors import UnsupportedError
from parallel_state.groups.coordinator import GroupCoordinator

logger = logging.getLogger("parallel_state")


class CoordinatorImpl:
    """mini-sglang's communicator. The first call creates the group, so all ranks must make this call."""

    def __init__(self, fallback: Any) -> None:
        self._fallback = fallback
        self._over: Any = None
        self._group: GroupCoordinator | None = None

    def _coordinator(self) -> GroupCoordinator:
        if self._group is None or self._over is not dist.group.WORLD:
            self._over = dist.group.WORLD
            self._group = GroupCoordinator.from_process_group(self._over, name="minisgl")
        return self._group

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums `x` over all ranks in place, and returns `x`."""
        return self._coordinator().all_reduce_(x) if x.is_cpu else self._fallback.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._coordinator().all_gather(x, 0) if x.is_cpu else self._fallback.all_gather(x)

    def close(self) -> None:
        """Destroys the group. Every rank must call this. Idempotent."""
        if self._group is not None:
            self._group.destroy()


def install() -> None:
    """Adds this library's communicator to `DistributedCommunicator.plugins`; mini-sglang uses the last plugin.

    Idempotent. Call this again after `destroy_distributed()`, which removes the communicator. Raises UnsupportedError
    if CUDA is available.
    """
    if torch.cuda.is_available():
        raise UnsupportedError(
            "install() is for mini-sglang on a CPU, but CUDA is available: mini-sglang's tensors are then on the GPU "
            "and use NCCL; don't call install()"
        )
    module = importlib.import_module("minisgl.distributed.impl")
    plugins = module.DistributedCommunicator.plugins
    before = plugins[-1] if plugins else module.TorchDistributedImpl()  # destroy_distributed() leaves none
    if isinstance(before, CoordinatorImpl):
        return
    ours: Any = type("ParallelStateImpl", (CoordinatorImpl, module.DistributedImpl), {})(before)
    theirs = getattr(module.destroy_distributed, "__wrapped__", module.destroy_distributed)

    @functools.wraps(theirs)
    def destroy_distributed() -> None:
        ours.close()
        theirs()

    plugins.append(ours)
    for each in (module, importlib.import_module("minisgl.distributed")):
        each.destroy_distributed = destroy_distributed  # type: ignore[attr-defined]
    logger.info("mini-sglang's collectives of CPU tensors now run on %s", __name__)
