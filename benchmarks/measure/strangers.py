"""How much of the machine others used while something was measured: a machine that is not quiet gives other figures."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from measure.teams import Team

NOTICED = 0.1  # cores
_TICKS = os.sysconf("SC_CLK_TCK")


class Strangers:
    """From its making on, the cores that processes other than this one and the teams' ranks kept busy."""

    def __init__(self, teams: Sequence[Team]) -> None:
        self.pids = [os.getpid(), *(pid for team in teams for pid in team.pids)]
        self.started_s = time.monotonic()
        self.before_s = self._others_s()

    def cores(self) -> float | None:
        """None where the system doesn't tell, or a rank has ended."""
        now_s = self._others_s()
        if now_s is None or self.before_s is None:
            return None
        return round((now_s - self.before_s) / (time.monotonic() - self.started_s), 2)

    def _others_s(self) -> float | None:
        try:
            ticks = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
            user, nice, system, _idle, _io, irq, softirq, steal = (int(each) for each in ticks[:8])
            own = sum(_used_ticks(pid) for pid in self.pids)
        except (OSError, ValueError):
            return None
        return (user + nice + system + irq + softirq + steal - own) / _TICKS


def _used_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
