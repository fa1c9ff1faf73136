"""Is this machine one that was measured? What `auto` asks before it switches on a path that is off elsewhere.

A row of the thresholds counts for `auto` where it was measured under the very conditions that the group finds: GPU
architecture, number of ranks, a GPU for each, kind of link, versions of driver, NCCL and torch. Rows of ranks that
shared a GPU are evidence and never count: no byte went over a link. What a measured row switches on is still proven by
the group at its start. Until there is a row, `auto` is off, and the log says once how to get one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import torch

from device_communicators.cuda import nccl_library
from device_communicators.errors import SettingError
from device_communicators.machine.group_topology import GroupTopology, agree_on_topology, exchange_facts, uuid_of
from device_communicators.machine.topology_reading import read_topology
from device_communicators.peer.thresholds import Thresholds, load
from device_communicators.routing.communicator import GroupContext

logger = logging.getLogger("parallel_state")

HOW = "`python -m parallel_state tune` measures this machine, proves the kernels on it and writes the user's row"


@dataclass(frozen=True)
class Conditions:
    """What a measurement holds for."""

    arch: str
    world_size: int
    one_gpu_each: bool
    link: str
    """Of `link_of`."""
    driver: str
    nccl: str
    torch: str

    def __str__(self) -> str:
        gpus = "a GPU for each" if self.one_gpu_each else "GPUs that are shared"
        return (
            f"{self.world_size} ranks with {gpus} of architecture {self.arch} over {self.link}, driver {self.driver}, "
            f"NCCL {self.nccl}, torch {self.torch}"
        )


def versions() -> dict[str, str]:
    """Of what the measured times depend on besides the hardware."""
    try:
        nccl = nccl_library.version_text(nccl_library.load().version)
    except nccl_library.NcclUnavailableError:
        nccl = "none"
    return {"driver": read_topology().driver_version or "none", "nccl": nccl, "torch": torch.__version__}


def link_of(topology: GroupTopology) -> str:
    """Returns NV18 and the like where NVLink connects all GPUs, by the fewest links between two; none or PCIe else."""
    size = len(topology.gpus)
    if len(topology.sharers(0)) == size > 1:
        return "none"
    if not topology.nvlink_full_mesh:
        return "PCIe"
    links = [topology.nvlinks[one][two] for one in range(size) for two in range(size) if one != two]
    return f"NV{min((each for each in links if each is not None), default='?')}"


def conditions_of(arch: str, topology: GroupTopology, told: dict[str, str]) -> Conditions:
    return Conditions(arch, len(topology.gpus), not topology.shared_gpus, link_of(topology), **told)


def covering(rows: Sequence[Thresholds], conditions: Conditions) -> Thresholds | None:
    """Returns the row that was measured, and proven, under these conditions."""
    wanted = asdict(conditions)
    for row in rows:
        if _counts(row) and conditions.one_gpu_each and all(getattr(row, each) == wanted[each] for each in wanted):
            return row
    return None


def _counts(row: Thresholds) -> bool:
    return row.measured and row.one_gpu_each and row.proven_calls > 0


def refusal(conditions: Conditions | None, setting: str) -> str:
    """Says why `auto` is off."""
    where = "this machine" if conditions is None else str(conditions)
    return f"{setting} is auto, and no measured row covers {where}: {HOW}"


def local_refusal(context: GroupContext, setting: str) -> str | None:
    """Returns why `auto` is off by what this rank knows alone, or None where the group has to look together.

    Asks nothing of the driver unless a measured row has this number of ranks; the package's table has none.
    """
    try:
        rows = [row for row in load().rows if _counts(row) and row.world_size == context.size]
    except SettingError as error:
        return str(error)
    if not rows:
        return refusal(None, setting)
    told = {"arch": arch_of(context.device), **versions()}
    if any(all(getattr(row, name) == value for name, value in told.items()) for row in rows):
        return None
    return refusal(None, setting)


def arch_of(device: torch.device) -> str:
    """Returns the compute capability, as `9.0`. Not run on a GPU."""
    return "{}.{}".format(*torch.cuda.get_device_capability(device))


def agreed_row(context: GroupContext, setting: str) -> Thresholds | str:
    """Returns the row that covers the group, or why there is none: the same on all ranks, each of which calls it."""
    table = load()
    mine = {"arch": arch_of(context.device), "table": table.digest, **versions()}
    told = exchange_facts(context, mine, "measured rows")
    for rank, each in enumerate(told):
        for name, value in each.items():
            if value != told[0][name]:
                return f"{setting} is auto, and {name} is {told[0][name]} on rank 0, but {value} on rank {rank}"
    topology = agree_on_topology(context, read_topology(), uuid_of(context.device), probe=False)
    names = {field.name for field in fields(Conditions)}
    found = conditions_of(mine["arch"], topology, {name: mine[name] for name in mine if name in names - {"arch"}})
    return covering(table.rows, found) or refusal(found, setting)


@functools.cache
def tell_once(setting: str) -> None:
    """Tells the user of an NVIDIA machine what measuring would give."""
    logger.warning(
        "this machine's GPUs go by torch's NCCL, since no measured row covers them: %s (%s=off: no such line)",
        HOW, setting,
    )  # fmt: skip
