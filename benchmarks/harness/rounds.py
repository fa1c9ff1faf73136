"""Measures cases one by one within a time budget, and repeats cases that other programs disturbed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.teams import Team
from parallel_state.tools.bench import rounds
from parallel_state.tools.bench.progress import Progress

_TICKS = os.sysconf("SC_CLK_TCK")
NOTICED = 0.1
"""A case counts as disturbed if other processes used more cores than this."""


@dataclass(frozen=True)
class Plan(rounds.Plan):
    repeat_s: float = 0.0


@dataclass
class Row(rounds.Row):
    strangers_cores: float | None = None
    """Cores that other processes used during the case; None: unknown."""
    repeats: int = 0

    @property
    def disturbed(self) -> bool:
        return (self.strangers_cores or 0.0) > NOTICED


@dataclass
class RankRow(Row):
    refused: dict[str, str] = field(default_factory=dict)
    """Unsupported candidate -> reason."""
    host_us: dict[str, float] = field(default_factory=dict)
    """Eager candidate -> median microseconds of a call on the host."""
    figures: dict[str, dict[str, float]] = field(default_factory=dict)


def measure_all(
    teams: list[Any],
    cases: Sequence[dict[str, Any]],
    plan: Plan,
    keep: Callable[[list[Row]], object] = lambda rows: None,
    until: float = math.inf,
    progress: Progress | None = None,
) -> list[Row]:
    """Measures each case on all teams, and returns one row per case. Then repeats, for about `plan.repeat_s`, the cases
    during which other processes used cores.

    `teams`: one object per library, which runs its calls. `cases`: arguments of the teams' method `prepare`; an entry
    "most_calls" limits the calls per round. `keep` gets all rows after each case. `until`: time.monotonic() at which
    all should be done; late cases get fewer rounds, but at least 3.
    """
    shown = Progress(len(cases) * plan.case_s) if progress is None else progress
    rows: list[Row] = []
    for number, case in enumerate(cases):
        share_s = (until - time.monotonic()) / (len(cases) - number)
        rows.append(_watched(teams, case, replace(plan, case_s=max(0.0, min(plan.case_s, share_s)))))
        keep(rows)
        shown.step(plan.case_s, f"{number + 1} of {len(cases)} {case.get('part', 'cases')}")
    if progress is None:
        shown.hide()
    end = min(until, time.monotonic() + plan.repeat_s)
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
    row = rounds.measure(teams, case, replace(plan, most_calls=case.get("most_calls", plan.most_calls)))
    return Row(**vars(row), strangers_cores=strangers.cores())


class Strangers:
    """Measures how many cores other programs use, besides this process and the ranks, from its creation on."""

    def __init__(self, teams: Sequence[Team]) -> None:
        self.pids = [os.getpid(), *(pid for team in teams for pid in team.pids)]
        self.started_s = time.monotonic()
        self.before_s = self._others_s()

    def cores(self) -> float | None:
        now_s = self._others_s()
        if now_s is None or self.before_s is None:
            return None
        cores = (now_s - self.before_s) / (time.monotonic() - self.started_s)
        return round(min(max(cores, 0.0), os.cpu_count() or 1), 2)

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
