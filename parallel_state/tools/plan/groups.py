"""Computes the groups of a layout, and estimates the memory of their NCCL communicators.

The estimate is a range, because published measurements (`FIGURES`) differ by GPU, NCCL version and settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from parallel_state.layout.axes import AXES, BY_NAME, Axis
from parallel_state.layout.ranks import Layout
from parallel_state.layout.resolution import made_at_start, resolve_layout


@dataclass(frozen=True)
class Request:
    world_size: int
    sizes: Mapping[str, int]
    order: str
    gpus_per_node: int

    def resolve(self) -> Layout:
        return resolve_layout(self.world_size, self.sizes, self.order, ranks_per_node=self.gpus_per_node)


Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Kind:
    axis: Axis
    count: int
    size: int
    groups: Groups = field(repr=False, compare=False)
    nodes: int
    crossing: int
    same_as: tuple[str, ...]
    made: bool
    """True: created at start; False: on demand."""

    @property
    def name(self) -> str:
        return self.axis.name

    @property
    def first(self) -> tuple[int, ...]:
        return self.groups[0]


@dataclass(frozen=True)
class Plan:
    request: Request
    layout: Layout
    kinds: tuple[Kind, ...]

    @property
    def world_size(self) -> int:
        return self.request.world_size

    @property
    def gpus_per_node(self) -> int:
        return self.request.gpus_per_node

    @property
    def nodes(self) -> int:
        return -(-self.world_size // self.gpus_per_node)

    def kind(self, name: str) -> Kind | None:
        return next((kind for kind in self.kinds if kind.name == name), None)

    def made(self, name: str) -> Kind | None:
        kind = self.kind(name)
        return kind if kind is not None and kind.made and kind.size > 1 else None

    def process_group(self, kind: Kind) -> str:
        if kind.size == 1:
            return "none"
        if kind.size == self.world_size:
            return "world"
        earlier = [other.name for other in self.kinds[: self.kinds.index(kind)] if other.name in kind.same_as]
        return earlier[0] if earlier else "own"

    def place(self, rank: int) -> tuple[int, int]:
        return divmod(rank, self.gpus_per_node)


class Steps(NamedTuple):
    """One axis of a group: `size` ranks, which are `stride` global ranks apart."""

    axis: str
    size: int
    stride: int


def make_plan(request: Request) -> Plan:
    layout = request.resolve()
    names = [axis.name for axis in AXES if axis.name in layout.names]
    facts: dict[str, dict[str, Any]] = {}
    known: dict[object, dict[str, Any]] = {}
    for name in names:
        # Kinds with the same steps have the same groups. Parts of other kinds are compared by ranks.
        key = name if whole_of(layout, name) else frozenset(each[1:] for each in steps_of(layout, name))
        if key not in known:
            groups = tuple(map(tuple, layout.groups(name)))
            known[key] = known[groups] = known.get(groups) or _facts_of(groups, request.gpus_per_node)
        facts[name] = known[key]
    made = made_at_start(layout, request.sizes)
    kinds = [
        Kind(
            axis=BY_NAME[name],
            **facts[name],
            same_as=tuple(other for other in names if other != name and facts[other] is facts[name]),
            made=name in made,
        )
        for name in names
    ]
    return Plan(request, layout, tuple(kinds))


def whole_of(layout: Layout, name: str) -> str | None:
    return BY_NAME[name].ends_of if name in layout.ends or name in layout.parts else None


def _facts_of(groups: Groups, per_node: int) -> dict[str, Any]:
    ends = ((ranks, ranks[0] // per_node, ranks[-1] // per_node) for ranks in groups)
    touched = Counter(1 if first == last else len({rank // per_node for rank in ranks}) for ranks, first, last in ends)
    size, crossing = max(map(len, groups)), len(groups) - touched[1]
    return {"groups": groups, "count": len(groups), "size": size, "nodes": max(touched), "crossing": crossing}


def steps_of(layout: Layout, name: str) -> list[Steps]:
    """Returns the axes of the groups `name` that have more than one rank, fastest-varying first.

    If the groups are parts of larger ones (`embedding` of `pp`), returns the larger groups' axes.
    """
    of = whole_of(layout, name) or name
    grid, axes = layout.grid_of(of), layout.axes_of(of)
    return [Steps(axis, grid.size(axis), grid.stride(axis)) for axis in axes if grid.size(axis) > 1]


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """Returns axis -> the rank's position on it, for each axis that has more than one rank."""
    found: dict[str, int] = {}
    for grid in layout.grids:
        here = grid.coordinates(rank - layout.rank_offset)
        for name, size in grid.axes:
            if size > 1 and name in BY_NAME:
                found.setdefault(name, here[name])
    return found


def abbreviate(ranks: Sequence[int]) -> str:
    """Formats ranks as one block `0–7`, as blocks `0–7 128–135 …`, or as start:stop:step `0:8:2 16:24:2`.

    Other lists are shortened to the first three ranks and the last.
    """
    ranks = list(ranks)
    if len(ranks) < 3:
        return " ".join(map(str, ranks)) or "none"
    steps = [after - before for before, after in pairwise(ranks)]
    run = next((at for at, step in enumerate(steps, 1) if step != steps[0]), len(ranks))
    if run == len(ranks) and steps[0] == 1:
        return _span(ranks)
    runs = [ranks[start : start + run] for start in range(0, len(ranks), run)]
    alike = all([rank - part[0] for rank in part] == [rank - ranks[0] for rank in runs[0]] for part in runs)
    return _shorten([_span(part) for part in runs] if alike and len(runs) > 1 else list(map(str, ranks)))


def _span(ranks: Sequence[int]) -> str:
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if step == 1:
        return f"{ranks[0]}–{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
    return f"{ranks[0]}:{ranks[-1] + step}:{step}"


def _shorten(words: Sequence[str]) -> str:
    return " ".join(words if len(words) <= 4 else [*words[:3], "…", words[-1]])


@dataclass(frozen=True)
class Figure:
    what: str
    megabytes: float
    source: str

    def __str__(self) -> str:
        return f"{self.megabytes:g} MB ({self.what}, {self.source})"


LOW = Figure("a communicator of 2 A100s after its first all-reduce", 544, "github.com/NVIDIA/nccl/issues/964")
HIGH = Figure("a communicator after its first all-reduce, unknown GPU", 1600, "github.com/NVIDIA/nccl/issues/864")
ALL_TO_ALL = Figure("the first all-to-all on 8 H100s, in addition", 3280, "github.com/NVIDIA/nccl/issues/1685")
FIGURES = (LOW, HIGH, ALL_TO_ALL)
BASIS = "cited, not measured here"


@dataclass(frozen=True)
class Communicators:
    made: tuple[tuple[str, ...], ...]
    """For each set of ranks with which a rank has a communicator: the kinds of groups with this set."""
    all_kinds: tuple[tuple[str, ...], ...]
    groups_made: int
    """Number in the whole world: torch creates each group on every rank."""
    groups_of_all_kinds: int
    all_to_all: bool

    def megabytes(self, communicators: int) -> tuple[float, float]:
        """Returns the least and the greatest memory of this many communicators, in MB."""
        extra = ALL_TO_ALL.megabytes if self.all_to_all and communicators else 0
        return communicators * LOW.megabytes, communicators * HIGH.megabytes + extra


def count_communicators(plan: Plan, rank: int = 0) -> Communicators:
    """Returns the communicators that `rank` creates. No rank creates more than rank 0."""
    made = [kind for kind in plan.kinds if kind.made]
    return Communicators(
        made=_sets_of(plan, rank, made),
        all_kinds=_sets_of(plan, rank, plan.kinds),
        groups_made=_count_groups(plan, made),
        groups_of_all_kinds=_count_groups(plan, plan.kinds),
        all_to_all=plan.made("ep") is not None,
    )


def _sets_of(plan: Plan, rank: int, kinds: Iterable[Kind]) -> tuple[tuple[str, ...], ...]:
    sets: dict[tuple[int, ...], list[str]] = {tuple(range(plan.world_size)): ["world"]}
    for kind in kinds:
        sets.setdefault(next((ranks for ranks in kind.groups if rank in ranks), ()), []).append(kind.name)
    return tuple(tuple(sharing) for ranks, sharing in sets.items() if len(ranks) > 1)


def _count_groups(plan: Plan, kinds: Iterable[Kind]) -> int:
    sets = {ranks for kind in kinds if kind.size > 1 for ranks in kind.groups} | {tuple(range(plan.world_size))}
    return sum(len(ranks) > 1 for ranks in sets)
