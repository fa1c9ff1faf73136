"""Checks each candidate (implementation), times all candidates in turns, and checks each candidate again.

A sample is the slowest rank's time per call. A case is an operation and a size. A team is the ranks that measure one
library; a candidate is one of the library's ways to run a case. Each method is called on all ranks of the team at the
same time:

prepare(values) -> list[str]     returns the candidates for a case (`values`), the same on every rank
check(name) -> str | None        makes one call of the candidate; returns the result's problem, or None
run(name, calls) -> Timing       makes some untimed calls, then `calls` timed calls
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
PING_PONG = "ping_pong"
"""Rank 0 sends a tensor to rank 1, and rank 1 sends the tensor back."""
OBJECT = "object"
"""Like PING_PONG, but the ranks send a dict that contains the tensor."""
OWN, GLOO = "parallel_state", "gloo"


class TeamError(RuntimeError):
    """The ranks that measure one library failed, or didn't answer in time."""


def last_line(text: str) -> str:
    lines = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if any(map(str.isalpha, line))), "no reason was given")


@dataclass(frozen=True)
class Timing:
    elapsed_s: float = 0.0
    """Duration of all calls together, for collectives. Messages have the next fields instead."""
    starts_ns: list[int] = field(default_factory=list)
    """On the sender: when each send began, in ns of the host's clock."""
    ends_ns: list[int] = field(default_factory=list)
    """On a receiver: when each message was received."""


class WrongAnswer(str):
    """A text that describes a wrong result, which has `elements` wrong elements."""

    elements = 0

    @classmethod
    def of(cls, elements: int, text: str) -> WrongAnswer:
        problem = cls(text)
        problem.elements = elements
        return problem


@dataclass(frozen=True)
class Plan:
    rounds: int = 30
    round_s: float = 0.005
    most_calls: int = 2000
    case_s: float = 8.0
    """Longest time for one operation with one size. Slow cases get fewer rounds, but at least 3."""


@dataclass
class Row:
    case: dict[str, Any]
    us: dict[str, list[float]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    """Candidate -> problem. A candidate with a problem has no samples."""
    calls: dict[str, int] = field(default_factory=dict)


class _Candidate(NamedTuple):
    team: Any
    name: str


def measure(teams: list[Any], case: dict[str, Any], plan: Plan) -> Row:
    """Measures all implementations for `case`, an operation and size. Removes failed libraries from `teams`."""
    row = Row(case)
    prepared = [(team, _ask(teams, row, team, "", "prepare", case) or ()) for team in list(teams)]
    candidates = [_Candidate(team, name) for team, names in prepared for name in names]
    candidates = [candidate for candidate in candidates if _is_right(teams, row, candidate)]
    durations = {}
    for candidate in candidates:
        samples = _run(teams, row, candidate, 2)
        if samples and min(samples) < 10_000:
            samples = _run(teams, row, candidate, 20)  # the first calls include the wait for other ranks
        if samples:
            call_s = min(samples) / 1e6
            row.calls[candidate.name] = max(2, min(plan.most_calls, int(plan.round_s / max(call_s, 1e-9))))
            durations[candidate.name] = call_s * row.calls[candidate.name] * 1.1 + 0.001
    rounds = max(3, min(plan.rounds, int(plan.case_s / max(sum(durations.values()), 1e-9))))
    for round_ in range(rounds):
        start = round_ % max(1, len(candidates))
        for candidate in (*candidates[start:], *candidates[:start]):
            if candidate.name not in row.wrong and candidate.name in row.calls:
                samples = _run(teams, row, candidate, row.calls[candidate.name])
                row.us.setdefault(candidate.name, []).extend(samples)
    for candidate in candidates:
        if candidate.name in row.us:
            _is_right(teams, row, candidate)
    for name in row.wrong:
        row.us.pop(name, None)
    return row


def _is_right(teams: list[Any], row: Row, candidate: _Candidate) -> bool:
    if candidate.team not in teams:
        return False
    found = _ask(teams, row, candidate.team, candidate.name, "check", candidate.name)
    problems = [problem for problem in found or () if problem is not None]
    if problems:
        row.wrong[candidate.name] = problems[0]
        print(f"WRONG: {candidate.name}: {problems[0]}", file=sys.stderr)
    return found is not None and not problems


def _run(teams: list[Any], row: Row, candidate: _Candidate, calls: int) -> list[float]:
    timings = _ask(teams, row, candidate.team, candidate.name, "run", candidate.name, calls)
    return [] if timings is None else samples_us(timings, calls)


def _ask(teams: list[Any], row: Row, team: Any, name: str, method: str, *arguments: Any) -> list[Any] | None:
    if team not in teams:
        return None
    try:
        answers = team.ask(method, *arguments)
    except TeamError as error:
        teams.remove(team)  # its ranks may be at different calls
        row.wrong[name or team.name] = str(error)
        reason = last_line(str(error)).removeprefix(f"{team.name}: ")
        print(f"left out from now on: {team.name}: {reason}", file=sys.stderr)
        return None
    return list(answers[0]) if method == "prepare" else answers


def samples_us(timings: Sequence[Timing], calls: int) -> list[float]:
    starts = [timing.starts_ns for timing in timings if timing.starts_ns]
    if not starts:
        return [max(timing.elapsed_s for timing in timings) / calls * 1e6]
    ends = [timing.ends_ns for timing in timings if timing.ends_ns]
    return [(max(moments) - start) / 1e3 for start, *moments in zip(starts[0], *ends, strict=True)]
