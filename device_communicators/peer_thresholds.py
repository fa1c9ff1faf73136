"""Up to which size the peer-memory kernels are preferred, and which of them: a table by GPU architecture and ranks.

This is preference; whether a group *can* use the kernels is `peer_admission`'s. The table is data: the package's is
`peer_thresholds.json`, whose figures are cited from other libraries and not measured here. `benchmarks/tune.py`
measures a node and writes one in the same form, which PARALLEL_STATE_PEER_MEMORY_TABLE puts in its place.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from device_communicators import settings
from device_communicators.errors import SettingError

ALGORITHMS = ("push", "pull", "two_shot")
"""Of all_reduce, from small messages to large."""

PACKAGED = Path(__file__).with_name("peer_thresholds.json")
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
    """The table at `path`; by default the one that PARALLEL_STATE_PEER_MEMORY_TABLE names, or the package's.

    Raises SettingError where it can't be read or isn't such a table.
    """
    named = settings.PEER_MEMORY_TABLE.get()
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
            f"({type(error).__name__}: {error}); benchmarks/tune.py writes one; unset the variable to use the package's"
        ) from error
    return Table(rows, path, hashlib.sha256(text.encode()).hexdigest()[:16])


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
