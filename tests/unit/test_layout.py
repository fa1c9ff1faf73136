"""Layout by itself: against a reference that lays the ranks out as an array, and against lists written out by hand."""

from __future__ import annotations

import itertools
import time
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_communicators.errors import LayoutError, UsageError
from parallel_state import Layout
from parallel_state.layout import position_in
from parallel_state.state import AXES, DEFAULT_ORDER

LOOK_UP_S = 0.25  # for 100 of 16,384 ranks, 4 ms here; by listing all groups it would be 1 s

NAMES = ["tp", "cp", "ep", "dp", "pp"]
axes_of_any_size = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(1, 5)), max_size=4, unique_by=lambda axis: axis[0]
).filter(lambda axes: prod(size for _, size in axes) <= 240)
many = settings(max_examples=60, deadline=None)


def grid(layout: Layout) -> np.ndarray:
    """The ranks as an array with one dim per axis, in the layout's order: its first axis varies fastest."""
    sizes = [size for _, size in layout.axes]
    return np.arange(prod(sizes)).reshape(sizes[::-1]).transpose() if sizes else np.zeros((), dtype=int)


def expected_groups(layout: Layout, axes: tuple[str, ...]) -> list[list[int]]:
    names = [name for name, _ in layout.axes]
    inside = [index for index, name in enumerate(names) if name in axes]
    outside = [index for index, name in enumerate(names) if name not in axes]
    array = grid(layout).transpose(outside + inside)
    rows = array.reshape(prod(array.shape[: len(outside)]), -1)
    return sorted(sorted(int(rank) for rank in row) for row in rows)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    return Layout(tuple(draw(axes_of_any_size)))


@st.composite
def layouts_and_axes(draw: st.DrawFn) -> tuple[Layout, tuple[str, ...]]:
    layout = draw(layouts())
    return layout, tuple(draw(st.lists(st.sampled_from(NAMES), unique=True)))


@many
@given(layouts())
def test_a_rank_is_the_mixed_radix_number_of_its_coordinates(layout: Layout) -> None:
    array = grid(layout)
    for coordinates in itertools.product(*(range(size) for _, size in layout.axes)):
        rank = int(array[coordinates])
        named = dict(zip([name for name, _ in layout.axes], coordinates, strict=True))
        assert layout.coordinates(rank) == named
        assert layout.rank_at(named) == rank
        assert rank == sum(index * prod(s for _, s in layout.axes[:i]) for i, index in enumerate(coordinates))


@many
@given(layouts_and_axes())
def test_groups_are_those_of_the_reference(case: tuple[Layout, tuple[str, ...]]) -> None:
    layout, axes = case
    groups = layout.groups(*axes)
    assert groups == expected_groups(layout, axes)
    assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
    assert {len(group) for group in groups} == {prod(layout.size(axis) for axis in axes)}
    for group in groups:
        for rank in group:
            assert layout.group_of(rank, *axes) == group
        fixed = [{k: v for k, v in layout.coordinates(rank).items() if k not in axes} for rank in group]
        assert all(each == fixed[0] for each in fixed)


@many
@given(axes_of_any_size, st.randoms(use_true_random=False))
def test_resolve_keeps_the_order_and_fills_in_the_rest(axes: list[tuple[str, int]], random: object) -> None:
    sizes = dict(axes)
    names = list(sizes)
    random.shuffle(names)  # type: ignore[attr-defined]
    world_size, order = prod(sizes.values()), "-".join(names)
    expected = Layout(tuple((name, sizes[name]) for name in names))
    assert Layout.resolve(world_size, sizes, order) == expected
    for left_open in names:
        for rest in (None, -1):
            assert Layout.resolve(world_size, {**sizes, left_open: rest}, order) == expected
    needed = "-".join(name for name in names if sizes[name] > 1)
    short = Layout.resolve(world_size, sizes, needed)
    assert short.world_size == world_size
    assert all(short.size(name) == sizes[name] for name in names)


def test_an_axis_that_the_layout_does_not_name_has_one_rank() -> None:
    layout = Layout((("tp", 2), ("pp", 2)))
    assert layout.size("ep") == 1
    assert layout.groups("ep") == [[0], [1], [2], [3]]
    assert layout.group_of(3, "ep") == [3]
    assert layout.groups() == [[0], [1], [2], [3]]


def test_one_rank() -> None:
    layout = Layout.resolve(1, {"tp": 1, "dp": None, "pp": 1}, DEFAULT_ORDER)
    assert layout.world_size == 1
    assert layout.groups("tp", "dp", "pp") == [[0]]
    assert Layout.resolve(1, {}, "").groups("tp") == [[0]]
    assert str(Layout(())) == "one rank"


def test_the_default_order_is_megatrons() -> None:
    assert DEFAULT_ORDER == "tp-dp-pp" == "-".join(axis.name for axis in AXES)


@pytest.mark.parametrize(
    ("world_size", "tp", "pp", "order", "tensor", "data", "pipeline"),
    [
        (8, 2, 2, "tp-dp-pp",  # Megatron
         [[0, 1], [2, 3], [4, 5], [6, 7]],
         [[0, 2], [1, 3], [4, 6], [5, 7]],
         [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (8, 2, 2, "tp-pp-dp",  # vLLM
         [[0, 1], [2, 3], [4, 5], [6, 7]],
         [[0, 4], [1, 5], [2, 6], [3, 7]],
         [[0, 2], [1, 3], [4, 6], [5, 7]]),
        # The example in the documentation of Megatron's initialize_model_parallel.
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
    layout = Layout.resolve(world_size, {"tp": tp, "dp": None, "pp": pp}, order)
    assert layout.groups("tp") == tensor
    assert layout.groups("dp") == data
    assert layout.groups("pp") == pipeline


def test_groups_across_two_axes() -> None:
    layout = Layout.resolve(8, {"tp": 2, "dp": 2, "pp": 2}, "tp-dp-pp")
    assert layout.groups("tp", "pp") == layout.groups("pp", "tp") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert layout.groups("tp", "dp", "pp") == [list(range(8))]


def test_the_group_of_one_rank_among_many_is_quick() -> None:
    layout = Layout.resolve(16_384, {"tp": 8, "cp": 4, "dp": None, "pp": 16}, "tp-cp-dp-pp")
    started = time.perf_counter()
    for axis in ("tp", "cp", "dp", "pp"):
        for rank in range(0, 16_384, 656):
            group = layout.group_of(rank, axis)
            assert rank in group
            assert len(group) == layout.size(axis)
    elapsed = time.perf_counter() - started
    assert elapsed < LOOK_UP_S
    assert layout.group_of(12_345, "pp")[:2] == [12_345 % 1024, 12_345 % 1024 + 1024]


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
        (8, {"tp": 3, "dp": None}, "tp-dp", ["divisible", "8 ranks", "tp=3 = 3", "multiple of 3", "[1, 2, 4, 8]"]),
        (8, {"tp": 4, "pp": 4}, "tp-pp", ["divisible", "8 ranks", "tp=4 × pp=4 = 16", "multiple of 16"]),
        (8, {"tp": 2, "pp": 2}, "tp-pp", ["must be the world size, 8", "tp=2 × pp=2 = 4", "-1", "factor of 2"]),
        (8, {"tp": 1}, "tp", ["must be the world size, 8", "but is 1", "-1", "factor of 8"]),
        (4, {"tp": 2, "pp": 2}, "tp-xx", ["'tp-xx'", "'xx', which is no axis", "the axes are tp, pp"]),
        (4, {"tp": 2, "pp": 2}, "tp-pp-", ["'tp-pp-'", "''", "tp, pp"]),
        (4, {"tp": 2, "pp": 2}, "TP-PP", ["'TP'", "tp, pp"]),
        (4, {"tp": 2, "pp": 2}, "tp-pp-tp", ["'tp' twice"]),
        (4, {"tp": 2, "pp": 2}, "tp", ["lacks 'pp', whose size is 2", "fastest first"]),
        (4, {"tp": 2, "pp": 2}, "", ["lacks 'tp'"]),
    ],
)
def test_what_does_not_fit_is_told(world_size: int, sizes: dict[str, object], order: str, parts: list[str]) -> None:
    """Each message says what must hold, what was found, and what can be done."""
    with pytest.raises(LayoutError) as caught:
        Layout.resolve(world_size, sizes, order)  # type: ignore[arg-type]
    for part in parts:
        assert part in str(caught.value)
    assert isinstance(caught.value, UsageError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("rank", [-1, 8, 100])
def test_a_rank_outside_of_the_world(rank: int) -> None:
    layout = Layout((("tp", 2), ("pp", 4)))
    for call in (layout.coordinates, lambda rank: layout.group_of(rank, "tp")):
        with pytest.raises(LayoutError, match=rf"rank must be in 0 … 7, but is {rank}"):
            call(rank)


@pytest.mark.parametrize(("axis", "index"), [("tp", 2), ("pp", 4), ("tp", -1), ("ep", 1)])
def test_coordinates_outside_of_the_layout(axis: str, index: int) -> None:
    layout = Layout((("tp", 2), ("pp", 4)))
    with pytest.raises(LayoutError, match=rf"'{axis}' must be in 0 … \d, but is {index}; the layout is tp=2 × pp=4"):
        layout.rank_at({axis: index})
    assert layout.rank_at({"pp": 3}) == 6
    assert layout.rank_at({"ep": 0}) == 0


def test_position_in() -> None:
    assert position_in([[0, 2], [1, 3]], 3) == 1
    with pytest.raises(LayoutError, match="rank 4 is in none"):
        position_in([[0, 2], [1, 3]], 4)
    with pytest.raises(LayoutError, match="rank 1 is in 2 of them"):
        position_in([[0, 1], [1, 2]], 1)


def test_a_layout_is_a_value() -> None:
    layout = Layout.resolve(4, {"tp": 2, "dp": None}, "tp-dp")
    assert layout == Layout((("tp", 2), ("dp", 2)))
    assert len({layout, Layout((("tp", 2), ("dp", 2)))}) == 1
    assert str(layout) == "tp=2 × dp=2"
    with pytest.raises(AttributeError):
        layout.axes = ()  # type: ignore[misc]
