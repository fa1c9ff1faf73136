"""Derives a layout from a DeviceMesh that the caller made."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from device_communicators.base.errors import InvalidArgumentError, LayoutError, format_ranks
from parallel_state.groups.coordinator import GroupCoordinator
from parallel_state.layout.axes import BY_NAME, by_axis
from parallel_state.layout.ranks import Layout


def read(
    mesh: DeviceMesh, world: GroupCoordinator, sizes: Mapping[str, int | None]
) -> tuple[dict[str, int | None], str, dict[str, Any]]:
    if not isinstance(mesh, DeviceMesh):
        raise InvalidArgumentError(f"device_mesh must be a torch DeviceMesh, but is a {type(mesh).__name__}")
    names = mesh.mesh_dim_names
    parts = {"dp_shard", "dp_replicate"}
    allowed = [row.name for row in BY_NAME.values() if row.size_parameter and not (row.experts or row.within)]
    if not names or not set(names) <= set(allowed):
        raise LayoutError(f"the dims of the mesh must be named after axes, {', '.join(allowed)}, but are {names}")
    if len(set(names)) != len(names) or ("dp" in names and parts & set(names)):
        raise LayoutError(
            f"the dims of the mesh must be different axes, and 'dp' includes dp_shard and dp_replicate, but are {names}"
        )
    if sorted(mesh.mesh.flatten().tolist()) != sorted(world.ranks):
        raise LayoutError(
            f"the mesh must contain each rank of the world, {format_ranks(world.ranks)}, once, but contains "
            f"{format_ranks(sorted(mesh.mesh.flatten().tolist()))}"
        )
    given = {name: size for name, size in by_axis(sizes).items() if size is not None}
    shape: dict[str, int] = dict(zip(names, mesh.mesh.shape, strict=True))
    mesh_sizes = {**shape, "dp": prod(shape[name] for name in parts & set(names))} if parts & set(names) else shape
    twice = [name for name, size in given.items() if name in mesh_sizes and size not in (-1, mesh_sizes[name])]
    if twice:
        raise InvalidArgumentError(
            f"the mesh has the sizes {', '.join(f'{name}={mesh_sizes[name]}' for name in twice)}, but the arguments "
            f"are {', '.join(f'{name}={given[name]}' for name in twice)}; leave these arguments out"
        )
    given = {name: size for name, size in given.items() if name not in mesh_sizes}
    order = _order_of(mesh, world)
    process_groups = {name: mesh.get_group(name) for name in names if shape[name] > 1}
    cut = [name for name in parts if name in process_groups]
    if len(cut) == 1:
        process_groups["dp"] = process_groups[cut[0]]  # the other part of dp has one rank
    data = {} if {"dp", *parts} & set(names) else {"dp": 1}
    return {**data, **given, **shape}, order, process_groups


def _order_of(mesh: DeviceMesh, world: GroupCoordinator) -> str:
    """Returns the axes by ascending stride in the mesh, and `ep`, joined by `-`."""
    position = {rank: index for index, rank in enumerate(world.context.ranks)}
    positions = mesh.mesh.clone().apply_(lambda rank: position[int(rank)])
    names = mesh.mesh_dim_names or ()
    strides = {}
    for dim, name in enumerate(names):
        steps = set(positions.diff(dim=dim).flatten().tolist())
        if len(steps) > 1 or (steps and min(steps) < 1):
            raise LayoutError(
                f"along each dim of the mesh the ranks must increase by equal steps, but along {name!r} the steps are "
                f"{sorted(steps)}: {mesh.mesh.tolist()}"
            )
        if steps:
            strides[name] = steps.pop()
    order = sorted(strides, key=lambda name: strides[name])
    within = [at for at, name in enumerate(order) if name == "tp" or BY_NAME[name].cuts_sequence]
    order.insert(within[-1] + 1 if within else 0, "ep")  # ep divides these axes and the next slower, as in Megatron
    return "-".join(order)


def check(mesh: DeviceMesh, layout: Layout, world: GroupCoordinator) -> None:
    names = mesh.mesh_dim_names or ()
    position = (mesh.mesh == world.rank).nonzero()[0].tolist()
    for dim, name in enumerate(names):
        index = tuple(slice(None) if each == dim else at for each, at in enumerate(position))
        by_mesh = mesh.mesh[index].tolist()
        by_layout = [world.context.ranks[position] for position in layout.group_of(world.rank_in_group, name)]
        by_group = dist.get_process_group_ranks(mesh.get_group(name))
        if not by_mesh == by_layout == by_group:
            raise LayoutError(
                f"the group along dim {name!r} of the mesh must have the ranks in this rank's row of the mesh, "
                f"{by_mesh}, but on rank {world.rank} the process group has ranks {by_group}; create the mesh with "
                "init_device_mesh, or pass the groups to DeviceMesh.from_group in the order of its dims"
            )
