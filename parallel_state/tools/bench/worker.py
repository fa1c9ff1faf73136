"""What each rank of a team answers: teams are asked for a method of every rank at the same time.

prepare(values) -> list[str]     the candidates for a case, the same on every rank
check(name) -> str | None        makes one call of the candidate; returns what is wrong with its answer
run(name, calls) -> Timing       makes untimed calls that bring the ranks together, then `calls` timed ones
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


class TeamError(RuntimeError):
    """A team failed, or didn't answer in time."""


@dataclass(frozen=True)
class Timing:
    """Holds one rank's times of some calls: the time of all, or the moments at which each began or ended there.

    Moments are nanoseconds of the clock that all processes of a host share; a call lasts from the only beginning to the
    last end.
    """

    elapsed_s: float = 0.0
    starts_ns: list[int] = field(default_factory=list)
    ends_ns: list[int] = field(default_factory=list)


class WrongAnswer(str):
    """Describes a wrong answer, as `check` returns it, and counts its wrong elements."""

    elements = 0

    @classmethod
    def of(cls, elements: int, text: str) -> WrongAnswer:
        problem = cls(text)
        problem.elements = elements
        return problem


def timed(call: Callable[[], object], calls: int) -> Timing:
    """Runs and times `calls` calls without arguments, after a tenth as many untimed ones."""
    for _ in range(max(1, calls // 10)):
        call()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return Timing(elapsed_s=time.perf_counter() - started)
