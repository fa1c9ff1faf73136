"""Start N local ranks of a function and return what each of them returned.

Belongs here: the processes, their environment, the store where they meet, and what becomes of a failure. What does
not: process groups (`state`), restarts and membership (torchrun's agent), who started *us* (`environment`).

`torch.distributed.elastic.multiprocessing.start_processes` is not used: with torch 2.13 its `wait` hangs after a
worker's `os._exit(0)` and outlasts its timeout while a worker is exiting, its grace after SIGTERM is fixed at 30 s,
its error times are whole seconds, and its signal handlers stay installed in the caller.

How nobody is left behind: the kernel kills a worker when its parent dies (PR_SET_PDEATHSIG), and, as that parent may
be the fork server, also when the launcher's end of a pipe, its leash, closes. Reports and results travel in unlinked
files: a worker never blocks on a reader, and whoever is killed, no file stays.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import fcntl
import logging
import math
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import connection, reduction
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from device_communicators import settings
from device_communicators.errors import InvalidArgumentError, LaunchError, RendezvousError

R = TypeVar("R")

logger = logging.getLogger(__name__)

_POLL_S = 0.5  # children of a spawned worker can hold its sentinel open, so exit codes are looked at now and then
_SETTLE_S = 0.3  # after the first failure, for the others to report theirs
_EXIT_S = 5.0  # for a failed worker to leave by itself, and for the kernel to end a killed one
_CRASH_S = 1.0  # a crash is seen this much later than it was, at most
_CRASHES = tuple(-number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE))
_TEXT_LIMIT = 32_768  # characters of a remote traceback
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_HINT = (
    "its error is on stderr: most often the main module can't be imported, or calls launch outside of "
    "`if __name__ == '__main__':`"
)
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # tells torch's env:// that rank 0 need not host the store
_OWN_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", _AGENT_STORE}


@dataclass(frozen=True)
class LaunchConfig:
    """What `launch` starts; it raises `InvalidArgumentError` for values that can't work."""

    nproc: int | None = None  # ranks to start here, whatever the world; None: one per visible accelerator, else 1
    world_size: int | None = None  # None: nproc
    rank_offset: int = 0  # global rank of the first one here
    master_addr: str = "127.0.0.1"  # the node of rank_offset 0 listens here
    master_port: int = 0  # 0: any free one
    preferred_port: int | None = None  # used if it is free, else any
    init_method: str | None = None  # None: env://, with a store that launch hosts
    tensor_model_parallel_size: int | None = None  # with both sizes None no groups are made: fn does its own init
    pipeline_model_parallel_size: int | None = None
    backend: str | None = None  # of all axes
    axis_backends: Mapping[str, str] = field(default_factory=dict)  # of single ones
    start_method: Literal["forkserver", "spawn"] = "forkserver"
    timeout: float | None = None  # seconds for the whole launch; None: no limit
    grace: float = 5.0  # seconds between SIGTERM and SIGKILL
    env: Mapping[str, str] = field(default_factory=dict)  # added to the launcher's environment
    setup: Callable[[], object] | None = None  # called in each worker, before the groups are made
    name: str = "rank"  # processes are called `name-rank`
    log_level: str | None = None  # None: PARALLEL_STATE_LOG_LEVEL

    @property
    def makes_groups(self) -> bool:
        return self.tensor_model_parallel_size is not None or self.pipeline_model_parallel_size is not None

    @property
    def hosts_store(self) -> bool:
        return self.init_method in (None, "env://")


def launch(
    fn: Callable[..., R],
    nproc: int | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    config: LaunchConfig | None = None,
    **options: Any,
) -> list[R]:
    """Call `fn(*args, **kwargs)` in `nproc` processes and return their results in rank order.

    `options` are fields of `LaunchConfig`; they go before those of `config`, which stays as it is. Each worker finds
    the environment that torchrun would give it (RANK, …, and OMP_NUM_THREADS=1 beside others), so a plain
    `init_process_group()` works. The order in a worker: logging, `setup`, the groups if sizes are given, `fn`, and
    the groups' end.

    `fn`, arguments and results are pickled: `fn` must be importable, and tensors are copied. One worker that is the
    whole world is called in this process, with the environment restored afterwards; with a `timeout` it is a
    process too, as nothing else can be stopped. The fork server imports torch once (1-2 s) and stays for later
    launches; for variables that are read while libraries are imported take `start_method="spawn"`.

    Raises `LaunchError` with the first failure in time, its rank, exit code or signal, and traceback; or, when
    `timeout` passed, with the place where each rank was. All workers are gone by then. KeyboardInterrupt, here or in
    a worker, is raised as itself. Raises `InvalidArgumentError`, and `RendezvousError` for a port that is taken.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InvalidArgumentError(
            "launch was called while a worker imports the main module: put it under `if __name__ == '__main__':`"
        )
    given = options if nproc is None else {**options, "nproc": nproc}
    config = _resolved(replace(config or LaunchConfig(), **given))
    call = _Call(fn, tuple(args), dict(kwargs or {}), config)
    deadline = time.monotonic() + (config.timeout or math.inf)
    inline = config.world_size == 1 and config.timeout is None
    content = b"" if inline else _pickled(call)
    with _meeting_point(config, deadline) as address:
        environs = [_variables(config, local_rank) | address for local_rank in range(config.nproc or 1)]
        if inline:
            return [_run_inline(call, environs[0])]
        return _run_workers(content, config, environs, deadline)


def _resolved(config: LaunchConfig) -> LaunchConfig:
    """A copy with `nproc` and `world_size` filled in. Raises for what can't work."""
    nproc = config.nproc if config.nproc is not None else torch.accelerator.device_count() or 1
    world = config.world_size if config.world_size is not None else nproc
    last = world - nproc
    ports = (config.master_port, config.preferred_port or 0)
    taken = sorted(_OWN_VARIABLES & set(config.env))
    group_options = config.init_method or config.backend or config.axis_backends
    for fits, must in (
        (nproc >= 1, f"nproc must be at least 1, but is {nproc}"),
        (last >= 0, f"world_size must be at least nproc ({nproc}), but is {world}"),
        (0 <= config.rank_offset <= last, f"rank_offset must be from 0 to {last}, but is {config.rank_offset}"),
        (all(0 <= port < 65_536 for port in ports), f"a port must be from 0 to 65535, but is {max(ports, key=abs)}"),
        (not all(ports), "master_port and preferred_port exclude each other, but both are given"),
        (nproc == world or config.master_port or not config.hosts_store, "several nodes must all name the master_port"),
        (not group_options or config.makes_groups, "init_method and backends must come with model parallel sizes"),
        (config.start_method in ("forkserver", "spawn"),
         f"start_method must be 'forkserver' or 'spawn', but is {config.start_method!r}; a fork inherits held locks"),
        (config.timeout is None or config.timeout > 0, f"timeout must be positive, but is {config.timeout}"),
        (config.grace >= 0, f"grace must not be negative, but is {config.grace}"),
        (config.log_level in (None, *_LEVELS), f"log_level must be one of {_LEVELS}, but is {config.log_level!r}"),
        (not taken, f"env must not hold what launch itself sets, but has {', '.join(taken)}"),
    ):  # fmt: skip
        if not fits:
            raise InvalidArgumentError(must)
    return replace(config, nproc=nproc, world_size=world)


def _pickled(call: _Call) -> bytes:
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    of_main = getattr(call.fn, "__module__", None) == "__main__"
    if getattr(main, "__spec__", None) is None and (not os.path.isfile(path) if path else of_main):
        raise InvalidArgumentError("fn must come from a file that workers can import, but __main__ has none")
    for what, value in (("fn", call.fn), ("setup", call.config.setup), ("args and kwargs", call)):
        try:
            content = pickle.dumps(value)
        except Exception as error:  # pickle raises whatever a __reduce__ does
            raise InvalidArgumentError(
                f"{what} must be picklable, but {error}; a function must stand at the top level of a module"
            ) from error
    return content


def _variables(config: LaunchConfig, local_rank: int) -> dict[str, str]:
    values = {
        "RANK": config.rank_offset + local_rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": config.world_size,
        "LOCAL_WORLD_SIZE": config.nproc,
    }
    return {**config.env, **{name: str(value) for name, value in values.items()}}


# Where the ranks meet


@contextmanager
def _meeting_point(config: LaunchConfig, deadline: float) -> Iterator[dict[str, str]]:
    """Yield the variables that lead torch's env:// to a store, which the node of rank_offset 0 hosts.

    It binds the port itself: nobody can take it between a probe and its use, nothing but the given address listens
    (a TCPStore that binds listens on all of them), and the store outlives rank 0.
    """
    if not config.hosts_store:
        yield {_AGENT_STORE: "False"}
        return
    start_s = min(settings.START_TIMEOUT_S.get(), max(1.0, deadline - time.monotonic()))
    store, port = _store(config, timedelta(seconds=start_s))
    try:
        yield {"MASTER_ADDR": config.master_addr, "MASTER_PORT": str(port), _AGENT_STORE: "True"}
        if config.nproc != config.world_size:
            _leave_together(store, config, min(deadline, time.monotonic() + start_s))
    finally:
        del store  # closes the port, also where an error's traceback keeps this frame


def _store(config: LaunchConfig, timeout: timedelta) -> tuple[Any, int]:
    hosts, listen_fd, port = config.rank_offset == 0, None, config.master_port
    if hosts:
        listener = _listen(config)
        port = listener.getsockname()[1]
        listen_fd = listener.detach()
    try:
        store = dist.TCPStore(
            config.master_addr, port, None, hosts, timeout, wait_for_workers=False, master_listen_fd=listen_fd
        )
    except RuntimeError as error:
        raise RendezvousError(
            f"the node of rank {config.rank_offset} must reach rank 0's store at {config.master_addr}:{port} "
            f"within {timeout.total_seconds():.0f} s, but: {str(error).splitlines()[0]}"
        ) from error
    return store, port


def _leave_together(store: Any, config: LaunchConfig, deadline: float) -> None:
    """The node that hosts the store stays until the ranks of all nodes are done with it."""
    done, world = 0, config.world_size or 1
    try:
        done = store.add("parallel_state/launch/done", config.nproc)
        while config.rank_offset == 0 and done < world and time.monotonic() < deadline:
            time.sleep(0.02)
            done = store.add("parallel_state/launch/done", 0)
    except RuntimeError:  # the store's node failed, but the ranks here have their results
        logger.warning("the node of rank 0 left before the ranks of this one were done")
    if config.rank_offset == 0 and done < world:
        logger.warning("this node leaves with the store, but only %d of %d ranks are done", done, world)


def _listen(config: LaunchConfig) -> socket.socket:
    address, port = config.master_addr, config.preferred_port or config.master_port
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise RendezvousError(f"master_addr must be an address of this node, but {address!r}: {error}") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections in TIME_WAIT don't matter
    try:
        try:
            listener.bind(where)
        except OSError as error:
            if not config.preferred_port or error.errno != errno.EADDRINUSE:
                raise
            listener.bind((where[0], 0, *where[2:]))
        listener.listen((config.world_size or 1) + 16)
    except OSError as error:
        listener.close()
        raise RendezvousError(
            f"can't listen on {address} ({where[0]}) port {port}: {error.strerror}; rank 0's node needs an address of "
            "its own and a free port: give another one, 0 for any, or preferred_port"
        ) from error
    return listener


# The launcher's side


class _Inherited:
    """A file descriptor that goes along to a worker."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherit, (reduction.DupFd(self.fd),)


def _inherit(handle: Any) -> _Inherited:
    return _Inherited(handle.detach())


@dataclass(frozen=True)
class _Report:
    """The first record of a worker's file; after a "result" follows the result itself."""

    kind: Literal["running", "result", "error", "interrupted"]
    time: float = 0.0  # monotonic: one clock for all processes of a host
    exit_code: int = 0
    summary: str = ""
    text: str = ""


class _Worker:
    """One process, as the launcher sees it."""

    def __init__(self, content: bytes, config: LaunchConfig, environ: dict[str, str]) -> None:
        self.rank = int(environ["RANK"])
        self.ended: float | None = None
        self.records: Any = tempfile.TemporaryFile()  # noqa: SIM115
        self.stacks_file: Any = tempfile.TemporaryFile()  # noqa: SIM115
        leash, self.leash = os.pipe()
        self.far_end = os.fdopen(leash)
        inherited = [_Inherited(file.fileno()) for file in (self.far_end, self.records, self.stacks_file)]
        context: Any = multiprocessing.get_context(config.start_method)
        self.process = context.Process(
            target=_worker_main, args=(content, environ, *inherited), name=f"{config.name}-{self.rank}"
        )

    def start(self) -> None:
        try:
            self.process.start()
        except (OSError, EOFError) as error:
            raise LaunchError(f"rank {self.rank} could not be started ({error!r}); {_HINT}", rank=self.rank) from error
        self.far_end.close()

    def close(self) -> None:
        os.close(self.leash)  # whatever became of it, it ends now
        self.far_end.close()
        with suppress(ValueError):  # the kernel can't end it
            self.process.close()

    def report(self) -> _Report | None:
        """None where the process ended before its first report, or within one."""
        try:
            report: _Report = pickle.load(self._rewound(self.records))
        except (EOFError, pickle.UnpicklingError):
            return None
        return report

    def result(self) -> Any:
        records = self._rewound(self.records)
        pickle.load(records)
        try:
            return pickle.load(records)
        except Exception as error:
            raise LaunchError(f"the result of rank {self.rank} can't be unpickled: {error}", rank=self.rank) from error

    def stacks(self) -> str:
        return self._rewound(self.stacks_file).read(4096).decode(errors="replace")

    def _rewound(self, file: Any) -> Any:
        reader = open(file.fileno(), "rb", closefd=False)  # noqa: SIM115  # file's own buffer may be older
        reader.seek(0)
        return reader

    @property
    def failed(self) -> bool:
        report = self.report()
        return self.process.exitcode != 0 or report is None or report.kind != "result"

    def explain(self) -> str:
        """What went wrong, in one line."""
        report, code = self.report(), self.process.exitcode or 0
        names = {number.value: number.name for number in signal.Signals}
        how = f"signal {-code} ({names.get(-code, 'unnamed')})" if code < 0 else f"exit code {code}"
        who = f"rank {self.rank} ({self.process.name}, pid {self.process.pid})"
        if report is None:
            return f"{who} ended with {how} before it could call the function; {_HINT}"
        if report.kind == "error":
            return f"{who} raised {report.summary}"
        if report.kind == "result":
            return f"{who} returned, but its process ended with {how}"
        hint = "; if nobody sent it, the kernel was out of memory (see dmesg)" if code == -signal.SIGKILL else ""
        return f"{who} ended with {how} before the function returned{hint}"


def _run_workers(content: bytes, config: LaunchConfig, environs: list[dict[str, str]], deadline: float) -> list[Any]:
    _preload()
    inherited = dict(os.environ)
    if len(environs) > 1:
        inherited.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: ranks with all cores each slow all down
    workers: list[_Worker] = []
    try:
        for environ in environs:
            workers.append(_Worker(content, config, {**inherited, **environ}))
            workers[-1].start()
        running = _watch(workers, deadline)
        stopped_at = time.monotonic()
        _stop(workers, config.grace)
        _raise_failure(workers, running, stopped_at, config)
        return [worker.result() for worker in workers]
    finally:
        _stop(workers, config.grace)
        for worker in workers:
            worker.close()


def _preload() -> None:
    """Let a fork server import torch and us once, instead of each worker, unless the program has its own list."""
    if getattr(multiprocessing.forkserver._forkserver, "_preload_modules", None) != ["__main__"]:
        return
    modules = ["__main__", "torch"]
    here, nearer = os.path.dirname(__file__), os.path.join(os.getcwd(), "parallel_state")
    if not os.path.exists(nearer) or os.path.samefile(here, nearer):  # it looks into the working directory first
        modules.append("parallel_state.launch")
    multiprocessing.set_forkserver_preload(modules)


def _watch(workers: list[_Worker], deadline: float) -> list[_Worker]:
    """Wait until all have ended, the deadline has passed, or one has failed; return those that still run."""
    running, failed = workers, False
    while running and (left := deadline - time.monotonic()) > 0:
        connection.wait([worker.process.sentinel for worker in running], min(left, _POLL_S))
        now = time.monotonic()
        for worker in running:
            if worker.process.exitcode is not None:
                worker.ended = now
        ended = [worker for worker in running if worker.ended is not None]
        running = [worker for worker in running if worker.ended is None]
        if not failed and any(worker.failed for worker in ended):
            failed, deadline = True, min(deadline, now + _SETTLE_S)
    return running


def _stop(workers: list[_Worker], grace: float) -> None:
    alive = [worker.process for worker in workers if worker.process.is_alive()]
    try:
        for process in alive:
            process.terminate()
        alive = _still_alive(alive, grace)
    finally:  # at once when Ctrl-C comes again
        for process in alive:
            process.kill()
        _still_alive(alive, _EXIT_S)


def _still_alive(processes: list[Any], wait_s: float) -> list[Any]:
    until = time.monotonic() + wait_s
    while (alive := [process for process in processes if process.is_alive()]) and time.monotonic() < until:
        connection.wait([process.sentinel for process in alive], min(_POLL_S, max(0.0, until - time.monotonic())))
    return alive


def _raise_failure(workers: list[_Worker], running: list[_Worker], stopped_at: float, config: LaunchConfig) -> None:
    """Raise for the first failure in time; for the deadline where nobody failed; return where all is well."""
    failures: list[tuple[float, _Worker, _Report | None]] = []
    for worker in workers:
        report = worker.report()
        if report is not None and report.kind in ("error", "interrupted") and report.time < stopped_at:
            failures.append((report.time, worker, report))
        elif worker.ended is not None and worker.failed:
            # Others can have reported what a crash did to them before we saw it; the reverse does not happen.
            early_s = _CRASH_S if worker.process.exitcode in _CRASHES else 0.0
            failures.append((worker.ended - early_s, worker, None))
    if not failures and not running:
        return
    if not failures:
        ranks = ", ".join(str(worker.rank) for worker in running)
        places = "".join(f"\nwhere rank {worker.rank} was:\n{worker.stacks()}" for worker in running[:8])
        raise LaunchError(
            f"launch must end within {config.timeout} s, but of {config.world_size} ranks {ranks} were still running "
            f"and have been stopped{places}",
            rank=running[0].rank,
        )
    failures.sort(key=lambda failure: failure[0])
    (_, first, told), *later = failures
    if told is not None and told.kind == "interrupted":
        raise KeyboardInterrupt
    text = f"{first.explain()} (world size {config.world_size})"
    if later:
        text += "\nlater failures: " + "; ".join(worker.explain()[:200] for _, worker, _ in later)
    where = told.text if told is not None else first.stacks()
    exit_code = told.exit_code if told is not None else first.process.exitcode
    raise LaunchError(text + (f"\nwhere it was:\n{where}" if where else ""), rank=first.rank, exit_code=exit_code)


# The worker's side


@dataclass(frozen=True)
class _Call:
    """The function, its arguments, and what to do before and after it."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    config: LaunchConfig

    def run(self, inline: bool) -> Any:
        config = self.config
        if config.setup is not None:
            config.setup()
        if not config.makes_groups:
            return self.fn(*self.args, **self.kwargs)
        from parallel_state import state  # fn may have no use for it

        per_axis: dict[str, Any] = {"axis_backends": dict(config.axis_backends)} if config.axis_backends else {}
        try:
            state.init_distributed_environment(
                distributed_init_method=config.init_method or "env://", backend=config.backend
            )
            state.initialize_model_parallel(
                tensor_model_parallel_size=config.tensor_model_parallel_size or 1,
                pipeline_model_parallel_size=config.pipeline_model_parallel_size or 1,
                backend=config.backend,
                **per_axis,
            )
            result = self.fn(*self.args, **self.kwargs)
        except BaseException:
            if inline:  # a worker reports first; its end destroys all, and destroying could wait for peers
                state.destroy_distributed_environment()
            raise
        state.destroy_model_parallel()
        state.destroy_distributed_environment()
        return result


def _run_inline(call: _Call, environ: dict[str, str]) -> Any:
    before = dict(os.environ)
    os.environ.update(environ)
    try:
        return call.run(inline=True)
    except (Exception, SystemExit) as error:
        raise LaunchError(f"rank 0, in this process, raised {type(error).__name__}: {error}", rank=0) from error
    finally:
        _replace_environ(before)


def _worker_main(
    content: bytes, environ: dict[str, str], leash: _Inherited, records: _Inherited, stacks: _Inherited
) -> None:
    _die_with_launcher(leash.fd)
    _write(records.fd, _Report("running"))
    faulthandler.enable(stacks.fd)
    faulthandler.register(signal.SIGTERM, stacks.fd, chain=True)  # where a rank was that had to be stopped
    try:
        _replace_environ(environ)
        threads = environ.get("OMP_NUM_THREADS", "")
        if threads.isdecimal() and int(threads):
            torch.set_num_threads(int(threads))  # the fork server's torch has read the variable long ago
        call: _Call = pickle.loads(content)
        logging.basicConfig(
            level=call.config.log_level or settings.LOG_LEVEL.get(),
            format=f"%(asctime)s rank {environ['RANK']} %(levelname)s %(name)s: %(message)s",
            force=True,
        )
        _write_result(records.fd, environ["RANK"], call.run(inline=False))
    except BaseException as error:
        failure = _error_report(error)
        _write(records.fd, failure)
        faulthandler.dump_traceback_later(_EXIT_S, file=stacks.fd, exit=True)
        sys.exit(failure.exit_code)


def _die_with_launcher(leash: int) -> None:
    """Let the kernel kill this process when its parent or the launcher is gone, whoever holds the GIL."""
    libc = ctypes.CDLL(None)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    libc.prctl(15, multiprocessing.current_process().name[:15].encode(), 0, 0, 0)  # PR_SET_NAME, for ps and top
    # Nothing is ever written to the leash, so the only event that the kernel can signal is its other end's close.
    fcntl.fcntl(leash, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(leash, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(leash, fcntl.F_SETFL, fcntl.fcntl(leash, fcntl.F_GETFL) | os.O_ASYNC)
    if connection.wait([leash], 0):  # it was gone before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


def _write(fd: int, *records: object) -> None:
    with open(fd, "wb", closefd=False) as file:
        file.seek(0)
        file.truncate()
        for record in records:
            pickle.dump(record, file, pickle.HIGHEST_PROTOCOL)


def _write_result(fd: int, rank: str, result: object) -> None:
    try:
        _write(fd, _Report("result"), result)
    except Exception as error:
        raise InvalidArgumentError(
            f"rank {rank} must return something picklable, but returned a {type(result).__qualname__}: {error}; "
            "return numbers, strings, containers or CPU tensors"
        ) from error


def _replace_environ(environ: Mapping[str, str]) -> None:
    """Set the whole environment; a fork server's own is as old as the first launch."""
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update(environ)


def _error_report(error: BaseException) -> _Report:
    now = time.monotonic()
    if isinstance(error, KeyboardInterrupt):
        return _Report("interrupted", now, 128 + signal.SIGINT)
    code, summary = 1, "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        summary = f"SystemExit({error.code!r}); a function that is done must return"
    text = "".join(traceback.format_exception(error))
    if len(text) > _TEXT_LIMIT:
        half, more = _TEXT_LIMIT // 2, len(text) - _TEXT_LIMIT
        text = f"{text[:half]}\n… {more} characters left out …\n{text[-half:]}"
    return _Report("error", now, code, summary[:500], text)
