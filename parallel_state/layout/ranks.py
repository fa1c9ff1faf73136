"""Computes lists of ranks from axis sizes and their order.

A `Grid` numbers the ranks in mixed radix, from the fastest-varying axis to the slowest. For `tp=2, dp=3, pp=2` in the
order `tp-dp-pp`, `rank = tp + 2 · dp + 6 · pp`: the tensor-parallel groups are [0, 1], [2, 3], …, the pipeline groups
[0, 6], [1, 7], ….

A `Layout` has several grids over the same ranks, because expert layers number the ranks differently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isqrt, prod

from device_communicators.base.errors import InvalidArgumentError, LayoutError, format_ranks, int_advice


@dataclass(frozen=True)
class Grid:
    """A numbering of ranks. `axes` has the name and size of each axis, fastest-varying first."""

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def resolve(cls, world_size: int, sizes: Mapping[str, int | None], order: str) -> Grid:
        """Creates the grid of `world_size` ranks.

        `sizes` maps axes to sizes; one can be None or -1: that axis takes the remaining ranks. `order` names axes,
        fastest first, joined by `-`; axes of size 1 can be omitted. Raises LayoutError if sizes or order don't fit.
        """
        names, resolved = split_order(order), fill_in_rest(world_size, sizes)
        check_order(order, names, resolved)
        return cls(tuple((name, resolved[name]) for name in names))

    @property
    def world_size(self) -> int:
        return prod(size for _, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    def size(self, *axes: str) -> int:
        """Returns the product of the sizes of these axes. An axis that the grid doesn't have counts as 1."""
        return prod(size for name, size in self.axes if name in axes)

    def stride(self, axis: str) -> int:
        return prod(size for _, size in self.axes[: self.names.index(axis)])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns axis -> position of `rank` on this axis."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank must be in 0 … {self.world_size - 1}, but is {rank}")
        position = {}
        for name, size in self.axes:
            rank, position[name] = divmod(rank, size)
        return position

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """Returns the rank at these coordinates. An omitted axis has the coordinate 0."""
        for name, index in coordinates.items():
            if not 0 <= index < self.size(name):
                raise LayoutError(
                    f"the coordinate on {name!r} must be in 0 … {self.size(name) - 1}, but is {index}; "
                    f"the grid is {self}"
                )
        rank, stride = 0, 1
        for name, size in self.axes:
            rank += coordinates.get(name, 0) * stride
            stride *= size
        return rank

    def groups(self, *axes: str) -> list[list[int]]:
        """Returns the lists of ranks that differ only in their positions on `axes`.

        Each list ascends, and the lists are ordered by first rank.
        """
        inside, outside = self.offsets(axes), self.offsets([name for name in self.names if name not in axes])
        return [[start + offset for offset in inside] for start in outside]

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """Returns `rank` and the ranks that differ from it only in their positions on `axes`, in ascending order."""
        here = self.coordinates(rank)
        start = self.rank_at({name: index for name, index in here.items() if name not in axes})
        return [start + offset for offset in self.offsets(axes)]

    def offsets(self, names: Sequence[str]) -> list[int]:
        """Returns the ranks of a group along the axes `names`, as ascending distances from its first rank."""
        offsets, stride = [0], 1
        for name, size in self.axes:  # each stride exceeds all offsets so far, so they ascend
            if name in names and size > 1:
                offsets = [start + offset for start in range(0, stride * size, stride) for offset in offsets]
            stride *= size
        return offsets

    def __str__(self) -> str:
        return " × ".join(f"{name}={size}" for name, size in self.axes) or "one rank"


@dataclass(frozen=True)
class Layout:
    """The ranks of every group; `resolve_layout` creates a layout.

    A group has the name of its axis (`tp`), or a name of its own if it spans several axes (`dp`). Several names, as
    arguments of a method, mean the group that spans all axes of these names. Ranks are global, starting at
    `rank_offset`. `missing`: names without a group -> reason. `is_sharded`: True if `dp_shard` or `dp_replicate` was
    passed.
    """

    grids: tuple[Grid, ...]
    """A group is computed by the first grid that has all its axes."""
    spans: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Group name -> axes that the group spans, for groups that aren't one axis."""
    ends: Mapping[str, tuple[str, Callable[[list[int]], Sequence[int]]]] = field(default_factory=dict)
    """Group name -> (kind of larger groups, function that picks the group's ranks from a larger group's ranks)."""
    parts: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Group name -> (kind of larger groups, number of equal parts into which each is cut)."""
    missing: Mapping[str, str] = field(default_factory=dict)
    rank_offset: int = 0
    is_sharded: bool = False
    title: str = ""

    @property
    def world_size(self) -> int:
        return self.grids[0].world_size

    @cached_property
    def names(self) -> tuple[str, ...]:
        axes = dict.fromkeys(name for grid in self.grids for name in grid.names if "/" not in name)
        return (*axes, *self.spans, *self.ends, *self.parts)

    def size(self, *names: str) -> int:
        """Returns the number of ranks in a group of the kind `names` (see `Layout`). If sizes differ, returns the
        largest.
        """
        if len(names) == 1 and names[0] in self.ends:
            return max(map(len, self.groups(*names)))
        if len(names) == 1 and names[0] in self.parts:
            whole, count = self.parts[names[0]]
            return self.size(whole) // count
        grid, axes = self._find(names)
        return grid.size(*axes)

    def axes_of(self, *names: str) -> tuple[str, ...]:
        """Returns the axes that a group of the kind `names` (see `Layout`) spans, fastest-varying first."""
        grid, axes = self._find(names)
        return tuple(name for name in grid.names if name in axes)

    def grid_of(self, *names: str) -> Grid:
        return self._find(names)[0]

    def coordinates(self, rank: int) -> dict[str, int]:
        return self.grids[0].coordinates(self._local(rank))

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        return self.grids[0].rank_at(coordinates) + self.rank_offset

    def groups(self, *names: str) -> list[list[int]]:
        """Returns the ranks of all groups of the kind `names` (see `Layout`). Each list ascends, and the lists are
        ordered by first rank.

        The lists contain every rank once. Only kinds in `self.ends`, such as embedding groups, omit ranks.
        """
        if len(names) == 1 and names[0] in self.ends:
            whole, pick = self.ends[names[0]]
            return [_picked(names[0], pick, ranks) for ranks in self.groups(whole)]
        if len(names) == 1 and names[0] in self.parts:
            size, (whole, _) = self.size(*names), self.parts[names[0]]
            return sorted(ranks[at : at + size] for ranks in self.groups(whole) for at in range(0, len(ranks), size))
        grid, axes = self._find(names)
        found = grid.groups(*axes)
        return [[rank + self.rank_offset for rank in ranks] for ranks in found] if self.rank_offset else found

    def group_of(self, rank: int, *names: str) -> list[int]:
        """Returns the group of the kind `names` (see `Layout`) that contains `rank`, or [] if none does."""
        if len(names) == 1 and names[0] in self.ends:
            whole, pick = self.ends[names[0]]
            ranks = _picked(names[0], pick, self.group_of(rank, whole))
            return ranks if rank in ranks else []
        if len(names) == 1 and names[0] in self.parts:
            size, ranks = self.size(*names), self.group_of(rank, self.parts[names[0]][0])
            start = ranks.index(rank) // size * size
            return ranks[start : start + size]
        grid, axes = self._find(names)
        return [each + self.rank_offset for each in grid.group_of(self._local(rank), *axes)]

    def _local(self, rank: int) -> int:
        if not self.rank_offset <= rank < self.rank_offset + self.world_size:
            raise LayoutError(
                f"rank must be in {self.rank_offset} … {self.rank_offset + self.world_size - 1}, but is {rank}"
            )
        return rank - self.rank_offset

    def _find(self, names: Sequence[str]) -> tuple[Grid, set[str]]:
        axes: set[str] = set()
        for name in names:
            if name in self.missing:
                raise LayoutError(f"this layout has no group {name!r}: {self.missing[name]}; the layout is {self}")
            if name not in self.names or name in self.ends or name in self.parts:
                raise LayoutError(f"there is no group {name!r} in this layout; its groups are {', '.join(self.names)}")
            axes.update(self.spans.get(name, (name,)))
        for grid in self.grids:
            if axes <= set(grid.names):
                return grid, axes
        raise LayoutError(
            f"no group spans {' and '.join(names)}: dense layers and expert layers have axes of their own "
            f"({'; '.join(map(str, self.grids))}); name axes of one of these"
        )

    def __str__(self) -> str:
        return self.title or str(self.grids[0])


def _picked(name: str, pick: Callable[[list[int]], Sequence[int]], ranks: list[int]) -> list[int]:
    picked = sorted(set(pick(list(ranks))))
    if not set(picked) <= set(ranks):
        raise LayoutError(f"the ranks picked for {name!r} must be a subset of {ranks}, but are {picked}")
    return picked


def split_order(order: object) -> list[str]:
    if not isinstance(order, str):
        raise LayoutError(f"order must be a str of axes joined by '-', such as 'tp-dp-pp', but is {order!r}")
    return order.split("-") if order else []


def check_order(order: str, names: Sequence[str], sizes: Mapping[str, int]) -> None:
    unknown = [name for name in names if name not in sizes]
    doubled = {name for name in names if names.count(name) > 1}
    missing = [name for name, size in sizes.items() if size > 1 and name not in names]
    if unknown or doubled or missing:
        problem = (
            f"it names {unknown[0]!r}, which isn't an axis" if unknown
            else f"it names {sorted(doubled)[0]!r} twice" if doubled
            else f"it lacks {missing[0]!r}, whose size is {sizes[missing[0]]}"
        )  # fmt: skip
        raise LayoutError(
            f"order must name each axis once, joined by '-', fastest-varying axis first, but is {order!r}: {problem}; "
            f"the axes are {', '.join(sizes)}"
        )


def product_in_words(sizes: Mapping[str, int]) -> str:
    factors = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    return " × ".join(factors) + (f" = {prod(sizes.values())}" if len(factors) > 1 else "")


def fill_in_rest(world_size: int, sizes: Mapping[str, int | None]) -> dict[str, int]:
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise LayoutError(f"the world size must be at least 1, but is {world_size!r}")
    open_axes = [name for name, size in sizes.items() if size is None or size == -1]
    for name, size in sizes.items():
        if name not in open_axes:
            check_size(name, size)
    if len(open_axes) > 1:
        raise LayoutError(
            f"at most one size may be -1 or None, which takes the remaining ranks, but "
            f"{' and '.join(map(repr, open_axes))} are"
        )
    given = {name: size for name, size in sizes.items() if size is not None and name not in open_axes}
    known = prod(given.values())
    text = product_in_words(given) or "1 (no size is larger)"
    if world_size % known and world_size == 1:
        raise LayoutError(
            f"this process is alone, a world of 1 rank, but {text} needs a multiple of {known} ranks; start {known} "
            f"ranks by `torchrun --nproc-per-node {known}` or `parallel_state.launch(…, {known})`"
        )
    if world_size % known:
        raise LayoutError(
            f"{world_size} ranks are not divisible by {text}; start a multiple of {known} ranks, or choose sizes whose "
            f"product is one of {divisors(world_size)}"
        )
    rest = world_size // known
    if not open_axes and rest != 1:
        raise LayoutError(
            f"the product of all parallel sizes must be the world size, {world_size}, but is {text}; change a size, "
            f"or pass -1 for one size, which then takes the remaining factor of {rest}"
        )
    return {name: rest if name in open_axes else given[name] for name in sizes}


def check_size(name: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise LayoutError(
            f"the size of axis {name!r} must be a positive integer, or -1 for the rest, but is {size!r}"
            f"{int_advice(size)}"
        )


def divisors(number: int) -> list[int]:
    small = [candidate for candidate in range(1, isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})


def check_division(rank_lists: Sequence[Sequence[int]], world_size: int) -> None:
    listed = Counter(rank for ranks in rank_lists for rank in ranks)
    problems = {
        "lack": [rank for rank in range(world_size) if rank not in listed],
        "repeat": [rank for rank, count in listed.items() if count > 1],
        "contain the unknown": [rank for rank in listed if not 0 <= rank < world_size],
    }
    for problem, wrong in problems.items():
        if wrong:
            raise LayoutError(
                f"the lists of ranks must contain each global rank in 0 … {world_size - 1} once, "
                f"but {problem} {format_ranks(wrong)}; every rank must pass the lists of all groups"
            )
    for ranks in rank_lists:
        if list(ranks) != sorted(ranks):
            # torch.distributed numbers a group's ranks in ascending order, whatever their order in the argument.
            raise InvalidArgumentError(f"the ranks of a group must be in ascending order, but are {list(ranks)}")
