"""Defines the methods of a team: the processes that measure one library.

A case is an operation and a size; a candidate is one of the library's ways to run a case. Each method is called on all
ranks of the team at the same time:

prepare(values) -> list[str]     returns the candidates for a case (`values`), the same on every rank
check(name) -> str | None        makes one call of the candidate; returns the result's problem, or None
run(name, calls) -> Timing       makes some untimed calls, then `calls` timed calls
"""

from __future__ import annotations

from dataclasses import dataclass, field


class TeamError(RuntimeError):
    """A team (the processes that measure one library) failed, or didn't answer in time."""


def last_line(text: str) -> str:
    lines = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if any(map(str.isalpha, line))), "no reason was given")


@dataclass(frozen=True)
class Timing:
    """The times of one rank's calls."""

    elapsed_s: float = 0.0
    """Duration of all calls together, for collectives. Messages have the next fields instead."""
    starts_ns: list[int] = field(default_factory=list)
    """On the sender: when each send began, by the host's clock."""
    ends_ns: list[int] = field(default_factory=list)
    """On a receiver: when each message was received."""


class WrongAnswer(str):
    """Describes a wrong result with `elements` wrong elements."""

    elements = 0

    @classmethod
    def of(cls, elements: int, text: str) -> WrongAnswer:
        problem = cls(text)
        problem.elements = elements
        return problem
