"""The common knowledge of a group's ranks of their GPUs: the same on every rank, so communicators may decide by it.

Each rank tells its GPU and how it sees those of the others; a claim about the group holds where each of its ranks
confirms it. What one machine's driver says is in `topology`. A driver may
report peer access that loses data: a group whose kernels use it proves it first (`peer.group`).

Ranks may share a GPU, for tests, laptops and the demo, but mostly it is a mistake that nobody sees; the end of this
file finds them, and knows what NCCL must be told before CUDA starts. NCCL refuses two ranks on one GPU. From 2.30.3 on
it takes them with a variable of its own; before, ranks that seem to be on different hosts pass, and their traffic goes
over sockets of the loopback interface: slow, but right. Either way a kernel that waits for another rank holds the GPU
until its time slice ends, so that is not for measuring.
"""

from __future__ import annotations

import json
import os
import socket
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch

from device_communicators.base import settings
from device_communicators.base.errors import format_ranks
from device_communicators.cuda import nccl_library
from device_communicators.machine.topology import Topology
from device_communicators.routing.communicator import GroupContext

_View = dict[str, Any]
"""A rank's view of the path to another GPU: `nvlinks`, `nvlink_problem` and `peer_problem` of its Path."""


@dataclass(frozen=True)
class Vote:
    """The verdict on a claim about the whole group; true or false as a condition."""

    holds: bool
    reason: str
    """The objection to the claim, or the evidence for it."""

    def __bool__(self) -> bool:
        return self.holds


@dataclass(frozen=True)
class RankGpu:
    """A rank's device."""

    uuid: str | None
    """Of the GPU, or of the slice of it; None for a slice that CUDA doesn't name, and without a GPU."""
    gpu_uuid: str | None
    """Of the GPU; None for a rank that has none."""
    problem: str | None
    """The reason that there is no GPU."""


@dataclass(frozen=True)
class GroupTopology:
    """The GPUs of a group's ranks and what connects them. Ranks are ranks in the group."""

    gpus: tuple[RankGpu, ...]
    shared_gpus: tuple[tuple[int, ...], ...]
    """Ranks that have one GPU, or slices of one, together."""
    fewest_nvlinks: int | None
    """Between two GPUs of the group, 0 where there are none; None where no rank knows of any two."""
    nvlink_full_mesh: Vote
    """Every two GPUs of the group are connected by NVLink, directly or through switches, and nothing that the driver
    says speaks against using it. Ranks on one GPU count as connected."""
    peer_access: Vote
    """Every GPU can use every other's memory, as the driver of each rank reports it."""

    def sharers(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that use this rank's GPU, itself included; empty where it is alone."""
        return next((ranks for ranks in self.shared_gpus if rank in ranks), ())


def uuid_of(device: torch.device) -> str | None:
    """Returns a CUDA device's UUID, for which torch starts CUDA; None for other devices."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def agree_on_topology(context: GroupContext, topology: Topology, uuid: str | None) -> GroupTopology:
    """Returns what the ranks know together, each of which calls it with its machine's topology and its GPU's UUID.

    `uuid` is `uuid_of(device)`, or as NVML writes it. Raises CommunicationError where the exchange fails.
    """
    gpus = [RankGpu(**each) for each in exchange_facts(context, _own_gpu(topology, uuid), "topology")]
    views: list[list[_View | None]] = exchange_facts(context, _views_of(context.rank, gpus, topology), "topology")
    # From here on a function of what all ranks told alone, so the same on every rank.
    users: dict[str, list[int]] = defaultdict(list)
    for rank, gpu in enumerate(gpus):
        if gpu.gpu_uuid is not None:
            users[gpu.gpu_uuid].append(rank)
    numbers = [view["nvlinks"] for row in views for view in row if view is not None]
    fewest = min((number for number in numbers if number is not None), default=None)
    no_mesh = _objection(gpus, views, "nvlink_problem", "NVLink doesn't connect", " ")
    no_peers = _objection(gpus, views, "peer_problem", "have no peer access", ": ")
    links = "there is one GPU" if fewest is None else f"{fewest} or more NVLinks between any two"
    return GroupTopology(
        tuple(gpus),
        tuple(tuple(ranks) for ranks in users.values() if len(ranks) > 1),
        fewest,
        Vote(no_mesh is None, no_mesh or links),
        Vote(no_peers is None, no_peers or "the driver reports it"),
    )


def _own_gpu(topology: Topology, uuid: str | None) -> dict[str, str | None]:
    """Returns what this rank tells of its device: the fields of a RankGpu."""
    found = None if uuid is None else topology.find(uuid)
    if found is None:
        problem = topology.problem or ("it has no GPU" if uuid is None else f"NVML doesn't know its device {uuid}")
        return {"uuid": None, "gpu_uuid": None, "problem": problem}
    gpu, part = found
    device = part.uuid if part is not None else None if gpu.mig else gpu.uuid
    return {"uuid": device, "gpu_uuid": gpu.uuid, "problem": None}


def _views_of(rank: int, gpus: Sequence[RankGpu], topology: Topology) -> list[_View | None]:
    """Returns how this rank sees each rank's GPU; None for its own, and for those that its machine doesn't have."""
    mine = gpus[rank]
    views: list[_View | None] = []
    for other in gpus:
        path = None
        if mine.gpu_uuid is not None and other.gpu_uuid is not None:
            path = topology.path(mine.gpu_uuid, other.gpu_uuid)
        if path is None:
            views.append(None)
            continue
        view = {"nvlinks": path.nvlinks, "nvlink_problem": path.nvlink_problem, "peer_problem": path.peer_problem}
        sliced = next((each for each in (mine, other) if each.uuid != each.gpu_uuid), None)
        if sliced is not None:  # NVIDIA's MIG guide: no peer access, over PCIe or NVLink
            view["peer_problem"] = view["nvlink_problem"] = f"{sliced.gpu_uuid} is divided into MIG slices"
        views.append(view)
    return views


def _objection(
    gpus: Sequence[RankGpu], views: Sequence[Sequence[_View | None]], problem: str, slices: str, joint: str
) -> str | None:
    """Returns the first pair of devices of the group that fails the check, in words, or None.

    `problem`: the entry of a view that says so; `slices`: what slices of one GPU lack; `joint`: goes before a problem.
    """
    for rank, gpu in enumerate(gpus):
        if gpu.gpu_uuid is None:
            return f"rank {rank} has no GPU: {gpu.problem}"
    for rank, other in permutations(range(len(gpus)), 2):
        one, two, view = gpus[rank], gpus[other], views[rank][other]
        if one.gpu_uuid == two.gpu_uuid:
            if one.uuid is None or one.uuid != two.uuid:
                return f"ranks {rank} and {other} have slices of one GPU, which {slices}"
        elif view is None:
            return f"rank {rank} doesn't see the GPU of rank {other}: another host or container"
        elif view[problem] is not None:
            return f"from the GPU of rank {rank} to that of rank {other}{joint}{view[problem]}"
    return None


def exchange_facts(context: GroupContext, mine: Any, operation: str) -> list[Any]:
    """Returns every rank's facts, as JSON has them, in rank order; every rank of the group calls it.

    Raises PeerDiedError, CollectiveTimeoutError, CommunicationError.
    """
    return [json.loads(each) for each in context.gather(json.dumps(mine).encode(), operation)]


def find_shared_gpus(context: GroupContext, uuid: str | None) -> dict[str, list[int]]:
    """Returns UUIDs of the GPUs that several ranks of the group use -> their global ranks.

    Every rank of the group calls it with its own GPU's UUID, None for one that has none.
    """
    users: dict[str | None, list[int]] = defaultdict(list)
    for rank, each in zip(context.ranks, exchange_facts(context, uuid, "comparison of GPUs"), strict=True):
        users[each].append(rank)
    return {gpu: ranks for gpu, ranks in users.items() if gpu and len(ranks) > 1}


def shared_gpu_warning(context: GroupContext, shared: dict[str, list[int]]) -> str:
    which = "; ".join(f"global ranks {format_ranks(ranks)} share GPU {gpu}" for gpu, ranks in shared.items())
    return (
        f"{which} in group {context.name!r}: they take turns on it, and NCCL refuses them unless it is told otherwise "
        "(from 2.30.3 on by NCCL_MULTI_RANK_GPU_ENABLE=1). Give each rank its own, with "
        "torch.cuda.set_device(local_rank) or CUDA_VISIBLE_DEVICES, or use fewer ranks"
    )


VISIBLE = "CUDA_VISIBLE_DEVICES"


def nccl_variables(rank: int, version: int) -> dict[str, str]:
    """Returns what NCCL of a version (as NCCL_VERSION_CODE) must be told by a rank that shares its GPU.

    One block of threads for each kernel: those of all ranks have to fit on the GPU together.
    """
    if version >= nccl_library.MULTI_RANK_GPU:
        return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "1"}
    return {
        "NCCL_HOSTID": f"{socket.gethostname()}-rank-{rank}",  # ranks of other hosts have the same numbers
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_MAX_CTAS": "1",
    }


def describe_sharing(version: int) -> str:
    """Returns how ranks share a GPU with a version of NCCL, in words."""
    if version >= nccl_library.MULTI_RANK_GPU:
        return "NCCL_MULTI_RANK_GPU_ENABLE=1"
    return "a NCCL_HOSTID for each rank, over sockets of the loopback interface"


def own_gpu(rank: int, gpus: int, environ: Mapping[str, str] | None = None) -> str:
    """Returns CUDA_VISIBLE_DEVICES for a rank that sees its GPU alone: in turns over those visible now."""
    visible = [each.strip() for each in (os.environ if environ is None else environ).get(VISIBLE, "").split(",")]
    visible = [each for each in visible if each]
    return visible[rank % gpus] if len(visible) >= gpus else str(rank % gpus)


def variables_of(
    rank: int, ranks: int, gpus: int, version: int, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Returns a rank's variables on a host with `gpus`; `version` is NCCL's. Empty if each has a GPU of its own."""
    if ranks <= gpus:
        return {}
    return {VISIBLE: own_gpu(rank, gpus, environ), settings.SHARE_GPUS.name: "on", **nccl_variables(rank, version)}


def share_gpus(
    rank: int, ranks: int, gpus: int, version: int, environ: MutableMapping[str, str] | None = None
) -> dict[str, str]:
    """Sets `variables_of` in this process, where it is not too late: before CUDA or NCCL start. Returns what it set.

    What somebody has set for NCCL stays.
    """
    env = os.environ if environ is None else environ
    found = variables_of(rank, ranks, gpus, version, env)
    written = {name: value for name, value in found.items() if name == VISIBLE or not env.get(name)}
    env.update(written)
    return written
