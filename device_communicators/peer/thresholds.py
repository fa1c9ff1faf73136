"""Up to which size the peer-memory kernels are preferred, and which of them: a table by GPU architecture and ranks.

This is preference; whether a group *can* use the kernels is `peer.admission`'s. The table is data: the package's is
`thresholds.json`, whose figures are cited from other libraries and not measured here. `python -m parallel_state
tune` measures a node and writes the user's, in the same form; PARALLEL_STATE_PEER_MEMORY_TABLE puts one in their place.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from device_communicators import settings
from device_communicators.errors import SettingError

ALGORITHMS = ("push", "pull", "two_shot")
"""Of all_reduce, from small messages to large."""

PACKAGED = Path(__file__).with_name("thresholds.json")
FORMAT = 1


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
    symmetric: int
    """torch's symmetric memory, behind two_shot."""
    multimem: bool
    """Whether that goes by the switches' multicast instead of two-shot."""
    measured: bool
    source: str
    # The conditions of a measurement, as `measured.Conditions`; empty where the figures are cited.
    one_gpu_each: bool = False
    link: str = ""
    driver: str = ""
    nccl: str = ""
    torch: str = ""
    proven_calls: int = 0
    """Calls with random delays, each checked, after which the row was written."""
    own_nccl: bool = False
    """Whether NCCL communicators of our own were faster than torch's."""

    def algorithm(self, size_bytes: int) -> str | None:
        """Which one all-reduces a message; None where it is too large for all."""
        return next((name for name in ALGORITHMS if size_bytes <= getattr(self, name)), None)

    def most(self) -> int:
        """The largest message that is all-reduced here."""
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
        """The row for so many ranks; where there is none, that of the next larger number, whose bounds are lower."""
        rows = [row for row in self.rows if row.arch == arch and row.world_size >= world_size]
        return min(rows, key=lambda row: row.world_size, default=None)


def load(path: Path | None = None) -> Table:
    """The table at `path`; by default the one that PARALLEL_STATE_PEER_MEMORY_TABLE names, or the package's behind the
    user's rows, of which those of shared GPUs are left out.

    Raises SettingError where it can't be read or isn't such a table.
    """
    named = settings.PEER_MEMORY_TABLE.get()
    if path is None and named is None and user_path().exists():
        own, packaged = load(user_path()), load(PACKAGED)
        rows = tuple(row for row in own.rows if row.one_gpu_each)
        return Table((*rows, *packaged.rows), own.path, f"{own.digest}+{packaged.digest}")
    path = path or (PACKAGED if named is None else Path(named))
    try:
        text = path.read_text()
        told = json.loads(text)
        if told["format"] != FORMAT:
            raise ValueError(f"format {told['format']}")
        rows = tuple(_row(each) for each in told["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(
            f"{settings.PEER_MEMORY_TABLE.name} must name a table of thresholds of format {FORMAT}, but {path} is none "
            f"({type(error).__name__}: {error}); a tuning writes one; unset the variable, or remove the file"
        ) from error
    return Table(rows, path, hashlib.sha256(text.encode()).hexdigest()[:16])


def user_path() -> Path:
    """Returns where the user's own rows are, if there are any."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base) / "parallel_state" / "measured.json"


def dump(rows: list[Thresholds], path: Path, origin: str) -> None:
    """Writes a table that `load` reads."""
    lines = [json.dumps({field.name: getattr(row, field.name) for field in fields(row)}) for row in rows]
    body = ",\n    ".join(lines)
    path.write_text(f'{{\n  "format": {FORMAT},\n  "origin": {json.dumps(origin)},\n  "rows": [\n    {body}\n  ]\n}}\n')


def _row(told: dict[str, Any]) -> Thresholds:
    row = Thresholds(**told)
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
