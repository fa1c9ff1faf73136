"""Axis sizes and their order to lists of ranks: pure arithmetic, no torch, no environment.

An axis is a name and a size; a layout is axes from the fastest-varying (neighbouring ranks) to the slowest, and the
global rank is the mixed-radix number of the coordinates. `tp=2, dp=3, pp=2` in the order `tp-dp-pp`:

    rank = tp + 2 · dp + 6 · pp

so the tensor-parallel groups are [0, 1], [2, 3], … and the pipeline groups [0, 6], [1, 7], …
Any axes in any order are data here; which axes the library offers is the table in `state`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from device_communicators.errors import LayoutError


@dataclass(frozen=True)
class Layout:
    """Axes from fastest to slowest, as (name, size); `resolve` makes one from user input."""

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def resolve(cls, world_size: int, sizes: Mapping[str, int | None], order: str) -> Layout:
        """The layout of `world_size` ranks. One size may be None or -1: it becomes the rest.

        `order` names every axis once, fastest first, joined by `-` (`"tp-dp-pp"`); axes of size 1 may be left out.
        Raises LayoutError for a size below 1, a product that isn't the world, an order with a missing or unknown axis.
        """
        if world_size < 1:
            raise LayoutError(f"the world size must be at least 1, but is {world_size}")
        if not isinstance(order, str):
            raise LayoutError(f"order must be a str of axes joined by '-', such as 'tp-dp-pp', but is {order!r}")
        resolved = _fill_in_rest(world_size, sizes)
        names = order.split("-") if order else []
        unknown = [name for name in names if name not in resolved]
        doubled = {name for name in names if names.count(name) > 1}
        missing = [name for name, size in resolved.items() if size > 1 and name not in names]
        if unknown or doubled or missing:
            problem = (
                f"it names {unknown[0]!r}, which is no axis" if unknown
                else f"it names {sorted(doubled)[0]!r} twice" if doubled
                else f"it lacks {missing[0]!r}, whose size is {resolved[missing[0]]}"
            )  # fmt: skip
            raise LayoutError(
                f"order must name each axis once, joined by '-', fastest first, but is {order!r}: {problem}; "
                f"the axes are {', '.join(resolved)}"
            )
        return cls(tuple((name, resolved[name]) for name in names))

    @property
    def world_size(self) -> int:
        return prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """The size of `axis`; 1 for one that the layout doesn't name."""
        return dict(self.axes).get(axis, 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """`rank`'s position on each axis."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank must be in 0 … {self.world_size - 1}, but is {rank}")
        position = {}
        for name, size in self.axes:
            rank, position[name] = divmod(rank, size)
        return position

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """The global rank at `coordinates`; an axis left out counts as 0."""
        for name, index in coordinates.items():
            if not 0 <= index < self.size(name):
                raise LayoutError(
                    f"the coordinate on {name!r} must be in 0 … {self.size(name) - 1}, but is {index}; "
                    f"the layout is {self}"
                )
        rank, stride = 0, 1
        for name, size in self.axes:
            rank += coordinates.get(name, 0) * stride
            stride *= size
        return rank

    def groups(self, *axes: str) -> list[list[int]]:
        """Every group that spans `axes`: ranks that differ in these axes only, each list in ascending order.

        The lists come in the order of their first ranks, the same on every rank; together they are the world.
        """
        inside = self._offsets([name for name, _ in self.axes if name in axes])
        outside = self._offsets([name for name, _ in self.axes if name not in axes])
        return [[start + offset for offset in inside] for start in outside]

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """The one of `groups(*axes)` that `rank` is in."""
        here = self.coordinates(rank)
        start = self.rank_at({name: index for name, index in here.items() if name not in axes})
        return [start + offset for offset in self._offsets([name for name, _ in self.axes if name in axes])]

    def _offsets(self, names: Sequence[str]) -> list[int]:
        strides, stride = {}, 1
        for name, size in self.axes:
            strides[name] = range(0, stride * size, stride)
            stride *= size
        return sorted(sum(steps) for steps in product(*(strides[name] for name in names)))

    def __str__(self) -> str:
        return " × ".join(f"{name}={size}" for name, size in self.axes) or "one rank"


def _fill_in_rest(world_size: int, sizes: Mapping[str, int | None]) -> dict[str, int]:
    open_axes = [name for name, size in sizes.items() if size is None or size == -1]
    for name, size in sizes.items():
        if name not in open_axes and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise LayoutError(
                f"the size of axis {name!r} must be a positive integer, or -1 for the rest, but is {size!r}"
            )
    if len(open_axes) > 1:
        raise LayoutError(f"at most one size may be left open, but {' and '.join(map(repr, open_axes))} are")
    given = {name: size for name, size in sizes.items() if size is not None and name not in open_axes}
    known = prod(given.values())
    text = " × ".join(f"{name}={size}" for name, size in given.items() if size > 1)
    text = f"{text} = {known}" if text else "1 (no size is larger)"
    if world_size % known:
        raise LayoutError(
            f"the world size must be divisible by the product of the parallel sizes, but {world_size} ranks are not "
            f"divisible by {text}; start a multiple of {known} ranks, or choose sizes "
            f"whose product is one of {_divisors(world_size)}"
        )
    rest = world_size // known
    if not open_axes and rest != 1:
        raise LayoutError(
            f"the product of all parallel sizes must be the world size, {world_size}, but is {text}; "
            f"leave one size open (-1) to take the remaining factor of {rest}"
        )
    return {name: rest if name in open_axes else given[name] for name in sizes}


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def position_in(ranks: Iterable[Sequence[int]], rank: int) -> int:
    """Index of the list that `rank` is in; LayoutError if it is in none or in two."""
    found = [index for index, group in enumerate(ranks) if rank in group]
    if len(found) != 1:
        where = "none" if not found else f"{len(found)} of them"
        raise LayoutError(f"each rank must be in exactly one of the lists of ranks, but rank {rank} is in {where}")
    return found[0]
