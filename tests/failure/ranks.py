from __future__ import annotations

import pickle
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import parallel_state as ps
from tests.workers import WorkerPool, WorkersFailedError


class Ranks(WorkerPool):
    def survivors(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> dict[int, Any]:
        self.begin(function, *args)
        return self.finish(timeout_s)

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send_bytes(pickle.dumps((function, args, None)))

    def finish(self, timeout_s: float) -> dict[int, Any]:
        results: dict[int, Any] = {}
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while pending and not errors and time.monotonic() < deadline:
            for connection in wait(list(pending), timeout=deadline - time.monotonic()):
                rank = pending.pop(connection)  # type: ignore[call-overload]
                try:
                    ok, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    continue
                (results if ok else errors)[rank] = value
        errors.update(dict.fromkeys(pending.values(), f"no answer within {timeout_s} s"))
        if errors:
            self.kill()
            raise WorkersFailedError(errors)
        return results

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def exit_code(self, rank: int, timeout_s: float = 2.0) -> int | None:
        self._processes[rank].join(timeout_s)
        return self._processes[rank].exitcode


def start_again() -> None:
    """A start removes the names that killed ranks left in /dev/shm; else the check for leftovers fails."""
    pool = Ranks(2)
    try:
        pool.run(_start_and_end, timeout_s=60.0)
    finally:
        pool.kill()


def _start_and_end() -> None:
    ps.init_distributed_environment()
    ps.destroy_distributed_environment()


KILLED = -signal.SIGKILL
