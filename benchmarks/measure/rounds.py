"""One case, measured: every candidate is checked, then they take turns, round by round, then they are checked again.

Every rank makes the same number of calls. A round's sample is the slowest rank's time; where candidates give moments
(messages), each call is a sample: from its beginning to its last end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from measure.strangers import Strangers
from measure.teams import Team, TeamError
from measure.worker import Timing


@dataclass(frozen=True)
class Plan:
    """How much time a case gets."""

    rounds: int = 30
    round_s: float = 0.005
    """What a round of one candidate should take, which gives its number of calls."""
    most_calls: int = 2000
    case_s: float = 8.0
    """Slow cases get fewer rounds, but at least 3."""


@dataclass
class Row:
    """What came out of one case."""

    case: dict[str, Any]
    us: dict[str, list[float]] = field(default_factory=dict)
    """Candidate to its samples, microseconds a call."""
    wrong: dict[str, str] = field(default_factory=dict)
    """Candidate to what was wrong with it; such a candidate has no samples."""
    calls: dict[str, int] = field(default_factory=dict)
    strangers_cores: float | None = None
    """Cores that were busy with something else meanwhile."""


class _Candidate(NamedTuple):
    team: Team
    name: str


def measure(teams: list[Team], case: dict[str, Any], plan: Plan) -> Row:
    """A team that fails leaves `teams`, and its candidates the row."""
    row = Row(case)
    candidates = []
    for team in list(teams):
        for name in _guarded(teams, row, team, "", "prepare", case) or ():
            candidates.append(_Candidate(team, name))
    candidates = [candidate for candidate in candidates if _right(teams, row, candidate)]
    durations = {}
    for candidate in candidates:
        samples = _run(teams, row, candidate, 2)
        if samples and min(samples) < 1000:
            samples = _run(teams, row, candidate, 20)  # the first calls are slow
        if samples:
            call_s = min(samples) / 1e6
            row.calls[candidate.name] = max(2, min(plan.most_calls, int(plan.round_s / max(call_s, 1e-9))))
            durations[candidate.name] = call_s * row.calls[candidate.name] * 1.1 + 0.001
    rounds = max(3, min(plan.rounds, int(plan.case_s / max(sum(durations.values()), 1e-9))))
    for round_ in range(rounds):
        for candidate in _turned(candidates, round_):
            if candidate.name not in row.wrong and candidate.name in row.calls:
                samples = _run(teams, row, candidate, row.calls[candidate.name])
                row.us.setdefault(candidate.name, []).extend(samples)
    for candidate in candidates:
        if candidate.name in row.us:
            _right(teams, row, candidate)
    for name in row.wrong:
        row.us.pop(name, None)
    return row


def _turned(candidates: Sequence[_Candidate], by: int) -> list[_Candidate]:
    """In another order each round, so that nobody always follows the same one."""
    start = by % max(1, len(candidates))
    return [*candidates[start:], *candidates[:start]]


def _right(teams: list[Team], row: Row, candidate: _Candidate) -> bool:
    if candidate.team not in teams:
        return False
    found = _guarded(teams, row, candidate.team, candidate.name, "check", candidate.name)
    problems = [problem for problem in found or () if problem is not None]
    if problems:
        row.wrong[candidate.name] = problems[0]
        print(f"WRONG: {candidate.name}: {problems[0]}", file=sys.stderr)
    return found is not None and not problems


def _run(teams: list[Team], row: Row, candidate: _Candidate, calls: int) -> list[float]:
    if candidate.team not in teams:
        return []
    try:
        return samples_us(candidate.team.ask("run", candidate.name, calls), calls)
    except TeamError as error:
        _drop(teams, row, candidate.team, candidate.name, error)
        return []


def _guarded(teams: list[Team], row: Row, team: Team, name: str, method: str, argument: Any) -> list[Any] | None:
    """The ranks' answers; for `prepare` the first rank's, which all have."""
    try:
        answers = team.ask(method, argument)
    except TeamError as error:
        _drop(teams, row, team, name, error)
        return None
    return answers[0] if method == "prepare" else answers


def _drop(teams: list[Team], row: Row, team: Team, name: str, error: TeamError) -> None:
    """A team whose ranks are out of step can't go on."""
    teams.remove(team)
    row.wrong[name or team.name] = str(error)
    print(f"left out from here on: {error}", file=sys.stderr)


def samples_us(timings: Sequence[Timing], calls: int) -> list[float]:
    """All ranks' timings of one round as samples."""
    starts = [timing.starts_ns for timing in timings if timing.starts_ns]
    if not starts:
        return [max(timing.elapsed_s for timing in timings) / calls * 1e6]
    ends = [timing.ends_ns for timing in timings if timing.ends_ns]
    return [(max(moments) - start) / 1e3 for start, *moments in zip(starts[0], *ends, strict=True)]


def measure_all(teams: list[Team], cases: Sequence[dict[str, Any]], plan: Plan) -> list[Row]:
    """All cases, one after the other, with a line on stderr where that takes long.

    A case may limit its calls in a round: `most_calls`.
    """
    rows = []
    shown = time.monotonic()
    strangers = Strangers(teams)
    for number, case in enumerate(cases):
        rows.append(measure(teams, case, replace(plan, most_calls=case.get("most_calls", plan.most_calls))))
        rows[-1].strangers_cores, strangers = strangers.cores(), Strangers(teams)
        if sys.stderr.isatty() or time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{number + 1} of {len(cases)} cases", file=sys.stderr, flush=True)
    return rows
