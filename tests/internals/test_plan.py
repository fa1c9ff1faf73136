from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_communicators.base.errors import LayoutError
from parallel_state.__main__ import COMMANDS, main
from parallel_state.layout.axes import AXES, BY_NAME, PRESETS
from parallel_state.layout.resolution import _DENSE, resolve_layout
from parallel_state.tools.plan.fit import changes_that_fit
from parallel_state.tools.plan.groups import (
    ALL_TO_ALL,
    FIGURES,
    HIGH,
    LOW,
    Plan,
    Request,
    abbreviate,
    count_communicators,
    make_plan,
)
from parallel_state.tools.plan.remarks import CHECKS, remarks_on

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 300
FIT_S = 5.0  # worst measured: 0.25 s for 16,384 ranks

THE_EXAMPLE = ["--world-size", "1024", "--tp", "8", "--pp", "8", "--cp", "2", "--ep", "8",
               "--gpus-per-node", "8", "--order", "megatron"]  # fmt: skip


def plan_of(world_size: int, order: str = "megatron", gpus_per_node: int = 8, **sizes: int) -> Plan:
    return make_plan(Request(world_size, sizes, order, gpus_per_node))


def codes(plan: Plan) -> set[tuple[str, str]]:
    return {(remark.level, remark.code) for remark in remarks_on(plan)}


def changes(world_size: int, order: str = "megatron", gpus_per_node: int = 8, **sizes: int) -> list[str]:
    return [str(change) for change in changes_that_fit(Request(world_size, sizes, order, gpus_per_node))]


plans = st.builds(
    lambda tp, cp, pp, dp, ep, node, order: (tp * cp * pp * dp, {"tp": tp, "cp": cp, "pp": pp, "ep": ep}, node, order),
    *[st.sampled_from([1, 2, 3, 4]) for _ in range(5)],
    st.sampled_from([1, 4, 6, 8]),
    st.sampled_from(["megatron", "torchtitan"]),
)


@settings(max_examples=60, deadline=None)
@given(plans)
def test_kinds_are_what_the_layout_says(asked: tuple[int, dict[str, int], int, str]) -> None:
    world_size, sizes, node, order = asked
    try:
        layout = resolve_layout(world_size, sizes, order, ranks_per_node=node)
    except LayoutError:
        return
    plan = make_plan(Request(world_size, sizes, order, node))
    assert [kind.name for kind in plan.kinds] == [axis.name for axis in AXES if axis.name in layout.names]
    for kind in plan.kinds:
        groups = layout.groups(kind.name)
        touched = [len({rank // node for rank in ranks}) for ranks in groups]
        assert (kind.count, kind.size, list(kind.first)) == (len(groups), layout.size(kind.name), groups[0])
        assert (kind.nodes, kind.crossing) == (max(touched), sum(nodes > 1 for nodes in touched))
        assert set(kind.same_as) == {
            other for other in layout.names if other != kind.name and layout.groups(other) == groups
        }
        assert kind.made == (BY_NAME[kind.name].always_made or sizes.get(kind.name, 1) != 1)


def test_equal_sets_of_ranks_are_one_process_group() -> None:
    plan = plan_of(1024, tp=8, cp=2, pp=8, ep=8)
    of = {kind.name: plan.process_group(kind) for kind in plan.kinds}
    assert of["tp"] == "own" and of["etp"] == "tp"
    assert of["dp"] == "own" and of["dp_shard"] == of["dp_inter_node"] == "dp"
    assert of["fsdp"] == "dp_cp"
    assert of["replica"] == "world"
    assert of["pcp"] == of["position_embedding"] == "none"


def test_communicators_are_the_distinct_sets_of_a_rank() -> None:
    plan = plan_of(64, tp=4, cp=2, pp=2, ep=4)
    found = count_communicators(plan)
    assert found.made == (("world",), ("tp",), ("cp",), ("ep",), ("dp",), ("pp",))
    everything = {tuple(plan.layout.group_of(0, kind.name)) for kind in plan.kinds} | {tuple(range(64))}
    assert len(found.all_kinds) == sum(len(ranks) > 1 for ranks in everything)
    in_world = {
        tuple(ranks) for name in ("tp", "cp", "ep", "dp", "pp") for ranks in plan.layout.groups(name)
    } | {tuple(range(64))}  # fmt: skip
    assert found.groups_made == len(in_world)
    assert found.megabytes(6) == (6 * LOW.megabytes, 6 * HIGH.megabytes + ALL_TO_ALL.megabytes)


def test_sets_that_coincide_are_counted_once() -> None:
    assert count_communicators(plan_of(8)).made == (("world", "dp"),)
    assert count_communicators(plan_of(8, tp=8)).made == (("world", "tp"),)
    assert count_communicators(plan_of(1)).made == ()
    assert count_communicators(plan_of(1)).megabytes(0) == (0, 0)


def test_no_rank_is_in_more_sets_than_rank_0() -> None:
    plan = plan_of(32, tp=2, cp=2, pp=4, ep=2)
    first = count_communicators(plan)
    for rank in range(32):
        found = count_communicators(plan, rank)
        assert len(found.made) == len(first.made) and len(found.all_kinds) <= len(first.all_kinds)


def test_each_figure_has_a_source() -> None:
    assert {LOW, HIGH, ALL_TO_ALL} <= set(FIGURES)
    assert all(figure.source and figure.megabytes > 0 for figure in FIGURES)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([5], "5"),
        ([0, 8], "0 8"),
        (range(8), "0–7"),
        (range(0, 64, 8), "0 8 16 … 56"),
        (range(0, 32, 8), "0 8 16 24"),
        ([0, 1, 8, 9], "0–1 8–9"),
        ([base + rank for base in range(0, 1024, 128) for rank in range(8)], "0–7 128–135 256–263 … 896–903"),
        ([base + rank for base in (0, 64) for rank in (0, 2, 4, 6)], "0:8:2 64:72:2"),
        ([0, 1, 2, 10, 20, 30], "0 1 2 … 30"),
        ([], "none"),
    ],
)
def test_abbreviate(ranks: Any, text: str) -> None:
    assert abbreviate(ranks) == text


REMARKS = [
    (plan_of(8, tp=8), set()),
    (plan_of(4, tp=4), set()),
    (plan_of(64, tp=8, pp=2), set()),
    (plan_of(28, tp=4), {("warning", "partial-node"), ("note", "dp-cut-unevenly")}),
    (plan_of(64, tp=16, pp=2), {("warning", "tp-across-nodes")}),
    (plan_of(24, tp=3), {("warning", "tp-across-nodes"), ("note", "dp-cut-unevenly")}),
    (plan_of(64, "dp-tp-pp", tp=4), {("warning", "tp-across-nodes"), ("note", "dp-in-two-steps")}),
    (plan_of(64, tp=8, ep=8, etp=1), set()),
    (plan_of(64, tp=8, ep=8), {("warning", "ep-across-nodes")}),
    (plan_of(64, tp=1, ep=32), {("warning", "ep-across-nodes"), ("note", "dp-in-two-steps")}),
    (plan_of(16, tp=8, cp=2), {("note", "cp-across-nodes")}),
    (plan_of(64, "pp-tp-dp", tp=4, pp=8), {("warning", "tp-across-nodes"), ("warning", "pp-inside-node")}),
    (plan_of(64, "vllm", tp=4, pp=2), set()),
    (plan_of(16, tp=4, dp_shard=2, dp_replicate=2), {("note", "dp-in-two-steps")}),
    (plan_of(16, "tp-dp_replicate-dp_shard-pp", tp=4, dp_shard=2, dp_replicate=2),
     {("warning", "replicas-inside-node"), ("note", "dp-cut-unevenly")}),
    (plan_of(64, tp=4, dp_shard=16), {("note", "dp-shard-across-nodes"), ("note", "dp-in-two-steps")}),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "expected"), REMARKS)
def test_remarks(plan: Plan, expected: set[tuple[str, str]]) -> None:
    assert codes(plan) == expected


def test_warnings_come_first_and_say_how_many_groups() -> None:
    remarks = remarks_on(plan_of(1024, tp=8, pp=8, cp=2, ep=8))
    assert [remark.level for remark in remarks] == ["warning", "note"]
    assert "128 of 128 ep groups cross nodes (up to 8)" in remarks[0].text
    assert "--etp 1" in remarks[0].text
    assert plan_of(1024, tp=8, pp=8, cp=2, ep=8, etp=1).made("ep").nodes == 1  # type: ignore[union-attr]


def test_advice_for_tp_depends_on_the_cause() -> None:
    too_large, not_first, odd = (
        remarks_on(plan)[0].text
        for plan in (plan_of(64, tp=16), plan_of(64, "dp-tp-pp", tp=4), plan_of(24, tp=3))
    )  # fmt: skip
    assert "--gpus-per-node" in too_large
    assert "put tp first" in not_first
    assert "divides 8" in odd


@pytest.mark.parametrize("check", CHECKS)
def test_each_check_has_a_case(check: Any) -> None:
    assert any(list(check(plan)) for plan, _ in REMARKS)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"world_size": 1024, "tp": 3},
         ["--tp 4 (from 3)", "--world-size 1032 (from 1024)", "--world-size 1008 (from 1024)"]),
        ({"world_size": 1026, "tp": 8, "pp": 8}, ["--world-size 1024 (from 1026)", "--world-size 1088 (from 1026)"]),
        ({"world_size": 1024, "tp": 8, "cp": 5, "pp": 3},
         ["--cp 4 (from 5), --pp 4 (from 3)", "--world-size 1080 (from 1024)", "--world-size 960 (from 1024)"]),
        ({"world_size": 1024, "tp": 8, "dp": 12}, ["--dp 128 (from 12)", "--world-size 96 (from 1024)"]),
        ({"world_size": 1024, "tp": 8, "ep": 12},
         ["--ep 16 (from 12)", "--world-size 1056 (from 1024)", "--world-size 960 (from 1024)"]),
        ({"world_size": 64, "tp": 8, "dcp": 3}, ["--dcp 4 (from 3)"]),
        ({"world_size": 64, "tp": 0}, ["--tp 1 (from 0)"]),
        ({"world_size": 0}, ["--world-size 1 (from 0)"]),
        ({"world_size": 64, "order": "megatorn", "tp": 2}, ["--order megatron (from megatorn)"]),
        ({"world_size": 64, "order": "tp-dp", "tp": 2, "cp": 2}, ["--order tp-cp-dp (from tp-dp)"]),
        ({"world_size": 64, "order": "tp-pp-dp", "tp": 4, "pp": 2, "ep": 8}, ["--order tp-ep-dp-pp (from tp-pp-dp)"]),
    ],
)  # fmt: skip
def test_smallest_change(asked: dict[str, Any], expected: list[str]) -> None:
    found = changes(**asked)
    assert found[: len(expected)] == expected


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.sampled_from([4, 8]))
def test_each_change_fits_and_is_needed(world_size: int, tp: int, pp: int, ep: int, node: int) -> None:
    request = Request(world_size, {"tp": tp, "pp": pp, "ep": ep}, "megatron", node)
    try:
        request.resolve()
    except LayoutError:
        found = changes_that_fit(request)
    else:
        return
    assert found
    for change in found:
        values = dict(change.values)
        world = values.pop("world-size", world_size)
        sizes = {**request.sizes, **values}
        kept = {name: size for name, size in sizes.items() if size is not None}
        make_plan(Request(world, kept, "megatron", node))  # type: ignore[arg-type]


def test_nearest_size_is_the_nearest() -> None:
    for tp in (3, 5, 6, 7, 9, 11, 13, 24, 100):
        fits = [size for size in range(1, 65) if 64 % size == 0]
        best = min(max(size, tp) / min(size, tp) for size in fits)
        size = next(
            dict(c.values)["tp"] for c in changes_that_fit(Request(64, {"tp": tp}, "megatron", 8)) if "tp" in c.values
        )
        assert isinstance(size, int) and max(size, tp) / min(size, tp) == best


@pytest.mark.parametrize("sizes", [
    {"tp": 11, "cp": 17, "pp": 13, "ep": 19, "etp": 23},
    {"tp": 7, "cp": 5, "pp": 9},
    {"tp": 6, "cp": 6, "pp": 6, "ep": 6, "etp": 6, "dp": 6, "pcp": 6, "external_dp": 6},
])  # fmt: skip
@pytest.mark.parametrize("world_size", [16384, 15120])
def test_the_search_is_quick(world_size: int, sizes: dict[str, int]) -> None:
    start = time.process_time()
    changes_that_fit(Request(world_size, sizes, "megatron", 8))
    assert time.process_time() - start < FIT_S


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *THE_EXAMPLE]) == 0
    out = capsys.readouterr().out
    assert "1024 ranks on 128 nodes of 8 GPUs" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["ep"][:4] == ["ep", "128", "8", "8"] and rows["ep"][-1] == "expert_model_parallel"
    assert "ep-across-nodes" in out and "cited, not measured here" in out
    assert max(map(len, out.splitlines())) <= 130


@pytest.mark.parametrize("axis", [axis for axis in AXES if axis.size_parameter], ids=lambda axis: axis.name)
def test_each_axis_has_both_options(axis: Any, capsys: pytest.CaptureFixture[str]) -> None:
    order = "-".join(["tp", "ep", *_DENSE[1:]])
    extra = ["--tp", "2"] if axis.name == "dcp" else []
    found = []
    for option in (axis.name, axis.size_parameter):
        words = ["--world-size", "2", f"--{option.replace('_', '-')}", "2", "--order", order, "--json", *extra]
        assert main(["plan", *words]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert found[0]["sizes"][axis.name] == 2


@pytest.mark.parametrize("order", PRESETS)
def test_presets(order: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--world-size", "64", "--tp", "4", "--pp", "2", "--order", order]) == 0
    assert f"order {order}" in capsys.readouterr().out


def test_bad_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--world-size", "1024", "--tp", "3"]) == 2
    captured = capsys.readouterr()
    with pytest.raises(LayoutError) as error:
        resolve_layout(1024, {"tp": 3})
    assert captured.out == "" and str(error.value) in captured.err
    assert "smallest change: --tp 4 (from 3)" in captured.err


def test_bad_sizes_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--world-size", "1024", "--tp", "3", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["changes"][0] == {"values": {"tp": 4}, "text": "--tp 4 (from 3)"}
    assert "1024 ranks" in found["error"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", "2"], "--world-size"),
        (["--world-size", "8", "--rank", "8"], "0 … 7"),
        (["--world-size", "8", "--gpus-per-node", "0"], "at least 1"),
        (["--world-size", "8", "--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json"),
        (["--world-size", "8", "--json", "/dev/full"], "cannot write /dev/full: No space"),
        (["--world-size", "16385", "--html", "x.html"], "at most 16384 ranks"),
    ],
)
def test_bad_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *words])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_one_rank_of_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *THE_EXAMPLE, "--rank", "165"]) == 0
    out = capsys.readouterr().out
    assert "rank 165: node 20, GPU 5" in out
    assert "coordinates: tp=5 cp=0 dp_shard=2 pp=1 etp=5 ep=4 efsdp=0 dp_inter_node=2" in out
    assert "stage 1 of 8: previous rank 37, next rank 293" in out
    rows = {line.split()[0]: line for line in out.splitlines() if line}
    assert "165 173" in rows["cp"]
    assert "not in a group" in rows["embedding"]


def test_first_and_last_stage(capsys: pytest.CaptureFixture[str]) -> None:
    for rank, text in ((0, "stage 0 of 2: the first, next rank 4"), (7, "stage 1 of 2: previous rank 3, the last")):
        main(["plan", "--world-size", "8", "--pp", "2", "--rank", str(rank)])
        assert text in capsys.readouterr().out


def test_one_rank_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--world-size", "1"]) == 0
    assert "needs no process group" in capsys.readouterr().out


def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", *THE_EXAMPLE, "--rank", "37", "--json", str(path)]) == 0
    assert "rank 37" in capsys.readouterr().out
    found = json.loads(path.read_text(encoding="utf-8"))
    assert set(found) == {
        "format", "world_size", "gpus_per_node", "nodes", "order", "layout", "sizes", "groups", "missing", "warnings",
        "communicators", "rank",
    }  # fmt: skip
    assert [each["code"] for each in found["warnings"]] == ["ep-across-nodes", "cp-across-nodes"]
    assert found["communicators"]["made"]["per_rank"] == len(found["communicators"]["made"]["sets"]) == 6
    assert found["rank"]["groups"]["ep"] == {"ranks": list(range(5, 64, 8)), "rank_in_group": 4}
    assert (found["rank"]["first_stage"], found["rank"]["last_stage"], found["rank"]["next"]) == (True, False, 165)


def test_a_groups_ranks_follow_from_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", *THE_EXAMPLE, "--json"])
    for group in json.loads(capsys.readouterr().out)["groups"]:
        steps = [range(0, step["size"] * step["stride"], step["stride"]) for step in group["steps"]]
        ranks = sorted(sum(offsets) for offsets in itertools.product(*steps))
        assert set(group["first"]) <= set(ranks) if group["ends_of"] else group["first"] == ranks


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    without = capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == without
    assert all(name in without and about in without for name, (_, about) in COMMANDS.items())


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plam"])
    assert stop.value.code == 2
    assert "plan" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--html", "--json"])
def test_a_file_on_stdout_comes_alone(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--world-size", "8", "--tp", "2", option, "-"]) == 0
    out = capsys.readouterr().out
    assert out.lstrip().startswith(("<", "{"))
    assert "long name" not in out.splitlines()[-1]
    assert out.rstrip().endswith((">", "}"))


def kinds_by_their_lists(request_: Request) -> dict[str, tuple[object, ...]]:
    layout = request_.resolve()
    lists = {axis.name: layout.groups(axis.name) for axis in AXES if axis.name in layout.names}
    found = {}
    for name, groups in lists.items():
        touched = [len({rank // request_.gpus_per_node for rank in ranks}) for ranks in groups]
        twins = tuple(other for other in lists if other != name and lists[other] == groups)
        crossing = sum(nodes > 1 for nodes in touched)
        found[name] = (len(groups), max(map(len, groups)), tuple(groups[0]), max(touched), crossing, twins)
    return found


def test_kinds_are_what_their_lists_of_ranks_are() -> None:
    random_ = random.Random(7)
    tried = 0
    while tried < 150:
        sizes = {name: random_.choice([1, 1, 2, 3, 4]) for name in random_.sample(["tp", "pp", "cp", "ep", "etp"], 3)}
        order = random_.choice(["megatron", "vllm", "torchtitan", "pp-tp-cp-ep-dp", "dp-ep-cp-tp-pp"])
        request_ = Request(random_.choice([8, 12, 24, 48, 72, 96]), sizes, order, random_.choice([1, 3, 4, 8, 9]))
        try:
            plan = make_plan(request_)
        except LayoutError:
            continue
        tried += 1
        found = {k.name: (k.count, k.size, k.first, k.nodes, k.crossing, k.same_as) for k in plan.kinds}
        assert found == kinds_by_their_lists(request_), request_
        for names, count in (
            ([kind.name for kind in plan.kinds if kind.made], count_communicators(plan).groups_made),
            ([kind.name for kind in plan.kinds], count_communicators(plan).groups_of_all_kinds),
        ):
            sets = {tuple(range(plan.world_size))}.union(*(map(tuple, plan.layout.groups(name)) for name in names))
            assert sum(len(ranks) > 1 for ranks in sets) == count, (request_, names)


def test_experts_that_took_the_tensor_parallel_size_over_can_be_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--world-size", "32", "--tp", "8", "--ep", "8"]) == 2
    assert "smallest change: --etp 1 (from 8, the tensor-parallel size unless given)" in capsys.readouterr().err
    assert main(["plan", "--world-size", "32", "--tp", "8", "--ep", "8", "--etp", "1"]) == 0
    for sizes in ({"tp": 8, "ep": 8, "etp": 8}, {"tp": 8, "ep": 64}, {"tp": 3}):
        changes = changes_that_fit(Request(32, sizes, "megatron", 8))
        assert changes
        assert all(change.values != {"etp": 1} or "etp" in sizes for change in changes), sizes


FORKS = """
import gc, json, os, runpy, sys
from parallel_state.tools import topology
from parallel_state.tools.plan import command

gc.freeze()
reader, writer = os.pipe()
os.close(reader)  # it has stopped reading
children = []
for number, (place, command) in enumerate(json.loads(sys.argv[1])):  # torch is imported once
    pid = os.fork()
    if pid == 0:
        os.dup2(writer if place == "pipe" else os.open(place, os.O_WRONLY), 1)
        os.dup2(os.open(f"{sys.argv[2]}/{number}", os.O_CREAT | os.O_WRONLY), 2)
        sys.argv[1:] = command
        runpy.run_module("parallel_state", run_name="__main__", alter_sys=True)
        sys.exit()  # as an interpreter that was started for it
    children.append(pid)
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]))
"""


@pytest.mark.slow
def test_as_a_process(tmp_path: Path) -> None:
    plan = ["plan", "--world-size", "64", "--json"]
    commands = [("pipe", ["topology"]), ("pipe", plan), ("pipe", ["--help"]), ("/dev/full", plan[:3])]
    commands += [("/dev/full", plan), ("/dev/full", ["topology", "--json"])]
    commands += [("/dev/null", ["plan", "--world-size", "7", "--tp", "2"])]
    done = subprocess.run(
        [sys.executable, "-c", FORKS, json.dumps(commands), str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    *_, code_of_text, code_of_json, code_of_topology, code_of_error = json.loads(done.stdout)
    *stopped, text, tree, topology, error = [(tmp_path / str(number)).read_text() for number in range(len(commands))]
    assert not [errors for errors in stopped if "Traceback" in errors or "BrokenPipe" in errors]
    for code, full in ((code_of_text, text), (code_of_json, tree), (code_of_topology, topology)):
        assert (code, full.count("\n")) == (1, 1) and "can't be written: No space left" in full
    assert code_of_error == 2
    assert error.startswith("error: 7 ranks are not divisible by tp=2;")


def test_a_stage_of_one_is_its_own_first_and_last() -> None:
    plan = plan_of(99_999, tp=9)
    for name in ("embedding", "position_embedding"):
        (kind,) = [each for each in plan.kinds if each.axis.name == name]
        assert (kind.count, kind.size, kind.first) == (99_999, 1, (0,))
