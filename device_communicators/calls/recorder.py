"""Records the last operations of each group, for the analysis of hangs and failures.

They are written to files on request, or when an operation fails and PARALLEL_STATE_DEBUG_DIR is set. `python -m
parallel_state debug` reads the files of all ranks. A record costs 3 µs in Python, some tens of ns in C++.
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
"""Operations in which ranks may have tensors of different shapes, or only one rank has a tensor."""
PAIRS = ("send", "recv", "isend", "irecv_", "send_message", "recv_message", "send_list", "recv_list")
"""Operations of two ranks. They have the number of the group's last collective, so that records stay comparable."""


@dataclass(slots=True)
class Operation:
    """A record of one collective or transfer of a group: its name, size, peer and times."""

    sequence: int
    """Number within its group."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    started_s: float
    """On the monotonic clock of the rank's host. Times of native ops are off by up to some milliseconds."""
    ended_s: float | None = None
    """None if it is running or has failed."""
    site: str = ""
    """`file:line` of the caller, in debug mode."""
    call_text: str = ""
    """The user's call as text, equal on all ranks."""
    peer: int = -1
    """The peer of a transfer, a rank in the group; else -1."""

    @property
    def call(self) -> str:
        """Returns the call as text. Ranks that make the same call have the same text."""
        if self.call_text or not self.dtype:
            return self.call_text or self.name
        alike = self.name not in NOT_ALIKE_SHAPES
        return f"{self.name} of {f'{list(self.shape)} ' if alike else ''}{self.dtype}"

    def __str__(self) -> str:
        what = f" of {list(self.shape)} {self.dtype}" if self.dtype else ""
        return f"{self.name} number {self.sequence}{what}{f' at {self.site}' if self.site else ''}"


def write(folder: Path, rank: int, groups: list[dict[str, Any]], control: Iterable[bytes] = ()) -> Path:
    """Writes this rank's records, and each of `control`, to files in `folder`, replacing earlier ones."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank}-{os.getpid()}.json"
    content = {"rank": rank, "pid": os.getpid(), "now_s": time.monotonic(), "groups": groups}
    made = path.with_suffix(".part")
    made.write_text(json.dumps(content, indent=1))
    made.rename(path)
    for number, record in enumerate(control):
        beside = path.with_suffix(f".{number}.control")
        beside.touch(mode=0o600)  # it contains the values of agreements
        beside.write_bytes(record)
    return path
