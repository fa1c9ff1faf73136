"""Starts the processes of one library (a team) and sends them requests. An idle team blocks in a socket read, so it
uses no core. A team that fails or misses a deadline is ended.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from device_communicators.base.interrupts import signals_wait
from parallel_state.tools.bench.report import ROOT
from parallel_state.tools.bench.rounds import TeamError, last_line

WORKER = Path(__file__).resolve().with_name("worker.py")
START_S = 120.0
END_S = 5.0


def python_path(*folders: Path) -> str:
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


class Fork:
    """A rank forked from this process, because a new interpreter takes seconds to import torch. Has those members of
    `Popen` that a team uses.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        with signals_wait():
            self.pid = os.fork()
            if self.pid == 0:
                self._run(arguments, environment, folder)

    def _run(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        code = 1
        try:
            os.setsid()  # as for processes that are started
            os.closerange(3, 4096)  # an inherited connection would keep another rank from its end
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class Team:
    def __init__(
        self,
        name: str,
        module: str,
        size: int,
        settings: Mapping[str, Any],
        *,
        launcher: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        root: Path = ROOT,
        forks: bool = True,
    ) -> None:
        """`module`: name or path of the Python module whose `make(name, settings)` returns what each rank runs. `size`:
        number of ranks. `launcher`: a command such as `mpiexec -n 2 python`, to which the worker script is appended;
        None: the team starts each rank. `root`: folder with `parallel_state` and `device_communicators`.

        `forks`: ranks are forks of this process; else each is a new interpreter, and can import another tree.
        """
        self.name = name
        self.size = size
        self.start_s = 0.0
        """From the start request until the last rank had run its first collective."""
        self._folder = tempfile.TemporaryDirectory(prefix="team_")
        cores = sorted(os.sched_getaffinity(0))
        self._settings = {"pin": True, "cores": cores, "folder": self._folder.name, **settings}
        self.pids: list[int] = []
        self._connections: list[Connection] = []
        self._store: TCPStore | None = None
        self._processes: list[subprocess.Popen[bytes] | Fork] = []
        self._log = Path(self._folder.name) / "stderr"
        """Holds the stderr of started processes: launchers add a banner to each error. Forks inherit stderr."""
        address = str(Path(self._folder.name) / "socket")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(address)
        self._socket.listen(size)
        self._root = root
        script = [str(WORKER), address, module, name, str(root)]
        common = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        if launcher is not None:
            self._start([*launcher, "-u", *script], common)
            return
        for rank in range(size):
            variables = {**common, **self._torch_variables(rank)}
            if forks:
                self._processes.append(Fork(script, variables, root))
            else:
                self._start([sys.executable, "-u", *script], variables)

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        with self._log.open("ab") as log:
            try:
                process = subprocess.Popen(
                    command, env=environment, cwd=self._root, stdin=subprocess.DEVNULL, stderr=log,
                    start_new_session=True,
                )  # fmt: skip  # Ctrl-C interrupts only this process, which then ends the ranks
            except OSError as error:
                log.write(f"{error}\n".encode())
                return
        self._processes.append(process)

    def _torch_variables(self, rank: int) -> dict[str, str]:
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": self.size}
        return {
            **{name: str(number) for name, number in numbers.items()},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def load(self, timeout_s: float = START_S) -> None:
        deadline = time.monotonic() + timeout_s
        for _ in range(self.size):
            connection = self._accept(deadline)
            self._connections.append(connection)
            connection.send(self._settings)
        self.pids = [self._reply(connection, deadline, "load") for connection in self._connections]

    def meet(self, timeout_s: float = START_S) -> None:
        if not self.pids:
            self.load(timeout_s)
        started = time.monotonic()
        for connection in self._connections:
            connection.send("start")
        ranks = [self._reply(connection, started + timeout_s, "start") for connection in self._connections]
        self.start_s = time.monotonic() - started
        self._connections = [self._connections[ranks.index(rank)] for rank in range(self.size)]

    def _accept(self, deadline: float) -> Connection:
        while True:
            self._socket.settimeout(0.2)
            try:
                accepted, _ = self._socket.accept()
                accepted.setblocking(True)
                return Connection(accepted.detach())
            except TimeoutError:
                codes = [process.poll() for process in self._processes]
                if not codes or any(code is not None for code in codes) or time.monotonic() > deadline:
                    raise TeamError(f"{self.name}: not all of {self.size} ranks came{self._ends()}") from None

    def ask(self, method: str, *arguments: Any, timeout_s: float = 120.0) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        try:
            for connection in self._connections:
                connection.send((method, arguments))
        except OSError as error:
            raise TeamError(f"{self.name}: a rank ended before {method}{self._ends()}") from error
        return [self._reply(connection, deadline, method) for connection in self._connections]

    def _reply(self, connection: Connection, deadline: float, what: str) -> Any:
        try:
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                raise TeamError(f"{self.name}: no answer to {what} in time")
            kind, value = connection.recv()
        except (EOFError, OSError) as error:
            raise TeamError(f"{self.name}: a rank ended during {what}{self._ends()}") from error
        if kind == "failed":
            raise TeamError(f"{self.name}: {what} failed\n{value}")
        return value

    def _ends(self) -> str:
        time.sleep(0.1)  # the connection closes before the process can be waited for
        codes = [process.poll() for process in self._processes]
        ends = [_ending(code) for code in codes if code is not None]
        if self._log.exists() and (text := self._log.read_text(errors="replace").strip()):
            ends.append(last_line(text))
        return f" ({', '.join(dict.fromkeys(ends))})" if ends else ""

    def hang_up(self) -> None:
        for connection in self._connections:
            connection.close()
        self._socket.close()
        for process in self._processes:
            if not self.start_s and process.poll() is None:
                os.kill(process.pid, signal.SIGTERM)

    def close(self) -> None:
        self.hang_up()
        deadline = time.monotonic() + END_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._kill()
                process.wait(END_S)
        self._folder.cleanup()

    def _kill(self) -> None:
        own = {process.pid for process in self._processes}
        for pid in self.pids:
            if pid not in own:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            if process.poll() is None:
                process.kill()


def _ending(code: int) -> str:
    with contextlib.suppress(ValueError):
        if code < 0:
            return signal.Signals(-code).name
    return f"exit code {code}"


@contextlib.contextmanager
def started(teams: Sequence[Team], left_out: dict[str, str] | None = None) -> Iterator[list[Team]]:
    """Yields the teams that started; `left_out` gets the reasons of teams that didn't. Ends all teams on exit and
    SIGTERM.
    """
    before = signal.getsignal(signal.SIGTERM)
    if before == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ready = list(teams)
    try:
        for step in (Team.load, Team.meet):  # imports run in parallel; then each team starts alone
            ready = [team for team in ready if _succeeds(step, team, left_out)]
        yield ready
    finally:
        for team in teams:
            team.hang_up()
        for team in teams:
            team.close()
        signal.signal(signal.SIGTERM, before)


def _succeeds(step: Callable[[Team], None], team: Team, left_out: dict[str, str] | None) -> bool:
    try:
        step(team)
    except TeamError as error:
        reason = last_line(str(error)).removeprefix(f"{team.name}: ")
        print(f"left out: {team.name}: {reason}", file=sys.stderr)
        if left_out is not None:
            left_out[team.name] = reason
        return False
    return True
