"""Steps of start-up: joins or creates torch's default group, and determines devices and hosts."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from device_communicators.base import host, limits, settings, torch_internals
from device_communicators.base.errors import (
    CommunicationError,
    ConfigMismatchError,
    InvalidArgumentError,
    PeerDiedError,
    RendezvousError,
    format_ranks,
    int_advice,
    plain,
)

# An import needs a file descriptor, of which none may be left when groups import them.
from device_communicators.cpu import host_memory  # noqa: F401
from device_communicators.liveness.health import Watcher, describe_deaths, kind_of_deaths
from device_communicators.machine.group_topology import find_shared_gpus, shared_gpu_warning, uuid_of
from device_communicators.routing.failures import died
from device_communicators.routing.waiting import Watched
from parallel_state.groups.coordinator import GroupCoordinator
from parallel_state.groups.same_node import nodes_of
from parallel_state.messages import media  # noqa: F401
from parallel_state.process_groups.agreement import Agreement
from parallel_state.process_groups.joining import agree_on_settings, agree_on_token, prepare
from parallel_state.process_groups.options import GroupOptions, check_backend
from parallel_state.process_groups.pool import AbandonedError, run_watched
from parallel_state.startup import environment, interfaces, reachability
from parallel_state.startup.environment import ProcessEnvironment
from parallel_state.startup.rendezvous import Met, meet

logger = logging.getLogger("parallel_state")

_GLOO_DESCRIPTORS = 8
"""File descriptors that creating the default group needs, in addition to one per rank."""
_LAST_CALL_S = 1.0
"""Time after the deadline in which ranks report whether they are connected."""
_TOGETHER_S = 0.5
"""A start that failed waits this long for reports of deaths on other hosts."""
_START_DESCRIPTORS = 20
"""File descriptors that a start needs, in addition to one per rank of the world (four per rank on rank 0)."""


@dataclass(frozen=True)
class JoinedWorld:
    place: ProcessEnvironment
    device: torch.device
    is_ours: bool
    token: str = ""
    """Prefix of the names of this world's process groups, because several worlds can use one store."""
    alone_backend: str | None = None
    """The backend, if this world has one rank and no default group of torch."""
    server: tuple[str, int] | None = None
    watcher: Watcher | None = None
    met: Met | None = None

    @property
    def address(self) -> str:
        address = host.address_towards(self.server or self.place.master)
        return address if self.met is None else self.met.address(self.place.rank, address)

    @property
    def has_made_default_group(self) -> bool:
        return self.is_ours and self.alone_backend is None


def place_of(world_size: int, rank: int, local_rank: int, init_method: str) -> ProcessEnvironment:
    for name, number in (("world_size", world_size), ("rank", rank), ("local_rank", local_rank)):
        if not isinstance(number, int) or isinstance(number, bool) or number < -1:
            raise InvalidArgumentError(
                f"{name} must be an int, or -1 to take it from the environment, but is {number!r}{int_advice(number)}"
            )
    if not isinstance(init_method, str):
        raise InvalidArgumentError(f"distributed_init_method must be a str such as 'env://', but is {init_method!r}")
    if (world_size == -1) != (rank == -1):
        raise InvalidArgumentError(
            f"pass both world_size and rank, or neither: they are {world_size} and {rank} (-1 means not passed)"
        )
    by_env = init_method == "env://"
    if rank == -1:
        place = environment.detect(rendezvous=by_env)
        place = place if local_rank == -1 else replace(place, local_rank=local_rank)
    else:
        if world_size < 1 or rank >= world_size:
            raise InvalidArgumentError(
                f"world_size must be at least 1 and rank below it, but they are {world_size} and {rank}"
            )
        place = environment.explicit(rank, world_size, local_rank, rendezvous=by_env)
    if local_rank == -1 and place.local_rank >= place.world_size:
        raise InvalidArgumentError(
            f"local_rank must be below the world size, but is {place.local_rank} of {place.world_size}"
        )
    return place


def join_default_group(world_size: int, rank: int, local_rank: int, backend: str | None) -> JoinedWorld:
    """Joins the world of torch's default group. Every rank of that group must call this.

    Raises ConfigMismatchError if the group differs from an argument that isn't -1 or None.
    """
    found_size, found_rank, found_backend = dist.get_world_size(), dist.get_rank(), str(dist.get_backend())
    if world_size not in (-1, found_size) or rank not in (-1, found_rank):
        raise ConfigMismatchError(
            f"torch.distributed is initialized with rank {found_rank} of {found_size}, but rank {rank} of "
            f"{world_size} was requested; leave rank and world_size out to join that group, or destroy that group first"
        )
    if backend not in (None, found_backend):
        raise ConfigMismatchError(
            f"torch.distributed is initialized with backend {found_backend!r}, but {backend!r} was requested; "
            "leave backend out to join that group"
        )
    place = environment.explicit(found_rank, found_size, local_rank, rendezvous=False)
    device = device_of(found_backend, place)
    prepare(found_size)
    token = agree_on_token(device)
    return JoinedWorld(place, device, False, token)


def join_world(
    place: ProcessEnvironment,
    init_method: str,
    backend: str | None,
    timeout_s: float,
    bind_device: bool,
    high_priority_stream: bool,
    *,
    undo: contextlib.ExitStack,
) -> JoinedWorld:
    """Creates torch's default group. Adds callbacks to `undo` that revert the effects.

    A world of one rank gets no default group, unless `bind_device` is set.
    """
    place = _with_free_port(place)
    undo.callback(_unexport, environment.export(environment.with_address_of(init_method, place)))
    backend = backend or settings.BACKEND.get() or ("nccl" if torch.cuda.is_available() else "gloo")
    undo.callback(_unexport, interfaces.set_nccl_environment(place, uses_nccl="nccl" in backend))
    if place.world_size == 1 and not bind_device:
        check_backend(backend)
        return JoinedWorld(place, device_of(backend, place), True, alone_backend=backend)
    options = GroupOptions(backend, timeout_s, high_priority_stream)
    device, met = _make_default_group(place, init_method, backend, options, bind_device)
    if met is not None:
        undo.callback(_close, met)  # keeps the stores alive, too: torch's groups don't
    undo.callback(_destroy_default_group, dist.group.WORLD)
    server = environment.store_server(init_method, place)
    watcher = None if met is None or place.world_size == 1 else met.watcher
    return JoinedWorld(place, device, True, server=server, watcher=watcher, met=met)


def _unexport(exported: Mapping[str, str]) -> None:
    for name, value in exported.items():
        if os.environ.get(name) == value:
            del os.environ[name]


def _close(met: Met) -> None:
    met.served.clear()  # a kept error may still refer to `met`
    met.store.close()


def _destroy_default_group(own: dist.ProcessGroup | None) -> None:
    if dist.is_initialized() and dist.group.WORLD is own:
        torch_internals.end_process_groups()


def device_of(backend: str, place: ProcessEnvironment) -> torch.device:
    """Returns this rank's device for `backend`. A GPU also becomes the current device."""
    # A default group created without a backend is `undefined`: it has gloo and, with CUDA, NCCL.
    if "nccl" not in backend and not (backend == "undefined" and torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InvalidArgumentError(f"backend {backend!r} needs a CUDA device, but torch finds none; use 'gloo'")
    count = torch.cuda.device_count()
    index = 0 if count == 1 else place.local_rank  # one visible GPU per process, or all of the node's
    if index >= count and settings.SHARE_GPUS.get():
        index %= count
    if index >= count:
        raise InvalidArgumentError(
            f"local rank {place.local_rank} needs {place.local_rank + 1} visible GPUs, but there are {count}; "
            f"start fewer ranks per node, pass local_rank, or let ranks share GPUs with {settings.SHARE_GPUS.name}=on"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _make_default_group(
    place: ProcessEnvironment, init_method: str, backend: str, options: GroupOptions, bind_device: bool
) -> tuple[torch.device, Met | None]:
    if backend == "fake":
        torch_internals.register_fake_backend()
        store, timeout = dist.HashStore(), timedelta(seconds=options.timeout_s)
        dist.init_process_group("fake", store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
        return torch.device("cpu"), None
    check_backend(backend)
    device = device_of(backend, place)
    if bind_device and device.type == "cpu":
        raise InvalidArgumentError(f"bind_device needs a GPU, but backend {backend!r} works on the CPU")
    prepare(place.world_size)
    start_timeout_s = settings.START_TIMEOUT_S.get()
    over_gloo = "gloo" in backend or "nccl" in backend
    if place.world_size > 1 and "gloo" in backend:
        each = 4 if place.rank == 0 else 1
        limits.need_descriptors(each * place.world_size + _START_DESCRIPTORS, "the start of this rank")
    met = meet(init_method, place, start_timeout_s, over_gloo=over_gloo)
    try:
        if place.world_size > 1:
            met.watcher.follow(place.rank, {rank: each.for_control for rank, each in met.places.items()})
            met.watcher.share()
            if over_gloo:
                reachability.check_all_hosts(place.rank, met.places, met.watcher, met.deadline, met.where)
            agreement = Agreement("start", place.rank, met.watcher)
            left_s = max(0.0, met.deadline - time.monotonic())
            try:
                agree_on_settings(agreement, range(place.world_size), backend, options.timeout_s, left_s)
            except CommunicationError as error:
                if type(error) is not CommunicationError:
                    raise
                raise RendezvousError(
                    str(error.args[0]),
                    operation="rendezvous",
                    rank=place.rank,
                    suspect_ranks=error.suspect_ranks,
                    timeout_s=start_timeout_s,
                ) from error
        _init_process_group(met, place, options, device if bind_device else None)
    except BaseException as error:
        named = limits.name_shortage(error, "init_process_group()")
        give_up(met.watcher, named)
        met.watcher.close()
        _close(met)
        if named is not error:
            raise named from error
        raise
    return device, met


def give_up(watcher: Watcher, error: BaseException) -> None:
    text = str(error).partition("\n")[0]
    watcher.give_up(f"gave up its start ({type(error).__name__}: {text})")


def _init_process_group(met: Met, place: ProcessEnvironment, options: GroupOptions, bound: torch.device | None) -> None:
    connecting = options.connecting(settings.START_TIMEOUT_S.get())

    def init(is_abandoned: Callable[[], bool]) -> None:
        if bound is not None:
            torch.cuda.set_device(bound)  # the current device is per thread
        torch_internals.reset_group_count()
        dist.init_process_group(
            options.backend,
            store=met.group_store.raw,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=connecting.timeout_s),
            device_id=bound,
            pg_options=connecting.for_backend(),
        )
        if is_abandoned():
            dist.destroy_process_group()
        elif connecting != options:
            torch_internals.set_timeout(dist.group.WORLD, options.timeout_s)

    started = time.monotonic()
    if "gloo" in str(options.backend):
        limits.need_descriptors(place.world_size + _GLOO_DESCRIPTORS, "the default group")
    everyone, failure = range(place.world_size), None
    try:
        if place.world_size == 1:
            return init(lambda: False)
        run_watched(init, met.watcher, everyone, met.deadline)
    except RuntimeError as error:
        failure = error
    left_s, missing = met.deadline - time.monotonic(), []
    if failure is None or left_s <= 0:
        verdict = met.watcher.agree("connected", 1, everyone, b"", max(0.0, left_s) + _LAST_CALL_S, everyone)
        if failure is None and (verdict is None or verdict.kind == "agreed"):
            return None
        missing = [] if verdict is None else verdict.ranks
    if not isinstance(failure, AbandonedError) and dist.is_initialized():
        dist.destroy_process_group()
    torch_internals.reset_group_count()
    raise _not_connected(failure, place, str(options.backend), started, met, missing) from failure


def _not_connected(
    error: RuntimeError | None,
    place: ProcessEnvironment,
    backend: str,
    started: float,
    met: Met,
    missing: Sequence[int],
) -> CommunicationError:
    late = time.monotonic() > met.deadline
    # torch's error can arrive before the control plane reports the exit.
    limit_s = 0.0 if late else None
    deaths = met.watcher.await_death_of(range(place.world_size), limit_s, together_s=_TOGETHER_S)
    who = f"rank {place.rank} of {place.world_size} found the other ranks, but "
    facts = {
        "group": "world",
        "operation": "init_process_group",
        "rank": place.rank,
        "suspect_ranks": [death.rank for death in deaths] or missing,
        "elapsed_s": time.monotonic() - started,
        "timeout_s": settings.START_TIMEOUT_S.get(),
    }
    if deaths:
        kind, text = kind_of_deaths(deaths, RendezvousError), describe_deaths(deaths)
        return kind(f"{who}{text}; see the log of that rank", **facts)  # type: ignore[arg-type]
    where = met.places.get(place.rank, "?")
    what = f"not all ranks were connected within {settings.START_TIMEOUT_S.get():g} s"
    if missing:
        held = "".join(f"; global rank {rank} is {why}" for rank, why in met.watcher.conditions(missing).items())
        what = f"ranks {format_ranks(missing)} did not connect within {settings.START_TIMEOUT_S.get():g} s{held}"
    elif error is not None and not late:
        what = f"creating the default {backend} group failed: {plain(error)}"
    return RendezvousError(
        f"{who}{what}. This rank is on {where}; no rank is known to have exited. {interfaces.advice()}. For a slow "
        f"start, raise {settings.START_TIMEOUT_S.name}",
        **facts,  # type: ignore[arg-type]
    )


def _with_free_port(place: ProcessEnvironment) -> ProcessEnvironment:
    if place.world_size > 1 or place.master_addr is None or place.master_port is not None:
        return place
    with socket.socket() as probe:
        probe.bind(("", 0))
        return replace(place, master_port=probe.getsockname()[1])


def check_shared_gpus(world: GroupCoordinator) -> None:
    """Raises an error if ranks share a GPU; with PARALLEL_STATE_SHARE_GPUS, logs a warning instead.

    Every rank must call this.
    """
    if world.device.type != "cuda" or world.world_size == 1:
        return
    uuid = uuid_of(world.device)
    shared = find_shared_gpus(world.context, uuid)
    if not shared:
        return
    if refused := find_shared_gpus(world.context, None if settings.SHARE_GPUS.get() else uuid):
        raise InvalidArgumentError(
            f"{shared_gpu_warning(world.context, refused)}; or let ranks share GPUs with {settings.SHARE_GPUS.name}=on"
        )
    if world.rank == 0:
        logger.warning("%s", shared_gpu_warning(world.context, shared))


def hosts_of(world: GroupCoordinator) -> list[list[int]]:
    """Returns one list of ranks for each host. Every rank must call this."""
    memory = world.context.host_memory
    if torch_internals.is_fake():
        return [world.ranks]
    return nodes_of(world) if memory is None else [list(host) for host in memory.hosts]


def closing_barrier(world: GroupCoordinator) -> None:
    if world.world_size == 1 or torch_internals.is_fake():
        return
    limit_s = min(settings.BARRIER_TIMEOUT_S.get(), settings.START_TIMEOUT_S.get())
    started = time.monotonic()
    try:
        work = world.context.cpu_group.barrier(timedelta(seconds=limit_s))
        Watched(work, world.context, "barrier", limit_s).wait()
    except PeerDiedError:
        raise
    except RuntimeError as error:
        # A connection can break before the exit of its rank is reported.
        if world.context.watcher is not None and world.context.watcher.await_death_of(world.ranks):
            raise died(world.context, "barrier", started) from error
        raise CommunicationError(
            f"rank {world.rank} created its groups, but not all ranks of {world.context} reached the closing barrier "
            f"within {limit_s:g} s. Likely causes: a rank crashed while creating its groups (see its log), a rank "
            f"never called initialize_model_parallel, or the network between two hosts is blocked. For a slow start, "
            f"raise {settings.BARRIER_TIMEOUT_S.name}. ({plain(error)})",
            group=world.unique_name,
            operation="barrier",
            rank=world.rank,
            timeout_s=limit_s,
        ) from error
