"""The last operations of a group, in a ring, to look at when something hangs or has failed.

Recording costs the calls that Python carries three microseconds, those that C++ carries by itself some tens of
nanoseconds (they keep a ring of their own). Nothing is written anywhere before somebody asks, or an operation fails
while PARALLEL_STATE_DEBUG_DIR names a folder; `python -m parallel_state debug` reads what all ranks wrote there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORDS = 64
NOT_ALIKE_SHAPES = ("all_gatherv", "reduce_scatterv", "all_to_all", "gather", "scatter")
"""Operations in which ranks may hold tensors of different shapes, or only one of them holds any."""
PAIRS = ("send", "recv", "isend", "irecv_", "send_message", "recv_message", "send_list", "recv_list")
"""Operations of two ranks: they have the number of the last one of all ranks, by which records are compared."""


@dataclass(slots=True)
class Operation:
    """One operation of a group."""

    sequence: int
    """The group's how-many-th."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    started_s: float
    """On the monotonic clock of the rank's host; ops that C++ carries have some milliseconds of uncertainty."""
    ended_s: float | None = None
    """None: under way, or failed."""
    site: str = ""
    """`file:line` of the caller, in debug mode."""
    call_text: str = ""
    """The caller's call in words, equal on all ranks."""
    peer: int = -1
    """The other rank in the group, of a transfer."""

    @property
    def call(self) -> str:
        """Returns the call in words, which are equal on all ranks in this operation."""
        if self.call_text or not self.dtype:
            return self.call_text or self.name
        alike = self.name not in NOT_ALIKE_SHAPES
        return f"{self.name} of {f'{list(self.shape)} ' if alike else ''}{self.dtype}"

    def __str__(self) -> str:
        what = f" of {list(self.shape)} {self.dtype}" if self.dtype else ""
        return f"{self.name} number {self.sequence}{what}{f' at {self.site}' if self.site else ''}"


def write(folder: Path, rank: int, groups: list[dict[str, Any]], control: Iterable[bytes] = ()) -> Path:
    """Writes this process's record, and one file for each record in `control`. Replaces files of an earlier call."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank}-{os.getpid()}.json"
    content = {"rank": rank, "pid": os.getpid(), "now_s": time.monotonic(), "groups": groups}
    made = path.with_suffix(".part")
    made.write_text(json.dumps(content, indent=1))
    made.rename(path)
    for number, record in enumerate(control):
        beside = path.with_suffix(f".{number}.control")
        beside.touch(mode=0o600)  # it has the values of agreements
        beside.write_bytes(record)
    return path
