"""Starts, watches and stops the processes of a launch, through multiprocessing.

torch.distributed.elastic isn't used: in torch 2.13 to 2.15 its `wait` never returns after a worker's `os._exit(0)`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import connection, forkserver, resource_tracker
from types import FrameType
from typing import Any, cast

from device_communicators.base import limits
from device_communicators.base.errors import LaunchError
from parallel_state.launch.config import LaunchConfig
from parallel_state.launch.worker import (
    EXIT_S,
    REPORT_BYTES,
    Inheritance,
    Inherited,
    Report,
    Start,
    blocked_signals,
    read_report,
    read_result,
    work,
)

logger = logging.getLogger("parallel_state")

_POLL_S = 0.5  # exit codes are polled: children of a spawned worker can hold its sentinel open
_SETTLE_S = 0.3  # after the first failure, for others to report theirs
_INTERRUPT_S = 0.8  # for the function to handle KeyboardInterrupt
_START_DESCRIPTORS = 8
_SERVER_END_S = 2.0  # a killed fork server has exited by then
_CUT_S = 1.0
_CRASH_S = 1.0  # a crash is detected at most this late
_CRASHES = tuple(-number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE))
_AT_INIT = ("parallel_state.launch.worker", "parallel_state.groups.world")
"""Modules that the fork server imports before it forks ranks."""
_HINT = (
    "its error is on stderr: most often the main module can't be imported, or calls launch outside of "
    "`if __name__ == '__main__':`"
)


def _unnamed_file() -> Any:
    """Opens an unnamed file for a worker's report, in memory if possible. Raises OSError if there is no space."""
    file: Any = None
    if hasattr(os, "memfd_create"):
        with suppress(OSError):  # EPERM or ENOSYS in a sandbox
            file = os.fdopen(os.memfd_create("parallel_state"), "w+b", 0)
    file = file or tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    file.write(bytes(REPORT_BYTES))
    file.seek(0)
    file.truncate()
    return file


class Rank:
    def __init__(self, rank: int, name: str) -> None:
        self.rank = rank
        self.name = name
        self.process: Any = None
        self.ended: float | None = None  # monotonic time at which `wait` detected its exit
        self.records = _unnamed_file()
        self.stacks_file = _unnamed_file()

    def report(self) -> Report | None:
        return read_report(self.records.fileno())

    def result(self) -> Any:
        return read_result(self.records.fileno(), self.rank)

    def stacks(self) -> str:
        self.stacks_file.seek(0)
        text: bytes = self.stacks_file.read(4096)
        return text.decode(errors="replace")

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.is_alive()

    @property
    def exit_code(self) -> int | None:
        return cast("int | None", self.process.exitcode)

    @property
    def failed(self) -> bool:
        report = self.report()
        return self.exit_code != 0 or report is None or report.kind != "result"

    def explain(self) -> str:
        report, code = self.report(), self.exit_code or 0
        names = {number.value: number.name for number in signal.Signals}
        how = f"signal {-code} ({names.get(-code, 'unnamed')})" if code < 0 else f"exit code {code}"
        name = f"rank {self.rank} ({self.name}, pid {self.process.pid})"
        if report is None:
            return f"{name} ended with {how} before it could call the function; {_HINT}"
        if report.kind == "error":
            return f"{name} raised {report.summary}"
        if report.kind == "result":
            return f"{name} returned, but its process ended with {how}"
        hint = "; if no process sent it, the kernel was out of memory (see dmesg)" if code == -signal.SIGKILL else ""
        return f"{name} ended with {how} before the function returned{hint}"


class Ranks:
    """The processes of a launch on this host. All have exited when the `with` block ends."""

    def __init__(
        self, content: bytes, secret: bytes, config: LaunchConfig, environs: list[dict[str, str]], deadline: float
    ) -> None:
        self.ranks = [Rank(rank, f"{config.name}-{rank}") for rank in (int(environ["RANK"]) for environ in environs)]
        self._content, self._secret, self._environs = content, secret, environs
        self._start_method, self._deadline, self._grace = config.start_method, deadline, config.grace
        self._failed = self._all_started = False
        end, leash = os.pipe()
        self._leash_end, self._leash = os.fdopen(end, "rb", 0), os.fdopen(leash, "wb", 0)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        received = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
        try:
            self.close(error.received if isinstance(error, _SignalReceived) else received)
        finally:
            self.release()

    def start(self) -> None:
        try:
            self._check_descriptors()
            if self._start_method == "forkserver":
                start_fork_server()
                if not _detects_exits():
                    logger.warning("this program's fork server has SIGCHLD blocked and can't detect exits of ranks: "
                                   "the ranks are spawned instead")  # fmt: skip
                    self._start_method = "spawn"
            context = multiprocessing.get_context(self._start_method)
            inheritance = Inheritance.of_this_process()
            for rank, environ in zip(self.ranks, self._environs, strict=True):
                files = (Inherited(file.fileno()) for file in (self._leash_end, rank.records, rank.stacks_file))
                start = Start(self._content, rank.name, environ, self._secret, inheritance, *files)
                process = context.Process(target=work, args=(start,), name=rank.name)  # type: ignore[attr-defined]
                _start(process)
                rank.process = process
            self._all_started = True
        except (OSError, EOFError, ValueError) as error:
            first, last = self.ranks[0].rank, self.ranks[-1].rank
            why = limits.shortage(error) or f"{_HINT}; or it reached a limit: {limits.in_force()}"
            raise LaunchError(
                f"one of the ranks {first} to {last} could not be started ({error!r}); {why}", rank=first
            ) from error
        finally:
            self._leash_end.close()

    def _check_descriptors(self) -> None:
        """Raises OSError if too few file descriptors are free. The fork server would print a traceback instead."""
        each = 2 if self._start_method == "forkserver" else 5
        with ExitStack() as spare:
            for _ in range(_START_DESCRIPTORS + each * len(self.ranks)):
                spare.callback(os.close, os.dup(self._leash.fileno()))

    def wait(self) -> None:
        """Waits for all ranks until the launch's deadline, but after a first failure at most 0.3 s longer (after Ctrl-C
        0.8 s).
        """
        while (running := self.running()) and (left := self._deadline - time.monotonic()) > 0:
            connection.wait([rank.process.sentinel for rank in running], min(left, _POLL_S))
            now = time.monotonic()
            ended = [rank for rank in running if rank.exit_code is not None]
            for rank in ended:
                rank.ended = now
            if not self._failed and (failed := [rank for rank in ended if rank.failed]):
                report = failed[0].report()
                interrupted = report is not None and report.kind == "interrupted"
                self._failed = True
                self._deadline = min(self._deadline, now + (_INTERRUPT_S if interrupted else _SETTLE_S))

    def running(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.ended is None]

    def close(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Sends the signal `number` to the ranks, and after the launch's grace period SIGKILL."""
        try:
            if number == signal.SIGINT:
                self._all_exit_within(_INTERRUPT_S)  # a terminal sends Ctrl-C to all; a second one interrupts cleanup
                self._send(signal.SIGINT)
                self._all_exit_within(_INTERRUPT_S)  # native code may not return for it
                number = signal.SIGTERM
            self._send(number)
            self._all_exit_within(self._grace)
        finally:  # also if another signal raises
            self._send(signal.SIGKILL)
            self._all_exit_within(EXIT_S)

    def _send(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            if rank.alive:
                with suppress(ProcessLookupError):
                    os.kill(rank.process.pid, number)

    def _all_exit_within(self, wait_s: float) -> None:
        until = time.monotonic() + wait_s
        while (alive := [rank for rank in self.ranks if rank.alive]) and (left := until - time.monotonic()) > 0:
            connection.wait([rank.process.sentinel for rank in alive], min(_POLL_S, left))

    def release(self) -> None:
        """Closes this process's handles and report files of the ranks, and the pipe `leash`. When the pipe closes, the
        kernel kills ranks that still run (see worker.py).
        """
        if not self._all_started:  # after a failed start only the kernel knows the processes
            self._leash_end.close()
            with suppress(BrokenPipeError):  # no process holds the other end
                self._leash.write(b"\0")
            other_end = select.poll()
            other_end.register(self._leash, 0)  # reports an error once no process holds the other end
            other_end.poll(_CUT_S * 1000)
        self._leash.close()
        for rank in self.ranks:
            if rank.process is not None:
                with suppress(ValueError):  # the process survived SIGKILL (uninterruptible)
                    rank.process.close()
            rank.records.close()
            rank.stacks_file.close()


class _SignalReceived(Exception):
    def __init__(self, received: signal.Signals) -> None:
        super().__init__(f"the launcher received {received.name}")
        self.received = received


@contextmanager
def signals_raise() -> Iterator[None]:
    """Within the block, a signal that would end the launcher raises an exception, so that the ranks are stopped first.
    After the block, the signal ends the launcher.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    ignores_sigchld = signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    if threading.current_thread() is not threading.main_thread():  # other threads can't set handlers
        if ignores_sigchld:
            raise LaunchError(
                "launch can't get the exit codes of its ranks, because this process ignores SIGCHLD; call "
                "signal.signal(signal.SIGCHLD, signal.SIG_DFL) in the main thread before launch",
                rank=0,
            )
        yield
        return
    ours = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    received = None
    try:
        for number in ours:
            signal.signal(number, _raise_signal)
        if ignores_sigchld:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        yield
    except _SignalReceived as caught:
        received = caught.received
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
        if ignores_sigchld:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if received is not None:
        signal.raise_signal(received)
        raise SystemExit(128 + received)  # process 1 of a container survives the signal


def _raise_signal(number: int, frame: FrameType | None) -> None:
    raise _SignalReceived(signal.Signals(number))


def _start(process: Any) -> None:
    while True:
        server = getattr(forkserver._forkserver, "_forkserver_pid", None)
        try:
            process.start()
            return
        except (ConnectionRefusedError, BrokenPipeError, EOFError):
            if server is None or not _exits_soon(server):
                raise
        start_fork_server()


def _exits_soon(pid: int) -> bool:
    deadline = time.monotonic() + _SERVER_END_S
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.005)
    return True


def _detects_exits() -> bool:
    """Returns False if the program started the fork server with SIGCHLD blocked."""
    server = forkserver._forkserver
    pid = getattr(server, "_forkserver_pid", None)
    if pid is None or "parallel_state.launch.preload" in getattr(server, "_preload_modules", ()):
        return True
    return not blocked_signals(pid) >> (signal.SIGCHLD - 1) & 1


def start_fork_server() -> None:
    """Starts multiprocessing's fork server, which first imports torch and this library.

    Does nothing if the program has set its own preload list.
    """
    ours = ["__main__", "torch", *_AT_INIT, "parallel_state.launch.preload"]
    present = getattr(forkserver._forkserver, "_preload_modules", None)
    # The server imports from the working directory first, where another `parallel_state` may be.
    here, nearer = os.path.dirname(os.path.dirname(__file__)), os.path.join(os.getcwd(), "parallel_state")
    found = not os.path.exists(nearer) or os.path.samefile(here, nearer)
    if present == ["__main__"]:
        multiprocessing.set_forkserver_preload(ours if found else ours[:2])
    elif present != ours:
        return
    resource_tracker.ensure_running()  # before SIGINT is blocked: its start unblocks it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT} if found else ())
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_Failure = tuple[float, Rank, Report | None]


def raise_failure(ranks: list[Rank], running: list[Rank], stopped_at: float, config: LaunchConfig) -> None:
    failures: list[_Failure] = []
    for rank in ranks:
        report = rank.report()
        if report is not None and report.kind in ("error", "interrupted") and report.time < stopped_at:
            failures.append((report.time, rank, report))
        elif rank.ended is not None and rank.failed:
            # Other ranks may report errors that a crash caused before it is detected.
            early_s = _CRASH_S if rank.exit_code in _CRASHES else 0.0
            failures.append((rank.ended - early_s, rank, None))
    if not failures and not running:
        return
    if not failures:
        names = ", ".join(str(rank.rank) for rank in running)
        places = "".join(f"\nwhere rank {rank.rank} was:\n{rank.stacks()}" for rank in running[:8])
        raise LaunchError(
            f"launch timed out after {config.timeout} s: of {config.world_size} ranks {names} were still running "
            f"and have been stopped{places}",
            rank=running[0].rank,
        )
    failures.sort(key=lambda failure: failure[0])
    _move_blamed_first(failures)
    (_, first, report_of_first), *later = failures
    if report_of_first is not None and report_of_first.kind == "interrupted":
        raise KeyboardInterrupt
    text = f"{first.explain()} (world size {config.world_size})"
    if later:
        text += "\nlater failures: " + "; ".join(rank.explain()[:200] for _, rank, _ in later)
    where, exit_code = first.stacks(), first.exit_code
    if report_of_first is not None:
        where, exit_code = report_of_first.text, report_of_first.exit_code
    raise LaunchError(text + (f"\nwhere the rank was:\n{where}" if where else ""), rank=first.rank, exit_code=exit_code)


def _move_blamed_first(failures: list[_Failure]) -> None:
    blamed = failures[0][2].suspect_ranks if failures[0][2] is not None else ()
    for index, (_, rank, report) in enumerate(failures):
        if report is None and rank.rank in blamed:
            failures.insert(0, failures.pop(index))
            return
