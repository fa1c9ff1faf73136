"""One process of a team: does what the benchmark's own process asks for, and sleeps between.

    python worker.py SOCKET MODULE TEAM        started by `teams`; MODULE makes the team: make(name, settings)

The module's team has `rank` and `size`, and these methods, which every rank is asked for at the same time:

    prepare(values) -> list[str]     the candidates for a case, the same on every rank
    check(name) -> str | None        one call of the candidate; what is wrong with its answer
    run(name, calls) -> Timing       untimed calls that bring the ranks together, then `calls` timed ones
    close()                          where there is something to end; every rank
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

CLOSE_S = 3
BENCHMARKS = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Timing:
    """One rank's times of some calls: the time of all, or the moments at which each began or ended here.

    Moments are nanoseconds of the clock that all processes of a host share; a call lasts from the only beginning to the
    last end.
    """

    elapsed_s: float = 0.0
    starts_ns: list[int] = field(default_factory=list)
    ends_ns: list[int] = field(default_factory=list)


class Team(Protocol):
    rank: int
    size: int

    def prepare(self, values: dict[str, Any]) -> list[str]: ...
    def check(self, name: str) -> str | None: ...
    def run(self, name: str, calls: int) -> Timing: ...


def timed(call: Callable[[], object], calls: int) -> Timing:
    """As `Team.run`, for a candidate that is one call without arguments."""
    for _ in range(max(1, calls // 10)):
        call()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return Timing(elapsed_s=time.perf_counter() - started)


def pin(rank: int, size: int, cores: list[int]) -> None:
    """Gives each rank a core of its own, where there are enough; more ranks than cores may go anywhere.

    Called after the groups are made, which are then free to count the cores; whatever a launcher has pinned is undone.
    """
    os.sched_setaffinity(0, {cores[rank]} if size <= len(cores) else cores)


def serve(connection: Connection, team: Any) -> None:
    """Until the other side hangs up."""
    gc.collect()
    gc.freeze()
    gc.disable()
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            reply = ("done", getattr(team, method)(*arguments))
        except Exception:
            reply = ("failed", traceback.format_exc())
        connection.send(reply)
        gc.collect()


def main() -> None:
    address, module, name = sys.argv[1:]
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a benchmark that is killed leaves nothing behind
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(address)
    connection = Connection(channel.detach())
    settings = connection.recv()
    try:
        sys.path[0] = str(BENCHMARKS)  # instead of this file's folder, whose modules are the package's
        team = importlib.import_module(module).make(name, settings)
        if settings["pin"]:
            pin(team.rank, team.size, settings["cores"])
    except Exception:
        connection.send(("failed", traceback.format_exc()))
        return
    connection.send(("ready", (team.rank, os.getpid())))
    serve(connection, team)
    connection.close()
    if hasattr(team, "close"):
        signal.alarm(CLOSE_S)  # what hangs here ends by the signal
        team.close()
    os._exit(0)  # libraries of this many kinds don't agree on how to end a process


if __name__ == "__main__":
    main()
