"""Finds the GPUs of a group's ranks and how these GPUs are connected. The result is the same on every rank.

NCCL before 2.30.3 lets ranks share a GPU only if they appear to be on different hosts.
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


@dataclass(frozen=True)
class Vote:
    """A property of the group (`holds`), and the reason why it holds or not. Equal on all ranks."""

    holds: bool
    reason: str

    def __bool__(self) -> bool:
        return self.holds


@dataclass(frozen=True)
class RankGpu:
    uuid: str | None
    """The GPU's UUID; None if the rank has no GPU or the GPU is in MIG mode."""
    problem: str | None


@dataclass(frozen=True)
class GroupTopology:
    gpus: tuple[RankGpu, ...]
    shared_gpus: tuple[tuple[int, ...], ...]
    fewest_nvlinks: int | None
    """Smallest known number of NVLinks between two GPUs, or None."""
    nvlink_full_mesh: Vote
    """The property that NVLink connects all ranks' GPUs. Ranks on the same GPU count as connected."""
    peer_access: Vote

    def sharers(self, rank: int) -> tuple[int, ...]:
        return next((ranks for ranks in self.shared_gpus if rank in ranks), ())


def uuid_of(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def agree_on_topology(context: GroupContext, topology: Topology, uuid: str | None) -> GroupTopology:
    """Combines what each rank's driver reports. Every rank of the group calls this. `topology`: of this machine.
    `uuid`: this rank's GPU, from `uuid_of(device)` or from NVML; None without a GPU.
    """
    gpus = [RankGpu(**each) for each in exchange_facts(context, _own_gpu(topology, uuid), "topology")]
    views: list[list[_View | None]] = exchange_facts(context, _views_of(context.rank, gpus, topology), "topology")
    # Depends only on data of all ranks, so the result is the same on every rank.
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
    mine, facts = gpus[rank].uuid, ("nvlinks", "nvlink_problem", "peer_problem")
    paths = (topology.path(mine, other.uuid) if mine and other.uuid else None for other in gpus)
    return [None if path is None else {fact: getattr(path, fact) for fact in facts} for path in paths]


def _objection(
    gpus: Sequence[RankGpu], views: Sequence[Sequence[_View | None]], problem: str, joint: str
) -> str | None:
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
    """All-gathers the JSON value `mine`. Returns the values by rank. Every rank calls this. `operation`: name for
    errors.
    """
    return [json.loads(each) for each in context.gather(json.dumps(mine).encode(), operation)]


def find_shared_gpus(context: GroupContext, uuid: str | None) -> dict[str, list[int]]:
    """Returns the GPUs that several ranks use: UUID -> global ranks. `uuid`: this rank's GPU. Every rank calls this."""
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
    """Returns environment variables with which NCCL of this `version` lets ranks share a GPU. `rank`: this rank's
    number on its host.

    Each kernel gets one thread block (CTA), because all ranks' kernels must fit on the GPU together.
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
    if version >= nccl_library.MULTI_RANK_GPU:
        return "NCCL_MULTI_RANK_GPU_ENABLE=1"
    return "a NCCL_HOSTID for each rank, over sockets of the loopback interface"


def own_gpu(rank: int, gpus: int, environ: Mapping[str, str] | None = None) -> str:
    text = (os.environ if environ is None else environ).get(VISIBLE, "")
    visible = [each.strip() for each in text.split(",") if each.strip()]
    return visible[rank % gpus] if len(visible) >= gpus else str(rank % gpus)


def variables_of(
    rank: int, ranks: int, gpus: int, version: int, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Returns the environment variables that rank `rank` of a host needs if its `ranks` ranks share `gpus` GPUs, or {}
    if there are enough GPUs. `version`: NCCL's version.
    """
    if ranks <= gpus:
        return {}
    return {VISIBLE: own_gpu(rank, gpus, environ), settings.SHARE_GPUS.name: "on", **nccl_variables(rank, version)}


def share_gpus(
    rank: int, ranks: int, gpus: int, version: int, environ: MutableMapping[str, str] | None = None
) -> dict[str, str]:
    """Lets ranks share GPUs: sets the variables that `variables_of` returns, except those that already have a value;
    CUDA_VISIBLE_DEVICES is always set. Returns the variables that it set. `version`: NCCL's. Call this before CUDA and
    NCCL start.
    """
    env = os.environ if environ is None else environ
    found = variables_of(rank, ranks, gpus, version, env)
    written = {name: value for name, value in found.items() if name == VISIBLE or not env.get(name)}
    env.update(written)
    return written
