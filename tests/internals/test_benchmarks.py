from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from harness.messages import SPEC_VIEWS, VIEWS, WITH_SPEC
from harness.rounds import Plan
from harness.teams import Team, started

from parallel_state.tools.bench.rounds import OWN, measure
from tests.programs import Program, script

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 400


def run(name: str, file: Path, *arguments: str, before: str = "") -> dict[str, Any]:
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(launcher)}
    environment["PYTHONPATH"] = str(ROOT)
    options = ["--no-peers", "--rounds", "1", "--round-ms", "0.1", "--json", str(file), *arguments]
    program = Program(before + script(ROOT / "benchmarks" / f"{name}.py", options), environment)
    out, err = program.communicate(DEADLINE_S)
    assert program.returncode == 0, out + err
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["machine"]["cores"] > 0
    assert content["versions"]["torch"]
    assert content["commit"]
    assert "WRONG" not in err
    assert "p50, us" in out
    for row in content["rows"]:
        assert row["wrong"] == {}
        assert all(len(samples) >= 3 for samples in row["us"].values())
        assert all(sample > 0 for samples in row["us"].values() for sample in samples)
    return content


def names(content: dict[str, Any], **case: Any) -> set[str]:
    (row,) = [row for row in content["rows"] if case.items() <= row["case"].items()]
    return set(row["us"])


def test_collectives(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    operations = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
    content = run("collectives", tmp_path / "c.json", "--sizes", "1024", "65536", "--svg", str(picture))
    ours = {"op", "coordinator"}
    assert {row["case"]["operation"] for row in content["rows"]} == set(operations)
    assert names(content, operation="barrier") == {"coordinator", "gloo"}
    for loop in ("tight", "produced"):
        found = names(content, operation="all_reduce", bytes=1024, loop=loop)
        assert found >= ours | {"op, in place", "coordinator, in place", "gloo"}
        assert ("(copies alone)" in found) == (loop == "produced")
        for operation in operations[1:-1]:
            assert names(content, operation=operation, bytes=65536, loop=loop) >= ours | {"gloo"}
    assert picture.read_text().count("<polyline") > 20


def test_transfers(tmp_path: Path) -> None:
    content = run("collectives", tmp_path / "c.json", "--operations", "ping_pong", "--sizes", "1024", "4194304")
    for loop in ("tight", "produced"):
        assert names(content, bytes=1024, loop=loop) >= {"op", "coordinator", "gloo"}


def test_messages(tmp_path: Path) -> None:
    content = run("messages", tmp_path / "m.json", "--readers", "1", "--objects", "1 KB")
    assert names(content, kind="object", idle_ms=0) == {"parallel_state", "gloo"}
    assert names(content, kind="object", idle_ms=5) == {"parallel_state", "gloo"}
    for kind in ("broadcast", "pipeline"):
        for what in ("decode", "prefill"):
            ours = {OWN, VIEWS, WITH_SPEC, SPEC_VIEWS}
            assert names(content, kind=kind, what=what) == ours | {"gloo", "(copying the bytes)"}


def test_messages_to_three_readers(tmp_path: Path) -> None:
    content = run("messages", tmp_path / "m.json", "--readers", "3", "--objects", "1 KB", "--kinds", "object")
    assert names(content, readers=3, idle_ms=0) == {"parallel_state", "gloo"}


def test_dispatch(tmp_path: Path) -> None:
    content = run("dispatch", tmp_path / "d.json", "--sizes", "1024", "--modes", "inference_mode", "requires_grad")
    assert {"plain function", "coordinator", "functional collective"} <= names(content, ranks=1, mode="inference_mode")
    assert {"op", "coordinator", "op, in place"} <= names(content, ranks=2, mode="inference_mode")
    assert "op, in place" not in names(content, ranks=2, mode="requires_grad")


TINY = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import decode_models

decode_models.MODELS["0.5B"] = decode_models.Model(2, 64, 16, 128, 256)
"""


def test_decode(tmp_path: Path) -> None:
    ours, spinning = "parallel_state", "parallel_state, spinning"
    arguments = ["--models", "0.5B", "--batches", "2"]
    content = run("decode", tmp_path / "m.json", *arguments, "--only", ours, "gloo", before=TINY)
    assert names(content, model="0.5B", layout="TP2xPP2", batch=2) == {ours, "gloo", "(matmuls alone)"}
    arguments += ["--layouts", "TP2", "--only", spinning, "parallel_state over gloo"]
    content = run("decode", tmp_path / "two.json", *arguments, before=TINY)
    assert names(content, layout="TP2") == {spinning, "parallel_state over gloo"}


KEPT = """
import shutil
from device_communicators.cpu import native_build
from tests.helpers.compiled import plain_library

build = native_build.compile_library


def compile_library(recipe, target, compiler, seal=None, base=None):
    if seal is not None:
        return build(recipe, target, compiler, seal, base)
    more = [source for source in recipe.sources if source not in native_build.plain_recipe().sources]
    shutil.copy(plain_library(compiler, more, recipe.flags), target)


native_build.compile_library = compile_library
"""
"""The tests' cached library, compiled without optimization."""


def test_failure_costs(tmp_path: Path) -> None:
    content = run("failure_costs", tmp_path / "f.json", "--ranks", "2", "--sizes", "8", "65536", before=KEPT)
    pieces = {"record", "lock", "lock and check", "tick", "tick, note", "tick, note, comparison"}
    assert names(content, part="C++", ranks=1) == pieces | {"empty loop", "group alone", "group, recorded"}
    found = {"group alone", "group, recorded", "exchange", "exchange, compared"}
    assert names(content, part="C++", ranks=2) == found
    calls = {"op, in place", "all_reduce", "record in Python", "gloo's all_gather of 512 bytes"}
    assert names(content, part="mode") == calls | {f"{name}, debug mode" for name in calls}
    for size in (8, 65536):
        assert names(content, part="gloo", bytes=size) == {"torch.distributed", "all_reduce", "all_reduce_"}


def leave_out(fault: str) -> None:
    teams = [Team(name, "tests.internals.benchmark_team", 2, {"fault": fault}) for name in ("failing", "sound")]
    with started(teams) as there:
        row = measure(there, {}, Plan(rounds=3, round_s=0.001))
    assert set(row.us) == {"sound"}
    assert [team.name for team in there] == ["sound"]
    assert all(process.poll() is not None for team in teams for process in team._processes)
    print("left out")


@pytest.mark.parametrize("fault", ["raises", "ends", "raises at start"])
def test_a_team_that_fails_is_left_out_and_the_others_go_on(fault: str) -> None:
    program = Program(
        f"from {__name__} import leave_out\nleave_out({fault!r})\n", {**os.environ, "PYTHONPATH": str(ROOT)}
    )
    out, err = program.communicate(DEADLINE_S)
    assert (program.returncode, out) == (0, "left out\n"), err
