"""Which way a call goes when it is made eagerly, from compiled code, or while a CUDA graph is recorded.

The table itself is `catalog`'s, a row for each communicator; here is what its entries mean, and how `explain()` prints
them. One thing is alike in all three states: which communicator carries a call depends on the call and never on the
state, so ranks that are in different states (one replays, another one records) still meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from device_communicators.errors import UnsupportedError
from device_communicators.routing.communicator import GroupContext

STATES = ("eager", "compiled", "captured")


class Paths(NamedTuple):
    """How a communicator is reached in each state, in a few words."""

    eager: str
    compiled: str
    captured: str | None
    """None for what the host does: a replay would not do it, so it is refused while a graph is recorded."""


_HOST = "not recordable: the host does it"

OP = Paths("registered op, Python", "the same op", None)
"""CPU tensors, unless a row says otherwise."""


def table(paths: Mapping[str, Paths]) -> list[str]:
    """Lines: a communicator in each, a state in each column."""
    rows = [("", *STATES)]
    rows += [(name, one.eager, one.compiled, one.captured or _HOST) for name, one in paths.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def is_capturing(context: GroupContext) -> bool:
    """Whether this thread records a CUDA graph on the group's device now."""
    return context.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_recordable(context: GroupContext, operation: str) -> None:
    """`operation` is done by the host: once, while a graph is recorded, and by no replay. UnsupportedError then."""
    if is_capturing(context):
        raise UnsupportedError(
            f"{operation} on {context} is done by the host and can't be recorded in a CUDA graph: a replay would not "
            "do it. Call it before or after the capture"
        )
