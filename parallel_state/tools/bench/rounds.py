"""Measures a case: every candidate is checked, then they take turns, round by round, then they are checked again.

Every rank makes the same number of calls. A round's sample is the slowest rank's time; where candidates give moments
(messages), each call is a sample: from its beginning to its last end.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from parallel_state.tools.bench.teams import Team, TeamError
from parallel_state.tools.bench.worker import Timing

NOTICED = 0.1
"""Cores; where others used more meanwhile, a case counts as disturbed."""
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Plan:
    """The time that a case gets."""

    rounds: int = 30
    round_s: float = 0.005
    """Wanted duration of a round of one candidate, which gives its number of calls."""
    most_calls: int = 2000
    case_s: float = 8.0
    """Slow cases get fewer rounds, but at least 3."""
    repeat_s: float = 0.0
    """Time for measuring disturbed cases again."""


@dataclass
class Row:
    """The result of one case."""

    case: dict[str, Any]
    us: dict[str, list[float]] = field(default_factory=dict)
    """Candidate to its samples, microseconds a call."""
    wrong: dict[str, str] = field(default_factory=dict)
    """Candidate to what was wrong with it; such a candidate has no samples."""
    calls: dict[str, int] = field(default_factory=dict)
    strangers_cores: float | None = None
    """Cores that were busy with something else meanwhile."""
    repeats: int = 0
    """Further measurements, made because others disturbed the case; the quietest one is kept."""

    @property
    def disturbed(self) -> bool:
        return (self.strangers_cores or 0.0) > NOTICED


class _Candidate(NamedTuple):
    team: Team
    name: str


def measure(teams: list[Any], case: dict[str, Any], plan: Plan) -> Row:
    """Measures one case; a team that fails leaves `teams`, and its candidates the row."""
    row = Row(case)
    candidates = []
    for team in list(teams):
        for name in _ask(teams, row, team, "", "prepare", case) or ():
            candidates.append(_Candidate(team, name))
    candidates = [candidate for candidate in candidates if _is_right(teams, row, candidate)]
    durations = {}
    for candidate in candidates:
        samples = _run(teams, row, candidate, 2)
        if samples and min(samples) < 10_000:
            samples = _run(teams, row, candidate, 20)  # in the first calls the ranks come together
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
            _is_right(teams, row, candidate)
    for name in row.wrong:
        row.us.pop(name, None)
    return row


def _turned(candidates: Sequence[_Candidate], by: int) -> list[_Candidate]:
    """Gives another order each round, so that nobody always follows the same one."""
    start = by % max(1, len(candidates))
    return [*candidates[start:], *candidates[:start]]


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


def _ask(teams: list[Any], row: Row, team: Team, name: str, method: str, *arguments: Any) -> list[Any] | None:
    """Returns the ranks' answers; for `prepare` the first rank's, which all have. None of a team that is out."""
    if team not in teams:
        return None
    try:
        answers = team.ask(method, *arguments)
    except TeamError as error:
        teams.remove(team)  # ranks that are out of step can't go on
        row.wrong[name or team.name] = str(error)
        print(f"left out from here on: {error}", file=sys.stderr)
        return None
    return list(answers[0]) if method == "prepare" else answers


def samples_us(timings: Sequence[Timing], calls: int) -> list[float]:
    """Returns all ranks' timings of one round as samples."""
    starts = [timing.starts_ns for timing in timings if timing.starts_ns]
    if not starts:
        return [max(timing.elapsed_s for timing in timings) / calls * 1e6]
    ends = [timing.ends_ns for timing in timings if timing.ends_ns]
    return [(max(moments) - start) / 1e3 for start, *moments in zip(starts[0], *ends, strict=True)]


def measure_all(
    teams: list[Any],
    cases: Sequence[dict[str, Any]],
    plan: Plan,
    keep: Callable[[list[Row]], object] = lambda rows: None,
) -> list[Row]:
    """Measures all cases, one after the other, with a line on stderr where that takes long.

    A case may limit its calls in a round: `most_calls`. Cases that others disturbed are measured again afterwards, the
    most disturbed first, as long as `plan.repeat_s` lasts. `keep` is given the rows so far after each case.
    """
    rows: list[Row] = []
    shown = time.monotonic()
    for number, case in enumerate(cases):
        rows.append(_watched(teams, case, plan))
        keep(rows)
        if sys.stderr.isatty() or time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{number + 1} of {len(cases)} cases", file=sys.stderr, flush=True)
    end = time.monotonic() + plan.repeat_s
    for at in sorted(range(len(rows)), key=lambda at: -(rows[at].strangers_cores or 0.0)):
        while teams and rows[at].disturbed and rows[at].repeats < 3 and time.monotonic() < end:
            again = _watched(teams, rows[at].case, plan)
            quieter = (again.strangers_cores or 0.0) < (rows[at].strangers_cores or 0.0) or bool(again.wrong)
            again.repeats = rows[at].repeats = rows[at].repeats + 1
            rows[at] = again if quieter else rows[at]
            keep(rows)
    return rows


def _watched(teams: list[Any], case: dict[str, Any], plan: Plan) -> Row:
    strangers = Strangers(teams)
    row = measure(teams, case, replace(plan, most_calls=case.get("most_calls", plan.most_calls)))
    row.strangers_cores = strangers.cores()
    return row


class Strangers:
    """Counts the cores that processes other than this one and the teams' ranks keep busy, from its making on."""

    def __init__(self, teams: Sequence[Team]) -> None:
        self.pids = [os.getpid(), *(pid for team in teams for pid in team.pids)]
        self.started_s = time.monotonic()
        self.before_s = self._others_s()

    def cores(self) -> float | None:
        """Returns None where the system doesn't tell, or a rank has ended."""
        now_s = self._others_s()
        if now_s is None or self.before_s is None:
            return None
        cores = (now_s - self.before_s) / (time.monotonic() - self.started_s)
        return round(min(max(cores, 0.0), os.cpu_count() or 1), 2)  # ticks are too coarse for what ends at once

    def _others_s(self) -> float | None:
        try:
            ticks = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:]
            user, nice, system, _idle, _io, irq, softirq, steal = (int(each) for each in ticks[:8])
            own = sum(_used_ticks(pid) for pid in self.pids)
        except (OSError, ValueError):
            return None
        return (user + nice + system + irq + softirq + steal - own) / _TICKS


def _used_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
