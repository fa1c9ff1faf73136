from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from math import gcd, prod
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_communicators.base.errors import LayoutError, UsageError
from parallel_state import PRESETS, Grid, Layout, resolve_layout

STEPS, STEPS_PER_RANK = 5_000, 50
"""Twice the measured steps, and a thirtieth of listing the groups of 16,384 ranks."""

NAMES = ["tp", "cp", "ep", "dp", "pp"]
axes_of_any_size = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(1, 5)), max_size=4, unique_by=lambda axis: axis[0]
).filter(lambda axes: prod(size for _, size in axes) <= 240)
many = settings(max_examples=60, deadline=None)


def steps_of(call: Callable[[], object]) -> int:
    """Bytecodes of a call are independent of the machine's load."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def array_of(grid: Grid) -> np.ndarray:
    sizes = [size for _, size in grid.axes]
    return np.arange(prod(sizes)).reshape(sizes[::-1]).transpose() if sizes else np.zeros((), dtype=int)


def expected_groups(grid: Grid, axes: tuple[str, ...]) -> list[list[int]]:
    names = [name for name, _ in grid.axes]
    inside = [index for index, name in enumerate(names) if name in axes]
    outside = [index for index, name in enumerate(names) if name not in axes]
    array = array_of(grid).transpose(outside + inside)
    rows = array.reshape(prod(array.shape[: len(outside)]), -1)
    return sorted(sorted(int(rank) for rank in row) for row in rows)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    return Grid(tuple(draw(axes_of_any_size)))


@st.composite
def grids_and_axes(draw: st.DrawFn) -> tuple[Grid, tuple[str, ...]]:
    grid = draw(grids())
    return grid, tuple(draw(st.lists(st.sampled_from(NAMES), unique=True)))


@many
@given(grids())
def test_a_rank_is_the_mixed_radix_number_of_its_coordinates(grid: Grid) -> None:
    array = array_of(grid)
    for coordinates in itertools.product(*(range(size) for _, size in grid.axes)):
        rank = int(array[coordinates])
        named = dict(zip([name for name, _ in grid.axes], coordinates, strict=True))
        assert grid.coordinates(rank) == named
        assert grid.rank_at(named) == rank
        assert rank == sum(index * prod(s for _, s in grid.axes[:i]) for i, index in enumerate(coordinates))


@many
@given(grids_and_axes())
def test_groups_are_those_of_the_reference(case: tuple[Grid, tuple[str, ...]]) -> None:
    grid, axes = case
    groups = grid.groups(*axes)
    assert groups == expected_groups(grid, axes)
    assert sorted(itertools.chain(*groups)) == list(range(grid.world_size))
    assert {len(group) for group in groups} == {prod(grid.size(axis) for axis in axes)}
    for group in groups:
        for rank in group:
            assert grid.group_of(rank, *axes) == group
        fixed = [{k: v for k, v in grid.coordinates(rank).items() if k not in axes} for rank in group]
        assert all(each == fixed[0] for each in fixed)


@many
@given(axes_of_any_size, st.randoms(use_true_random=False))
def test_resolve_keeps_the_order_and_fills_in_the_rest(axes: list[tuple[str, int]], random: object) -> None:
    sizes = dict(axes)
    names = list(sizes)
    random.shuffle(names)  # type: ignore[attr-defined]
    world_size, order = prod(sizes.values()), "-".join(names)
    expected = Grid(tuple((name, sizes[name]) for name in names))
    assert Grid.resolve(world_size, sizes, order) == expected
    for left_open in names:
        for rest in (None, -1):
            assert Grid.resolve(world_size, {**sizes, left_open: rest}, order) == expected
    needed = "-".join(name for name in names if sizes[name] > 1)
    short = Grid.resolve(world_size, sizes, needed)
    assert short.world_size == world_size
    assert all(short.size(name) == sizes[name] for name in names)


def test_an_axis_that_the_grid_does_not_name_has_one_rank() -> None:
    grid = Grid((("tp", 2), ("pp", 2)))
    assert grid.size("ep") == 1
    assert grid.groups("ep") == [[0], [1], [2], [3]]
    assert grid.group_of(3, "ep") == [3]
    assert grid.groups() == [[0], [1], [2], [3]]


def test_one_rank() -> None:
    grid = Grid.resolve(1, {"tp": 1, "dp": None, "pp": 1}, "tp-dp-pp")
    assert grid.world_size == 1
    assert grid.groups("tp", "dp", "pp") == [[0]]
    assert Grid.resolve(1, {}, "").groups("tp") == [[0]]
    assert str(Grid(())) == "one rank"


@pytest.mark.parametrize(
    ("world_size", "tp", "pp", "order", "tensor", "data", "pipeline"),
    [
        (8, 2, 2, "tp-dp-pp",
         [[0, 1], [2, 3], [4, 5], [6, 7]],
         [[0, 2], [1, 3], [4, 6], [5, 7]],
         [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (8, 2, 2, "tp-pp-dp",
         [[0, 1], [2, 3], [4, 5], [6, 7]],
         [[0, 4], [1, 5], [2, 6], [3, 7]],
         [[0, 2], [1, 3], [4, 6], [5, 7]]),
        # The example of Megatron's documentation.
        (16, 2, 4, "tp-dp-pp",
         [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
         [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
         [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]),
        (16, 2, 4, "tp-pp-dp",
         [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
         [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]],
         [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]),
    ],
)  # fmt: skip
def test_the_lists_of_megatron_and_vllm(
    world_size: int, tp: int, pp: int, order: str, tensor: list[object], data: list[object], pipeline: list[object]
) -> None:
    grid = Grid.resolve(world_size, {"tp": tp, "dp": None, "pp": pp}, order)
    assert grid.groups("tp") == tensor
    assert grid.groups("dp") == data
    assert grid.groups("pp") == pipeline


def test_groups_across_two_axes() -> None:
    grid = Grid.resolve(8, {"tp": 2, "dp": 2, "pp": 2}, "tp-dp-pp")
    assert grid.groups("tp", "pp") == grid.groups("pp", "tp") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert grid.groups("tp", "dp", "pp") == [list(range(8))]


def test_the_group_of_one_rank_among_many_takes_steps_for_its_own_ranks_only() -> None:
    grid = Grid.resolve(16_384, {"tp": 8, "cp": 4, "dp": None, "pp": 16}, "tp-cp-dp-pp")
    for axis in ("tp", "cp", "dp", "pp"):
        for rank in range(0, 16_384, 656):
            group = grid.group_of(rank, axis)
            assert rank in group
            assert len(group) == grid.size(axis)
        assert steps_of(lambda axis=axis: grid.group_of(12_345, axis)) < STEPS + STEPS_PER_RANK * grid.size(axis)
    assert grid.group_of(12_345, "pp")[:2] == [12_345 % 1024, 12_345 % 1024 + 1024]


@pytest.mark.parametrize(
    ("world_size", "sizes", "order", "parts"),
    [
        (0, {}, "", ["world size must be at least 1", "is 0"]),
        (8, {"tp": 0}, "tp", ["axis 'tp' must be a positive integer", "or -1", "is 0"]),
        (8, {"tp": -2}, "tp", ["axis 'tp'", "is -2"]),
        (8, {"tp": 2.0}, "tp", ["axis 'tp'", "is 2.0"]),
        (8, {"tp": True}, "tp", ["axis 'tp'", "is True"]),
        (8, {"tp": "2"}, "tp", ["axis 'tp'", "is '2'"]),
        (8, {"tp": None, "pp": -1}, "tp-pp", ["at most one", "'tp' and 'pp'"]),
        (8, {"tp": 3, "dp": None}, "tp-dp", ["divisible", "8 ranks", "tp=3;", "multiple of 3", "[1, 2, 4, 8]"]),
        (8, {"tp": 4, "pp": 4}, "tp-pp", ["divisible", "8 ranks", "tp=4 × pp=4 = 16", "multiple of 16"]),
        (8, {"tp": 2, "pp": 2}, "tp-pp", ["must be the world size, 8", "tp=2 × pp=2 = 4", "-1", "factor of 2"]),
        (8, {"tp": 1}, "tp", ["must be the world size, 8", "but is 1", "-1", "factor of 8"]),
        (4, {"tp": 2, "pp": 2}, "tp-xx", ["'tp-xx'", "'xx', which isn't an axis", "the axes are tp, pp"]),
        (4, {"tp": 2, "pp": 2}, "tp-pp-", ["'tp-pp-'", "''", "tp, pp"]),
        (4, {"tp": 2, "pp": 2}, "TP-PP", ["'TP'", "tp, pp"]),
        (4, {"tp": 2, "pp": 2}, "tp-pp-tp", ["'tp' twice"]),
        (4, {"tp": 2, "pp": 2}, "tp", ["lacks 'pp', whose size is 2", "fastest-varying axis first"]),
        (4, {"tp": 2, "pp": 2}, "", ["lacks 'tp'"]),
    ],
)
def test_what_does_not_fit_is_told(world_size: int, sizes: dict[str, object], order: str, parts: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        Grid.resolve(world_size, sizes, order)  # type: ignore[arg-type]
    for part in parts:
        assert part in str(caught.value)
    assert isinstance(caught.value, UsageError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("rank", [-1, 8, 100])
def test_a_rank_outside_of_the_world(rank: int) -> None:
    grid = Grid((("tp", 2), ("pp", 4)))
    for call in (grid.coordinates, lambda rank: grid.group_of(rank, "tp")):
        with pytest.raises(LayoutError, match=rf"rank must be in 0 … 7, but is {rank}"):
            call(rank)


@pytest.mark.parametrize(("axis", "index"), [("tp", 2), ("pp", 4), ("tp", -1), ("ep", 1)])
def test_coordinates_outside_of_the_grid(axis: str, index: int) -> None:
    grid = Grid((("tp", 2), ("pp", 4)))
    with pytest.raises(LayoutError, match=rf"'{axis}' must be in 0 … \d, but is {index}; the grid is tp=2 × pp=4"):
        grid.rank_at({axis: index})
    assert grid.rank_at({"pp": 3}) == 6
    assert grid.rank_at({"ep": 0}) == 0


def test_a_grid_is_a_value() -> None:
    grid = Grid.resolve(4, {"tp": 2, "dp": None}, "tp-dp")
    assert grid == Grid((("tp", 2), ("dp", 2)))
    assert len({grid, Grid((("tp", 2), ("dp", 2)))}) == 1
    assert str(grid) == "tp=2 × dp=2"
    with pytest.raises(AttributeError):
        grid.axes = ()  # type: ignore[misc]


def first_and_last(ranks: list[int]) -> list[int]:
    return [ranks[-1], ranks[0], ranks[0]]


def two_grids(rank_offset: int = 0) -> Layout:
    return Layout(
        grids=(Grid((("tp", 2), ("dp", 2), ("pp", 2))), Grid((("ep", 4), ("pp", 2))), Grid((("a", 1), ("tp/a", 2)))),
        spans={"model": ("tp", "pp"), "everyone": ("ep", "pp")},
        ends={"rim": ("pp", first_and_last), "head": ("model", lambda ranks: ranks[:1])},
        missing={"etp": "nobody asked for it"},
        rank_offset=rank_offset,
        title="two grids",
    )


@pytest.mark.parametrize("offset", [0, 1, 1000])
def test_the_lists_of_a_layout_of_two_grids(offset: int) -> None:
    layout = two_grids(offset)
    expected = {
        ("tp",): [[0, 1], [2, 3], [4, 5], [6, 7]],
        ("dp",): [[0, 2], [1, 3], [4, 6], [5, 7]],
        ("pp",): [[0, 4], [1, 5], [2, 6], [3, 7]],
        ("ep",): [[0, 1, 2, 3], [4, 5, 6, 7]],
        ("model",): [[0, 1, 4, 5], [2, 3, 6, 7]],
        ("pp", "tp"): [[0, 1, 4, 5], [2, 3, 6, 7]],
        ("model", "dp"): [[0, 1, 2, 3, 4, 5, 6, 7]],
        ("everyone",): [[0, 1, 2, 3, 4, 5, 6, 7]],
        ("pp", "ep"): [[0, 1, 2, 3, 4, 5, 6, 7]],
        ("rim",): [[0, 4], [1, 5], [2, 6], [3, 7]],
        ("head",): [[0], [2]],
        (): [[0], [1], [2], [3], [4], [5], [6], [7]],
    }
    for names, lists in expected.items():
        moved = [[rank + offset for rank in ranks] for ranks in lists]
        assert layout.groups(*names) == moved, names
        assert layout.size(*names) == len(lists[0])
        for rank in range(offset, offset + 8):
            assert layout.group_of(rank, *names) == next((ranks for ranks in moved if rank in ranks), [])
    assert layout.world_size == 8
    assert layout.names == ("tp", "dp", "pp", "ep", "a", "model", "everyone", "rim", "head")
    assert str(layout) == "two grids"
    assert str(Layout((Grid((("tp", 2),)),))) == "tp=2"


def test_the_axes_and_the_grid_of_a_group() -> None:
    layout = two_grids()
    dense, experts, _ = layout.grids
    assert layout.axes_of("pp", "tp") == layout.axes_of("model") == ("tp", "pp")
    assert layout.axes_of("everyone") == ("ep", "pp")
    assert layout.axes_of() == ()
    assert layout.grid_of("model") is layout.grid_of("pp") is dense, "of two grids with an axis, the first counts"
    assert layout.grid_of("ep") is layout.grid_of("everyone") is experts


@pytest.mark.parametrize("offset", [0, 3])
def test_the_coordinates_of_a_layout_are_those_of_its_first_grid(offset: int) -> None:
    layout = two_grids(offset)
    assert layout.coordinates(6 + offset) == {"tp": 0, "dp": 1, "pp": 1}
    assert layout.rank_at({"dp": 1, "pp": 1}) == 6 + offset
    with pytest.raises(LayoutError, match="'ep' must be in 0 … 0"):
        layout.rank_at({"ep": 1})


@pytest.mark.parametrize("rank", [-1, 2, 11, 8 + 3])
def test_a_rank_outside_of_a_layout(rank: int) -> None:
    layout = two_grids(3)
    for call in (
        layout.coordinates,
        lambda rank: layout.group_of(rank, "tp"),
        lambda rank: layout.group_of(rank, "rim"),
    ):
        with pytest.raises(LayoutError, match=rf"rank must be in 3 … 10, but is {rank}$"):
            call(rank)


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (("etp",), ["no group 'etp'", "nobody asked for it", "two grids"]),
        (("tp", "etp"), ["no group 'etp'", "nobody asked for it"]),
        (("xx",), ["no group 'xx'", "tp, dp, pp, ep, a, model, everyone, rim, head"]),
        (("tp", "xx"), ["no group 'xx'"]),
        (("tp/a",), ["no group 'tp/a'"]),
        (("rim", "tp"), ["no group 'rim' in this layout"]),
        (("tp", "ep"), ["tp and ep", "have axes of their own", "tp=2 × dp=2 × pp=2", "ep=4 × pp=2"]),
        (("model", "everyone"), ["model and everyone", "have axes of their own"]),
    ],
)
def test_a_group_that_a_layout_does_not_have(names: tuple[str, ...], parts: list[str]) -> None:
    layout = two_grids()
    for call in (layout.groups, layout.size, layout.axes_of, layout.grid_of, lambda *names: layout.group_of(0, *names)):
        with pytest.raises(LayoutError) as caught:
            call(*names)
        for part in parts:
            assert part in str(caught.value)


def test_the_axes_of_what_lies_at_the_ends_are_none() -> None:
    for call in (two_grids().axes_of, two_grids().grid_of):
        with pytest.raises(LayoutError, match="no group 'rim' in this layout"):
            call("rim")


def test_ends_must_be_ranks_of_the_group_and_may_differ_in_size() -> None:
    grid = Grid((("pp", 4), ("dp", 2)))
    outside = Layout((grid,), ends={"rim": ("pp", lambda ranks: [ranks[0], 9])})
    for call in (lambda: outside.groups("rim"), lambda: outside.group_of(0, "rim"), lambda: outside.size("rim")):
        with pytest.raises(LayoutError, match=r"'rim' must be a subset of \[0, 1, 2, 3\], but are \[0, 9\]"):
            call()
    uneven = Layout((grid,), ends={"rim": ("pp", lambda ranks: ranks[1:2] if 0 in ranks else ranks)})
    assert uneven.groups("rim") == [[1], [4, 5, 6, 7]]
    assert uneven.size("rim") == 4
    assert uneven.group_of(5, "rim") == [4, 5, 6, 7]
    assert uneven.group_of(1, "rim") == [1]
    assert uneven.group_of(0, "rim") == []


def test_what_picks_ends_gets_a_list_of_its_own() -> None:
    layout = Layout((Grid((("pp", 3),)),), ends={"rim": ("pp", lambda ranks: [ranks.pop()])})
    assert layout.groups("rim") == [[2]]
    assert layout.groups("pp") == [[0, 1, 2]]


@st.composite
def resolved_layouts(draw: st.DrawFn) -> Layout:
    order = draw(st.sampled_from([*PRESETS, "cp-tp-dp-ep-pp", "ep-dp_replicate-tp-cp-dp_shard-external_dp-pp"]))
    axes = {"vllm": ("pcp", "external_dp"), "megatron": ("cp",), "torchtitan": ("cp",)}.get(order, ("cp",))
    axes += ("tp", "dp_shard", "dp_replicate", "pp") + (("external_dp",) if "external_dp" in order else ())
    sizes: dict[str, int] = {}
    for axis in draw(st.permutations(axes)):
        sizes[axis] = draw(st.sampled_from([1, 1, 2, 3] if prod(sizes.values()) <= 12 else [1]))
    world_size = prod(sizes.values())
    sizes["dcp"] = draw(st.sampled_from([1, sizes["tp"] * sizes.get("pcp", 1)]))
    if order != "vllm" and draw(st.booleans()):
        sizes["etp"] = draw(st.sampled_from([1, sizes["tp"]]))
        inside = prod(sizes.get(axis, 1) for axis in ("tp", "cp", "dp_shard")) // sizes["etp"]
        sizes["ep"] = draw(st.sampled_from([size for size in range(1, inside + 1) if inside % size == 0]))
        if sizes["dp_replicate"] == 1:
            both = gcd(sizes["dp_shard"] * sizes.get("cp", 1), inside // sizes["ep"])
            sizes["inter_dist_opt"] = draw(st.sampled_from([size for size in range(1, both + 1) if both % size == 0]))
    return resolve_layout(
        world_size,
        sizes,
        order,
        ranks_per_node=draw(st.sampled_from([None, 1, 2, 4, 6, world_size])),
        rank_offset=draw(st.sampled_from([0, 0, 1, 500])),
    )


@pytest.mark.slow
@many
@given(resolved_layouts())
def test_what_a_layout_says_of_each_group_agrees(layout: Layout) -> None:
    world = range(layout.rank_offset, layout.rank_offset + layout.world_size)
    assert [layout.rank_at(layout.coordinates(rank)) for rank in world] == list(world)
    for name in layout.names:
        groups = layout.groups(name)
        assert layout.size(name) == max(map(len, groups))
        found = {rank: ranks for ranks in groups for rank in ranks}
        assert sum(map(len, groups)) == len(found)
        assert {rank: layout.group_of(rank, name) for rank in world} == {rank: found.get(rank, []) for rank in world}
        if name in layout.parts:
            assert sorted(itertools.chain(*groups)) == list(world)
            assert groups == sorted(groups)
        elif name not in layout.ends:
            check_partition(layout, name, groups)
    for name, (whole, pick) in layout.ends.items():
        assert layout.groups(name) == [sorted(set(pick(ranks))) for ranks in layout.groups(whole)]
    for name, axes in layout.spans.items():
        assert layout.groups(name) == layout.groups(*axes) == layout.groups(*reversed(axes))
        assert layout.axes_of(name) == layout.axes_of(*axes)


def check_partition(layout: Layout, name: str, groups: list[list[int]]) -> None:
    world = range(layout.rank_offset, layout.rank_offset + layout.world_size)
    assert sorted(itertools.chain(*groups)) == list(world)
    assert groups == sorted(sorted(ranks) for ranks in groups)
    assert {len(ranks) for ranks in groups} == {layout.size(name)}
    axes, grid = layout.axes_of(name), layout.grid_of(name)
    assert prod(grid.size(axis) for axis in axes) == layout.size(name)
    for ranks in groups:
        outside = [
            {axis: index for axis, index in grid.coordinates(rank - layout.rank_offset).items() if axis not in axes}
            for rank in ranks
        ]
        assert all(each == outside[0] for each in outside)
        if grid is layout.grids[0]:
            moves = itertools.product(*(range(grid.size(axis)) for axis in axes))
            along = [dict(zip(axes, indices, strict=True)) for indices in moves]
            assert sorted(layout.rank_at({**outside[0], **indices}) for indices in along) == ranks


LARGE = {
    "megatron": {"tp": 8, "cp": 4, "pp": 16, "ep": 64, "etp": 1},
    "torchtitan": {"tp": 8, "cp": 4, "pp": 16, "ep": 64, "dp_replicate": 4},
    "vllm": {"tp": 8, "pcp": 4, "pp": 16, "dcp": 32, "external_dp": 2},
}


@pytest.mark.parametrize("order", LARGE)
def test_a_layout_of_many_ranks_takes_the_steps_of_one_of_fewer(order: str) -> None:
    """A lookup's work depends only on the ranks it returns. Listing all groups would take 100,000 steps."""

    def resolve(world_size: int) -> Layout:
        return resolve_layout(world_size, LARGE[order], order, ranks_per_node=8)

    assert steps_of(lambda: resolve(16_384)) < 1.1 * steps_of(lambda: resolve(8_192))
    layout = resolve(16_384)
    names = [name for name in layout.names if layout.size(name) <= 4096]
    assert len(names) >= 15
    for number, name in enumerate(names):
        rank = number * 977 % layout.world_size
        assert rank in layout.group_of(rank, name) or name in layout.ends
        # The ends and parts of a group are found from the whole.
        whole = layout.size(*(layout.ends | layout.parts).get(name, (name,))[:1])
        steps = steps_of(lambda rank=rank, name=name: layout.group_of(rank, name))
        assert steps < STEPS + STEPS_PER_RANK * whole, name


def test_the_groups_of_many_ranks_at_both_ends_of_the_world() -> None:
    layout = resolve_layout(16_384, LARGE["megatron"], ranks_per_node=8, rank_offset=1_000_000)
    assert layout.group_of(1_016_383, "tp") == list(range(1_016_376, 1_016_384))
    assert layout.group_of(1_000_000, "pp") == list(range(1_000_000, 1_016_384, 1024))
    assert layout.group_of(1_000_000, "ep") == list(range(1_000_000, 1_000_064))
    assert layout.size("edp") == 16
