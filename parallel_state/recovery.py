"""After a failure: the ranks that are left start again in the same processes, as a smaller world.

What belongs here: where the survivors meet, and in which order things are let go and made. How a world is made is
`state`'s business. The old world's transfers may hang in gloo's threads: they are left behind, not waited for.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from device_communicators.errors import GroupNotInitializedError, InvalidArgumentError, format_ranks
from device_communicators.host_calls import OUTSIDE, host_call
from parallel_state.axes import other_sizes_by_name
from parallel_state.environment import ProcessEnvironment

logger = logging.getLogger("parallel_state")


@dataclass(frozen=True)
class Start:
    """How this process joined its world."""

    init_method: str
    backend: str
    local_rank: int
    timeout_s: float
    allow_pickle: bool
    bind_device: bool
    served_by: int | None
    """The rank that serves the store; None where a launcher, or the file system, does."""
    server: tuple[str, int] | None
    """Host and port of the store, where a rank serves it."""
    high_priority_stream: bool = False
    generation: int = 0
    """How many worlds this process was in before by `reinitialize`."""


_FIRST_PORT = 1024
"""Below, only root may listen; after the last one come these."""


def server_of(init_method: str, place: ProcessEnvironment) -> tuple[str, int] | None:
    """Where rank 0 serves the store of a world; None where it doesn't."""
    if place.world_size == 1:
        return None
    if init_method.startswith("tcp://"):
        parts = urlsplit(init_method)
        return (parts.hostname, parts.port) if parts.hostname and parts.port else None
    if init_method != "env://" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return (place.master_addr, place.master_port) if place.master_addr and place.master_port else None


def own_address(server: tuple[str, int] | None) -> str:
    """Under which address the hosts of this world reach this process; empty where that doesn't matter."""
    if server is None:
        return ""
    try:
        family, kind, _, _, where = socket.getaddrinfo(*server, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing: it picks the interface
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def meeting_place(start: Start, ranks: Sequence[int], addresses: Sequence[str]) -> str:
    """The init method of the next world, of the old one's `ranks`; the same on all of them."""
    if start.served_by is None or start.server is None:
        return start.init_method
    host, port = start.server
    if start.served_by in ranks:
        # It serves the next world too, for it is the lowest; its port is its own to give back.
        return f"tcp://{_bracketed(host)}:{port}"
    host = addresses[ranks[0]] if addresses else ""
    if not host:
        raise InvalidArgumentError(
            f"rank {start.served_by} served the store, and where rank {ranks[0]} can be reached isn't known; call "
            "destroy_distributed_environment() and init_distributed_environment(...) with an address"
        )
    # Not the old port: the rank that held it may only have been given up, and still hold it.
    next_port = _FIRST_PORT + (port + 1 + start.generation - _FIRST_PORT) % (65_536 - _FIRST_PORT)
    return f"tcp://{_bracketed(host)}:{next_port}"


def check_survivors(ranks: Sequence[int], own: int, world_size: int) -> list[int]:
    """`ranks` of the old world, ascending; InvalidArgumentError for what can't be the next one."""
    wanted = sorted(set(ranks))
    if list(ranks) != wanted or not wanted or wanted[0] < 0 or wanted[-1] >= world_size:
        raise InvalidArgumentError(
            f"ranks of reinitialize must be distinct global ranks 0 … {world_size - 1} in ascending order, but are "
            f"{list(ranks)}"
        )
    if own not in wanted:
        raise InvalidArgumentError(
            f"this rank, {own}, is not among the survivors {format_ranks(wanted)}; end this process"
        )
    return wanted


@host_call(OUTSIDE)
@other_sizes_by_name
def reinitialize(
    ranks: Sequence[int],
    tensor_model_parallel_size: int | None = None,
    pipeline_model_parallel_size: int | None = None,
    *,
    data_parallel_size: int | None = None,
    timeout: timedelta | float | None = None,
    **options: Any,
) -> None:
    """Starts again with the `ranks` (global, of the present world) that are left, in the same processes.

    Each of them calls it with the same `ranks`, ascending, and sizes; `error.suspect_ranks` says who is lost. The old
    world is let go without a word to the lost ranks, the next one numbers the survivors from 0 in their order, under
    the same launcher's store or at the same address; where the rank that served the store is lost, at the lowest
    survivor's, one port further. Then initialize_model_parallel with the sizes and `options` given.

    Where it fails on the way, as another rank ends meanwhile, there is no world any more: those that are left then call
    init_distributed_environment with an address of their own.

    `timeout` is that of the next world's operations (default: as before). Raises GroupNotInitializedError without a
    world, InvalidArgumentError for `ranks`, RendezvousError where a survivor doesn't come before
    PARALLEL_STATE_START_TIMEOUT_S, and what initialize_model_parallel raises.
    """
    from parallel_state import state

    start, world = state._START, state._WORLD
    if start is None or world is None:
        raise GroupNotInitializedError(
            "there is no world that this library has started; call init_distributed_environment()"
        )
    survivors = check_survivors(ranks, world.rank, world.world_size)
    memory = world.context.host_memory
    addresses = memory.addresses if memory is not None else ()
    init_method = meeting_place(start, survivors, addresses)
    lost = sorted(set(world.ranks) - set(survivors))
    logger.warning("rank %d starts again without ranks %s", world.rank, format_ranks(lost))
    place = survivors.index(world.rank)
    if world.pool is not None:
        world.pool.abandon()
    state.destroy_distributed_environment()
    gc.collect()  # an error and the calls that it went through hold each other: with them goes the port
    state.init_distributed_environment(
        len(survivors),
        place,
        init_method,
        start.local_rank,
        start.backend,
        start.timeout_s if timeout is None else timeout,
        allow_pickle=start.allow_pickle,
        bind_device=start.bind_device,
        high_priority_stream=start.high_priority_stream,
    )
    state._note_generation(start.generation + 1)
    state.initialize_model_parallel(
        tensor_model_parallel_size, pipeline_model_parallel_size, data_parallel_size=data_parallel_size, **options
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
