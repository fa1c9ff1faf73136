"""The GPUs of a group's ranks and how they are connected: the same result on every rank.

Each rank publishes its GPU and its view of the other ranks' GPUs. A fact about the group holds if every rank confirms
it. Drivers may report peer access that loses data, so `peer.group` tests it.

The end of this file detects ranks that share a GPU, and sets the variables that NCCL (from 2.30.3 on) needs for it
before CUDA starts. Older versions accept ranks that seem to be on different hosts, and then use slow sockets.
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
    """The ranks' common answer to a question such as "does NVLink connect every pair?"; usable as a condition."""

    holds: bool
    reason: str
    """The objection to the claim, or the evidence for it."""

    def __bool__(self) -> bool:
        return self.holds


@dataclass(frozen=True)
class RankGpu:
    """The GPU of one rank, or another device, as the rank publishes it."""

    uuid: str | None
    """UUID of the GPU; None without one, and in MIG mode."""
    problem: str | None
    """Why there is no GPU."""


@dataclass(frozen=True)
class GroupTopology:
    """The GPUs of a group's ranks, and the answers to questions about their connections."""

    gpus: tuple[RankGpu, ...]
    shared_gpus: tuple[tuple[int, ...], ...]
    """Sets of ranks that share a GPU."""
    fewest_nvlinks: int | None
    """Minimum number of NVLinks between two GPUs of the group; None if unknown for all pairs."""
    nvlink_full_mesh: Vote
    """NVLink connects every two GPUs, directly or through switches, and the driver reports no obstacle to using it.
    Ranks on one GPU count as connected."""
    peer_access: Vote
    """Every GPU can access every other GPU's memory, as each rank's driver reports it."""

    def sharers(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that share this rank's GPU, including itself; () if none do."""
        return next((ranks for ranks in self.shared_gpus if rank in ranks), ())


def uuid_of(device: torch.device) -> str | None:
    """Returns a CUDA device's UUID, and starts CUDA; None for other devices."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def agree_on_topology(context: GroupContext, topology: Topology, uuid: str | None) -> GroupTopology:
    """Returns the group's topology. Each rank calls it with its machine's topology and its GPU's UUID.

    `uuid` is `uuid_of(device)` or NVML's form. Raises CommunicationError if the exchange fails.
    """
    gpus = [RankGpu(**each) for each in exchange_facts(context, _own_gpu(topology, uuid), "topology")]
    views: list[list[_View | None]] = exchange_facts(context, _views_of(context.rank, gpus, topology), "topology")
    # The rest depends only on data of all ranks, so the result is the same on every rank.
    users: dict[str, list[int]] = defaultdict(list)
    for rank, gpu in enumerate(gpus):
        if gpu.uuid is not None:
            users[gpu.uuid].append(rank)
    numbers = [view["nvlinks"] for row in views for view in row if view is not None]
    fewest = min((number for number in numbers if number is not None), default=None)
    no_mesh = _objection(gpus, views, "nvlink_problem", " ")
    no_peers = _objection(gpus, views, "peer_problem", ": ")
    links = "there is one GPU" if fewest is None else f"{fewest} or more NVLinks between any two"
    return GroupTopology(
        tuple(gpus),
        tuple(tuple(ranks) for ranks in users.values() if len(ranks) > 1),
        fewest,
        Vote(no_mesh is None, no_mesh or links),
        Vote(no_peers is None, no_peers or "the driver reports it"),
    )


def _own_gpu(topology: Topology, uuid: str | None) -> dict[str, str | None]:
    gpu = None if uuid is None else topology.find(uuid)
    if gpu is not None and not gpu.mig:
        return {"uuid": gpu.uuid, "problem": None}
    if gpu is not None or (uuid or "").startswith("MIG-"):
        return {"uuid": None, "problem": f"{uuid} is in MIG mode, whose slices have no links and no peer access"}
    problem = topology.problem or ("it has no GPU" if uuid is None else f"NVML doesn't know its device {uuid}")
    return {"uuid": None, "problem": problem}


def _views_of(rank: int, gpus: Sequence[RankGpu], topology: Topology) -> list[_View | None]:
    """Returns this rank's view of each rank's GPU; None for its own, and for GPUs that its machine doesn't have."""
    mine, facts = gpus[rank].uuid, ("nvlinks", "nvlink_problem", "peer_problem")
    paths = (topology.path(mine, other.uuid) if mine and other.uuid else None for other in gpus)
    return [None if path is None else {fact: getattr(path, fact) for fact in facts} for path in paths]


def _objection(
    gpus: Sequence[RankGpu], views: Sequence[Sequence[_View | None]], problem: str, joint: str
) -> str | None:
    """Describes the first pair of devices that fails the check, or returns None.

    `problem`: the key of the check in a view. `joint`: separates pair and problem.
    """
    for rank, gpu in enumerate(gpus):
        if gpu.uuid is None:
            return f"rank {rank} has no GPU: {gpu.problem}"
    for rank, other in permutations(range(len(gpus)), 2):
        one, two, view = gpus[rank], gpus[other], views[rank][other]
        if one.uuid == two.uuid:
            continue
        if view is None:
            return f"rank {rank} doesn't see the GPU of rank {other}: another host or container"
        if view[problem] is not None:
            return f"from the GPU of rank {rank} to that of rank {other}{joint}{view[problem]}"
    return None


def exchange_facts(context: GroupContext, mine: Any, operation: str) -> list[Any]:
    """Returns the facts of every rank, JSON values, in rank order. Every rank of the group calls it.

    Raises PeerDiedError, CollectiveTimeoutError, CommunicationError.
    """
    return [json.loads(each) for each in context.gather(json.dumps(mine).encode(), operation)]


def find_shared_gpus(context: GroupContext, uuid: str | None) -> dict[str, list[int]]:
    """Returns UUID -> global ranks, for GPUs that several ranks of the group use.

    Every rank of the group calls it with its GPU's UUID, or None without a GPU.
    """
    users: dict[str | None, list[int]] = defaultdict(list)
    for rank, each in zip(context.ranks, exchange_facts(context, uuid, "comparison of GPUs"), strict=True):
        users[each].append(rank)
    return {gpu: ranks for gpu, ranks in users.items() if gpu and len(ranks) > 1}


def shared_gpu_warning(context: GroupContext, shared: dict[str, list[int]]) -> str:
    which = "; ".join(f"global ranks {format_ranks(ranks)} share GPU {gpu}" for gpu, ranks in shared.items())
    return (
        f"{which} in group {context.name!r}: they take turns on it, and NCCL refuses them (from 2.30.3 on unless "
        "NCCL_MULTI_RANK_GPU_ENABLE=1). Give each rank its own GPU, with torch.cuda.set_device(local_rank) or "
        "CUDA_VISIBLE_DEVICES, or use fewer ranks"
    )


VISIBLE = "CUDA_VISIBLE_DEVICES"


def nccl_variables(rank: int, version: int) -> dict[str, str]:
    """Returns the variables that NCCL needs on a rank that shares its GPU. `version`: as NCCL_VERSION_CODE.

    One thread block (CTA) per kernel, because the kernels of all ranks must fit on the GPU together.
    """
    if version >= nccl_library.MULTI_RANK_GPU:
        return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "1"}
    return {
        "NCCL_HOSTID": f"{socket.gethostname()}-rank-{rank}",  # with the host: other hosts use the same numbers
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_MAX_CTAS": "1",
    }


def describe_sharing(version: int) -> str:
    """Describes how ranks share a GPU with a version of NCCL."""
    if version >= nccl_library.MULTI_RANK_GPU:
        return "NCCL_MULTI_RANK_GPU_ENABLE=1"
    return "a NCCL_HOSTID for each rank, over sockets of the loopback interface"


def own_gpu(rank: int, gpus: int, environ: Mapping[str, str] | None = None) -> str:
    """Returns CUDA_VISIBLE_DEVICES with one GPU for a rank: round robin over the visible ones."""
    text = (os.environ if environ is None else environ).get(VISIBLE, "")
    visible = [each.strip() for each in text.split(",") if each.strip()]
    return visible[rank % gpus] if len(visible) >= gpus else str(rank % gpus)


def variables_of(
    rank: int, ranks: int, gpus: int, version: int, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Returns a rank's variables on a host with `gpus` GPUs; `version` is NCCL's. {} if each rank has its own GPU."""
    if ranks <= gpus:
        return {}
    return {VISIBLE: own_gpu(rank, gpus, environ), settings.SHARE_GPUS.name: "on", **nccl_variables(rank, version)}


def share_gpus(
    rank: int, ranks: int, gpus: int, version: int, environ: MutableMapping[str, str] | None = None
) -> dict[str, str]:
    """Sets `variables_of` in this process, except NCCL variables that are already set. Returns the new ones.

    Call it before CUDA and NCCL start.
    """
    env = os.environ if environ is None else environ
    found = variables_of(rank, ranks, gpus, version, env)
    written = {name: value for name, value in found.items() if name == VISIBLE or not env.get(name)}
    env.update(written)
    return written
