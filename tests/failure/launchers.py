"""Programs that call `launch`, as forks of the tests' fork server, which saves importing torch. Each has its
own session, environment, output and exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import Any

from tests.programs import wakeup_descriptors
from tests.workers import fork_context

_STEP_S = 0.01


class Program:
    def __init__(self, function: Callable[..., object], *args: Any, env: Mapping[str, str] | None = None) -> None:
        context = fork_context()
        self._output: list[tuple[bytearray, threading.Thread]] = []
        ends = []
        for _ in range(2):
            mine, theirs = context.Pipe(duplex=False)
            text = bytearray()
            thread = threading.Thread(target=_read, args=(mine, text), daemon=True)
            thread.start()
            self._output.append((text, thread))
            ends.append(theirs)
        self._process = context.Process(target=_run, args=(*ends, dict(env or {}), function, args))
        self._process.start()
        for end in ends:
            end.close()
        self.pid: int = self._process.pid

    def wait(self, timeout_s: float) -> int:
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise TimeoutError(f"the program runs after {timeout_s} s: {self.said}")
        for _, thread in self._output:
            thread.join(timeout_s)
        code: int = self._process.exitcode
        return code

    def lines(self, count: int, timeout_s: float) -> list[str]:
        until = time.monotonic() + timeout_s
        while self.printed.count("\n") < count:
            assert time.monotonic() < until and self._process.is_alive(), f"{count} lines weren't printed: {self.said}"
            time.sleep(_STEP_S)
        return self.printed.splitlines()[:count]

    @property
    def printed(self) -> str:
        return self._output[0][0].decode()

    @property
    def said(self) -> str:
        return self._output[1][0].decode()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()


def _read(end: Connection, text: bytearray) -> None:
    with end, suppress(OSError):
        while data := os.read(end.fileno(), 1 << 16):
            text += data


@contextmanager
def program(function: Callable[..., object], *args: Any, env: Mapping[str, str] | None = None) -> Iterator[Program]:
    started = Program(function, *args, env=env)
    try:
        yield started
    finally:
        started.kill()


def _run(
    out: Connection, err: Connection, env: Mapping[str, str], function: Callable[..., object], args: tuple[Any, ...]
) -> None:
    os.setsid()
    for end, descriptor in ((out, 1), (err, 2)):
        os.dup2(end.fileno(), descriptor)
        end.close()
    os.environ.update(env)
    util.spawnv_passfds = _started_by(util.spawnv_passfds)  # type: ignore[attr-defined]
    try:
        function(*args)
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _started_by(spawn: Callable[..., int]) -> Callable[..., int]:
    def start(path: Any, args: list[Any], passed: list[int]) -> int:
        code = args[-1]
        if "forkserver" not in str(code):
            return spawn(path, args, passed)
        kept = {*passed, *wakeup_descriptors()}
        pid = os.fork()
        if pid == 0:
            try:
                for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
                    if descriptor > 2 and descriptor not in kept:
                        with suppress(OSError):
                            os.close(descriptor)
                exec(code, {})
            except SystemExit:
                pass
            finally:
                os._exit(0)
        return pid

    return start
