"""Hooks on each operation of a group, and on each group's first failure: users' own, and this process' meters.

Nothing is called, and nothing costs anything, while there are none. A hook that raises is logged, and no operation
fails by it.

Meters add up what the calls of groups take, and how long they wait for others. What goes over shared memory is measured
in C++, wherever it is called from (csrc/handle.h); of other ways it is known what a call took, and not what of it was
waiting.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from device_communicators.base.errors import CommunicationError
from device_communicators.calls.recorder import Operation
from device_communicators.routing.communicator import GroupContext

logger = logging.getLogger("parallel_state")


@dataclass(frozen=True)
class OperationEvent:
    """One operation of a group that has ended on this rank."""

    group: str
    ranks: tuple[int, ...]
    """Global, in group order."""
    rank: int
    """This one, global."""
    operation: str
    """The method that was called."""
    sequence: int
    """Its number in the group; of a transfer between two ranks that of the last operation of all."""
    bytes: int
    """Of this rank's tensor."""
    dtype: str
    shape: tuple[int, ...]
    peer: int
    """The other global rank of a transfer, else -1."""
    started_s: float
    """On the monotonic clock of this host."""
    ended_s: float


@dataclass(frozen=True)
class FailureEvent:
    """The first failure of a group on this rank."""

    group: str
    ranks: tuple[int, ...]
    rank: int
    """This one, global."""
    error: CommunicationError
    at_s: float = field(default_factory=time.monotonic)
    """On the monotonic clock of this host."""


ON_OPERATION: list[Callable[[OperationEvent], object]] = []
OF_PYTHON: list[Callable[[OperationEvent], object]] = []
"""Told of those operations only that come through Python; the others go on past it."""
IN_PROFILER: list[bool] = []
"""Not empty: torch's profiler is to show each operation that comes through Python, with group and bytes."""
ON_FAILURE: list[Callable[[FailureEvent], object]] = []


def profiled(
    carry: Callable[..., Any], context: GroupContext, operation: str, tensor: torch.Tensor | None
) -> Callable[..., Any]:
    """Returns `carry` as an operation that torch's profiler shows."""
    name = f"parallel_state.{operation} {context.name} {0 if tensor is None else tensor.nbytes} bytes"

    def shown(*args: Any) -> Any:
        with torch.autograd.profiler.record_function(name):
            return carry(*args)

    return shown


def notify_operation(context: GroupContext, record: Operation, tensor: torch.Tensor | None) -> None:
    event = OperationEvent(
        context.name,
        context.ranks,
        context.global_rank,
        record.call_text.partition("(")[0].partition(" of ")[0] or record.name,
        record.sequence,
        0 if tensor is None else tensor.nbytes,
        record.dtype,
        record.shape,
        context.ranks[record.peer] if record.peer >= 0 else -1,
        record.started_s,
        record.ended_s or time.monotonic(),
    )
    _call((*ON_OPERATION, *OF_PYTHON), event, "on_operation")


def notify_failure(context: GroupContext, error: CommunicationError) -> None:
    event = FailureEvent(context.name, context.ranks, context.global_rank, error)
    _call(tuple(ON_FAILURE), event, "on_failure")


def _call(hooks: tuple[Callable[[Any], object], ...], event: OperationEvent | FailureEvent, adder: str) -> None:
    for hook in hooks:
        try:
            hook(event)
        except Exception:
            logger.exception("%r, which %s was given, failed", hook, adder)


class _Meters:
    """Seconds that Python measures, by group and method."""

    def __init__(self) -> None:
        self.is_on = False
        self.took_s: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))

    def note(self, event: OperationEvent) -> None:
        self.took_s[event.group][event.operation] += event.ended_s - event.started_s


METERS = _Meters()


def measure(on: bool) -> None:
    """Begins to measure the operations of all groups of this process, or ends it. What was measured stays."""
    if on and not METERS.is_on:
        OF_PYTHON.append(METERS.note)
    elif METERS.is_on and not on:
        OF_PYTHON.remove(METERS.note)
    METERS.is_on = on


def switch_native_meter(context: GroupContext) -> None:
    """Has the compiled part of a group measure if Python does; it is one switch for all groups."""
    if context.collectives is not None:
        context.collectives.library.ps_measure_calls(int(METERS.is_on))
