"""Restarts the surviving ranks as a smaller world after a failure."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial

from typing_extensions import Unpack

from device_communicators.base import settings
from device_communicators.base.errors import (
    GroupNotInitializedError,
    InvalidArgumentError,
    UnsupportedError,
    format_ranks,
)
from device_communicators.base.host_calls import OUTSIDE, host_call
from device_communicators.routing.failures import counted_from_begin
from parallel_state import state
from parallel_state.keywords import ModelParallelOptions
from parallel_state.layout.axes import other_sizes_by_name

logger = logging.getLogger("parallel_state")


def check_survivors(ranks: Sequence[int], own: int, world_size: int) -> list[int]:
    wanted = sorted(set(ranks))
    if list(ranks) != wanted or not wanted or wanted[0] < 0 or wanted[-1] >= world_size:
        raise InvalidArgumentError(
            f"ranks of reinitialize must be distinct global ranks 0 … {world_size - 1} in ascending order, but are "
            f"{list(ranks)}"
        )
    if own not in wanted:
        raise InvalidArgumentError(
            f"this rank, {own}, is not in the survivors {format_ranks(wanted)} that reinitialize got; exit this process"
        )
    return wanted


@host_call(OUTSIDE)
@partial(other_sizes_by_name, also=state.initialize_model_parallel)
@counted_from_begin()
def reinitialize(
    ranks: Sequence[int],
    tensor_model_parallel_size: int | None = None,
    pipeline_model_parallel_size: int | None = None,
    *,
    data_parallel_size: int | None = None,
    timeout: timedelta | float | None = None,
    **options: Unpack[ModelParallelOptions],
) -> None:
    """Replaces the world by a new world of the surviving `ranks`, in the same processes.

    Each survivor must call this with the same arguments. `ranks` are ascending global ranks of the old world, without
    the lost ranks. The error that ended the old world lists the lost ranks in `suspect_ranks`. The new world numbers
    its ranks from 0. Then initialize_model_parallel runs with the sizes and `options`. `timeout` limits each operation;
    the default is the old world's.

    If this function fails, there is no world. The surviving ranks can then call init_distributed_environment with a new
    address.

    Raises GroupNotInitializedError without a world; InvalidArgumentError for invalid `ranks`; RendezvousError if a
    survivor doesn't call this in time; and the errors of initialize_model_parallel.
    """
    from device_communicators.control.plane import Endpoint
    from parallel_state.startup.rendezvous import meet_again, met_before

    start, world = state._START, state._WORLD
    if start is None or world is None:
        raise GroupNotInitializedError(
            "reinitialize() needs a world that this library started; call init_distributed_environment()"
        )
    survivors = check_survivors(ranks, world.rank, world.world_size)
    lost = sorted(set(world.ranks) - set(survivors))
    logger.warning("rank %d restarts without ranks %s", world.rank, format_ranks(lost))
    place = survivors.index(world.rank)
    met = None
    with ExitStack() as stack:  # after a failure other survivors then detect that this rank left
        try:
            if world.pool is not None and len(survivors) > 1:
                limit_s = settings.START_TIMEOUT_S.get()
                met = meet_again(world.pool.watcher, survivors, world.rank, start.own_place, limit_s)
            if met is not None:
                stack.callback(met.watcher.close)
        finally:
            if world.pool is not None:
                world.pool.abandon()
            state.destroy_distributed_environment()
        gc.collect()  # an error and its frames are a reference cycle, which holds the old store
        init_method = start.init_method
        if met is not None:
            host, port = Endpoint.parse(met.places[0].endpoint)[1:3]
            init_method = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        elif len(survivors) > 1 and start.is_served_by_rank_0:
            raise UnsupportedError(
                "reinitialize() failed: the surviving ranks can't find each other. Rank 0, which served the store, is "
                "gone, and this process has no control plane. Call init_distributed_environment() with a new address"
            )
        options_of_world = {**start.options} if timeout is None else {**start.options, "timeout": timeout}
        with met_before(met):
            state.init_distributed_environment(len(survivors), place, init_method, **options_of_world)
        stack.pop_all()
    state.initialize_model_parallel(
        tensor_model_parallel_size, pipeline_model_parallel_size, data_parallel_size=data_parallel_size, **options
    )
