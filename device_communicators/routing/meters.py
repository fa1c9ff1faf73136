"""The switch of this process' meters: what the calls of its groups take, and how long they wait for others.

What goes over shared memory is measured in C++, wherever it is called from (csrc/handle.h); of other ways it is known
what a call took, and not what of it was waiting. Off, as it is by default, nothing is measured.
"""

from __future__ import annotations

from collections import defaultdict

from device_communicators.routing import observers
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.observers import OperationEvent


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
        observers.OF_PYTHON.append(METERS.note)
    elif METERS.is_on and not on:
        observers.OF_PYTHON.remove(METERS.note)
    METERS.is_on = on


def tell(context: GroupContext) -> None:
    """Tells the compiled part of a group whether it measures; it is one switch for all."""
    if context.collectives is not None:
        context.collectives.library.ps_measure_calls(int(METERS.is_on))
