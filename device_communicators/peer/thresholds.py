"""Decides if a group uses the kernels in peer memory, and up to which size: a table by GPU and ranks.

The table is data: `python -m parallel_state tune` measures a node and writes the user's rows;
PARALLEL_STATE_PEER_MEMORY_TABLE puts another file in their place. The package brings no rows.

A row counts for `auto` where it was measured under the very conditions that the group finds: GPU architecture, number
of ranks, a GPU for each, kind of link, versions of driver, NCCL and torch. Rows of ranks that shared a GPU are evidence
and never count: no byte went over a link. What a measured row switches on is still proven by the group at its start.
Until there is a row, `auto` is off, and the log says once how to get one. `on` needs no measured row: without one for
the architecture it has the bounds of `cited`.

All ranks agree whether they use them, with the reason where they can't. Ranks that share a GPU are admitted: slow, but
right, as their kernels wait for each other in turns of the device.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from device_communicators.base import settings
from device_communicators.base.errors import SettingError
from device_communicators.machine.group_topology import GroupTopology, agree_on_topology, exchange_facts, uuid_of
from device_communicators.machine.topology import read_topology
from device_communicators.peer.device import PeerDevice, arch_of, versions
from device_communicators.peer.memory import NotSharedError, together
from device_communicators.routing.communicator import GroupContext

ALGORITHMS = ("push", "pull", "two_shot")
"""Of all_reduce, from small messages to large."""

FORMAT = 1
_FORMER = ("symmetric", "multimem")
"""Columns of rows that 0.2.0 and earlier versions wrote; ignored."""


@dataclass(frozen=True)
class Thresholds:
    """One row: the largest message in bytes for each algorithm and operation; 0: never."""

    arch: str
    """CUDA's compute capability, as `9.0`."""
    world_size: int
    push: int
    pull: int
    two_shot: int
    all_gather: int
    """Of a rank's input."""
    all_gather_push: int
    """Up to here by push, then by pull; likewise below."""
    reduce_scatter: int
    """Of a rank's output."""
    reduce_scatter_push: int
    fused: int
    """all_reduce_add_rms_norm in one kernel, which pushes; beyond it an all_reduce and a norm."""
    measured: bool
    source: str
    # The conditions of a measurement, as `Conditions`; empty where the figures are cited.
    one_gpu_each: bool = False
    link: str = ""
    driver: str = ""
    nccl: str = ""
    torch: str = ""
    proven_calls: int = 0
    """Calls with random delays, each checked, after which the row was written."""
    own_nccl: bool = False
    """True if NCCL communicators of our own were faster than torch's."""

    def algorithm(self, size_bytes: int) -> str | None:
        """Returns the algorithm that all-reduces a message; None if it is too large for all."""
        return next((name for name in ALGORITHMS if size_bytes <= getattr(self, name)), None)

    def most(self) -> int:
        """Returns the largest message that is all-reduced here."""
        return max(getattr(self, name) for name in ALGORITHMS)

    def __str__(self) -> str:
        bounds = ", ".join(f"{name} to {_text(getattr(self, name))}" for name in ALGORITHMS if getattr(self, name))
        return f"{bounds or 'nothing'} ({'measured' if self.measured else 'cited, not measured here'})"


@dataclass(frozen=True)
class Table:
    """The rows of one file."""

    rows: tuple[Thresholds, ...]
    path: Path
    digest: str
    """Of its content: ranks with different tables would choose differently."""

    def find(self, arch: str, world_size: int) -> Thresholds | None:
        """Returns the row for so many ranks, or for the next larger number, whose bounds are lower."""
        rows = [row for row in self.rows if row.arch == arch and row.world_size >= world_size]
        return min(rows, key=lambda row: row.world_size, default=None)


def load(path: Path | None = None) -> Table:
    """Loads the table at `path`. The default is that of PARALLEL_STATE_PEER_MEMORY_TABLE, else the user's rows without
    those of shared GPUs. Without either the table is empty.

    Raises SettingError where it can't be read or isn't such a table.
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
        facts = json.loads(text)
        if facts["format"] != FORMAT:
            raise ValueError(f"format {facts['format']}")
        rows = tuple(_row(each) for each in facts["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(
            f"{settings.PEER_MEMORY_TABLE.name} must name a table of thresholds of format {FORMAT}, but {path} is none "
            f"({type(error).__name__}: {error}); a tuning writes one; unset the variable, or remove the file"
        ) from error
    return Table(rows, path, hashlib.sha256(text.encode()).hexdigest()[:16])


_CITED = ((2, 2 << 20, 2 << 20), (4, 512 << 10, 2 << 20), (6, 256 << 10, 512 << 10), (8, 256 << 10, 256 << 10))
"""The largest number of ranks of a row, and its bounds of pull and of two_shot."""


def cited(arch: str, world_size: int) -> Thresholds | None:
    """Returns bounds from other libraries, for `on` without a measured row; None for more than 8 ranks.

    MSCCL++ pushes up to 16 KiB (algorithm_selector.cpp). vLLM pulls on 2 ranks, below 512 KiB on 4 and below 256 KiB on
    8 (csrc/custom_all_reduce.cuh). The bound of two_shot is the least that vLLM has for any architecture
    (all_reduce_utils.py at b250ac3dd5ef, CUSTOM_ALL_REDUCE_MAX_SIZES). all_gather and reduce_scatter move as many bytes
    as a pull. The fused kernel pushes twice the bytes to every rank: at most 1 MiB is a guess.
    """
    for ranks, pull, two_shot in _CITED:
        if world_size <= ranks:
            return Thresholds(
                arch, world_size, 16 << 10, pull, two_shot, all_gather=pull, all_gather_push=16 << 10,
                reduce_scatter=pull, reduce_scatter_push=16 << 10, fused=min(pull, 1 << 20), measured=False,
                source="vLLM and MSCCL++",
            )  # fmt: skip
    return None


def user_path() -> Path:
    """Returns where the user's own rows are, if there are any."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base) / "parallel_state" / "measured.json"


def dump(rows: list[Thresholds], path: Path, origin: str) -> None:
    """Writes a table that `load` reads."""
    lines = [json.dumps({field.name: getattr(row, field.name) for field in fields(row)}) for row in rows]
    body = ",\n    ".join(lines)
    path.write_text(
        f'{{\n  "format": {FORMAT},\n  "origin": {json.dumps(origin)},\n  "rows": [\n    {body}\n  ]\n}}\n',
        encoding="utf-8",
    )


def _row(facts: dict[str, Any]) -> Thresholds:
    row = Thresholds(**{name: value for name, value in facts.items() if name not in _FORMER})
    for field in fields(row):
        value = getattr(row, field.name)
        if type(value).__name__ != field.type or (isinstance(value, int) and value < 0):
            raise ValueError(f"{field.name} is {value!r}")
    return row


def _text(size_bytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:g} {name}"
    return f"{size_bytes} B"


logger = logging.getLogger("parallel_state")

HOW = "`python -m parallel_state tune` measures this machine, proves the kernels on it and writes the user's row"


@dataclass(frozen=True)
class Conditions:
    """The conditions of a measurement."""

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


def link_of(topology: GroupTopology) -> str:
    """Returns NV18 and the like where NVLink connects all GPUs, by the fewest links between two; none or PCIe else."""
    if len(topology.sharers(0)) == len(topology.gpus) > 1:
        return "none"
    if not topology.nvlink_full_mesh:
        return "PCIe"
    return f"NV{'?' if topology.fewest_nvlinks is None else topology.fewest_nvlinks}"


def conditions_of(arch: str, topology: GroupTopology, facts: dict[str, str]) -> Conditions:
    return Conditions(arch, len(topology.gpus), not topology.shared_gpus, link_of(topology), **facts)


def covering(rows: Sequence[Thresholds], conditions: Conditions) -> Thresholds | None:
    """Returns the row that was measured, and proven, under these conditions."""
    wanted = asdict(conditions).items()
    for row in rows:
        if _counts(row) and all(getattr(row, name) == value for name, value in wanted):
            return row
    return None


def _counts(row: Thresholds) -> bool:
    return row.measured and row.one_gpu_each and row.proven_calls > 0


def auto_refusal(conditions: Conditions | None, setting: str) -> str:
    """Says why `auto` is off."""
    where = "this machine" if conditions is None else str(conditions)
    return f"{setting} is auto, and no measured row covers {where}: {HOW}"


def local_refusal(context: GroupContext, setting: str) -> str | None:
    """Returns why `auto` is off by what this rank knows alone, or None where the group has to look together.

    Asks nothing of the driver unless a measured row has this number of ranks.
    """
    try:
        rows = [row for row in load().rows if _counts(row) and row.world_size == context.size]
    except SettingError as error:
        return str(error)
    if not rows:
        return auto_refusal(None, setting)
    facts = {"arch": arch_of(context.device), **versions()}
    if any(all(getattr(row, name) == value for name, value in facts.items()) for row in rows):
        return None
    return auto_refusal(None, setting)


def agreed_row(context: GroupContext, setting: str) -> Thresholds | str:
    """Returns the row that covers the group, or why there is none: the same on all ranks, each of which calls it."""
    table, arch, here = load(), arch_of(context.device), versions()
    facts = exchange_facts(context, {"arch": arch, "table": table.digest, **here}, "measured rows")
    difference = _difference(facts)
    if difference is not None:
        return f"{setting} is auto, and {difference}"
    found = conditions_of(arch, agree_on_topology(context, read_topology(), uuid_of(context.device)), here)
    return covering(table.rows, found) or auto_refusal(found, setting)


def _difference(facts: Sequence[dict[str, Any]]) -> str | None:
    """Returns the first fact that isn't the same on all ranks, in words, or None."""
    for rank, each in enumerate(facts):
        for name, value in facts[0].items():
            if each.get(name) != value:
                return f"{name} is {value} on rank 0, but {each.get(name)} on rank {rank}"
    return None


@functools.cache
def warn_once(setting: str) -> None:
    """Tells the user of an NVIDIA machine what measuring would give."""
    logger.warning(
        "this machine's GPUs go by torch's NCCL, since no measured row covers them: %s (%s=off: no such line)",
        HOW, setting,
    )  # fmt: skip


@dataclass(frozen=True)
class Admission:
    """The agreement of all ranks."""

    thresholds: Thresholds
    pinned: str | None
    """The algorithm for every size; None: by size."""
    topology: GroupTopology


def agree(
    context: GroupContext, device: PeerDevice, thresholds: Thresholds | None = None, *, is_auto: bool = False
) -> Admission:
    """Agrees on the kernels' use; every rank calls it. `thresholds`: instead of the table's, to measure them.
    `is_auto`: only a row that was measured under this group's conditions will do.

    Raises NotSharedError with the same reason on all ranks; CommunicationError where they can't tell each other.
    """
    tables: list[Table] = []
    facts = together(context, "peer memory", lambda: _facts(device, tables, is_auto))
    difference = _difference(facts)
    if difference is not None:
        raise NotSharedError(difference)
    arch = facts[0]["GPU architecture"]
    thresholds = thresholds or tables[0].find(arch, context.size) or cited(arch, context.size)
    if thresholds is None:
        raise NotSharedError(f"no thresholds are known for {context.size} ranks: {HOW}")
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
    """Returns what must be the same on every rank, by the name under which a difference is reported."""
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
