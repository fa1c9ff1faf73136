"""The code that runs in each process of `launch` (a worker), and the worker's reports to the launcher.

The kernel kills a worker when its parent (the launcher or the fork server) exits, or when the launcher's end of the
pipe `leash` closes. Workers write reports to unnamed files, so that they never block on a reader.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import logging
import multiprocessing
import os
import pickle
import re
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import connection, reduction
from typing import Any, Literal

import torch

from device_communicators.base import limits, settings
from device_communicators.base.errors import InvalidArgumentError, LaunchError
from device_communicators.base.helper_threads import HelperThread, name_this_thread
from device_communicators.base.host import read_text
from device_communicators.base.torch_internals import find_stores_by
from device_communicators.control.store import ControlStore
from device_communicators.cpu import native
from parallel_state.launch.config import LaunchConfig
from parallel_state.startup.binding import bind_to_cores
from parallel_state.startup.stores import JOB_STORE

STORE_NAME = "launch's store"
EXIT_S = 5.0  # for a failed worker to exit, and for the kernel to end a killed one
_TEXT_LIMIT = 32_768  # characters of a remote traceback
REPORT_BYTES = 4 * _TEXT_LIMIT + 4096
_LIMITS = tuple(sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}))
_NEEDED = (signal.SIGTERM, signal.SIGCHLD)
"""Signals that no rank blocks: SIGTERM stops ranks, and SIGCHLD reports exits of a rank's children."""


@dataclass(frozen=True)
class Inheritance:
    """The launcher's umask, cores, limits and signal mask. Ranks otherwise have those of the fork server."""

    umask: int | None
    cores: frozenset[int]
    limits: tuple[tuple[int, tuple[int, int]], ...]
    blocked: frozenset[int]

    @classmethod
    def of_this_process(cls) -> Inheritance:
        found = _status(os.getpid(), "Umask")
        return cls(
            umask=int(found, 8) if found else None,
            cores=frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset(),
            limits=tuple((number, resource.getrlimit(number)) for number in _LIMITS),
            blocked=frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        )

    def take_over(self) -> None:
        if self.umask is not None:
            os.umask(self.umask)
        if self.cores and self.cores != os.sched_getaffinity(0):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self.cores)
        for number, limit in self.limits:
            if resource.getrlimit(number) != limit:
                with contextlib.suppress(OSError, ValueError):
                    resource.setrlimit(number, limit)
        for needed in _NEEDED:
            if signal.getsignal(needed) == signal.SIG_IGN:
                signal.signal(needed, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked - {*map(int, _NEEDED)})


def blocked_signals(pid: int) -> int:
    """Returns the signals that process `pid` blocks, as a bit mask whose bit 0 is SIGHUP; 0 if unknown."""
    return int(_status(pid, "SigBlk") or "0", 16)


def _status(pid: int, field: str) -> str:
    found = re.search(rf"^{field}:\s*(\S+)", read_text(f"/proc/{pid}/status"), re.MULTILINE)
    return found[1] if found else ""


class Inherited:
    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherit, (reduction.DupFd(self.fd),)


def _inherit(handle: Any) -> Inherited:
    return Inherited(handle.detach())


@dataclass(frozen=True)
class Start:
    content: bytes  # a pickled Call: its import errors are raised in `work`
    name: str
    environ: dict[str, str]
    secret: bytes = field(repr=False)  # of the job's store; empty with torch's TCPStore
    inheritance: Inheritance
    leash: Inherited
    records: Inherited
    stacks: Inherited


@dataclass(frozen=True)
class Report:
    """A worker's state, written to a file for the launcher. If `kind` is "result", the function's result follows.

    `time`: time of writing. `summary`: the error's type and message. `text`: the traceback.
    """

    kind: Literal["running", "result", "error", "interrupted"]
    time: float = 0.0  # monotonic, one clock for all processes of a host
    exit_code: int = 0
    summary: str = ""
    text: str = ""
    suspect_ranks: tuple[int, ...] = ()  # blamed by the error


def read_report(fd: int) -> Report | None:
    try:
        return next(_read(fd))
    except (EOFError, pickle.UnpicklingError):
        return None


def read_result(fd: int, rank: int) -> Any:
    records = _read(fd)
    next(records)
    try:
        return next(records)
    except Exception as error:  # unpickling runs code of the result's class
        raise LaunchError(f"the result of rank {rank} can't be unpickled: {error}", rank=rank) from error


def _read(fd: int) -> Any:
    with open(fd, "rb", closefd=False) as file:
        file.seek(0)
        while True:
            yield pickle.load(file)


def _write(fd: int, *records: object) -> None:
    with open(fd, "wb", closefd=False) as file:
        file.seek(0)
        file.truncate()
        for record in records:
            pickle.dump(record, file, pickle.HIGHEST_PROTOCOL)


def _write_result(fd: int, rank: str, result: object) -> None:
    try:
        _write(fd, Report("result"), result)
    except (OSError, MemoryError) as error:
        raise limits.name_shortage(error, f"writing the result of rank {rank}") from error
    except Exception as error:
        raise InvalidArgumentError(
            f"rank {rank} must return a picklable value, but returned a {type(result).__qualname__}: {error}; "
            "return numbers, strings, containers or CPU tensors"
        ) from error


@dataclass(frozen=True)
class Call:
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    config: LaunchConfig

    def pickled(self) -> bytes:
        main = sys.modules["__main__"]
        path = getattr(main, "__file__", None)
        of_main = getattr(self.fn, "__module__", None) == "__main__"
        if getattr(main, "__spec__", None) is None and (not os.path.isfile(path) if path else of_main):
            raise InvalidArgumentError(
                "fn must be in a file that workers can import, but __main__ has no file; move fn to such a file"
            )
        for what, value in (("fn", self.fn), ("setup", self.config.setup), ("args and kwargs", self)):
            try:
                content = pickle.dumps(value)
            except Exception as error:  # pickling runs code of the arguments' classes
                raise InvalidArgumentError(
                    f"{what} must be picklable, but {error}; a function must be at the top level of a module"
                ) from error
        return content

    def run(self, inline: bool) -> Any:
        config = self.config
        if config.setup is not None:
            config.setup()
        if not config.makes_groups:
            return self.fn(*self.args, **self.kwargs)
        from parallel_state import state  # not needed if fn does its own init
        from parallel_state.process_groups.options import GroupOptions

        sizes: dict[str, Any] = dict(config.sizes)
        try:
            state.init_distributed_environment(
                distributed_init_method=config.init_method or "env://", backend=config.backend
            )
            state.initialize_model_parallel(
                tensor_model_parallel_size=config.tensor_model_parallel_size or 1,
                pipeline_model_parallel_size=config.pipeline_model_parallel_size or 1,
                order=config.order,
                backend=config.backend,
                axis_options={axis: GroupOptions(backend) for axis, backend in config.axis_backends.items()},
                **sizes,
            )
            result = self.fn(*self.args, **self.kwargs)
        except BaseException:
            if inline:  # a worker exits anyway; destroying could wait for peers and delay its report
                state.destroy_distributed_environment()
            raise
        state.destroy_model_parallel()
        state.destroy_distributed_environment()
        return result


def run_inline(call: Call, environ: Mapping[str, str], secret: bytes) -> Any:
    before = dict(os.environ)
    os.environ.update(environ)
    _take_secret(secret)
    root = logging.getLogger()
    logging_before = root.handlers, root.level
    root.handlers = []  # otherwise basicConfig closes the program's handlers
    try:
        _log_as_rank(call.config, environ["RANK"])
        return call.run(inline=True)
    except (Exception, SystemExit) as error:
        raise LaunchError(f"rank 0, in this process, raised {type(error).__name__}: {error}", rank=0) from error
    finally:
        root.handlers, root.level = logging_before
        JOB_STORE.put(None)
        find_stores_by(None)
        _set_environment(before)


def work(start: Start) -> None:
    _die_with_launcher(start.leash.fd, start.name)
    records, stacks, environ = start.records.fd, start.stacks.fd, start.environ
    _write(records, Report("running"))
    start.inheritance.take_over()
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGTERM, stacks, chain=True)  # dumps the stacks of a rank that is stopped
    try:
        _set_environment(environ)  # a fork server has the variables of the first launch
        if lists := settings.CORES.get():  # first: memory is on the NUMA node of the core that touches it
            bind_to_cores(lists)
        threads = environ.get("OMP_NUM_THREADS", "")
        if threads.isdecimal() and int(threads):
            torch.set_num_threads(int(threads))  # the fork server's torch read an older value
        _take_secret(start.secret)
        call: Call = pickle.loads(start.content)
        _log_as_rank(call.config, environ["RANK"])
        _write_result(records, environ["RANK"], call.run(inline=False))
    except BaseException as error:
        failure = _error_report(error)
        _write(records, failure)
        faulthandler.dump_traceback_later(EXIT_S, file=stacks, exit=True)
        sys.exit(failure.exit_code)


def _log_as_rank(config: LaunchConfig, rank: str) -> None:
    logging.basicConfig(
        level=config.log_level or settings.LOG_LEVEL.get(),
        format=f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s",
        force=True,
    )


def _take_secret(secret: bytes) -> None:
    if not secret:
        return
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    start_s = settings.START_TIMEOUT_S.get()
    JOB_STORE.put(ControlStore(native.load(), address, secret.hex(), start_s, STORE_NAME))
    find_stores_by(JOB_STORE.try_get)


def _die_with_launcher(leash: int, name: str) -> None:
    """Names this process `name`. Makes the kernel kill this process when the launcher exits, even while a thread holds
    the GIL. `leash`: descriptor of a pipe whose other end only the launcher has.
    """
    multiprocessing.current_process().name = name
    name_this_thread(name)
    if sys.platform != "linux":
        HelperThread("leash", _end_with, leash).start()
        return
    libc = ctypes.CDLL(None)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    # Reopened: the signal's receiver belongs to the open file, which all workers share. Its only event is the close of
    # the launcher's end.
    own = os.open(f"/proc/self/fd/{leash}", os.O_RDONLY)
    os.close(leash)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    if connection.wait([own], 0):  # the launcher exited before the signal was set up
        os.kill(os.getpid(), signal.SIGKILL)


def _end_with(leash: int) -> None:
    poll = select.poll()
    poll.register(leash, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def _set_environment(environ: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update(environ)


def _error_report(error: BaseException) -> Report:
    now = time.monotonic()
    if isinstance(error, KeyboardInterrupt):
        return Report("interrupted", now, 128 + signal.SIGINT)
    code, summary = 1, "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        summary = f"SystemExit({error.code!r}); a function that is done must return"
    text = "".join(traceback.format_exception(error))
    if len(text) > _TEXT_LIMIT:
        half, more = _TEXT_LIMIT // 2, len(text) - _TEXT_LIMIT
        text = f"{text[:half]}\n… {more} characters left out …\n{text[-half:]}"
    return Report("error", now, code, summary[:500], text, tuple(getattr(error, "suspect_ranks", ())))
