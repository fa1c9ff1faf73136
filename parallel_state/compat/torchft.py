"""A process group for torchft: `torchft.Manager(pg=ProcessGroupParallelState(), …)`.

Needs no accelerator. Works with torchft 0.2 and torch 2.13.
"""

from __future__ import annotations

from typing import Any

from torchft.process_group import ProcessGroupWrapper

from device_communicators.base.bounded_store import BoundedStore
from device_communicators.base.torch_internals import backend_options, group_over
from device_communicators.c10d import creation
from device_communicators.c10d.world import World


class ProcessGroupParallelState(ProcessGroupWrapper):
    """A process group for torchft's `Manager`, which reconnects it when replicas join or leave.

    If a rank exits, the calls of the other replicas fail within 1 s. The constructor's `timeout` limits calls and
    reconnecting. A failure doesn't affect a replica's other groups. Errors number the group's ranks from 0.
    """

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        options = backend_options(store, rank, world_size, self._timeout, "torchft")
        world = World(BoundedStore(store), range(world_size), "configure", may_borrow=False)
        return group_over(store, rank, world_size, creation.create_group(options, world))

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "torchft-parallel_state"
