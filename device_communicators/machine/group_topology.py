"""What the ranks of a group know of their GPUs together: the same on every rank, so communicators may decide by it.

Each rank tells its GPU and how it sees those of the others; a claim about the group holds where each of its ranks
confirms it. The exchange goes over the group's CPU group. What one machine's driver says is in `topology`, what a
trial shows in `peer_probe`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any

import torch

from device_communicators.errors import CommunicationError, plain
from device_communicators.machine.peer_probe import Pair, Probe, probe_peers
from device_communicators.machine.topology import Path, Topology
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.waiting import Watched

Told = Mapping[str, Any]
Prober = Callable[[Sequence[Pair], "str | None"], Mapping[Pair, Probe]]


@dataclass(frozen=True)
class Vote:
    """Whether a claim holds for the whole group; true or false as a condition."""

    holds: bool
    reason: str
    """What speaks against it; or what it rests on."""

    def __bool__(self) -> bool:
        return self.holds


@dataclass(frozen=True)
class RankGpu:
    """A rank's device. All None but `problem` for a rank that has no GPU."""

    uuid: str | None
    """Of the GPU, or of the slice of it; None for a slice that CUDA doesn't name."""
    gpu_uuid: str | None
    """Of the GPU."""
    pci_id: str | None
    name: str | None
    numa_node: int | None
    problem: str | None


@dataclass(frozen=True)
class GroupTopology:
    """The GPUs of a group's ranks and what connects them. Ranks are ranks in the group."""

    gpus: tuple[RankGpu, ...]
    shared_gpus: tuple[tuple[int, ...], ...]
    """Ranks that have one GPU, or slices of one, together."""
    nvlinks: tuple[tuple[int | None, ...], ...]
    """By two ranks: the NVLinks between their GPUs, 0 where there are none; None where neither rank knows."""
    nvlink_full_mesh: Vote
    """Every two GPUs of the group are connected by NVLink, directly or through switches, and nothing that the driver
    says speaks against using it. Ranks on one GPU count as connected."""
    one_fabric: Vote
    """All GPUs are in one NVLink domain that spans hosts (MNNVL), and in one clique of it."""
    peer_access: Vote
    """Every GPU can use every other's memory: the driver says so and, unless told not to try, a trial shows it."""

    def sharers(self, rank: int) -> tuple[int, ...]:
        """The ranks that use this rank's GPU, itself included; empty where it is alone."""
        return next((ranks for ranks in self.shared_gpus if rank in ranks), ())


def uuid_of(device: torch.device) -> str | None:
    """Of a CUDA device, from torch, which starts CUDA for it; None for other devices. Not run on a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def agree_on_topology(
    context: GroupContext,
    topology: Topology,
    uuid: str | None,
    *,
    probe: bool = True,
    probe_peers: Prober = probe_peers,
) -> GroupTopology:
    """Every rank of the group calls it, with its machine's topology and its own device's UUID (None: it has none).

    `uuid` is `uuid_of(device)`, or as NVML writes it. With `probe` peer access is tried where the driver reports it:
    once per pair, driver and boot (see `peer_probe`). Raises CommunicationError where the exchange fails.
    """
    me = _tell_device(topology, uuid)
    devices = exchange_facts(context, me, "topology")
    views = exchange_facts(context, _tell_views(context.rank, devices, topology, probe, probe_peers), "topology")
    return combine(devices, views, probe)


# What a rank tells.


def _tell_device(topology: Topology, uuid: str | None) -> Told:
    found = None if uuid is None else topology.find(uuid)
    if found is None:
        problem = topology.problem or ("it has no GPU" if uuid is None else f"NVML doesn't know its device {uuid}")
        return {"problem": problem}
    gpu, part = found
    fabric = gpu.fabric
    return {
        "uuid": part.uuid if part is not None else None if gpu.mig else gpu.uuid,
        "gpu_uuid": gpu.uuid,
        "pci_id": gpu.pci_id,
        "name": gpu.name,
        "numa_node": gpu.numa_node,
        "fabric": None if fabric is None else [fabric.cluster, fabric.clique],
        "fabric_problem": gpu.unknown.get("fabric", "not told") if fabric is None else fabric.problem,
    }


def _tell_views(
    rank: int, devices: Sequence[Told], topology: Topology, probe: bool, probe_peers: Prober
) -> dict[str, Any]:
    """How this rank sees the others' GPUs, by rank; those that its machine doesn't have are missing."""
    mine: str | None = devices[rank].get("gpu_uuid")
    views: dict[str, Any] = {}
    tried: dict[str, Pair] = {}
    for other, device in enumerate(devices):
        if mine is None or device.get("gpu_uuid") is None:
            continue
        path = topology.path(mine, device["gpu_uuid"])
        if path is None:
            continue
        sliced = next((each for each in (devices[rank], device) if each["uuid"] != each["gpu_uuid"]), None)
        views[str(other)] = view = _view(path)
        if sliced is not None:  # NVIDIA's MIG guide: no peer access, over PCIe or NVLink
            view["peer_problem"] = view["nvlink_problem"] = f"{sliced['gpu_uuid']} is divided into MIG slices"
        elif probe and view["peer_problem"] is None:
            tried[str(other)] = (mine, device["gpu_uuid"])
    results = probe_peers(list(dict.fromkeys(tried.values())), topology.driver_version) if tried else {}
    for name, pair in tried.items():
        result = results[pair]
        if not result.works:
            verdict = "a trial shows that it doesn't work" if result.works is False else "it couldn't be tried"
            views[name]["peer_problem"] = f"the driver reports peer access, but {verdict}: {result.reason}"
    return views


def _view(path: Path) -> dict[str, Any]:
    return {"nvlinks": path.nvlinks, "nvlink_problem": path.nvlink_problem, "peer_problem": path.peer_problem}


# What the group makes of it.


def combine(devices: Sequence[Told], views: Sequence[Told], probed: bool) -> GroupTopology:
    """From what each rank told: a function of that alone, so it gives the same on every rank."""
    size = len(devices)
    gpus = tuple(
        RankGpu(*(told.get(name) for name in ("uuid", "gpu_uuid", "pci_id", "name", "numa_node", "problem")))
        for told in devices
    )
    users: dict[str, list[int]] = defaultdict(list)
    for rank, gpu in enumerate(gpus):
        if gpu.gpu_uuid is not None:
            users[gpu.gpu_uuid].append(rank)
    return GroupTopology(
        gpus,
        tuple(tuple(ranks) for ranks in users.values() if len(ranks) > 1),
        tuple(tuple(_nvlinks(views, rank, other) for other in range(size)) for rank in range(size)),
        _vote_on_mesh(gpus, views),
        _vote_on_fabric(gpus, devices),
        _vote_on_peers(gpus, views, probed),
    )


def _nvlinks(views: Sequence[Told], rank: int, other: int) -> int | None:
    told = [_seen(views, *pair, "nvlinks") for pair in ((rank, other), (other, rank))]
    return min((number for number in told if number is not None), default=None)


def _seen(views: Sequence[Told], rank: int, other: int, what: str) -> Any:
    return views[rank].get(str(other), {}).get(what)


def _same_device(gpus: Sequence[RankGpu], rank: int, other: int) -> bool:
    return gpus[rank].uuid is not None and gpus[rank].uuid == gpus[other].uuid


def _no_gpu(gpus: Sequence[RankGpu]) -> Vote | None:
    for rank, gpu in enumerate(gpus):
        if gpu.gpu_uuid is None:
            return Vote(False, f"rank {rank} has no GPU: {gpu.problem}")
    return None


def _vote_on_mesh(gpus: Sequence[RankGpu], views: Sequence[Told]) -> Vote:
    if (vote := _no_gpu(gpus)) is not None:
        return vote
    fewest = None
    for rank, other in combinations(range(len(gpus)), 2):
        if gpus[rank].gpu_uuid == gpus[other].gpu_uuid:
            if not _same_device(gpus, rank, other):
                return Vote(False, f"ranks {rank} and {other} have slices of one GPU, which NVLink doesn't connect")
            continue
        for pair in ((rank, other), (other, rank)):
            if str(pair[1]) not in views[pair[0]]:
                return Vote(False, f"rank {pair[0]} doesn't see the GPU of rank {pair[1]}: another host or container")
            if (problem := _seen(views, *pair, "nvlink_problem")) is not None:
                return Vote(False, f"from the GPU of rank {pair[0]} to that of rank {pair[1]} {problem}")
        links = _nvlinks(views, rank, other)
        fewest = links if fewest is None or links is None else min(fewest, links)
    return Vote(True, "there is one GPU" if fewest is None else f"{fewest} or more NVLinks between any two")


def _vote_on_fabric(gpus: Sequence[RankGpu], devices: Sequence[Told]) -> Vote:
    if (vote := _no_gpu(gpus)) is not None:
        return vote
    for rank, device in enumerate(devices):
        if device["fabric_problem"] is not None:
            return Vote(False, f"rank {rank}: {device['fabric_problem']}")
        if device["fabric"] != devices[0]["fabric"]:
            one, two = (" clique ".join(map(str, each["fabric"])) for each in (devices[0], device))
            return Vote(False, f"rank 0 is in the NVLink domain {one}, rank {rank} in {two}")
    return Vote(True, "all are in the NVLink domain {} clique {}".format(*devices[0]["fabric"]))


def _vote_on_peers(gpus: Sequence[RankGpu], views: Sequence[Told], probed: bool) -> Vote:
    if (vote := _no_gpu(gpus)) is not None:
        return vote
    for rank, other in permutations(range(len(gpus)), 2):
        if _same_device(gpus, rank, other):
            continue  # one's own memory
        if gpus[rank].gpu_uuid == gpus[other].gpu_uuid:
            return Vote(False, f"ranks {rank} and {other} have slices of one GPU, which have no peer access")
        if str(other) not in views[rank]:
            return Vote(False, f"rank {rank} doesn't see the GPU of rank {other}: another host or container")
        if (problem := _seen(views, rank, other, "peer_problem")) is not None:
            return Vote(False, f"from the GPU of rank {rank} to that of rank {other}: {problem}")
    return Vote(True, "the driver reports it" + (", and it came back right when tried" if probed else "; not tried"))


def exchange_facts(context: GroupContext, mine: Told, operation: str) -> list[dict[str, Any]]:
    """Every rank's facts, as JSON has them, in rank order; every rank of the group calls it.

    Raises PeerDiedError, CollectiveTimeoutError, CommunicationError.
    """
    text = json.dumps(mine).encode()
    if context.size == 1:
        return [json.loads(text)]
    lengths = _gather(context, torch.tensor([len(text)]), operation).tolist()
    padded = torch.frombuffer(bytearray(text.ljust(max(lengths))), dtype=torch.uint8)
    rows = _gather(context, padded, operation).view(context.size, -1)
    return [json.loads(bytes(row.tolist())) for row in rows]


def _gather(context: GroupContext, mine: torch.Tensor, operation: str) -> torch.Tensor:
    out = mine.new_empty(context.size * mine.numel())
    try:
        Watched(context.cpu_group._allgather_base(out, mine), context, operation).wait()
    except RuntimeError as error:
        if isinstance(error, CommunicationError):
            raise
        raise CommunicationError(
            f"the ranks of {context} could not tell each other their facts ({operation}): "
            f"{plain(error)}. Look for the first rank that failed",
            group=context.name,
            operation=operation,
            rank=context.rank,
            timeout_s=context.timeout_s,
        ) from error
    return out
