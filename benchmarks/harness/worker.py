"""One rank of a team, started by `teams`: python worker.py SOCKET MODULE TEAM ROOT.

MODULE (a name or file) has `make(name, settings)`, which returns the team's object, and optionally `load(name,
settings)` for imports, which the start-up time excludes. The object has `rank`, `size`, the methods in
`parallel_state.tools.bench.rounds`, and optionally `close`.
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
    """Pins rank `rank` of `size` to its own core, or to all `cores` if there are fewer than ranks. Call this after
    groups are created, because groups count available cores.
    """
    os.sched_setaffinity(0, {cores[rank]} if size <= len(cores) else cores)


def serve(connection: Connection, team: Any) -> None:
    gc.collect()
    gc.freeze()
    gc.disable()
    while (order := _receive(connection)) is not None:
        method, arguments = order
        try:
            reply = ("done", getattr(team, method)(*arguments))
        except Exception as error:
            reply = ("failed", described(error))
        with contextlib.suppress(ConnectionError):
            connection.send(reply)
        gc.collect()


def described(error: Exception) -> str:
    short = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
    return "".join(traceback.format_exception(error)) + short


def _receive(connection: Connection) -> Any:
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
    if "torch" in sys.modules:  # a fork, whose parent's OMP_NUM_THREADS was read
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed benchmark leaves no process behind
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark handles Ctrl-C and hangs up
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
    except Exception as error:
        with contextlib.suppress(ConnectionError):
            connection.send(("failed", described(error)))
        return
    serve(connection, team)
    connection.close()
    if hasattr(team, "close"):
        signal.alarm(CLOSE_S)  # kills this process if `close` hangs
        team.close()
    os._exit(0)  # skip exit handlers: those of many libraries may conflict


if __name__ == "__main__":
    root = sys.argv[4]
    sys.path[:1] = [str(Path(__file__).resolve().parents[1]), *[root] * (root not in sys.path)]
    main()
