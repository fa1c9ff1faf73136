"""The steps of start-up that need no state: where this process stands, its device, the default group, its proof.

`state` calls them in order and keeps what comes of it; nothing here is remembered.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from device_communicators import native, settings
from device_communicators.errors import (
    CommunicationError,
    ConfigMismatchError,
    InvalidArgumentError,
    PeerDiedError,
    RendezvousError,
)
from device_communicators.group_topology import uuid_of
from device_communicators.health import Farewells
from device_communicators.heartbeat import Heartbeats
from device_communicators.links import Links
from device_communicators.segment import sweep
from device_communicators.shared_gpus import find_shared_gpus
from device_communicators.shared_gpus import warning as shared_gpus_warning
from device_communicators.waiting import Watched
from parallel_state import environment
from parallel_state.coordinator import GroupCoordinator
from parallel_state.environment import ProcessEnvironment
from parallel_state.groups import ProcessGroupPool
from parallel_state.options import GroupOptions, check_backend
from parallel_state.rendezvous import make_store
from parallel_state.same_node import nodes_of

logger = logging.getLogger("parallel_state")

_READERS_PER_S = 256
"""Larger worlds beat less often: every rank reads each time, and one store serves them all."""


def place_of(world_size: int, rank: int, local_rank: int, init_method: str) -> ProcessEnvironment:
    """Where this process stands: from the arguments, or, where they are -1, from what started it."""
    for name, number in (("world_size", world_size), ("rank", rank), ("local_rank", local_rank)):
        if not isinstance(number, int) or isinstance(number, bool) or number < -1:
            raise InvalidArgumentError(f"{name} must be an int, -1 for what the environment says, but is {number!r}")
    if not isinstance(init_method, str):
        raise InvalidArgumentError(f"distributed_init_method must be a str such as 'env://', but is {init_method!r}")
    if (world_size == -1) != (rank == -1):
        raise InvalidArgumentError(
            f"world_size and rank must be given both or neither, but are {world_size} and {rank} (-1 is: not given)"
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


def master_of(place: ProcessEnvironment) -> tuple[str, int] | None:
    """Returns the host and port where the ranks meet, whoever serves there; None where the environment has none."""
    return (place.master_addr, place.master_port) if place.master_addr and place.master_port else None


def join_default_group(
    world_size: int, rank: int, local_rank: int, backend: str | None
) -> tuple[ProcessEnvironment, torch.device]:
    """Place and device in a default group that is there already; ConfigMismatchError where it isn't as asked for."""
    found_size, found_rank, found_backend = dist.get_world_size(), dist.get_rank(), str(dist.get_backend())
    if world_size not in (-1, found_size) or rank not in (-1, found_rank):
        raise ConfigMismatchError(
            f"torch.distributed is initialised with rank {found_rank} of {found_size}, but rank {rank} of "
            f"{world_size} was asked for; leave both out to join it, or destroy it first"
        )
    if backend not in (None, found_backend):
        raise ConfigMismatchError(
            f"torch.distributed is initialised with backend {found_backend!r}, but {backend!r} was asked for; "
            "leave backend out to join it"
        )
    place = environment.explicit(found_rank, found_size, local_rank, rendezvous=False)
    device = device_of(found_backend, place)
    prepare(device, found_size)
    return place, device


def device_of(backend: str, place: ProcessEnvironment) -> torch.device:
    """The device whose tensors the device groups carry; for CUDA also made this process' current one."""
    # A default group that was made without a backend, `undefined`, has gloo and, where there is CUDA, NCCL.
    if "nccl" not in backend and not (backend == "undefined" and torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InvalidArgumentError(f"backend {backend!r} needs a CUDA device, but torch sees none; use 'gloo'")
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


def prepare(device: torch.device, world_size: int) -> None:
    """Has the compiled part ready where it will be used: the first use may compile it, which takes its time.

    Before the ranks look for each other, whose deadlines begin then. What speaks against it is told by `explain()`.
    And takes away what a start that was killed left in shared memory.
    """
    if world_size > 1 and (swept := sweep()):
        logger.info("removed %d shared segments whose makers have ended", swept)
    if device.type == "cpu" and world_size > 1 and settings.SHARED_MEMORY.get():
        with contextlib.suppress(native.NativeUnavailableError):
            native.load()


def backend_of(backend: str | None) -> str:
    """The default group's: the argument, the setting, or what fits the machine."""
    return backend or settings.BACKEND.get() or ("nccl" if torch.cuda.is_available() else "gloo")


def make_default_group(
    place: ProcessEnvironment, init_method: str, backend: str | None, timeout_s: float, bind_device: bool = False,
    high_priority_stream: bool = False,
) -> torch.device:  # fmt: skip
    """Finds the other ranks and makes torch's default group with them; returns the device of its tensors."""
    backend = backend_of(backend)
    check_backend(backend)
    device = device_of(backend, place)
    if bind_device and device.type == "cpu":
        raise InvalidArgumentError(f"bind_device needs a device to bind, but backend {backend!r} works on the CPU")
    prepare(device, place.world_size)
    start_timeout_s = settings.START_TIMEOUT_S.get()
    store = make_store(init_method, place, start_timeout_s, over_gloo="gloo" in backend or "nccl" in backend)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if bind_device else None,
            pg_options=GroupOptions(backend, timeout_s, high_priority_stream).for_backend(),
        )
    except RuntimeError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise RendezvousError(
            f"rank {place.rank} of {place.world_size} reached the store, but making the default {backend} group "
            f"failed: {str(error).splitlines()[0]}. Look for a rank that never came or ended early",
            rank=place.rank,
            timeout_s=start_timeout_s,
        ) from error
    return device


def with_free_port(place: ProcessEnvironment) -> ProcessEnvironment:
    """Returns a copy in which a world of one has a port, by which its owner may make a default group over env://."""
    if place.world_size > 1 or place.master_addr is None or place.master_port is not None:
        return place
    with socket.socket() as probe:
        probe.bind(("", 0))
        return replace(place, master_port=probe.getsockname()[1])


def device_alone(backend: str, place: ProcessEnvironment) -> torch.device:
    """Returns the device of a world of one, which needs no default group."""
    check_backend(backend)
    device = device_of(backend, place)
    prepare(device, place.world_size)
    return device


def agree_on_token(device: torch.device) -> str:
    """A name for a world in a default group that somebody else made, where others of ours may have been before.

    Every rank of the default group calls it; rank 0 says the name.
    """
    token = torch.randint(256, (8,), dtype=torch.uint8).to(device)
    if dist.get_world_size() > 1:
        dist.broadcast(token, src=0)
    return "/" + bytes(token.tolist()).hex()


def prove(group: GroupCoordinator) -> None:
    """A first small all-reduce: a group that doesn't work shows here, and not in the middle of a model."""
    if group.world_size > 1:
        total = int(group.all_reduce(torch.ones(1, device=group.device)).item())
        if total != group.world_size:
            raise CommunicationError(f"the first all-reduce of {group.context} gave {total}, not {group.world_size}")
        logger.debug("the first all-reduce of %s gave the right sum", group.context)


def tell_of_shared_gpus(world: GroupCoordinator) -> None:
    """One warning where ranks of the world share a GPU; every rank calls it. Not run on a GPU."""
    if world.device.type == "cuda" and world.world_size > 1:
        shared = find_shared_gpus(world.context, uuid_of(world.device))
        if shared and world.rank == 0:
            logger.warning("%s", shared_gpus_warning(world.context, shared))


_BEATS_IN_LIMIT = 4
"""A host may miss some before it is given up, however long the interval is."""


def hosts_of(world: GroupCoordinator) -> list[list[int]]:
    """The ranks by host, in the order of the hosts' first ranks. Every rank calls it."""
    memory = world.context.host_memory
    return nodes_of(world) if memory is None else [list(host) for host in memory.hosts]


def watch(pool: ProcessGroupPool, world: GroupCoordinator) -> None:
    """Has the ranks of this host watched, and all others listened to; every rank calls it once.

    Ranks of one host in several PID namespaces, as containers have them, hear of each other as hosts do.
    """
    memory = world.context.host_memory
    if memory is None:
        return
    pool.neighbours = memory.cores
    pids = dict(zip(memory.local_ranks, memory.pids, strict=True))

    others = {rank: pid for rank, pid in pids.items() if pid > 0 and rank != world.rank}
    farewells = Farewells(pool.private_store()) if memory.collectives is None and others else None
    if farewells is not None:
        pool.watcher.on_close.append(functools.partial(farewells.say, world.rank))

    def has_left(rank: int) -> bool:
        """Who leaves says so in shared memory, or else to the store."""
        if farewells is not None:
            return farewells.said(rank)
        return memory.collectives is not None and memory.collectives.has_left(rank)

    pool.watcher.watch_processes(others, has_left)
    apart = memory.watched_together
    store = pool.private_store() if len(apart) > 1 else None
    if store is not None:
        interval_s = settings.HEARTBEAT_S.get() * max(1.0, world.world_size / _READERS_PER_S)
        beats = Heartbeats(
            store, apart, world.rank, pool.watcher,
            interval_s=interval_s, limit_s=max(settings.HEARTBEAT_LIMIT_S.get(), _BEATS_IN_LIMIT * interval_s),
        )  # fmt: skip
        beats.start()
        pool.watcher.bound_s = beats.limit_s + 2 * interval_s
        pool.watcher.on_close.append(beats.close)
        links = Links(pool.private_store(), apart, world.rank, pool.address, pool.watcher)
        try:
            links.start()
        except (OSError, RuntimeError) as error:
            logger.warning("rank %d can't listen at %r for the other hosts (%s): its end is noticed there by beats",
                           world.rank, pool.address, str(error).splitlines()[0])  # fmt: skip
        pool.watcher.on_close.append(links.close)
    elif len(apart) > 1:
        logger.warning("the store of %s takes no second connection, so hosts that vanish are noticed late", world)


def closing_barrier(world: GroupCoordinator) -> None:
    if world.world_size == 1:
        return
    limit_s = settings.BARRIER_TIMEOUT_S.get()
    try:
        work = world.cpu_group.barrier(timedelta(seconds=limit_s))
        Watched(work, world.context, "barrier", limit_s).wait()
    except PeerDiedError:
        raise
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {world.rank} made its groups, but not all of {world.context} came to the closing barrier within "
            f"{limit_s:g} s. Likely: a rank crashed while making its groups (see its log), a rank took another branch "
            f"and never called initialize_model_parallel, or the network between two hosts is blocked. "
            f"Slow start-up? Raise {settings.BARRIER_TIMEOUT_S.name}. ({str(error).splitlines()[0]})",
            group=world.unique_name,
            operation="barrier",
            rank=world.rank,
            timeout_s=limit_s,
        ) from error
