"""Calls the program's hooks after operations and failures, and measures operations."""

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
    """A completed operation of a group on this rank."""

    group: str
    ranks: tuple[int, ...]
    """Global ranks."""
    rank: int
    """Global rank."""
    operation: str
    sequence: int
    """Number of the collective in its group. A transfer has the number of the collective before it."""
    bytes: int
    """Size of this rank's tensor."""
    dtype: str
    shape: tuple[int, ...]
    peer: int
    """Global rank of the peer; -1 for a collective."""
    started_s: float
    """Start, by this host's monotonic clock."""
    ended_s: float


@dataclass(frozen=True)
class FailureEvent:
    """The first failure of a group on this rank."""

    group: str
    ranks: tuple[int, ...]
    rank: int
    """Global rank."""
    error: CommunicationError
    at_s: float = field(default_factory=time.monotonic)
    """Time of the failure, by this host's monotonic clock."""


ON_OPERATION: list[Callable[[OperationEvent], object]] = []
PYTHON_ONLY: list[Callable[[OperationEvent], object]] = []
"""Hooks that aren't called for operations in C++. Hooks in ON_OPERATION instead make every operation run in Python."""
IN_PROFILER: list[bool] = []
"""Not empty while torch's profiler records this library's operations."""
ON_FAILURE: list[Callable[[FailureEvent], object]] = []


def profiled(
    carry: Callable[..., Any], context: GroupContext, operation: str, tensor: torch.Tensor | None
) -> Callable[..., Any]:
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
    _call((*ON_OPERATION, *PYTHON_ONLY), event, "on_operation")


def notify_failure(context: GroupContext, error: CommunicationError) -> None:
    event = FailureEvent(context.name, context.ranks, context.global_rank, error)
    _call(tuple(ON_FAILURE), event, "on_failure")


def _call(hooks: tuple[Callable[[Any], object], ...], event: OperationEvent | FailureEvent, adder: str) -> None:
    for hook in hooks:
        try:
            hook(event)
        except Exception:
            logger.exception("hook %r of %s failed", hook, adder)


class _Meters:
    def __init__(self) -> None:
        self.is_on = False
        self.took_s: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))

    def note(self, event: OperationEvent) -> None:
        self.took_s[event.group][event.operation] += event.ended_s - event.started_s


METERS = _Meters()


def measure(on: bool) -> None:
    if on and not METERS.is_on:
        PYTHON_ONLY.append(METERS.note)
    elif METERS.is_on and not on:
        PYTHON_ONLY.remove(METERS.note)
    METERS.is_on = on


def switch_native_meter(context: GroupContext) -> None:
    if context.collectives is not None:
        context.collectives.library.ps_measure_calls(int(METERS.is_on))
