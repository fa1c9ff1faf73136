"""torch's DeviceMesh, both ways: one over our groups, and our layout from one that the caller made.

A mesh is a tensor of ranks with named dims, slowest first, and a process group along each dim. torch takes any groups
for it; here each group's ranks are checked against the rank's coordinates.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from device_communicators.base.errors import GroupNotInitializedError, InvalidArgumentError, LayoutError, format_ranks
from parallel_state.groups.coordinator import GroupCoordinator
from parallel_state.layout.axes import BY_NAME, by_axis
from parallel_state.layout.ranks import Grid, Layout

if TYPE_CHECKING:
    from parallel_state.groups.parallel_groups import ParallelGroups

logger = logging.getLogger("parallel_state")


def device_mesh(groups: ParallelGroups, names: Sequence[str] = (), *, experts: bool = False) -> DeviceMesh:
    """Returns this rank's mesh with these dims, slowest first, over the groups of these names.

    It makes those that aren't made yet.

    Every rank of the world calls it with the same names. They are axes, or groups made of axes (`dp`, `fsdp`), of one
    numbering of the ranks, and don't overlap. Without names: all axes that have more than one rank, slowest first;
    `dp_shard` also with one rank where tp or ep has more, as FSDP needs a dim to shard; and a mesh of one dim,
    `world`, for one rank. Axes that aren't named are dims of the root mesh that the result is a slice of.

    With `experts`, and no names: the axes of the experts' numbering (`ep`, `etp`, `efsdp`, `dp_replicate`, `pp`).
    Raises LayoutError for names that no mesh can have, GroupNotInitializedError in a simulated world.
    """
    world, layout = groups.world, groups.layout
    if world.pool is None:
        raise GroupNotInitializedError("a simulated world has no process groups, and so no DeviceMesh")
    if experts and names:
        raise InvalidArgumentError(f"get_device_mesh takes names or experts=True, but has both: {', '.join(names)}")
    grid = _grid_of(layout, ("ep",) if experts else names)
    wanted = list(names) or _usual(layout, grid)
    if not (names or experts) and groups.is_coordinator and tuple(wanted) not in groups.meshes:
        _warn_about_experts(layout, wanted)
    dims = _dims_of_root(layout, grid, wanted)
    process_groups = [_process_group(groups, name) for name in dims]
    root = groups.meshes.get(tuple(dims))
    if root is None or root.get_all_groups() != process_groups:  # patch_tensor_parallel_group has others
        root = groups.meshes[tuple(dims)] = _root(groups, grid, dims, process_groups)
    return root if wanted == dims else root[tuple(wanted)]


def _warn_about_experts(layout: Layout, dims: Sequence[str]) -> None:
    if _size(layout, "ep") > 1:
        left_out = [name for name, size in reversed(layout.grid_of("ep").axes) if size > 1 and name not in dims]
        logger.warning(
            "the mesh (%s) leaves out %s, as experts number the ranks in their own way; "
            "get_device_mesh(experts=True) is the experts' mesh",
            ", ".join(dims), ", ".join(left_out),
        )  # fmt: skip


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


def _dims_of_root(layout: Layout, grid: Grid, wanted: Sequence[str]) -> list[str]:
    """Returns `wanted` and the axes beside them, slowest first if `wanted` are, else those beside them first.

    Slowest first, the ranks of all roots are in the same order, whichever dims they have: FSDP joins the meshes of its
    own dims and of tensor parallelism, and torch refuses to join those of different ranks in different order.
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
                f"no mesh can have the dims {', '.join(wanted)}: the other ranks of {name.partition('/')[0]!r} are no "
                f"group, and each dim of a mesh has one; get_group({wanted[0]!r}) has the group"
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
            f"the group along dim {name!r} of a mesh must have the ranks of the layout, {ranks}, but {group!r} is in "
            "its place; leave patch_tensor_parallel_group first"
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


def read(
    mesh: DeviceMesh, world: GroupCoordinator, sizes: Mapping[str, int | None]
) -> tuple[dict[str, int | None], str, dict[str, Any]]:
    """Returns sizes, order and process groups of a mesh that the caller made; LayoutError if it isn't a layout."""
    if not isinstance(mesh, DeviceMesh):
        raise InvalidArgumentError(f"device_mesh must be a torch DeviceMesh, but is a {type(mesh).__name__}")
    names = mesh.mesh_dim_names
    parts = {"dp_shard", "dp_replicate"}
    allowed = [row.name for row in BY_NAME.values() if row.size_parameter and not (row.experts or row.within)]
    if not names or not set(names) <= set(allowed):
        raise LayoutError(f"the dims of the mesh must have names of axes, {', '.join(allowed)}, but have {names}")
    if len(set(names)) != len(names) or ("dp" in names and parts & set(names)):
        raise LayoutError(
            f"the dims of the mesh must be different axes, and 'dp' is made of its parts, but are {names}"
        )
    if sorted(mesh.mesh.flatten().tolist()) != sorted(world.ranks):
        raise LayoutError(
            f"the mesh must hold each rank of the world, {format_ranks(world.ranks)}, once, but holds "
            f"{format_ranks(sorted(mesh.mesh.flatten().tolist()))}"
        )
    given = {name: size for name, size in by_axis(sizes).items() if size is not None}
    shape: dict[str, int] = dict(zip(names, mesh.mesh.shape, strict=True))
    mesh_sizes = {**shape, "dp": prod(shape[name] for name in parts & set(names))} if parts & set(names) else shape
    twice = [name for name, size in given.items() if name in mesh_sizes and size not in (-1, mesh_sizes[name])]
    if twice:
        raise InvalidArgumentError(
            f"the mesh says the sizes of its axes, {', '.join(f'{name}={mesh_sizes[name]}' for name in twice)}, but "
            f"{', '.join(f'{name}={given[name]}' for name in twice)} are given as well"
        )
    given = {name: size for name, size in given.items() if name not in mesh_sizes}
    order = _order_of(mesh, world)
    process_groups = {name: mesh.get_group(name) for name in names if shape[name] > 1}
    cut = [name for name in parts if name in process_groups]
    if len(cut) == 1:
        process_groups["dp"] = process_groups[cut[0]]  # made of the two, and the other one has one rank
    data = {} if {"dp", *parts} & set(names) else {"dp": 1}
    return {**data, **given, **shape}, order, process_groups


def _order_of(mesh: DeviceMesh, world: GroupCoordinator) -> str:
    """Returns the dims from the fastest to the slowest, with `ep`, by how far apart neighbours on them are."""
    position = {rank: index for index, rank in enumerate(world.context.ranks)}
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
    order = sorted(strides, key=lambda name: strides[name])
    within = [at for at, name in enumerate(order) if name == "tp" or BY_NAME[name].cuts_sequence]
    order.insert(within[-1] + 1 if within else 0, "ep")  # experts divide those and what comes next, as in Megatron
    return "-".join(order)


def check(mesh: DeviceMesh, layout: Layout, world: GroupCoordinator) -> None:
    """Raises LayoutError unless this rank's group along each dim has the ranks that the mesh and the layout say."""
    names = mesh.mesh_dim_names or ()
    position = (mesh.mesh == world.rank).nonzero()[0].tolist()
    for dim, name in enumerate(names):
        index = tuple(slice(None) if each == dim else at for each, at in enumerate(position))
        by_mesh = mesh.mesh[index].tolist()
        by_layout = [world.context.ranks[position] for position in layout.group_of(world.rank_in_group, name)]
        by_group = dist.get_process_group_ranks(mesh.get_group(name))
        if not by_mesh == by_layout == by_group:
            raise LayoutError(
                f"the group along dim {name!r} of the mesh must have this rank's row of the mesh, {by_mesh}, but rank "
                f"{world.rank} has a process group of {by_group} there; make the mesh with init_device_mesh, or give "
                "DeviceMesh.from_group the groups in the order of its dims"
            )
