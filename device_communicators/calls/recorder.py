"""Records the last operations of each group."""

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
"""Operations whose tensors can have different shapes on different ranks."""
PAIRS = ("send", "recv", "isend", "irecv_", "send_message", "recv_message", "send_list", "recv_list")
"""Operations between two ranks. Their records have the sequence number of the group's last collective."""


@dataclass(slots=True)
class Operation:
    sequence: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    started_s: float
    """Time on the host's monotonic clock. For ops in C++ the error is up to some milliseconds."""
    ended_s: float | None = None
    site: str = ""
    """`file:line` of the caller in debug mode, otherwise empty."""
    call_text: str = ""
    peer: int = -1
    """The peer's rank in the group; -1 for a collective."""
    key: int = 0
    """See `UserCall.key`."""

    @property
    def call(self) -> str:
        if self.call_text or not self.dtype:
            return self.call_text or self.name
        alike = self.name not in NOT_ALIKE_SHAPES
        return f"{self.name} of {f'{list(self.shape)} ' if alike else ''}{self.dtype}"

    def __str__(self) -> str:
        what = f" of {list(self.shape)} {self.dtype}" if self.dtype else ""
        return f"{self.name} number {self.sequence}{what}{f' at {self.site}' if self.site else ''}"


def write(folder: Path, rank: int, groups: list[dict[str, Any]], control: Iterable[bytes] = ()) -> Path:
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
