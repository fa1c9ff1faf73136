"""Interface of a team: a method is called on all of its ranks at the same time.

prepare(values) -> list[str]     returns the candidates for a case, the same on every rank
check(name) -> str | None        makes one call of the candidate; returns the problem of its result
run(name, calls) -> Timing       makes some untimed calls, then `calls` timed ones
"""

from __future__ import annotations

from dataclasses import dataclass, field


class TeamError(RuntimeError):
    """The candidates of one library failed, or didn't answer in time."""


def last_line(text: str) -> str:
    """Returns the last line with words, which in a traceback is the exception."""
    lines = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if any(map(str.isalpha, line))), "no reason was given")


@dataclass(frozen=True)
class Timing:
    """The times of one rank: the total of all calls, or the start or end of each call, in ns of the host's clock.

    Only one rank has starts; a call lasts from its start to its last end on any rank.
    """

    elapsed_s: float = 0.0
    starts_ns: list[int] = field(default_factory=list)
    ends_ns: list[int] = field(default_factory=list)


class WrongAnswer(str):
    """A description of a wrong result, as `check` returns it, with the number of wrong elements."""

    elements = 0

    @classmethod
    def of(cls, elements: int, text: str) -> WrongAnswer:
        problem = cls(text)
        problem.elements = elements
        return problem
