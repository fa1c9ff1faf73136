"""Serves as one process of a team: does what the benchmark's own process asks for, and sleeps between.

    python worker.py SOCKET MODULE TEAM        started by `teams`; MODULE is a name or a file

The module has `make(name, settings)` and may have `load(name, settings)`, which imports what the start-up time leaves
out. The team it makes has `rank` and `size`, and these methods, which every rank is asked for at the same time:

    prepare(values) -> list[str]     the candidates for a case, the same on every rank
    check(name) -> str | None        makes one call of the candidate; returns what is wrong with its answer
    run(name, calls) -> Timing       makes untimed calls that bring the ranks together, then `calls` timed ones
    close()                          optional; ends what must be ended on every rank
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
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
from types import ModuleType
from typing import Any

CLOSE_S = 3
ROOT = Path(__file__).resolve().parents[3]
"""The folder of both packages: a checkout, or site-packages."""


@dataclass(frozen=True)
class Timing:
    """Holds one rank's times of some calls: the time of all, or the moments at which each began or ended there.

    Moments are nanoseconds of the clock that all processes of a host share; a call lasts from the only beginning to the
    last end.
    """

    elapsed_s: float = 0.0
    starts_ns: list[int] = field(default_factory=list)
    ends_ns: list[int] = field(default_factory=list)


class WrongAnswer(str):
    """Describes a wrong answer, as `check` returns it, and counts its wrong elements."""

    elements = 0

    @classmethod
    def of(cls, elements: int, text: str) -> WrongAnswer:
        problem = cls(text)
        problem.elements = elements
        return problem


def timed(call: Callable[[], object], calls: int) -> Timing:
    """Runs and times `calls` calls without arguments, after a tenth as many untimed ones."""
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
    """Answers until the other side hangs up."""
    gc.collect()
    gc.freeze()
    gc.disable()
    while (order := _receive(connection)) is not None:
        method, arguments = order
        try:
            reply = ("done", getattr(team, method)(*arguments))
        except Exception:
            reply = ("failed", traceback.format_exc())
        with contextlib.suppress(ConnectionError):
            connection.send(reply)
        gc.collect()


def _receive(connection: Connection) -> Any:
    """Returns what the other side sent, or None if it has hung up."""
    with contextlib.suppress(EOFError, ConnectionError):
        return connection.recv()
    return None


def _import(module: str) -> ModuleType:
    if not module.endswith(".py"):
        return importlib.import_module(module)
    sys.path.insert(0, str(Path(module).parent))
    return importlib.import_module(Path(module).stem)


def main() -> None:
    address, module_name, name = sys.argv[1:]
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a benchmark that is killed leaves nothing behind
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the benchmark's: it hangs up
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(address)
    connection = Connection(channel.detach())
    settings = _receive(connection)
    if settings is None:
        return
    try:
        module = _import(module_name)
        if hasattr(module, "load"):
            module.load(name, settings)
        connection.send(("loaded", os.getpid()))
        if _receive(connection) is None:
            return
        team = module.make(name, settings)
        connection.send(("made", team.rank))
        if settings["pin"]:
            pin(team.rank, team.size, settings["cores"])
    except Exception:
        with contextlib.suppress(ConnectionError):
            connection.send(("failed", traceback.format_exc()))
        return
    serve(connection, team)
    connection.close()
    if hasattr(team, "close"):
        signal.alarm(CLOSE_S)  # what hangs here ends by the signal
        team.close()
    os._exit(0)  # libraries of this many kinds don't agree on how to end a process


if __name__ == "__main__":
    if str(ROOT) in sys.path:
        del sys.path[0]  # this file's folder, whose modules are the package's
    else:
        sys.path[0] = str(ROOT)
    # Timings are pickled by their class's name, which in this file, run as a script, would be __main__'s.
    importlib.import_module("parallel_state.tools.bench.worker").main()
