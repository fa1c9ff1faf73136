"""Simulates one rank of a layout in one process.

The other ranks are assumed to hold this rank's tensors: a sum multiplies the tensor by the group's size, a gather
repeats it. A send does nothing; other calls that need a real peer raise UnsupportedError.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from typing_extensions import Unpack

from device_communicators.base import settings
from device_communicators.base.errors import InvalidArgumentError, int_advice
from device_communicators.base.host_calls import OUTSIDE, host_call
from device_communicators.base.member import Timeout
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.registry import unique_name
from parallel_state.groups.coordinator import GroupCoordinator
from parallel_state.groups.parallel_groups import ParallelGroups, virtual_pipeline
from parallel_state.keywords import Sizes
from parallel_state.layout.axes import DEFAULT_ORDER, by_axis, named_sizes, other_sizes_by_name
from parallel_state.layout.resolution import made_at_start, resolve_layout


@host_call(OUTSIDE)
@other_sizes_by_name
def simulate(
    rank: int = 0,
    world_size: int = 1,
    tensor_model_parallel_size: int | None = None,
    pipeline_model_parallel_size: int | None = None,
    *,
    data_parallel_size: int | None = None,
    order: str = DEFAULT_ORDER,
    device: torch.device | str = "cpu",
    virtual_pipeline_model_parallel_size: int | None = None,
    ranks_per_node: int | None = None,
    **sizes: Unpack[Sizes],
) -> ParallelGroups:
    """Returns the groups of `rank` in one process, to check shapes. Calls act as if all ranks had this rank's tensors.
    Works before any init.

    Sizes, order and errors are those of initialize_model_parallel. `ranks_per_node`: as in create_parallel_groups.
    """
    asked = named_sizes(tensor_model_parallel_size, pipeline_model_parallel_size, data_parallel_size, sizes)
    layout = resolve_layout(world_size, asked, order, ranks_per_node=ranks_per_node)
    if not isinstance(rank, int):
        raise InvalidArgumentError(f"rank must be an int, but is {rank!r}{int_advice(rank)}")
    layout.coordinates(rank)  # raises

    def make(name: str, _: ParallelGroups | None = None) -> GroupCoordinator | None:
        ranks = layout.group_of(rank, name)
        return simulated_group(ranks, rank, name=name, device=device) if ranks else None

    world = simulated_group(list(range(world_size)), rank, name="world", device=device)

    def divide(changed: Mapping[str, int | None]) -> ParallelGroups:
        return simulate(
            rank,
            world_size,
            order=order,
            device=device,
            virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
            ranks_per_node=ranks_per_node,
            **{**by_axis(asked), **changed},
        )

    stages = virtual_pipeline(layout, virtual_pipeline_model_parallel_size)
    groups = ParallelGroups(layout, world, {}, make, stages, divide)
    for name in made_at_start(layout, asked):
        groups.get(name)
    return groups


@host_call(OUTSIDE)
def simulated_group(
    ranks: list[int], rank: int, *, name: str = "simulated", device: torch.device | str = "cpu"
) -> GroupCoordinator:
    """Returns a group of the global `ranks` in one process, which acts as `rank`. Calls act as if all ranks had this
    rank's tensors.
    """
    if rank not in ranks or len(set(ranks)) != len(ranks):
        raise InvalidArgumentError(f"ranks must be distinct and include rank {rank}, but are {ranks}")
    context = GroupContext(
        name=unique_name(name),
        ranks=tuple(ranks),
        rank=ranks.index(rank),
        device=torch.device(device),
        timeout=Timeout(settings.TIMEOUT_S.get()),
        simulated=True,
    )
    return GroupCoordinator(context)
