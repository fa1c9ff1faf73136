"""A benchmark team that exchanges nothing; the one named "failing" has the requested fault."""

from __future__ import annotations

import os
from typing import Any

from harness.timing import timed

from parallel_state.tools.bench.rounds import Timing


def make(name: str, settings: dict[str, Any]) -> EmptyTeam:
    if name == "failing" and settings["fault"] == "raises at start":
        raise RuntimeError("as asked")
    return EmptyTeam(name, settings["fault"])


class EmptyTeam:
    def __init__(self, name: str, fault: str) -> None:
        self.name, self.fault = name, fault
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def prepare(self, values: dict[str, Any]) -> list[str]:
        return [self.name]

    def check(self, name: str) -> str | None:
        return None

    def run(self, name: str, calls: int) -> Timing:
        if self.name == "failing" and self.rank == 1 and self.fault == "ends":
            os._exit(7)
        if self.name == "failing" and self.rank == 1:
            raise RuntimeError("as asked")
        return timed(int, calls)
