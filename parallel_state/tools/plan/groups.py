"""A layout on nodes: every kind of group with its size, its ranks and the nodes that it touches; and what they cost.

Arithmetic only. The library measures no memory here: the figures are what others published, each with its source; they
differ by GPU, NCCL version and settings (`NCCL_BUFFSIZE`, `NCCL_MAX_NCHANNELS`), so that a range is all one can give.
What is worth a warning is in `remarks`, how it is printed in `report`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from parallel_state.groups.parallel_groups import made_at_start
from parallel_state.layout.axes import AXES, BY_NAME, Axis, embedding_ranks, position_embedding_ranks
from parallel_state.layout.ranks import Layout
from parallel_state.layout.resolution import resolve_layout


@dataclass(frozen=True)
class Request:
    """Holds what was asked for. Sizes by axis name; those left out follow from the others."""

    world_size: int
    sizes: Mapping[str, int]
    order: str
    gpus_per_node: int

    def resolve(self) -> Layout:
        """Returns the layout; raises LayoutError where the sizes don't fit."""
        return resolve_layout(self.world_size, self.sizes, self.order, ranks_per_node=self.gpus_per_node)


@dataclass(frozen=True)
class Kind:
    """One kind of group, such as `tp`, in one layout."""

    axis: Axis
    count: int
    size: int
    """Ranks in a group."""
    first: tuple[int, ...]
    """Ranks of the first group."""
    nodes: int
    """Nodes that a group touches at most."""
    crossing: int
    """Groups that touch more than one node."""
    same_as: tuple[str, ...]
    """Kinds with the same sets of ranks: each set becomes one process group."""
    made: bool
    """True if initialize_model_parallel makes it with these sizes; the rest is made when somebody asks for it."""

    @property
    def name(self) -> str:
        return self.axis.name


@dataclass(frozen=True)
class Plan:
    """A request that fits, looked at from all sides."""

    request: Request
    layout: Layout
    kinds: tuple[Kind, ...]
    """In the order of the table of axes."""

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
        """Returns the kind of that name; None if this layout doesn't have it."""
        return next((kind for kind in self.kinds if kind.name == name), None)

    def made(self, name: str) -> Kind | None:
        """Returns the kind of that name if it is made and has more than one rank a group, else None."""
        kind = self.kind(name)
        return kind if kind is not None and kind.made and kind.size > 1 else None

    def process_group(self, kind: Kind) -> str:
        """Returns whose process group a kind has.

        It is its "own", the "world"'s, an earlier kind's, or "none" for one rank.
        """
        if kind.size == 1:
            return "none"
        if kind.size == self.world_size:
            return "world"
        earlier = [other.name for other in self.kinds[: self.kinds.index(kind)] if other.name in kind.same_as]
        return earlier[0] if earlier else "own"

    def place(self, rank: int) -> tuple[int, int]:
        """Returns node and GPU of `rank`."""
        return divmod(rank, self.gpus_per_node)


class Steps(NamedTuple):
    """One axis that a kind of group spans, in ranks."""

    axis: str
    size: int
    stride: int


def make_plan(request: Request) -> Plan:
    """Returns the plan for `request`; raises LayoutError where the sizes don't fit."""
    layout = request.resolve()
    names = [axis.name for axis in AXES if axis.name in layout.names]
    ends = {
        name: tuple(map(tuple, layout.groups(name)))
        for name in names
        if (whole := whole_of(layout, name)) is not None and not (layout.size(whole) == 1 and _takes_all(layout, name))
    }
    shapes = {name: _shape_of(layout, name) for name in names if name not in ends}
    shapes |= {name: _known_shape(layout, shapes, lists) for name, lists in ends.items()}
    facts: dict[Shape, dict[str, Any]] = {}
    for name, shape in shapes.items():
        if shape not in facts:
            facts[shape] = _facts_of(layout, name, ends.get(name), request.gpus_per_node)
    made = made_at_start(layout, request.sizes)
    kinds = [
        Kind(
            axis=BY_NAME[name],
            **facts[shapes[name]],
            same_as=tuple(other for other in names if other != name and shapes[other] == shapes[name]),
            made=name in made,
        )
        for name in names
    ]
    return Plan(request, layout, tuple(kinds))


def _takes_all(layout: Layout, name: str) -> bool:
    """Returns True if a kind is known to take the one rank of a group of one, of which a layout may have 100,000."""
    return name in layout.parts or layout.ends[name][1] in (embedding_ranks, position_embedding_ranks)


def whole_of(layout: Layout, name: str) -> str | None:
    """Returns the kind of group that a kind takes its ranks from, if it is part of another one."""
    return BY_NAME[name].ends_of if name in layout.ends or name in layout.parts else None


Shape = tuple[tuple[int, ...], ...]


def _shape_of(layout: Layout, name: str) -> Shape:
    """Returns what two kinds have in common whose sets of ranks are the same: size and stride of each step."""
    joined: list[tuple[int, int]] = []
    for step in sorted(steps_of(layout, name), key=lambda step: step.stride):
        if joined and joined[-1][0] * joined[-1][1] == step.stride:
            joined[-1] = (joined[-1][0] * step.size, joined[-1][1])
        else:
            joined.append((step.size, step.stride))
    return tuple(joined)


def _known_shape(layout: Layout, shapes: Mapping[str, Shape], lists: Shape) -> Shape:
    """Returns the shape of the kind that has these sets of ranks, else the sets: a part of others may be any."""
    for name, shape in shapes.items():
        alike = layout.size(name) * len(lists) == layout.world_size and layout.group_of(lists[0][0], name) == [
            *lists[0]
        ]
        if alike and tuple(map(tuple, layout.groups(name))) == lists:
            return shape
    return lists


def _facts_of(layout: Layout, name: str, groups: Shape | None, per_node: int) -> dict[str, Any]:
    """Returns a kind's counts, without its lists of ranks where one of them, moved, gives all others."""
    if groups is not None:
        touched = Counter(len({rank // per_node for rank in ranks}) for ranks in groups)
        count, first, size = len(groups), groups[0], max(map(len, groups))
    else:
        grid, axes = layout.grid_of(name), layout.axes_of(name)
        first = tuple(layout.group_of(layout.rank_offset, name))
        count, size = layout.world_size // len(first), len(first)
        starts = Counter({layout.rank_offset % per_node: 1})  # of the groups, by GPU of the node
        for axis, steps in grid.axes:
            if axis not in axes and steps > 1:
                moved: Counter[int] = Counter()
                stride = grid.stride(axis)
                for step in range(steps):
                    for gpu, groups_there in starts.items():
                        moved[(gpu + step * stride) % per_node] += groups_there
                starts = moved
        offsets = [rank - layout.rank_offset for rank in first]
        touched = Counter()
        for gpu, groups_there in starts.items():
            touched[len({(gpu + offset) // per_node for offset in offsets})] += groups_there
    crossing = count - touched[1]
    return {"count": count, "size": size, "first": first, "nodes": max(touched), "crossing": crossing}


def steps_of(layout: Layout, name: str) -> list[Steps]:
    """Returns the axes of more than one rank that a kind of group spans, fastest first.

    An end has those of its parent.
    """
    of = whole_of(layout, name) or name
    grid, axes = layout.grid_of(of), layout.axes_of(of)
    return [Steps(axis, grid.size(axis), grid.stride(axis)) for axis in axes if grid.size(axis) > 1]


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """Returns `rank`'s position on every axis of more than one rank, dense ones first, then those of the experts."""
    found: dict[str, int] = {}
    for grid in layout.grids:
        here = grid.coordinates(rank - layout.rank_offset)
        for name, size in grid.axes:
            if size > 1 and name in BY_NAME:
                found.setdefault(name, here[name])
    return found


def abbreviate(ranks: Sequence[int]) -> str:
    """Returns `0–7`, `0 8 16 … 56`, or runs of ranks: `0–7 128–135 … 896–903`; with a step as in Python, `0:8:2`."""
    ranks = list(ranks)
    if len(ranks) < 3:
        return " ".join(map(str, ranks)) or "none"
    run = _run_length(ranks)
    if run == len(ranks):
        return f"{ranks[0]}–{ranks[-1]}" if ranks[1] - ranks[0] == 1 else _shorten(list(map(str, ranks)))
    runs = [ranks[start : start + run] for start in range(0, len(ranks), run)]
    if any([rank - part[0] for rank in part] != [rank - ranks[0] for rank in runs[0]] for part in runs):
        return _shorten(list(map(str, ranks)))
    return _shorten([_span(part) for part in runs])


def _run_length(ranks: Sequence[int]) -> int:
    """Returns how many of the first ranks have equal distances."""
    length = min(2, len(ranks))
    while length < len(ranks) and ranks[length] - ranks[length - 1] == ranks[1] - ranks[0]:
        length += 1
    return length


def _span(ranks: Sequence[int]) -> str:
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if step == 1:
        return f"{ranks[0]}–{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
    return f"{ranks[0]}:{ranks[-1] + step}:{step}"


def _shorten(words: Sequence[str]) -> str:
    return " ".join(words if len(words) <= 4 else [*words[:3], "…", words[-1]])


@dataclass(frozen=True)
class Figure:
    """A published figure of the memory that NCCL takes on one GPU."""

    what: str
    megabytes: float
    source: str


LOW = Figure("a communicator of 2 A100s after its first all-reduce", 544, "github.com/NVIDIA/nccl/issues/964")
HIGH = Figure("a communicator after its first all-reduce, GPU not told", 1600, "github.com/NVIDIA/nccl/issues/864")
ALL_TO_ALL = Figure("the first all-to-all on 8 H100s, in addition", 3280, "github.com/NVIDIA/nccl/issues/1685")
FIGURES = (
    LOW,
    HIGH,
    ALL_TO_ALL,
    Figure(
        "one connection in one channel; a ring has two in each of up to 32 channels", 10.5,
        "github.com/NVIDIA/nccl/issues/1685, issues/864",
    ),
    Figure("NCCL_BUFFSIZE, the largest part of it", 4.2, "NCCL user guide, environment variables"),
    Figure("all of a rank's communicators, Megatron with tp=2 pp=2 dp=2 on 8 H100s", 7000,
           "github.com/verl-project/verl/pull/6408"),
    Figure("all of a rank's communicators, vLLM with tp=4", 1000, "github.com/vllm-project/vllm/pull/51485"),
)  # fmt: skip
"""The first three are reckoned with; the rest is there to judge the result by."""

BASIS = "cited, not measured here"


@dataclass(frozen=True)
class Communicators:
    """The sets of ranks that a rank of the first stage is in: each is one process group and one communicator."""

    made: tuple[tuple[str, ...], ...]
    """Per set, the kinds of group that share it; those that initialize_model_parallel makes, and the world."""
    all_kinds: tuple[tuple[str, ...], ...]
    """The same if somebody asked for every kind in the table."""
    groups_made: int
    """Process groups in the whole world: every rank of torch takes part in making each."""
    groups_of_all_kinds: int
    all_to_all: bool
    """True if expert-parallel ranks exchange tokens."""

    def megabytes(self, communicators: int) -> tuple[float, float]:
        """Returns GPU memory of a rank with so many communicators, least and most.

        It is their number times a published figure.

        Expert-parallel ranks exchange tokens by all-to-all, which may connect every pair of ranks: that counts for the
        most, not for the least.
        """
        extra = ALL_TO_ALL.megabytes if self.all_to_all and communicators else 0
        return communicators * LOW.megabytes, communicators * HIGH.megabytes + extra


def count_communicators(plan: Plan, rank: int = 0) -> Communicators:
    """Returns the communicators of `rank`.

    Rank 0 has as many as any, for only first stages have both embedding groups.
    """
    made = [kind.name for kind in plan.kinds if kind.made]
    everything = [kind.name for kind in plan.kinds]
    ends = {
        kind.name: list(map(tuple, plan.layout.groups(kind.name)))
        for kind in plan.kinds
        if whole_of(plan.layout, kind.name) is not None and kind.size > 1
    }
    return Communicators(
        made=_sets_of(plan, rank, made),
        all_kinds=_sets_of(plan, rank, everything),
        groups_made=_count_groups(plan, made, ends),
        groups_of_all_kinds=_count_groups(plan, everything, ends),
        all_to_all=plan.made("ep") is not None,
    )


def _sets_of(plan: Plan, rank: int, names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    sets: dict[tuple[int, ...], list[str]] = {tuple(range(plan.world_size)): ["world"]}
    for name in names:
        sets.setdefault(tuple(plan.layout.group_of(rank, name)), []).append(name)
    return tuple(tuple(sharing) for ranks, sharing in sets.items() if len(ranks) > 1)


def _count_groups(plan: Plan, names: Iterable[str], ends_of: Mapping[str, Sequence[tuple[int, ...]]]) -> int:
    """Returns how many sets of several ranks these kinds have.

    Kinds that are no ends of others share all of them, or none.
    """
    kinds = [kind for kind in map(plan.kind, names) if kind is not None and kind.size > 1]
    shared: set[str] = set()
    ends: set[tuple[int, ...]] = set()
    count = 1 if plan.world_size > 1 else 0
    for kind in sorted(kinds, key=lambda kind: whole_of(plan.layout, kind.name) is not None):
        if kind.name in shared or kind.size == plan.world_size:
            continue
        shared.update(kind.same_as)
        if whole_of(plan.layout, kind.name) is None:
            count += kind.count
        else:
            ends.update(ends_of[kind.name])
    whole: dict[tuple[int, ...], list[str]] = {tuple(range(plan.world_size)): []}
    for kind in kinds:
        if whole_of(plan.layout, kind.name) is None:
            whole.setdefault(_from_zero(kind.first), []).append(kind.name)

    def is_counted(ranks: tuple[int, ...]) -> bool:
        """Returns True for the world, or a group of a kind that is no end of another."""
        names = whole.get(_from_zero(ranks), [])
        return len(ranks) == plan.world_size or any(
            plan.layout.group_of(ranks[0], name) == list(ranks) for name in names
        )

    return count + sum(len(ranks) > 1 and not is_counted(ranks) for ranks in ends)


def _from_zero(ranks: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank - ranks[0] for rank in ranks)
