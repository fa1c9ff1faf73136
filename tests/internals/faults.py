"""Functions of a rank's start, run and exit at which tests inject faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from device_communicators.base.bounded_store import BoundedStore
from device_communicators.c10d import world as c10d_world
from device_communicators.cpu.channels import Channels
from device_communicators.cpu.host_memory import HostMemory
from device_communicators.cpu.segment import Segment
from device_communicators.cpu.watching import _Roll
from device_communicators.cpu_communicator import CpuCommunicator
from device_communicators.liveness.health import Watcher
from parallel_state import GroupCoordinator, ParallelGroups, state
from parallel_state.groups import world
from parallel_state.messages.messenger import Messenger
from parallel_state.process_groups import pool
from parallel_state.process_groups.agreement import Agreement
from parallel_state.startup import reachability
from parallel_state.startup.rendezvous import Met, _Meeting

Place = tuple[Any, str]
STARTS: dict[str, Place] = {
    "in the rendezvous": (world, "meet"),
    "before the agreement": (Agreement, "resolve_and_agree"),
    "amid its groups": (pool.ProcessGroupPool, "_new_group_of_members"),
    "with a segment": (Segment, "resize"),
    "before the proof": (state, "verify_group"),
    "at the end": (world, "closing_barrier"),
}
STAGES: dict[str, Place] = {
    "meeting": (_Meeting, "_judge"),
    "reachability": (reachability, "check_all_hosts"),
    "default group": (world, "_init_process_group"),
    "shared memory": (HostMemory, "attach"),
    "first call": (state, "verify_group"),
    "exchange of the backend": (c10d_world, "meet"),
}
ENDS: dict[str, Place] = {
    f"{owner.__name__}.{name}": (owner, name)
    for owner, name in (
        (Messenger, "close"),
        (CpuCommunicator, "close"),
        (Channels, "close"),
        (HostMemory, "close"),
        (pool.ProcessGroupPool, "release"),
        (GroupCoordinator, "destroy"),
        (ParallelGroups, "close"),
        (Watcher, "close"),
        (dist, "destroy_process_group"),
    )
}
OF_A_WATCHER = "Watcher.close"


def after_entering(then: Callable[[], object], of_backend: bool = False) -> None:
    """Calls `then` once this rank has entered the rendezvous: the world's, or that of a group of our backend."""
    meeting: Any = _Roll if of_backend else _Meeting
    enter = meeting._enter

    def enter_and_then(*args: Any) -> Any:
        entered = enter(*args)
        then()
        return entered

    meeting._enter = enter_and_then


def met_alone() -> Met:
    store = BoundedStore(dist.HashStore())
    return Met(store, "", {}, math.inf, Watcher(), store, [])
