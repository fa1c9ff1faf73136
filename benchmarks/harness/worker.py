"""Serves as one process of a team: does what the benchmark's own process asks for, and sleeps between.

    python worker.py SOCKET MODULE TEAM ROOT       started by `teams`; MODULE is a name or a file

The module has `make(name, settings)` and may have `load(name, settings)`, which imports what the start-up time leaves
out. The team it makes has `rank` and `size`, the methods that `parallel_state.tools.bench.worker` names, and maybe

    close()                          ends what must be ended on every rank

ROOT is the folder of both packages: of this tree, or of another version of it.
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
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

CLOSE_S = 3


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
    address, module_name, name, _ = sys.argv[1:]
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
    root = sys.argv[4]
    sys.path[:1] = [str(Path(__file__).resolve().parents[1]), *[root] * (root not in sys.path)]
    main()
