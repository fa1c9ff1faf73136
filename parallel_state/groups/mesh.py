"""Creates torch DeviceMeshes over our groups, and checks each group's ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from device_communicators.base.errors import GroupNotInitializedError, InvalidArgumentError, LayoutError
from parallel_state.groups.parallel_groups import ParallelGroups
from parallel_state.layout.ranks import Grid, Layout

logger = logging.getLogger("parallel_state")


def device_mesh(groups: ParallelGroups, names: Sequence[str] = (), *, experts: bool = False) -> DeviceMesh:
    world, layout = groups.world, groups.layout
    if world.pool is None:
        raise GroupNotInitializedError("a simulated world has no process groups, and so no DeviceMesh")
    if experts and names:
        raise InvalidArgumentError(
            f"get_device_mesh takes names or experts=True, but got both; the names are {', '.join(names)}"
        )
    grid = _grid_of(layout, ("ep",) if experts else names)
    wanted = list(names) or _usual(layout, grid)
    is_new = not (names or experts) and groups.is_coordinator and tuple(wanted) not in groups.meshes
    if is_new and _size(layout, "ep") > 1:
        left_out = [name for name, size in reversed(layout.grid_of("ep").axes) if size > 1 and name not in wanted]
        logger.warning(
            "the mesh (%s) leaves out %s, because expert layers number the ranks in their own way; "
            "get_device_mesh(experts=True) returns their mesh",
            ", ".join(wanted), ", ".join(left_out),
        )  # fmt: skip
    dims = _dims_of_root(layout, grid, wanted)
    process_groups = [_process_group(groups, name) for name in dims]
    root = groups.meshes.get(tuple(dims))
    if root is None or root.get_all_groups() != process_groups:  # patch_tensor_parallel_group may have changed them
        root = groups.meshes[tuple(dims)] = _root(groups, grid, dims, process_groups)
    return root if wanted == dims else root[tuple(wanted)]


def _grid_of(layout: Layout, names: Sequence[str]) -> Grid:
    if not all(isinstance(name, str) for name in names):
        raise InvalidArgumentError(f"the dims of a mesh must be given as names, one argument each, but are {names!r}")
    if len(set(names)) != len(names):
        raise LayoutError(f"the dims of a mesh must be different, but are {list(names)}")
    grid = layout.grid_of(*names)
    axes = [axis for name in names for axis in layout.axes_of(name)]
    overlapping = sorted({axis for axis in axes if axes.count(axis) > 1})
    if overlapping:
        raise LayoutError(
            f"the dims of a mesh must be separate axes, but {list(names)} have {', '.join(overlapping)} in common"
        )
    return grid


def _usual(layout: Layout, grid: Grid) -> list[str]:
    shards = layout.size("tp") > 1 or _size(layout, "ep") > 1
    return [name for name, size in reversed(grid.axes) if size > 1 or (shards and name == "dp_shard")] or ["world"]


def _size(layout: Layout, name: str) -> int:
    return layout.size(name) if name in layout.names else 1


def _dims_of_root(layout: Layout, grid: Grid, wanted: Sequence[str]) -> list[str]:
    """Returns the dims of a mesh over the whole world, slowest-varying first. Slicing this mesh gives one with dims
    `wanted`.

    `grid`: the layout's numbering of ranks that has the wanted axes.
    """
    if list(wanted) == ["world"]:
        return ["world"]
    place = {name: at for at, (name, _) in enumerate(reversed(grid.axes))}
    axes_of = {name: layout.axes_of(name) for name in wanted}
    taken = {axis for axes in axes_of.values() for axis in axes}
    rest = [name for name in _usual(layout, grid) if name != "world" and name not in taken]
    for name in rest:
        if name not in layout.names:
            raise LayoutError(
                f"no mesh can have the dims {', '.join(wanted)}: they contain only a part of the group "
                f"{name.partition('/')[0]!r}, and the rest of {name.partition('/')[0]!r} is no group, so it can't be "
                f"another dim; add the group's other axes, or use get_group({wanted[0]!r}) for a single group"
            )
    dims = sorted([*rest, *wanted], key=lambda name: min(place[axis] for axis in axes_of.get(name, (name,))))
    return dims if [name for name in dims if name in wanted] == list(wanted) else [*rest, *wanted]


def _process_group(groups: ParallelGroups, name: str) -> Any:
    if name == "world":
        return groups.world.device_group
    group, world = groups.get(name), groups.world
    ranks = [world.context.ranks[position] for position in groups.layout.group_of(world.rank_in_group, name)]
    if group.ranks != ranks:
        raise LayoutError(
            f"the group along dim {name!r} of a mesh must have the ranks of the layout, {ranks}, but is {group!r}; "
            "make the mesh outside `with patch_tensor_parallel_group(…)`"
        )
    return group.device_group


def _root(groups: ParallelGroups, grid: Grid, dims: Sequence[str], process_groups: Sequence[Any]) -> DeviceMesh:
    world, layout = groups.world, groups.layout
    if list(dims) == ["world"]:
        return DeviceMesh.from_group(process_groups[0], world.device.type, mesh_dim_names=("world",))
    offsets = [grid.offsets(layout.axes_of(name)) for name in dims]
    ranks = torch.tensor([world.context.ranks[sum(steps)] for steps in product(*offsets)], device="cpu")
    mesh = ranks.reshape([len(steps) for steps in offsets])
    return DeviceMesh.from_group(list(process_groups), world.device.type, mesh, mesh_dim_names=tuple(dims))
