"""Runs programs as forks of the fork server, which saves seconds of importing torch.

These programs end by `os._exit`. Tests of an interpreter's start or exit need real interpreters.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, util
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from tests.workers import fork_context


class Program:
    """A program that runs like `python -c`, with exactly `environment`. Its output can be read once it has ended."""

    def __init__(self, code: str, environment: Mapping[str, str], umask: int | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="program-")
        arguments = (code, dict(environment), umask, self._folder.name)
        self._process = fork_context().Process(target=_run, args=arguments)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def lines(self, count: int, timeout_s: float) -> list[str]:
        until = time.monotonic() + timeout_s
        while True:
            running = self._process.exitcode is None
            file = Path(self._folder.name) / "out"
            found = file.read_text().splitlines(keepends=True) if file.exists() else []
            complete = [line.rstrip("\n") for line in found if line.endswith("\n")]
            if len(complete) >= count:
                return complete[:count]
            if not running or time.monotonic() > until:
                raise TimeoutError(f"{count} lines were expected:\n{''.join(self.communicate(0.0))}")
            time.sleep(0.005)

    def communicate(self, timeout_s: float) -> tuple[str, str]:
        self._process.join(timeout_s)
        late = self._process.exitcode is None
        self.kill()
        out, err = ((Path(self._folder.name) / name).read_text() for name in ("out", "err"))
        self._folder.cleanup()
        if late:
            raise TimeoutError(f"the program runs after {timeout_s} s:\n{out}{err}")
        return out, err

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _run(code: str, environment: dict[str, str], umask: int | None, folder: str) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(os.path.join(folder, name), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    if umask is not None:
        os.umask(umask)
    exec(compile(code, "program", "exec"), {"__name__": "__main__"})


def run_in_ranks(
    code: str, environment: Mapping[str, str], size: int, timeout_s: float
) -> list[tuple[int | None, str]]:
    """Runs the code in `size` processes with torchrun's variables. Returns their exit codes and outputs."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    programs = []
    for rank in range(size):
        place = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        programs.append(Program(code, {**environment, **place}))
    try:
        outputs = ["".join(program.communicate(timeout_s)) for program in programs]
    finally:
        for program in programs:
            program.kill()
    return [(program.returncode, output) for program, output in zip(programs, outputs, strict=True)]


def script(path: Path, arguments: Sequence[str]) -> str:
    """Returns code that runs a script. If the script starts Python scripts (`python -u`), these are forked."""
    return (
        f"{_FORKING}sys.argv = {[str(path), *arguments]!r}\nsys.path.insert(0, {str(path.parent)!r})\n"
        f"runpy.run_path({str(path)!r}, run_name='__main__')\n"
    )


def module(name: str, arguments: Sequence[str]) -> str:
    run = f"runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    return f"{_FORKING}sys.argv = {[name, *arguments]!r}\n{run}\n"


FORK_SERVERS = "from tests.programs import fork_servers\nfork_servers()\n"
"""Prefix for a program's code. It calls `fork_servers`."""
_FORKING = "import runpy, sys\nfrom tests.programs import fork_scripts\nfork_scripts()\n"


def fork_scripts() -> None:
    """Makes this process start `python -u SCRIPT ...` as a fork that has torch. Other commands start as usual."""
    started = subprocess.Popen

    def start(args: Any, *more: Any, **options: Any) -> Any:
        is_script = list(args[:2]) == [sys.executable, "-u"]
        return _Forked(args[2:], **options) if is_script else started(args, *more, **options)

    for module in [*sys.modules.values()]:  # torchrun has its own reference if the fork server imported it
        if getattr(module, "__dict__", {}).get("Popen") is started:
            module.Popen = start  # type: ignore[attr-defined]


def fork_servers() -> None:
    """Makes this process start multiprocessing's fork servers as forks that have torch."""
    started = util.spawnv_passfds

    def start(path: Any, args: Any, passfds: Any) -> int:
        if "forkserver" not in args[-1]:
            return started(path, args, passfds)
        pid = os.fork()
        if pid == 0:
            _serve_forks(args[-1], passfds)
        return pid

    util.spawnv_passfds = start  # type: ignore[assignment]


def wakeup_descriptors() -> list[int]:
    """Returns both descriptors of the pipe for signals. Forks keep them, so no other file must get these numbers."""
    wakeup = sys.modules.get("device_communicators.base.wakeup")
    made = [wakeup._wakeup()] if wakeup is not None and wakeup._wakeup.cache_info().currsize else []
    return [number for each in made for number in (each.reader, each.writer)]


def _serve_forks(code: str, descriptors: Sequence[int]) -> None:
    """Runs a fork server in this fork. Closes other descriptors and resets signal handlers, as a new program does."""
    try:
        kept = sorted({0, 1, 2, *descriptors, *wakeup_descriptors()})
        for before, after in zip(kept, [*kept[1:], 4096], strict=True):
            os.closerange(before + 1, after)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        forkserver._forkserver.__init__()  # type: ignore[misc]  # locked by the thread that this one was
        exec(code, {})
    except SystemExit:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


class _Forked:
    """A forked process with the methods of Popen that tests use. Writes to this process's streams or a file."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: Path | None = None,
        stdin: int | None = None,
        stdout: IO[bytes] | None = None,
        stderr: int | None = None,
        start_new_session: bool = False,
    ) -> None:
        assert stderr in (None, subprocess.STDOUT)
        self.returncode: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if start_new_session:
                os.setsid()
            if stdout is not None:
                os.dup2(stdout.fileno(), 1)
            if stderr is not None:
                os.dup2(1, 2)
            self._run(command, env, cwd)

    def _run(self, command: Sequence[str], env: Mapping[str, str], cwd: Path | None) -> None:
        code = 1
        try:
            os.closerange(3, 4096)  # other processes' sockets, whose peers would wait for this process to close them
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if cwd is not None:
                os.chdir(cwd)
            os.environ.clear()
            os.environ.update(env)
            sys.argv = list(command)
            sys.path[:0] = [os.path.dirname(command[0]), *env.get("PYTHONPATH", "").split(os.pathsep)]
            runpy.run_path(command[0], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
