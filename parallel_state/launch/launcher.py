"""Runs a function in several processes of this host."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from typing_extensions import Unpack

from device_communicators.base import cores, limits, settings
from device_communicators.base.errors import (
    InvalidArgumentError,
    LaunchError,
    ParallelStateError,
    int_advice,
    no_such_name,
)
from device_communicators.base.host_calls import OUTSIDE, host_call
from parallel_state.keywords import LaunchOptions
from parallel_state.launch.config import LaunchConfig
from parallel_state.layout.axes import DEFAULT_ORDER

R = TypeVar("R")

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_OWN_VARIABLES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
}


@host_call(OUTSIDE)
def launch(
    fn: Callable[..., R],
    nproc: int | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    config: LaunchConfig | None = None,
    **options: Unpack[LaunchOptions],
) -> list[R]:
    """Calls `fn(*args, **kwargs)` in `nproc` processes (workers), and returns their results in rank order.

    `options` are fields of `LaunchConfig` and override those of `config`. Workers get torchrun's variables (RANK, …). A
    worker calls the option `setup`, creates groups if sizes are given, calls `fn`, and destroys the groups.

    `fn`, arguments and results are pickled, so `fn` must be importable. A world of one rank without a `timeout` runs in
    this process. By default, a server that has imported torch forks the workers. Use `start_method="spawn"` for
    environment variables that must be set before a library is imported.

    Raises LaunchError with the rank, exit code or signal, and traceback of the earliest failure. After the `timeout`,
    the error has the stacks of up to 8 ranks. All workers have exited when an error is raised. Also raises
    KeyboardInterrupt, InvalidArgumentError, and RendezvousError if the port is taken.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InvalidArgumentError(
            "launch was called at the top level of the main module, which each worker imports; put the call under "
            "`if __name__ == '__main__':`"
        )
    known = ["args", "kwargs", "config", *(field.name for field in fields(LaunchConfig))]
    if unknown := next((name for name in options if name not in known), None):
        raise InvalidArgumentError(no_such_name("launch() has no argument", unknown, known))
    given = options if nproc is None else {**options, "nproc": nproc}
    config = _resolved(replace(config or LaunchConfig(), **given))
    inline = config.world_size == 1 and config.timeout is None
    try:
        # Imported inside the `try`: an import fails if no descriptor is left.
        from parallel_state.launch.store import meeting_point, secret_and_library
        from parallel_state.launch.worker import Call, run_inline

        call = Call(fn, tuple(args), dict(kwargs or {}), config)
        content = b"" if inline else call.pickled()
        secret, library = secret_and_library(config)  # may compile the library, so before the timeout starts
        deadline = time.monotonic() + (config.timeout or math.inf)
        with meeting_point(config, secret, library, deadline) as address:
            environs = [_variables(config, local_rank) | address for local_rank in range(config.nproc or 1)]
            if inline:
                return [run_inline(call, environs[0], secret)]
            return _run_ranks(content, secret, config, environs, deadline)
    except ParallelStateError:
        raise
    except (OSError, RuntimeError, MemoryError) as error:
        first = config.rank_offset
        why = limits.shortage(error) or "no rank was started, or all were stopped"
        raise LaunchError(
            f"launch could not run its ranks, which begin with rank {first}: {error!r}; {why}", rank=first
        ) from error


def _resolved(config: LaunchConfig) -> LaunchConfig:
    numbers = ("nproc", "world_size", "rank_offset", "master_port", "preferred_port")
    for name, number in ((name, getattr(config, name)) for name in numbers):
        if number is not None and not hasattr(number, "__index__"):
            raise InvalidArgumentError(f"{name} must be an int, but is {number!r}{int_advice(number)}")
    nproc = config.nproc if config.nproc is not None else torch.accelerator.device_count() or 1
    world = config.world_size if config.world_size is not None else nproc
    last = world - nproc
    ports = (config.master_port, config.preferred_port or 0)
    taken = sorted(_OWN_VARIABLES & set(config.env))
    group_options = config.init_method or config.backend or config.axis_backends or config.order != DEFAULT_ORDER
    for fits, must in (
        (nproc >= 1, f"nproc must be at least 1, but is {nproc}"),
        (last >= 0, f"world_size must be at least nproc ({nproc}), but is {world}"),
        (0 <= config.rank_offset <= last, f"rank_offset must be from 0 to {last}, but is {config.rank_offset}"),
        (all(0 <= port < 65_536 for port in ports), f"a port must be from 0 to 65535, but is {max(ports, key=abs)}"),
        (not all(ports), "master_port and preferred_port exclude each other, but both are given; leave one out"),
        (nproc == world or config.master_port or not config.hosts_store,
         "several nodes need one master_port; pass the same on each node"),
        (not group_options or config.makes_groups, "init_method, order and backends need sizes; pass sizes as well"),
        (config.secret_file is None or config.hosts_store,
         "secret_file and init_method exclude each other, but both are given; leave one out"),
        (config.start_method in ("forkserver", "spawn"),
         f"start_method must be 'forkserver' or 'spawn', but is {config.start_method!r}; a fork inherits held locks"),
        (config.timeout is None or config.timeout > 0, f"timeout must be positive, but is {config.timeout}"),
        (config.grace >= 0, f"grace must not be negative, but is {config.grace}"),
        (config.bind in (None, "cores"), f"bind must be 'cores' or None, but is {config.bind!r}"),
        (config.bind is None or settings.CORES.name not in config.env,
         f"bind and env must not both set {settings.CORES.name}"),
        (config.log_level in (None, *_LEVELS), f"log_level must be one of {_LEVELS}, but is {config.log_level!r}"),
        (not taken, f"env must not have variables that launch itself sets, but has {', '.join(taken)}"),
    ):  # fmt: skip
        if not fits:
            raise InvalidArgumentError(must)
    return replace(config, nproc=nproc, world_size=world)


def _variables(config: LaunchConfig, local_rank: int) -> dict[str, str]:
    values = {
        "RANK": config.rank_offset + local_rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": config.world_size,
        "LOCAL_WORLD_SIZE": config.nproc,
    }
    bound = {settings.CORES.name: _core_lists(config.nproc or 1)} if config.bind == "cores" else {}
    return {**config.env, **bound, **{name: str(value) for name, value in values.items()}}


def _core_lists(nproc: int) -> str:
    return "|".join(map(cores.spans, cores.shares(cores.read_cores(cores.usable_cores()), nproc)))


def _run_ranks(
    content: bytes, secret: bytes, config: LaunchConfig, environs: list[dict[str, str]], deadline: float
) -> list[Any]:
    from parallel_state.launch.processes import Ranks, raise_failure, signals_raise

    inherited = dict(os.environ)
    if len(environs) > 1:
        inherited.setdefault("OMP_NUM_THREADS", "1")  # like torchrun: ranks that each use all cores slow each other
    environs = [{**inherited, **environ} for environ in environs]
    with signals_raise(), Ranks(content, secret, config, environs, deadline) as processes:
        processes.start()
        processes.wait()
        running, stopped_at = processes.running(), time.monotonic()
        processes.close()
        raise_failure(processes.ranks, running, stopped_at, config)
        return [rank.result() for rank in processes.ranks]
