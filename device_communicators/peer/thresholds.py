"""Decides up to which message size a group uses kernels in peer memory, by tables of measurements."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from device_communicators.base import settings
from device_communicators.base.errors import SettingError
from device_communicators.machine.group_topology import GroupTopology, agree_on_topology, exchange_facts, uuid_of
from device_communicators.machine.topology import read_topology
from device_communicators.peer.device import PeerDevice, arch_of, versions
from device_communicators.peer.memory import NotSharedError, run_on_all_ranks
from device_communicators.routing.communicator import GroupContext

ALGORITHMS = ("push", "pull", "two_shot")
"""Algorithms for small messages are first, for large messages last."""

Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class Conditions:
    arch: str
    """Compute capability, such as `9.0`."""
    world_size: Count
    one_gpu_each: bool = False
    link: str = ""
    driver: str = ""
    nccl: str = ""
    torch: str = ""

    def __str__(self) -> str:
        gpus = "a GPU for each" if self.one_gpu_each else "shared GPUs"
        return (
            f"{self.world_size} ranks with {gpus} of architecture {self.arch} over {self.link}, driver {self.driver}, "
            f"NCCL {self.nccl}, torch {self.torch}"
        )


@dataclass(frozen=True, kw_only=True)
class Thresholds(Conditions):
    """Largest message in bytes for each all_reduce algorithm and other operation of the peer-memory kernels; 0: none.
    Valid under the base class's conditions. `own_nccl`: True if this library's NCCL communicators were faster than
    torch's. `proven_calls`: test calls that returned correct results. `source`: who measured.
    """

    push: Count
    pull: Count
    two_shot: Count
    all_gather: Count
    """Largest input of one rank, in bytes."""
    all_gather_push: Count
    """Largest input of the algorithm push, in bytes. Larger inputs use pull."""
    reduce_scatter: Count
    """Largest output of one rank, in bytes."""
    reduce_scatter_push: Count
    fused: Count
    source: str
    proven_calls: Count = 0
    own_nccl: bool = False

    def algorithm(self, size_bytes: int) -> str | None:
        return next((name for name in ALGORITHMS if size_bytes <= getattr(self, name)), None)

    def most(self) -> int:
        return max(getattr(self, name) for name in ALGORITHMS)

    def __str__(self) -> str:
        bounds = (f"{name} to {_text(getattr(self, name))}" for name in ALGORITHMS if getattr(self, name))
        return ", ".join(bounds) or "nothing"


@dataclass(frozen=True)
class Table:
    rows: tuple[Thresholds, ...]
    path: Path
    digest: str
    """Hash of the table's file. All ranks of a group must have the same table."""

    def find(self, arch: str, world_size: int) -> Thresholds | None:
        rows = [row for row in self.rows if row.arch == arch and row.world_size >= world_size]
        return min(rows, key=lambda row: row.world_size, default=None)


class _File(msgspec.Struct):
    format: Literal[1]
    rows: tuple[Thresholds, ...]
    origin: str = ""


def load(path: Path | None = None) -> Table:
    """Loads the table at `path`, by default at PARALLEL_STATE_PEER_MEMORY_TABLE. If neither is given, loads the user's
    table without rows that were measured on shared GPUs.
    """
    named = settings.PEER_MEMORY_TABLE.get()
    if path is None and named is None:
        if not user_path().exists():
            return Table((), user_path(), "none")
        own = load(user_path())
        return Table(tuple(row for row in own.rows if row.one_gpu_each), own.path, own.digest)
    path = path or Path(str(named))
    try:
        text = path.read_text()
        file = msgspec.json.decode(text, type=_File)
    except (OSError, ValueError) as error:  # ValueError: also of msgspec, and of text that isn't UTF-8
        raise SettingError(
            f"{settings.PEER_MEMORY_TABLE.name} must name a file that `python -m parallel_state tune` wrote in format "
            f"1, but {path} is no such file ({type(error).__name__}: {error}). Run that command to write a new file, "
            "unset the variable, or remove the file"
        ) from error
    return Table(file.rows, path, hashlib.sha256(text.encode()).hexdigest()[:16])


def user_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base) / "parallel_state" / "measured.json"


def dump(rows: list[Thresholds], path: Path, origin: str) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(_File(1, tuple(rows), origin))) + b"\n")


def _text(size_bytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:g} {name}"
    return f"{size_bytes} B"


logger = logging.getLogger("parallel_state")

HOW = "`python -m parallel_state tune` measures this machine, tests the kernels on it and writes the user's row"


def link_of(topology: GroupTopology) -> str:
    if len(topology.sharers(0)) == len(topology.gpus) > 1:
        return "none"
    if not topology.nvlink_full_mesh:
        return "PCIe"
    return f"NV{'?' if topology.fewest_nvlinks is None else topology.fewest_nvlinks}"


def conditions_of(arch: str, topology: GroupTopology, facts: dict[str, str]) -> Conditions:
    return Conditions(arch, len(topology.gpus), not topology.shared_gpus, link_of(topology), **facts)


def covering(rows: Sequence[Thresholds], conditions: Conditions) -> Thresholds | None:
    return next((row for row in rows if _counts(row) and _has(row, asdict(conditions))), None)


def _counts(row: Thresholds) -> bool:
    return row.one_gpu_each and row.proven_calls > 0


def _has(row: Thresholds, facts: dict[str, Any]) -> bool:
    return all(getattr(row, name) == value for name, value in facts.items())


def auto_refusal(conditions: Conditions | None, setting: str) -> str:
    where = "this machine" if conditions is None else str(conditions)
    return f"{setting} is auto, and no measured row covers {where}: {HOW}"


def local_refusal(context: GroupContext, setting: str) -> str | None:
    """Returns None if the table has measured thresholds for this rank's GPU, else the reason. `setting`: name of the
    setting whose value `auto` needs them.
    """
    try:
        rows = [row for row in load().rows if _counts(row) and row.world_size == context.size]
    except SettingError as error:
        return str(error)
    facts = {"arch": arch_of(context.device), **versions()} if rows else {}
    return None if any(_has(row, facts) for row in rows) else auto_refusal(None, setting)


def agreed_row(context: GroupContext, setting: str) -> Thresholds | str:
    """Returns the measured thresholds for the group's hardware and software, or text: why there are none. `setting`:
    name of the setting in that text. Every rank must call this.
    """
    table, arch, here = load(), arch_of(context.device), versions()
    facts = exchange_facts(context, {"arch": arch, "table": table.digest, **here}, "measured rows")
    difference = _difference(facts)
    if difference is not None:
        return f"{setting} is auto, and {difference}"
    found = conditions_of(arch, agree_on_topology(context, read_topology(), uuid_of(context.device)), here)
    return covering(table.rows, found) or auto_refusal(found, setting)


def _difference(facts: Sequence[dict[str, Any]]) -> str | None:
    for rank, each in enumerate(facts):
        for name, value in facts[0].items():
            if each.get(name) != value:
                return f"{name} is {value} on rank 0, but {each.get(name)} on rank {rank}"
    return None


@functools.cache
def warn_once(setting: str) -> None:
    logger.warning(
        "this machine's GPUs use torch's NCCL, because no measured row covers them: %s (%s=off disables this warning)",
        HOW, setting,
    )  # fmt: skip


@dataclass(frozen=True)
class Admission:
    thresholds: Thresholds
    pinned: str | None
    """The algorithm for all sizes; None: by size."""
    topology: GroupTopology


def agree(
    context: GroupContext, device: PeerDevice, thresholds: Thresholds | None = None, *, is_auto: bool = False
) -> Admission:
    """Decides which algorithm and sizes all ranks of the group use; every rank must call this. Uses `thresholds` if
    passed, else those of the table for this GPU. If `is_auto`, the row's conditions must be those of the group.
    """
    tables: list[Table] = []
    facts = run_on_all_ranks(context, "peer memory", lambda: _facts(device, tables, is_auto))
    difference = _difference(facts)
    if difference is not None:
        raise NotSharedError(difference)
    arch = facts[0]["GPU architecture"]
    thresholds = thresholds or tables[0].find(arch, context.size)
    if thresholds is None:
        raise NotSharedError(
            f"{tables[0].path} has no row for {context.size} ranks with GPUs of architecture {arch}: {HOW}"
        )
    topology = device.topology(context)
    problem = _problem(topology, context.size)
    if problem is not None:
        raise NotSharedError(problem)
    if is_auto:
        found = conditions_of(arch, topology, {name: facts[0][name] for name in ("driver", "nccl", "torch")})
        row = covering(tables[0].rows, found)
        if row is None:
            raise NotSharedError(auto_refusal(found, settings.PEER_MEMORY.name))
        thresholds = row
    algorithm = facts[0][settings.PEER_MEMORY_ALGORITHM.name]
    return Admission(thresholds, None if algorithm == "auto" else algorithm, topology)


def _facts(device: PeerDevice, tables: list[Table], is_auto: bool) -> dict[str, Any]:
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
    # Over PCIe a rank's traffic to all peers shares one link, so these kernels aren't faster.
    if size > 2 and not topology.nvlink_full_mesh:
        return f"NVLink doesn't connect all GPUs, which more than 2 ranks need: {topology.nvlink_full_mesh.reason}"
    return None
