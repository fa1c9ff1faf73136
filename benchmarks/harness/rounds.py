"""Measures cases one by one, and repeats disturbed ones."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.teams import Team
from parallel_state.tools.bench.rounds import Plan, Row, measure

_TICKS = os.sysconf("SC_CLK_TCK")


def measure_all(
    teams: list[Any],
    cases: Sequence[dict[str, Any]],
    plan: Plan,
    keep: Callable[[list[Row]], object] = lambda rows: None,
) -> list[Row]:
    """Measures all cases. Reports slow progress on stderr.

    A case may limit its calls per round by `most_calls`. Cases that other programs disturbed are repeated last,
    the most disturbed first, for about `plan.repeat_s` at most. `keep` gets all rows after each case.
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
    """Measures how many cores other processes than this one and the ranks use, from its creation on."""

    def __init__(self, teams: Sequence[Team]) -> None:
        self.pids = [os.getpid(), *(pid for team in teams for pid in team.pids)]
        self.started_s = time.monotonic()
        self.before_s = self._others_s()

    def cores(self) -> float | None:
        """None if the system doesn't report it or a rank has exited."""
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
