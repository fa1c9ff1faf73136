"""Sizes and orders become layouts. Expected groups are written by hand; `test_incumbent_layouts` compares with
the incumbents."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from device_communicators.base.errors import InvalidArgumentError, LayoutError
from parallel_state import AXES, PRESETS, Axis, Grid, Layout, resolve_layout
from parallel_state.layout import axes as axes_module
from parallel_state.layout.axes import (
    BY_NAME,
    BY_PARAMETER,
    DEFAULT_ORDER,
    by_axis,
    embedding_ranks,
    named_sizes,
    position_embedding_ranks,
)

EXPERT_ROWS = {"ep", "etp", "efsdp", "edp", "tp_ep", "tp_ep_pp", "intra_edp"}
NODE_ROWS = {"dp_intra_node", "dp_inter_node"}

Sizes = Mapping[str, int | None]


def sizes_of(layout: Layout, *names: str) -> tuple[int, ...]:
    return tuple(layout.size(name) for name in names)


def message_of(world_size: int, sizes: Sizes, order: object = DEFAULT_ORDER, **options: object) -> str:
    with pytest.raises(LayoutError) as caught:
        resolve_layout(world_size, sizes, order, **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_no_two_rows_share_a_name() -> None:
    words = [word for row in AXES for word in {row.name, row.long_name, row.size_parameter or row.name}]
    assert len(words) == len(set(words))
    assert {row.name: row for row in AXES} == BY_NAME
    assert {row.size_parameter: row for row in AXES if row.size_parameter} == BY_PARAMETER


@pytest.mark.parametrize("row", AXES, ids=lambda row: row.name)
def test_a_row_refers_to_rows_and_describes_itself(row: Axis) -> None:
    assert {*row.spans, *filter(None, (row.within, row.ends_of))} <= BY_NAME.keys()
    assert sum(map(bool, (row.spans, row.within, row.ends_of))) <= 1
    assert row.about.endswith(".")
    assert row.size_parameter in (None, f"{row.long_name}_size", "num_distributed_optimizer_instances")


def test_every_row_is_in_some_layout_and_each_layout_has_or_explains_every_row() -> None:
    reached: set[str] = set()
    for order, ranks_per_node in itertools.product(PRESETS, (None, 2)):
        layout = resolve_layout(4, {"tp": 2}, order, ranks_per_node=ranks_per_node)
        assert {*layout.names, *layout.missing} == BY_NAME.keys()
        assert not {*layout.names} & {*layout.missing}
        for name in layout.names:
            assert layout.groups(name)
        for name, reason in layout.missing.items():
            with pytest.raises(LayoutError, match=f"no group '{name}'") as caught:
                layout.groups(name)
            assert reason in str(caught.value)
        reached.update(layout.names)
    assert reached == BY_NAME.keys()


def table_with(row: str) -> ModuleType:
    source = Path(str(axes_module.__file__)).read_text(encoding="utf-8")
    assert source.count("\nAXES = (\n") == 1
    changed = ModuleType("axes_with_a_row")
    exec(compile(source.replace("\nAXES = (\n", f"\nAXES = (\n{row},\n"), "axes_with_a_row", "exec"), vars(changed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "parallel_state.layout.axes", changed)
        resolution = Path(str(axes_module.__file__)).with_name("resolution.py").read_text(encoding="utf-8")
        exec(compile(resolution, "resolution", "exec"), vars(changed))
    return changed


def test_a_new_axis_is_a_row_of_the_table_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "axes_with_a_row", ModuleType("axes_with_a_row"))
    changed = table_with('Axis("vp", "variant_parallel", "Cuts the variants.", "variant_parallel_size")')
    assert changed.by_axis({"variant_parallel_size": 2}) == {"vp": 2}
    layout = changed.resolve_layout(16, {"variant_parallel_size": 2, "tp": 2, "ep": 2}, "tp-ep-vp-dp-pp")
    assert layout.groups("vp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert sizes_of(layout, "tp", "vp", "dp", "ep", "etp", "edp") == (2, 2, 4, 2, 2, 2)
    assert layout.groups("ep") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert str(layout) == "tp=2 × vp=2 × dp=4 × pp=1; experts etp=2 × ep=2 × vp=2 × efsdp=2"
    with pytest.raises(LayoutError, match="'vp', which isn't an axis"):
        resolve_layout(16, {"tp": 2}, "tp-ep-vp-dp-pp")


def test_a_new_axis_that_cuts_sequences_is_data_parallel_for_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "axes_with_a_row", ModuleType("axes_with_a_row"))
    changed = table_with('Axis("tried", "tried_parallel", "Cuts.", "tried_parallel_size", cuts_sequence=True)')
    layout = changed.resolve_layout(16, {"tried": 4, "tp": 2, "ep": 1}, "tp-tried-ep-dp-pp")
    assert sizes_of(layout, "tried", "dp", "edp") == (4, 2, 8)


def test_sizes_by_both_kinds_of_names() -> None:
    parameters = {str(row.size_parameter): number for number, row in enumerate(BY_PARAMETER.values(), 2)}
    names = {row.name: number for number, row in enumerate(BY_PARAMETER.values(), 2)}
    assert by_axis(parameters) == by_axis(names) == names
    assert set(names) >= {
        "tp", "cp", "pcp", "dcp", "ep", "etp", "dp", "dp_shard", "dp_replicate", "external_dp", "pp", "inter_dist_opt",
    }  # fmt: skip
    assert by_axis({"tensor_model_parallel_size": 2, "pp": -1, "dp": None}) == {"tp": 2, "pp": -1, "dp": None}
    assert by_axis({}) == {}


@pytest.mark.parametrize("name", ["tp_size", "model", "edp", "efsdp", "dp_intra_node", "embedding", "TP", "", "world"])
def test_a_size_that_nobody_knows(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="there is no parallel size") as caught:
        by_axis({name: 2})
    assert repr(name) in str(caught.value)
    for row in BY_PARAMETER.values():
        assert f"{row.size_parameter} ({row.name})" in str(caught.value)


@pytest.mark.parametrize("first", [2, None])
def test_a_size_that_is_given_twice(first: int | None) -> None:
    with pytest.raises(InvalidArgumentError, match=r"axis 'tp' is passed twice, once as 'tensor_model_parallel_size'"):
        by_axis({"tp": first, "tensor_model_parallel_size": 2})
    with pytest.raises(InvalidArgumentError, match="passed twice"):
        resolve_layout(4, {"tp": first, "tensor_model_parallel_size": 2})


def test_none_leaves_a_size_out_and_an_explicit_one_does_not() -> None:
    assert named_sizes(None, None, None, {"cp": None}) == {}
    assert named_sizes(1, 1, 1, {"cp": 1}) == {
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "data_parallel_size": 1, "cp": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "expected"),  # of 24 ranks: (dp_shard, dp_replicate)
    [
        ({}, (24, 1)),
        ({"dp": 24}, (24, 1)),
        ({"dp": -1}, (24, 1)),
        ({"dp": None}, (24, 1)),
        ({"tp": 2}, (12, 1)),
        ({"dp_shard": 24}, (24, 1)),
        ({"dp_shard": 8}, (8, 3)),
        ({"dp_replicate": 3}, (8, 3)),
        ({"dp_replicate": 24}, (1, 24)),
        ({"dp_shard": 8, "dp_replicate": 3}, (8, 3)),
        ({"dp_shard": 8, "dp_replicate": 3, "dp": 24}, (8, 3)),
        ({"dp_shard": 8, "dp_replicate": 3, "dp": -1}, (8, 3)),
        ({"dp_shard": 8, "dp_replicate": 3, "dp": None}, (8, 3)),
        ({"dp_shard": 8, "dp": 24}, (8, 3)),
        ({"dp_replicate": 3, "dp": 24}, (8, 3)),
        ({"dp_shard": -1}, (24, 1)),
        ({"dp_shard": -1, "dp": -1}, (24, 1)),
        ({"dp_shard": -1, "dp_replicate": 3}, (8, 3)),
        ({"dp_shard": -1, "dp_replicate": 3, "dp": 24}, (8, 3)),
        ({"dp_shard": None, "dp_replicate": None}, (24, 1)),
        ({"dp_replicate": -1}, (1, 24)),
        ({"dp_replicate": -1, "dp": 24}, (1, 24)),
        ({"dp_replicate": -1, "dp_shard": None}, (1, 24)),
        ({"dp_replicate": -1, "dp_shard": 8}, (8, 3)),
        ({"dp_replicate": 1, "dp_shard": -1}, (24, 1)),
        ({"tp": 2, "dp_shard": 4}, (4, 3)),
        ({"pp": -1}, (1, 1)),
        ({"pp": -1, "dp": 6}, (6, 1)),
        ({"pp": -1, "dp_shard": 2}, (2, 1)),
        ({"pp": -1, "dp_replicate": 2}, (1, 2)),
        ({"pp": -1, "dp_shard": 2, "dp_replicate": 3}, (2, 3)),
        ({"pp": -1, "dp_shard": 2, "dp_replicate": 3, "dp": -1}, (2, 3)),
        ({"pp": -1, "dp": 6, "dp_shard": -1}, (6, 1)),
        ({"pp": -1, "dp": 6, "dp_replicate": 3}, (2, 3)),
        ({"tp": -1, "dp": 6, "dp_replicate": -1}, (1, 6)),
        ({"tp": None, "pp": None, "dp_replicate": -1}, (1, 24)),
    ],
)
def test_which_data_parallel_sizes_follow_from_which(sizes: Sizes, expected: tuple[int, int]) -> None:
    layout = resolve_layout(24, sizes)
    assert sizes_of(layout, "dp_shard", "dp_replicate") == expected
    assert layout.size("dp") == expected[0] * expected[1]
    rest = {name: size for name, size in sizes.items() if name in ("tp", "pp")}
    assert layout.size("model") == 24 // layout.size("dp")
    assert all(layout.size(name) == size for name, size in rest.items() if size not in (None, -1))


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({"dp": 12}, ["must be the world size, 24", "is dp=12;", "factor of 2"]),
        ({"dp": 1}, ["must be the world size, 24"]),
        ({"dp": 5}, ["24 ranks are not divisible by dp=5"]),
        ({"dp_shard": 5}, ["must be the data-parallel size, 24", "5 and not passed", "a divisor of 24"]),
        ({"dp_replicate": 16}, ["must be the data-parallel size, 24", "not passed and 16"]),
        ({"dp": 24, "dp_shard": 2, "dp_replicate": 3}, ["must be the data-parallel size, 24", "2 and 3"]),
        ({"dp": 1, "dp_shard": 8, "dp_replicate": 3}, ["must be the world size, 24"]),
        ({"dp": 1, "tp": 24, "dp_shard": 2, "dp_replicate": 2}, ["must be the data-parallel size, 1", "2 and 2"]),
        ({"dp_shard": 2, "dp_replicate": 3}, ["must be the world size, 24", "dp=6"]),
        ({"dp_shard": -1, "dp_replicate": -1}, ["at most one", "'dp_shard' and 'dp_replicate'"]),
        ({"dp": 24, "dp_shard": -1, "dp_replicate": -1}, ["at most one", "'dp_shard' and 'dp_replicate'"]),
        ({"pp": -1, "dp_shard": -1}, ["at most one", "'pp' and 'dp'"]),
        ({"pp": -1, "dp_replicate": -1}, ["at most one", "'pp' and 'dp'"]),
        ({"pp": -1, "dp_shard": 2, "dp_replicate": -1}, ["at most one", "'pp' and 'dp'"]),
        ({"pp": -1, "dp": -1}, ["at most one", "'pp' and 'dp'"]),
        ({"pp": -1, "tp": -1}, ["at most one", "'tp' and 'pp'"]),
        ({"tp": None, "dp": 6}, ["must be the world size, 24", "factor of 4"]),
        ({"dp_shard": 0}, ["axis 'dp_shard'", "is 0"]),
        ({"dp_replicate": True}, ["axis 'dp_replicate'", "is True"]),
        ({"dp_shard": 2.0}, ["axis 'dp_shard'", "is 2.0"]),
    ],
)
def test_data_parallel_sizes_that_do_not_fit(sizes: Sizes, parts: list[str]) -> None:
    message = message_of(24, sizes)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "dp"])
def test_the_rest_goes_to_the_size_that_is_left_open(axis: str) -> None:
    sizes = {"tp": 2, "cp": 2, "pp": 2, "dp": 2}
    layout = resolve_layout(24, {**sizes, axis: -1})
    assert {name: layout.size(name) for name in sizes} == {**sizes, axis: 3}


@pytest.mark.parametrize(
    ("axis", "order"),
    [("pcp", "vllm"), ("external_dp", "vllm"), ("external_dp", "external_dp-tp-dp-pp"), ("pcp", "tp-pcp-dp-pp")],
)
def test_the_rest_of_an_axis_that_the_default_order_lacks(axis: str, order: str) -> None:
    layout = resolve_layout(24, {"tp": 2, "pp": 3, axis: -1}, order)
    assert sizes_of(layout, "tp", "pp", "dp", axis) == (2, 3, 1, 4)


def test_what_is_left_out_is_one() -> None:
    layout = resolve_layout(6, {})
    assert sizes_of(layout, "tp", "cp", "pcp", "dcp", "pp", "external_dp", "dp_replicate", "ep", "etp") == (1,) * 9
    assert resolve_layout(6, dict.fromkeys(["tp", "cp", "pp", "dp", "ep", "dcp", "inter_dist_opt"])) == layout


@pytest.mark.parametrize(
    ("order", "sizes", "expected"),  # of 24 ranks: (ep, etp, efsdp, edp)
    [
        (DEFAULT_ORDER, {}, (1, 1, 24, 24)),
        (DEFAULT_ORDER, {"tp": 2}, (1, 2, 12, 12)),
        (DEFAULT_ORDER, {"tp": 2, "cp": 3}, (1, 2, 12, 12)),
        (DEFAULT_ORDER, {"tp": 2, "ep": 4}, (4, 2, 3, 3)),
        (DEFAULT_ORDER, {"tp": 2, "ep": 4, "etp": 1}, (4, 1, 6, 6)),
        (DEFAULT_ORDER, {"tp": 2, "ep": -1}, (12, 2, 1, 1)),
        (DEFAULT_ORDER, {"tp": 2, "ep": -1, "etp": 3}, (8, 3, 1, 1)),
        (DEFAULT_ORDER, {"tp": 2, "pp": 2, "ep": -1}, (6, 2, 1, 1)),
        (DEFAULT_ORDER, {"tp": 2, "etp": 6}, (1, 6, 4, 4)),
        (DEFAULT_ORDER, {"tp": 2, "ep": 2, "etp": -1}, (2, 12, 1, 1)),
        (DEFAULT_ORDER, {"tp": 2, "ep": None, "etp": None}, (1, 2, 12, 12)),
        (DEFAULT_ORDER, {"tp": 2, "ep": 2, "dp_replicate": 3}, (2, 2, 2, 6)),
        (DEFAULT_ORDER, {"tp": 2, "ep": -1, "dp_replicate": 3}, (4, 2, 1, 3)),
        ("torchtitan", {"tp": 2, "ep": 4}, (4, 1, 6, 6)),
        ("torchtitan", {"tp": 2, "ep": 4, "etp": 2}, (4, 2, 3, 3)),
        ("torchtitan", {"tp": 2}, (1, 1, 24, 24)),
        ("tp-ep-dp-external_dp-pp", {"tp": 2, "ep": 2, "external_dp": 3}, (2, 2, 2, 2)),
    ],
)
def test_the_sizes_of_expert_layers(order: str, sizes: Sizes, expected: tuple[int, ...]) -> None:
    layout = resolve_layout(24, sizes, order)
    assert sizes_of(layout, "ep", "etp", "efsdp", "edp") == expected
    assert layout.size("tp_ep") == expected[0] * expected[1]


@pytest.mark.parametrize(
    ("sizes", "order", "parts"),
    [
        ({"ep": 5}, DEFAULT_ORDER, ["expert layers", "24 ranks", "ep=5, the sizes", "expert_model_"]),
        ({"tp": 8, "ep": 2, "pp": 3}, DEFAULT_ORDER, ["etp=8", "ep=2", "pp=3", "= 48", "default: the tp size"]),
        ({"etp": 5, "ep": -1}, DEFAULT_ORDER, ["expert layers", "etp=5"]),
        ({"etp": -1, "ep": -1}, DEFAULT_ORDER, ["at most one", "'etp' and 'ep'"]),
        ({"ep": 0}, DEFAULT_ORDER, ["axis 'ep'", "is 0"]),
        ({"etp": "2"}, DEFAULT_ORDER, ["axis 'etp'", "is '2'"]),
        ({"ep": 2}, "tp-dp-pp", ["lacks 'ep', whose size is 2"]),
        ({"tp": 2, "ep": 2}, "tp-ep", ["lacks 'dp', whose size is 12"]),
        ({"dp": 2, "tp": 12, "etp": 1, "ep": 1}, "dp-tp-pp-ep-ep", ["'ep' twice"]),
        ({}, "tp-ep-dp-ep", ["'ep' twice"]),
        ({"pp": 2, "tp": 4, "ep": 3, "etp": 4}, "tp-pp-ep-dp", ["ends with pp", "3 and 1", "etp · ep = 4", "pp last"]),
        ({"pp": 2, "tp": 2, "cp": 2, "ep": 1}, "tp-cp-pp-dp", ["are 4 ranks apart", "and 2 in etp=2", "pp last"]),
        ({"pp": 2, "tp": 2, "cp": 2, "ep": 1}, "tp-pp-cp-dp", ["have 3 and 6", "etp · ep = 4", "put pp last"]),
        ({"pp": 2, "tp": 4, "ep": 2, "etp": 2}, "tp-pp-ep-dp", ["4 ranks apart", "2 in etp=2", "put pp last"]),
    ],
)
def test_expert_layers_that_do_not_fit(sizes: Sizes, order: str, parts: list[str]) -> None:
    message = message_of(24, sizes, order)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("world_size", "sizes", "order", "reason"),
    [
        (24, {"tp": 2, "cp": 2, "pp": 2}, "tp-pp-cp-dp", "have 3 and 6"),
        (24, {"tp": 2, "cp": 2, "pp": 2}, "tp-cp-pp-dp", "4 ranks apart"),
        (2, {"tp": 1, "cp": 2}, "tp-cp", "lacks 'efsdp', whose size is 2"),
    ],
)
def test_who_does_not_ask_for_experts_gets_the_dense_groups_alone(
    world_size: int, sizes: Sizes, order: str, reason: str
) -> None:
    layout = resolve_layout(world_size, sizes, order)
    assert {name: layout.size(name) for name in sizes} == sizes
    assert layout.missing.keys() - NODE_ROWS == EXPERT_ROWS
    assert {layout.missing[name] for name in EXPERT_ROWS} == {layout.missing["ep"]}
    assert "expert layers don't fit" in layout.missing["ep"]
    assert reason in layout.missing["ep"]
    for asked in ("ep", "etp"):
        assert reason in message_of(world_size, {**sizes, asked: sizes["tp"] if asked == "etp" else 1}, order)


def test_where_the_order_says_what_ep_is_made_of() -> None:
    sizes = {"tp": 2, "pp": 2, "dp": 3}
    layout = resolve_layout(24, {**sizes, "external_dp": 2}, "vllm")
    assert layout.size("ep") == 6
    assert layout.axes_of("ep") == ("tp", "pcp", "dp_shard", "dp_replicate")
    assert layout.groups("ep") == [
        [0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11], [12, 13, 16, 17, 20, 21], [14, 15, 18, 19, 22, 23],
    ]  # fmt: skip
    assert layout.missing.keys() - NODE_ROWS == EXPERT_ROWS - {"ep"}
    for ep in (None, -1, 6):
        assert resolve_layout(12, {**sizes, "ep": ep}, "vllm").size("ep") == 6
    for wrong in ({"ep": 2}, {"ep": 12}, {"etp": 2}):
        message = message_of(12, {**sizes, **wrong}, "vllm")
        assert "tp · pcp · dp_shard · dp_replicate = 6" in message
        assert "no axes of their own for expert layers" in message
        assert "=".join(map(str, *wrong.items())) in message


@pytest.mark.parametrize(
    ("order", "spelled"),
    [
        ("megatron", "tp-cp-ep-dp-pp"),
        ("megatron", "tp-cp-ep-dp_shard-dp_replicate-pp"),
        ("torchtitan", "tp-cp-ep-dp-pp"),
        ("megatron", "TP-CP-EP-DP-PP"),
        ("megatron", "tp-ep-dp-pp"),
        ("megatron", "tp-pcp-ep-dp-external_dp-pp"),
    ],
)
def test_orders_that_are_the_same(order: str, spelled: str) -> None:
    sizes = {"tp": 2, "pp": 2, "dp_replicate": 3, "ep": 2, "etp": 1}
    layout, again = resolve_layout(24, sizes, order), resolve_layout(24, sizes, spelled)
    for name in layout.names:
        assert again.groups(name) == layout.groups(name), name
    assert str(layout) == str(again).replace("external_dp=1 × ", "")


def test_the_groups_of_each_preset() -> None:
    sizes = {"tp": 2, "pp": 2}
    expected = {
        "megatron": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "torchtitan": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "vllm": [[0, 2], [1, 3], [4, 6], [5, 7]],
    }
    assert {order: resolve_layout(8, sizes, order).groups("pp") for order in PRESETS} == expected
    assert resolve_layout(8, sizes).groups("pp") == expected["megatron"]
    for preset in PRESETS.values():
        assert preset.about
        assert set(preset.order.split("-")) <= BY_NAME.keys()


def test_data_parallel_axes_that_other_axes_lie_between() -> None:
    layout = resolve_layout(8, {"tp": 2, "dp_replicate": 2}, "dp_replicate-tp-dp_shard")
    assert layout.groups("dp_replicate") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("dp_shard") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.groups("dp") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert layout.groups("replica") == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize(
    ("sizes", "order", "parts"),
    [
        ({"tp": 2}, "tp-xx-dp", ["'tp-xx-dp'", "'xx', which isn't an axis", "tp, cp, pcp", "ep"]),
        ({"tp": 2}, "tp-dp-", ["'', which isn't an axis"]),
        ({"tp": 2}, "tp-model-dp", ["'model', which isn't an axis"]),
        ({"tp": 2}, "tp-etp-dp", ["'etp', which isn't an axis"]),
        ({"tp": 2}, "tp-dcp-dp", ["'dcp', which isn't an axis"]),
        ({"tp": 2}, "tp-tp-dp", ["'tp' twice"]),
        ({"tp": 2}, "tp-dp-dp_shard", ["'dp' and also dp_shard and dp_replicate, into which 'dp' is divided"]),
        ({"tp": 2}, "dp-pp", ["lacks 'tp', whose size is 2"]),
        ({"tp": 2}, "tp-pp", ["lacks 'dp', whose size is 4"]),
        ({"dp_replicate": 2}, "tp-dp_shard-pp", ["lacks 'dp_replicate', whose size is 2"]),
        ({"pcp": 2}, "megatron", ["'megatron'", "lacks 'pcp', whose size is 2"]),
        ({"cp": 2}, "vllm", ["'vllm'", "lacks 'cp', whose size is 2"]),
        ({}, "", ["lacks 'dp', whose size is 8"]),
        ({}, None, ["order must be a str", "None"]),
        ({}, 7, ["order must be a str", "7"]),
        ({}, ["tp", "dp"], ["order must be a str", "['tp', 'dp']"]),
    ],
)
def test_orders_that_do_not_fit(sizes: Sizes, order: object, parts: list[str]) -> None:
    message = message_of(8, sizes, order)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("axis", ["tp", "cp", "dp", "pp", "dcp", "ep", "etp", "dp_shard", "dp_replicate"])
@pytest.mark.parametrize("size", [0, -2, 2.0, True, "2"])
def test_a_size_that_is_no_positive_integer(axis: str, size: object) -> None:
    message = message_of(8, {axis: size})  # type: ignore[dict-item]
    assert f"axis {axis!r} must be a positive integer" in message
    assert f"is {size!r}" in message


@pytest.mark.parametrize("world_size", [0, -1, 2.0, True])
def test_a_world_without_ranks(world_size: int) -> None:
    assert "world size must be at least 1" in message_of(world_size, {})


def test_decode_context_parallel_ranks_are_neighbours_within_tp() -> None:
    layout = resolve_layout(16, {"tp": 4, "pp": 2, "dcp": 2}, "vllm")
    assert layout.groups("dcp") == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert layout.groups("tp") == [[rank, rank + 1, rank + 2, rank + 3] for rank in range(0, 16, 4)]
    late = resolve_layout(16, {"tp": 4, "pp": 2, "dcp": 2}, "pp-tp-dp")
    assert late.groups("tp")[0] == [0, 2, 4, 6]
    assert late.groups("dcp")[:3] == [[0, 2], [1, 3], [4, 6]]
    assert resolve_layout(16, {"tp": 4, "dcp": -1}).groups("dcp") == resolve_layout(16, {"tp": 4}).groups("tp")
    for none in ({}, {"dcp": None}, {"dcp": 1}):
        assert resolve_layout(16, {"tp": 4, **none}).size("dcp") == 1
    assert "tp=4 must be divisible by dcp=3" in message_of(16, {"tp": 4, "dcp": 3})
    assert "tp=1 must be divisible by dcp=2" in message_of(16, {"dcp": 2})


def test_decode_context_parallel_groups_are_those_of_pcp_or_of_pcp_and_tp() -> None:
    sizes = {"tp": 2, "pcp": 4, "pp": 2}
    layouts = {dcp: resolve_layout(16, {**sizes, "dcp": dcp}, "vllm") for dcp in (1, 4, 8, -1)}
    assert layouts[1].groups("dcp") == [[rank] for rank in range(16)]
    assert layouts[4].groups("dcp") == layouts[4].groups("pcp")
    assert layouts[4].axes_of("dcp") == ("pcp",)
    assert layouts[8].groups("dcp") == [list(range(8)), list(range(8, 16))]
    assert layouts[-1] == layouts[8]
    assert (
        "pcp=4 and tp=2, the decode-context-parallel size dcp must be 1, pcp or pcp · tp: one of [1, 4, 8], but is 2"
        in message_of(16, {**sizes, "dcp": 2}, "vllm")
    )


def test_optimizer_instances_divide_dp_and_cp_together() -> None:
    """With three data-parallel ranks and two instances, each has one and a half parts of a sequence."""
    layout = resolve_layout(12, {"cp": 4, "ep": 1, "num_distributed_optimizer_instances": 2})
    assert layout.size("dp") == 3
    assert layout.groups("intra_dp_cp") == [list(range(6)), list(range(6, 12))]
    assert layout.groups("intra_edp") == layout.groups("intra_dist_opt") == layout.groups("intra_dp_cp")
    assert layout.groups("inter_dist_opt") == [[rank, rank + 6] for rank in range(6)]
    assert layout.group_of(7, "intra_dp_cp") == list(range(6, 12))
    assert sizes_of(layout, "intra_dp_cp", "intra_edp", "intra_dist_opt", "inter_dist_opt") == (6, 6, 6, 2)
    assert str(layout) == "tp=1 × cp=4 × dp=3 × pp=1; 2 optimizer instances"
    apart = resolve_layout(24, {"tp": 2, "cp": 4, "ep": 1, "inter_dist_opt": 2}, "cp-ep-tp-dp")
    assert apart.groups("intra_dp_cp")[:2] == [[0, 1, 2, 3, 8, 9], [4, 5, 6, 7, 12, 13]]


@pytest.mark.parametrize("order", PRESETS)
def test_each_copy_of_the_weights_is_an_optimizer_instance_unless_their_number_is_given(order: str) -> None:
    layout = resolve_layout(16, {"tp": 2, "dp_replicate": 2, "inter_dist_opt": 1}, order)
    assert layout == resolve_layout(16, {"tp": 2, "dp_replicate": 2}, order)
    for name, same in (("intra_dp_cp", "fsdp"), ("intra_dist_opt", "replica"), ("inter_dist_opt", "dp_replicate")):
        assert layout.groups(name) == layout.groups(same)
    if order == "vllm":
        assert layout.missing["intra_edp"] == layout.missing["efsdp"]
    else:
        assert layout.groups("intra_edp") == layout.groups("efsdp")


@pytest.mark.parametrize(
    ("sizes", "order", "parts"),
    [
        ({"inter_dist_opt": 0}, DEFAULT_ORDER, ["num_distributed_optimizer_instances must be", "is 0"]),
        ({"inter_dist_opt": -1}, DEFAULT_ORDER, ["num_distributed_optimizer_instances must be", "is -1"]),
        ({"inter_dist_opt": True}, DEFAULT_ORDER, ["num_distributed_optimizer_instances must be", "is True"]),
        ({"inter_dist_opt": 5}, DEFAULT_ORDER, ["dp · cp size", "24 is not divisible", "instances=5"]),
        ({"inter_dist_opt": 8, "ep": 2}, DEFAULT_ORDER, ["expert-data-parallel size", "12 is not divisible"]),
        ({"inter_dist_opt": 2, "dp_replicate": 2}, DEFAULT_ORDER, ["data_parallel_replicate_size=2", "pass only one"]),
        ({"inter_dist_opt": 2}, "vllm", ["order 'vllm' has no separate layout for expert layers"]),
        ({"inter_dist_opt": 2, "tp": 2, "cp": 2, "pp": 2}, "tp-cp-pp-dp", ["are 4 ranks apart"]),
    ],
)
def test_optimizer_instances_that_do_not_fit(sizes: Sizes, order: str, parts: list[str]) -> None:
    message = message_of(24, sizes, order)
    for part in parts:
        assert part in message


def test_the_ranks_of_a_node_and_across_nodes_as_in_hybrid_sharding() -> None:
    layout = resolve_layout(16, {"tp": 2}, ranks_per_node=8)
    assert layout.groups("dp_intra_node") == [
        [0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15],
    ]  # fmt: skip
    assert layout.groups("dp_inter_node") == [[rank, rank + 8] for rank in range(8)]
    assert layout.groups("dp_intra_node", "dp_inter_node") == layout.groups("dp")
    alone = resolve_layout(8, {}, ranks_per_node=4)
    assert alone.groups("dp_intra_node") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert alone.groups("dp_inter_node") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    "order", ["tp-dp-pp", "dp-tp-pp", "pp-tp-dp", "tp-dp_replicate-pp", "dp_shard-dp_replicate-tp-pp"]
)
def test_nodes_divide_data_parallel_groups_or_are_missing_for_a_reason(order: str) -> None:
    parted = uneven = 0
    for tp, dp, pp in itertools.product((1, 2, 3), (1, 2, 3, 4, 6), (1, 2)):
        world_size = tp * dp * pp
        sizes: dict[str, int | None] = {"tp": tp, "dp": dp, "pp": pp}
        if "dp_replicate" in order:
            sizes["dp_replicate"] = dp if "dp_shard" not in order else 2 - dp % 2
        for ranks_per_node in range(1, world_size + 2):
            if world_size % ranks_per_node and ranks_per_node < world_size:
                continue
            layout = resolve_layout(world_size, sizes, order, ranks_per_node=ranks_per_node)
            parts = [
                [rank for rank in ranks if rank // ranks_per_node == node]
                for ranks in layout.groups("dp")
                for node in sorted({rank // ranks_per_node for rank in ranks})
            ]
            case = (order, sizes, ranks_per_node)
            if len({len(part) for part in parts}) == 1:
                parted += 1
                assert not layout.missing.keys() & NODE_ROWS, case
                assert layout.groups("dp_intra_node") == sorted(parts), case
                across = [dict(zip(part, range(len(part)), strict=True)) for part in parts]
                for ranks in layout.groups("dp_inter_node"):
                    assert len({rank // ranks_per_node for rank in ranks}) == len(ranks), case
                    assert len({places[rank] for rank in ranks for places in across if rank in places}) == 1, case
                assert layout.size("dp_intra_node") * layout.size("dp_inter_node") == dp
            else:
                uneven += 1
                assert layout.missing.keys() & NODE_ROWS == NODE_ROWS, case
                assert f"nodes of {ranks_per_node} ranks" in layout.missing["dp_intra_node"], case
    assert parted >= 50
    assert uneven >= 5


@pytest.mark.parametrize(
    ("world_size", "sizes", "order", "ranks_per_node", "reason"),
    [
        (8, {"tp": 2}, DEFAULT_ORDER, None, "pass ranks_per_node"),
        (12, {}, DEFAULT_ORDER, 8, "nodes of 8 ranks cut the data-parallel groups of 12 ranks, 1 apart, unevenly"),
        (6, {"tp": 2}, DEFAULT_ORDER, 3, "nodes of 3 ranks cut the data-parallel groups of 3 ranks, 2 apart, unevenly"),
        (8, {"tp": 2, "dp_replicate": 2}, "dp_shard-tp-dp_replicate", 4, "dp_replicate doesn't follow dp_shard"),
        (8, {"tp": 2, "dp_replicate": 2}, "dp_replicate-dp_shard-tp", 4, "dp_replicate doesn't follow dp_shard"),
    ],
)
def test_why_there_are_no_nodes(
    world_size: int, sizes: Sizes, order: str, ranks_per_node: int | None, reason: str
) -> None:
    layout = resolve_layout(world_size, sizes, order, ranks_per_node=ranks_per_node)
    for name in NODE_ROWS:
        assert reason in layout.missing[name]
        with pytest.raises(LayoutError, match=f"no group '{name}'"):
            layout.group_of(0, name)


@pytest.mark.parametrize("ranks_per_node", [0, -1, 2.0, True, "8"])
def test_ranks_per_node_that_are_no_number_of_ranks(ranks_per_node: object) -> None:
    message = message_of(8, {}, ranks_per_node=ranks_per_node)
    assert message == f"ranks_per_node must be a positive integer, but is {ranks_per_node!r}"


def test_the_embedding_groups_are_ends_of_pipelines() -> None:
    layout = resolve_layout(8, {"tp": 2, "pp": 4})
    assert layout.groups("embedding") == [[0, 6], [1, 7]]
    assert layout.groups("position_embedding") == [[0], [1]]
    assert layout.group_of(2, "embedding") == layout.group_of(6, "position_embedding") == []
    one_stage = resolve_layout(2, {"tp": 2})
    assert one_stage.groups("embedding") == one_stage.groups("position_embedding") == [[0], [1]]
    assert embedding_ranks([4, 5, 6]) == [4, 6]
    assert position_embedding_ranks([4, 5, 6]) == [4]


def test_other_stages_with_an_embedding() -> None:
    layout = resolve_layout(
        8,
        {"tp": 2, "pp": 4},
        get_embedding_ranks=lambda ranks: [ranks[0], ranks[1], ranks[-1]],
        get_position_embedding_ranks=lambda ranks: ranks[:2],
        rank_offset=100,
    )
    assert layout.groups("embedding") == [[100, 102, 106], [101, 103, 107]]
    assert layout.groups("position_embedding") == [[100, 102], [101, 103]]


@pytest.mark.parametrize("order", PRESETS)
def test_an_offset_moves_every_rank(order: str) -> None:
    sizes = {"tp": 2, "pp": 2, "dcp": 2}
    layout, moved = (resolve_layout(8, sizes, order, ranks_per_node=4, rank_offset=offset) for offset in (0, 24))
    for name in layout.names:
        assert moved.groups(name) == [[rank + 24 for rank in ranks] for ranks in layout.groups(name)]
    assert moved.world_size == 8
    assert moved.coordinates(29) == layout.coordinates(5)


@pytest.mark.parametrize("rank_offset", [-1, 2.0, None])
def test_an_offset_that_is_no_rank(rank_offset: object) -> None:
    message = message_of(8, {}, rank_offset=rank_offset)
    assert message == f"rank_offset must be a rank, 0 or more, but is {rank_offset!r}"


@pytest.mark.parametrize(
    ("world_size", "sizes", "order", "title"),
    [
        (1, {}, "", "one rank"),
        (1, {}, DEFAULT_ORDER, "tp=1 × dp=1 × pp=1"),
        (8, {"tp": 2}, DEFAULT_ORDER, "tp=2 × dp=4 × pp=1"),
        (8, {"tp": 2, "cp": 2}, DEFAULT_ORDER, "tp=2 × cp=2 × dp=2 × pp=1"),
        (8, {"tp": 2}, "tp-pp-dp", "tp=2 × pp=1 × dp=4"),
        (8, {"dp_replicate": 2}, DEFAULT_ORDER, "tp=1 × dp_shard=4 × dp_replicate=2 × pp=1"),
        (8, {"tp": 2}, "torchtitan", "tp=2 × dp=4 × pp=1; experts etp=1 × ep=1 × efsdp=8"),
        (8, {"tp": 2, "ep": 4}, DEFAULT_ORDER, "tp=2 × dp=4 × pp=1; experts etp=2 × ep=4 × efsdp=1"),
        (8, {"tp": 2, "ep": 2, "pp": 2}, DEFAULT_ORDER, "tp=2 × dp=2 × pp=2; experts etp=2 × ep=2 × efsdp=1 × pp=2"),
        (8, {"tp": 4, "dcp": 2}, "vllm", "tp=4 × pp=1 × dp=2, dcp=2 in tp"),
        (8, {"tp": 4, "dcp": -1}, "vllm", "tp=4 × pp=1 × dp=2, dcp=4 in tp"),
        (8, {"tp": 2, "pcp": 2, "dcp": 4}, "vllm", "tp=2 × pcp=2 × pp=1 × dp=2, dcp=4 in pcp · tp"),
        (8, {"external_dp": 2}, "vllm", "tp=1 × pp=1 × dp=4 × external_dp=2"),
    ],
)
def test_a_layout_in_words(world_size: int, sizes: Sizes, order: str, title: str) -> None:
    assert str(resolve_layout(world_size, sizes, order)) == title


def test_the_first_grid_is_the_dense_one() -> None:
    layout = resolve_layout(8, {"tp": 2, "pp": 2, "ep": 2})
    assert isinstance(layout.grids[0], Grid)
    assert layout.grids[0].size("tp", "dp_shard", "pp") == 8
    coordinates = layout.coordinates(7)
    assert set(coordinates) >= {"tp", "dp_shard", "pp", "cp", "pcp", "dp_replicate", "external_dp"}
    assert {axis: at for axis, at in coordinates.items() if at} == {"tp": 1, "dp_shard": 1, "pp": 1}
    assert layout.rank_at({"tp": 1, "pp": 1}) == 5
