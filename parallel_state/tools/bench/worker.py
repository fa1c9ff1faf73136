"""Interface of a team: a method is called on all of its ranks at the same time.

prepare(values) -> list[str]     returns the candidates for a case, the same on every rank
check(name) -> str | None        makes one call of the candidate; returns the problem of its result
run(name, calls) -> Timing       makes some untimed calls, then `calls` timed ones
"""

from __future__ import annotations

from dataclasses import dataclass, field


class TeamError(RuntimeError):
    """A library's candidates failed, or didn't answer in time."""


def last_line(text: str) -> str:
    lines = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if any(map(str.isalpha, line))), "no reason was given")


@dataclass(frozen=True)
class Timing:
    """Totals, or each call's start or end in ns of the host's clock.

    Only one rank has starts; a call lasts until its last end on any rank.
    """

    elapsed_s: float = 0.0
    starts_ns: list[int] = field(default_factory=list)
    ends_ns: list[int] = field(default_factory=list)


class WrongAnswer(str):
    """`elements`: the number of wrong ones."""

    elements = 0

    @classmethod
    def of(cls, elements: int, text: str) -> WrongAnswer:
        problem = cls(text)
        problem.elements = elements
        return problem
