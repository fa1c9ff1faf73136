"""The processes of one runtime, started and asked from outside.

A team waits for its orders in a read of a socket, which costs nothing: only the team whose turn it is uses the cores.
Each wait has a deadline; a team that failed or didn't answer is ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

WORKER = Path(__file__).resolve().parent / "worker.py"
ROOT = WORKER.parent.parent.parent
START_S = 120.0
END_S = 5.0


def python_path(*folders: Path) -> str:
    """PYTHONPATH with these folders first: behind them may be what this machine's Python lacks."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


class TeamError(RuntimeError):
    """A team that failed, or was not heard of in time."""


class Team:
    """`size` processes that run `module`'s team `name`. Started here, met by `meet`; `close` ends them."""

    def __init__(
        self,
        name: str,
        module: str,
        size: int,
        settings: Mapping[str, Any],
        *,
        launcher: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`launcher`: the command that starts all ranks when a script's arguments follow, else one process each."""
        self.name = name
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="team_")  # also for files between the ranks
        cores = sorted(os.sched_getaffinity(0))
        self._settings = {"pin": True, "cores": cores, "folder": self._folder.name, **settings}
        self.pids: list[int] = []  # of the ranks, once they are met
        self._connections: list[Connection] = []
        self._store: TCPStore | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        address = str(Path(self._folder.name) / "socket")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(address)
        self._socket.listen(size)
        script = ["-u", str(WORKER), address, module, name]
        common = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT), **(environment or {})}
        if launcher is not None:
            self._start([*launcher, *script], common)
        else:
            for rank in range(size):
                self._start([sys.executable, *script], {**common, **self._torch_variables(rank)})

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL)
        self._processes.append(process)

    def _torch_variables(self, rank: int) -> dict[str, str]:
        """As torchrun's: a rank finds the others through a store that this process has."""
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": self.size}
        return {
            **{name: str(number) for name, number in numbers.items()},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def meet(self, timeout_s: float = START_S) -> None:
        """Waits until every rank is ready for orders."""
        deadline = time.monotonic() + timeout_s
        unsorted = []
        for _ in range(self.size):
            unsorted.append(self._accept(deadline))
            unsorted[-1].send(self._settings)
        ranks: dict[int, Connection] = {}
        for connection in unsorted:
            rank, pid = self._reply(connection, deadline, "start")
            self.pids.append(pid)
            ranks[rank] = connection
        self._connections = [ranks[rank] for rank in range(self.size)]

    def _accept(self, deadline: float) -> Connection:
        while True:
            self._socket.settimeout(0.2)
            try:
                accepted, _ = self._socket.accept()
                accepted.setblocking(True)
                return Connection(accepted.detach())
            except TimeoutError:
                codes = [process.poll() for process in self._processes]
                if any(code is not None for code in codes) or time.monotonic() > deadline:
                    raise TeamError(f"{self.name}: not all of {self.size} ranks came (exit codes {codes})") from None

    def ask(self, method: str, *arguments: Any, timeout_s: float = 120.0) -> list[Any]:
        """What every rank's `method` returned, in rank order."""
        deadline = time.monotonic() + timeout_s
        for connection in self._connections:
            connection.send((method, arguments))
        return [self._reply(connection, deadline, method) for connection in self._connections]

    def _reply(self, connection: Connection, deadline: float, what: str) -> Any:
        try:
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                raise TeamError(f"{self.name}: no answer to {what} in time")
            kind, value = connection.recv()
        except (EOFError, OSError) as error:
            raise TeamError(f"{self.name}: a rank ended during {what}") from error
        if kind == "failed":
            raise TeamError(f"{self.name}: {what} failed\n{value}")
        return value

    def close(self) -> None:
        """Hangs up, gives the processes some seconds, and kills what is left of them."""
        for connection in self._connections:
            connection.close()
        self._socket.close()
        deadline = time.monotonic() + END_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._kill()
                process.wait(END_S)
        self._folder.cleanup()

    def _kill(self) -> None:
        """The ranks before their launcher, which then cleans up behind them."""
        own = {process.pid for process in self._processes}
        for pid in self.pids:
            if pid not in own:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            if process.poll() is None:
                process.kill()


@contextlib.contextmanager
def started(teams: Sequence[Team]) -> Iterator[list[Team]]:
    """The teams that came; the others are named, and done without. All are ended behind it, and when this is ended."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        there = []
        for team in teams:
            try:
                team.meet()
                there.append(team)
            except TeamError as error:
                print(f"left out: {error}", file=sys.stderr)
        yield there
    finally:
        for team in teams:
            team.close()
        signal.signal(signal.SIGTERM, before)
