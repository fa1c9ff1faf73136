"""Whether a group can use the kernels in peer memory: agreed by all its ranks, with the reason where it can't.

Up to which size they are preferred is `peer.thresholds`' business, what the ranks then make together `peer.group`'s.
Ranks that share a GPU are admitted: slow, but right, as their kernels wait for each other in turns of the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from device_communicators import settings
from device_communicators.machine.group_topology import GroupTopology
from device_communicators.peer.device import PeerDevice
from device_communicators.peer.measured import HOW, conditions_of, covering, refusal
from device_communicators.peer.memory import NotSharedError, together
from device_communicators.peer.thresholds import Table, Thresholds, load
from device_communicators.routing.communicator import GroupContext


@dataclass(frozen=True)
class Admission:
    """What all ranks agreed on."""

    thresholds: Thresholds
    pinned: str | None
    """The algorithm for every size; None: by size."""
    topology: GroupTopology


def agree(
    context: GroupContext, device: PeerDevice, thresholds: Thresholds | None = None, *, is_auto: bool = False
) -> Admission:
    """Every rank of the group calls it. `thresholds`: to be taken instead of the table's, for who measures them.
    `is_auto`: only a row that was measured under this group's conditions will do.

    Raises NotSharedError with the same reason on all ranks; CommunicationError where they can't tell each other.
    """
    tables: list[Table] = []
    told = together(context, "peer memory", lambda: _facts(device, tables, is_auto))
    for rank, each in enumerate(told):
        for name, value in told[0].items():
            if each.get(name) != value:
                raise NotSharedError(f"{name} is {value} on rank 0, but {each.get(name)} on rank {rank}")
    arch = told[0]["GPU architecture"]
    thresholds = thresholds or tables[0].find(arch, context.size)
    if thresholds is None:
        raise NotSharedError(f"no thresholds are known for {context.size} ranks on GPUs of architecture {arch}: {HOW}")
    topology = device.topology(context)
    problem = _problem(topology, context.size)
    if problem is not None:
        raise NotSharedError(problem)
    if is_auto:
        found = conditions_of(arch, topology, {name: told[0][name] for name in ("driver", "nccl", "torch")})
        row = covering(tables[0].rows, found)
        if row is None:
            raise NotSharedError(refusal(found, settings.PEER_MEMORY.name))
        thresholds = row
    algorithm = told[0][settings.PEER_MEMORY_ALGORITHM.name]
    return Admission(thresholds, None if algorithm == "auto" else algorithm, topology)


def _facts(device: PeerDevice, tables: list[Table], is_auto: bool) -> dict[str, Any]:
    """What has to be the same on every rank, by the name under which a difference is reported; and the table."""
    tables.append(load())
    return {
        "GPU architecture": device.arch(),
        settings.PEER_MEMORY_ALGORITHM.name: settings.PEER_MEMORY_ALGORITHM.get(),
        "the table of thresholds": tables[0].digest,
        settings.PEER_MEMORY.name: "auto" if is_auto else "not auto",
        **(device.versions() if is_auto else {}),
    }


def _problem(topology: GroupTopology, size: int) -> str | None:
    if not topology.peer_access:
        return f"no peer access: {topology.peer_access.reason}"
    # Over PCIe each rank's traffic to all others goes through one link, in which these kernels gain nothing.
    if size > 2 and not topology.nvlink_full_mesh:
        return f"NVLink doesn't connect all GPUs, which more than 2 ranks need: {topology.nvlink_full_mesh.reason}"
    return None
