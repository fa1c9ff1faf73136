"""A communicator for mini-sglang, which has no entry points: `minisgl.install()` in each process, before its engine.

Over torch's default group, which mini-sglang makes, and by which it counts its tensor-parallel ranks.
"""

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

_MODULE = "minisgl.distributed.impl"


class CoordinatorImpl:
    """Carries mini-sglang's collectives over torch's default group; all ranks make the group at the first call."""

    def __init__(self, otherwise: Any) -> None:
        """`otherwise`: the implementation that was there, for tensors of a device."""
        self._otherwise = otherwise
        self._over: Any = None
        self._group: GroupCoordinator | None = None

    def _coordinator(self) -> GroupCoordinator:
        if self._group is None or self._over is not dist.group.WORLD:
            self._over = dist.group.WORLD
            self._group = GroupCoordinator.from_process_group(self._over, name="minisgl")
        return self._group

    def all_reduce(self, x: Tensor) -> Tensor:
        """Adds up over the ranks in place; returns `x`."""
        return self._coordinator().all_reduce_(x) if x.is_cpu else self._otherwise.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """Returns the ranks' tensors one behind the other along dim 0."""
        return self._coordinator().all_gather(x, 0) if x.is_cpu else self._otherwise.all_gather(x)

    def close(self) -> None:
        """Ends the group, which leaves torch's to mini-sglang. Every rank calls it; twice is fine."""
        if self._group is not None:
            self._group.destroy()


def implementation() -> Any:
    """Returns an implementation of mini-sglang's class, which is in `minisgl.distributed.impl`."""
    module = importlib.import_module(_MODULE)
    before = module.DistributedCommunicator.plugins
    theirs = before[-1] if before else module.TorchDistributedImpl()  # destroy_distributed() leaves none
    return type("ParallelStateImpl", (CoordinatorImpl, module.DistributedImpl), {})(theirs)


def install() -> None:
    """Adds ours to `DistributedCommunicator.plugins`, of which mini-sglang asks the last; the log says so.

    Twice is fine; after `destroy_distributed()`, which takes it out, it is added again. Raises UnsupportedError where
    there is CUDA: mini-sglang's tensors are there then, and NCCL carries them.
    """
    if torch.cuda.is_available():
        raise UnsupportedError("mini-sglang runs on CUDA here, where NCCL carries its tensors: nothing to install")
    module = importlib.import_module(_MODULE)
    if any(isinstance(each, CoordinatorImpl) for each in module.DistributedCommunicator.plugins[-1:]):
        return
    ours = implementation()
    theirs = getattr(module.destroy_distributed, "__wrapped__", module.destroy_distributed)

    @functools.wraps(theirs)
    def destroy_distributed() -> None:
        ours.close()
        theirs()

    module.DistributedCommunicator.plugins.append(ours)
    for each in (module, importlib.import_module("minisgl.distributed")):
        each.destroy_distributed = destroy_distributed  # type: ignore[attr-defined]
    logger.info("mini-sglang's collectives of CPU tensors are those of %s from now on", __name__)
