"""torch's DeviceMesh, both ways: one over our groups, and our layout from one that the caller made.

A mesh is a tensor of ranks with named dims, slowest first, and a process group along each dim. torch takes any groups
for it; here each group's ranks are checked against the rank's coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from device_communicators.errors import GroupNotInitializedError, InvalidArgumentError, LayoutError, format_ranks
from parallel_state.axes import BY_NAME, by_axis
from parallel_state.coordinator import GroupCoordinator
from parallel_state.layout import Grid, Layout
from parallel_state.parallel_groups import ParallelGroups


def device_mesh(groups: ParallelGroups, names: Sequence[str] = ()) -> DeviceMesh:
    """The mesh of this rank with these dims, slowest first, over the groups of these names, which it makes if need be.

    Every rank of the world calls it with the same names. They are axes, or groups made of axes (`dp`, `fsdp`), of one
    numbering of the ranks, and don't overlap. Without names: all axes that have more than one rank, slowest first;
    `dp_shard` also with one rank where tp or ep has more, as FSDP needs a dim to shard; and a mesh of one dim,
    `world`, for one rank. Axes that aren't named are dims of the root mesh that the result is a slice of.

    Raises LayoutError for names that no mesh can have, GroupNotInitializedError in a simulated world.
    """
    world, layout = groups.world, groups.layout
    if world.pool is None:
        raise GroupNotInitializedError("a simulated world has no process groups, and so no DeviceMesh")
    grid = _grid_of(layout, names)
    wanted = list(names) or _usual(layout, grid)
    rest = _rest(layout, grid, wanted)
    dims = [*rest, *wanted]
    usual = _usual(layout, grid)
    if [name for name in usual if name in wanted] == wanted:
        dims = usual  # one root for all meshes in the usual order: FSDP and TP want theirs to have one
    key = tuple(dims)
    if key not in groups.meshes:
        groups.meshes[key] = _root(groups, grid, dims)
    root = groups.meshes[key]
    return root if tuple(wanted) == key else root[tuple(wanted)]


def _grid_of(layout: Layout, names: Sequence[str]) -> Grid:
    if len(set(names)) != len(names):
        raise LayoutError(f"the dims of a mesh must be different, but are {list(names)}")
    grid = layout.grid_of(*names)
    axes = [axis for name in names for axis in layout.axes_of(name)]
    overlapping = sorted({axis for axis in axes if axes.count(axis) > 1})
    if overlapping:
        raise LayoutError(
            f"the dims of a mesh must not overlap, but {list(names)} have {', '.join(overlapping)} in common"
        )
    return grid


def _usual(layout: Layout, grid: Grid) -> list[str]:
    sizes = dict(grid.axes)
    kept = [name for name, size in reversed(grid.axes) if size > 1]
    if "dp_shard" in sizes and "dp_shard" not in kept and (layout.size("tp") > 1 or _size(layout, "ep") > 1):
        kept = [name for name, size in reversed(grid.axes) if size > 1 or name == "dp_shard"]
    return kept or ["world"]


def _size(layout: Layout, name: str) -> int:
    return layout.size(name) if name in layout.names else 1


def _rest(layout: Layout, grid: Grid, names: Sequence[str]) -> list[str]:
    """The axes that the names leave, slowest first."""
    taken = {axis for name in names if name != "world" for axis in layout.axes_of(name)}
    return [name for name, size in reversed(grid.axes) if size > 1 and name not in taken]


def _root(groups: ParallelGroups, grid: Grid, dims: Sequence[str]) -> DeviceMesh:
    world, layout = groups.world, groups.layout
    if list(dims) == ["world"]:
        return DeviceMesh.from_group([world.device_group], world.device.type, [world.rank], mesh_dim_names=("world",))
    offsets = [grid.offsets(layout.axes_of(name)) for name in dims]
    ranks = torch.tensor([world.ranks[sum(steps)] for steps in product(*offsets)])
    mesh = ranks.reshape([len(steps) for steps in offsets])
    process_groups = [groups.get(name).device_group for name in dims]
    return DeviceMesh.from_group(process_groups, world.device.type, mesh, mesh_dim_names=tuple(dims))


def read(
    mesh: DeviceMesh, world: GroupCoordinator, sizes: Mapping[str, int | None]
) -> tuple[dict[str, int | None], str, dict[str, Any]]:
    """Sizes, order and process groups of a mesh that the caller made; LayoutError for one that isn't a layout."""
    if not isinstance(mesh, DeviceMesh):
        raise InvalidArgumentError(f"device_mesh must be a torch DeviceMesh, but is a {type(mesh).__name__}")
    names = mesh.mesh_dim_names
    allowed = [row.name for row in BY_NAME.values() if row.size_parameter is not None and not row.experts]
    if not names or not set(names) <= set(allowed):
        raise LayoutError(f"the dims of the mesh must have names of axes, {', '.join(allowed)}, but have {names}")
    if sorted(mesh.mesh.flatten().tolist()) != sorted(world.ranks):
        raise LayoutError(
            f"the mesh must hold each rank of the world, {format_ranks(world.ranks)}, once, but holds "
            f"{format_ranks(sorted(mesh.mesh.flatten().tolist()))}"
        )
    given = {name: size for name, size in by_axis(sizes).items() if size not in (None, 1)}
    twice = [name for name in given if name in names or (name == "dp" and {"dp_shard", "dp_replicate"} & set(names))]
    if twice:
        raise InvalidArgumentError(f"the mesh says the sizes of its axes, but {', '.join(twice)} are given as well")
    shape = dict(zip(names, mesh.mesh.shape, strict=True))
    order = _order_of(mesh, world)
    process_groups = {name: mesh.get_group(name) for name in names}
    return (
        {**given, **shape, **({} if {"dp", "dp_shard", "dp_replicate"} & set(names) else {"dp": 1})},
        order,
        {name: group for name, group in process_groups.items() if shape[name] > 1},
    )


def _order_of(mesh: DeviceMesh, world: GroupCoordinator) -> str:
    """The dims from the fastest to the slowest, by how far apart in the world neighbours on them are."""
    position = {rank: index for index, rank in enumerate(world.ranks)}
    positions = mesh.mesh.clone().apply_(lambda rank: position[int(rank)])
    names = mesh.mesh_dim_names or ()
    strides = {}
    for dim, name in enumerate(names):
        steps = set(positions.diff(dim=dim).flatten().tolist())
        if len(steps) > 1 or (steps and min(steps) < 1):
            raise LayoutError(
                f"along each dim of the mesh the ranks must go up by equal steps, but along {name!r} they go by "
                f"{sorted(steps)}: {mesh.mesh.tolist()}"
            )
        if steps:
            strides[name] = steps.pop()
    return "-".join(sorted(strides, key=lambda name: strides[name]))


def check(mesh: DeviceMesh, layout: Layout, world: GroupCoordinator) -> None:
    """LayoutError unless this rank's group along each dim has the ranks that the mesh and the layout say."""
    names = mesh.mesh_dim_names or ()
    here = (mesh.mesh == world.rank).nonzero()[0].tolist()
    for dim, name in enumerate(names):
        index = tuple(slice(None) if each == dim else at for each, at in enumerate(here))
        by_mesh = mesh.mesh[index].tolist()
        by_layout = [world.ranks[position] for position in layout.group_of(world.rank_in_group, name)]
        by_group = dist.get_process_group_ranks(mesh.get_group(name))
        if not by_mesh == by_layout == by_group:
            raise LayoutError(
                f"the group along dim {name!r} of the mesh must have this rank's row of the mesh, {by_mesh}, but rank "
                f"{world.rank} has a process group of {by_group} there; make the mesh with init_device_mesh, or give "
                "DeviceMesh.from_group the groups in the order of its dims"
            )
