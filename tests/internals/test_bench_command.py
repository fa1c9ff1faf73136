from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import report
import torch
from harness import page
from harness.messages import KINDS
from harness.page import FILES
from harness.peers import VLLM_TORCH
from harness.teams import Team, started

from parallel_state.tools.bench import command
from tests.extent import LONG
from tests.internals.test_bench import findings
from tests.programs import Program, module

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
RANK = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}

BEFORE = """
import torch.distributed.fsdp
from dataclasses import replace
from harness import comparison, through_torch

comparison.QUICK_PLAN = replace(comparison.QUICK_PLAN, rounds=3, round_s=0.0, repeat_s=0.0)
through_torch._WIDTH, through_torch._DEPTH = 64, 2
"""
"""Imports once what each rank would import, and shrinks the models."""


def report_of(words: Sequence[str]) -> str:
    return f"import sys, report\nsys.exit(report.main({[*words]!r}))"


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}


@pytest.mark.slow
def test_what_every_installation_has(tmp_path: Path) -> None:
    operations, file = ("all_reduce", "all_gather", "barrier", "ping_pong", "object"), tmp_path / "found.json"
    words = ["--quick", "--ranks", "2", "--sizes", "1000", "65536", "--operations", *operations, "--json", str(file)]
    program = Program(module("parallel_state", ["bench", *words]), environment())
    out, err = program.communicate(DEADLINE_S)
    assert program.returncode == 0, out + err
    content = json.loads(file.read_text())
    cases = [(row["case"]["operation"], row["case"]["bytes"]) for row in content["rows"]]
    assert cases == [(each, size) for each in operations for size in ((0,) if each == "barrier" else (992, 65536))]
    for row in content["rows"]:
        in_place = ["parallel_state in place"] if row["case"]["operation"] == "all_reduce" else []
        assert list(row["us"]) == ["parallel_state", *in_place, "torch over gloo"]
        assert row["wrong"] == {}
        assert all(len(samples) >= 3 and min(samples) > 0 for samples in row["us"].values())
    assert content["settings"]["route"].startswith("group 'tp:0'")
    assert "all_reduce, 2 ranks, bfloat16: us" in out
    assert "object, there and back, 2 ranks, bfloat16: us" in out


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith(VLLM_TORCH), reason="a peer for another torch isn't started")
def test_a_quick_page_without_a_peer_that_cannot_run(tmp_path: Path) -> None:
    package = tmp_path / "peers" / "vllm" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    folder = tmp_path / "deep" / "report"
    arguments = ("--quick", "--ranks", 2, "--sizes", 1000, 65536, "--operations", "all_reduce", "reduce_scatter")
    words = [*map(str, arguments), "--peers", str(tmp_path / "peers"), "--report", str(folder)]
    program = Program(BEFORE + report_of(words), environment())
    out, err = program.communicate(DEADLINE_S)
    assert program.returncode == 0, out + err
    assert {each.name for each in folder.iterdir()} == set(FILES)
    content = json.loads((folder / "report.json").read_text())
    assert "SIGILL" in content["left_out"]["vLLM"]
    assert {"parallel_state", "gloo"} <= content["used"].keys()
    collectives = [row["case"] for row in content["rows"] if row["case"]["part"] == "collectives"]
    cases = [(case["operation"], case["bytes"]) for case in collectives]
    assert cases == [("all_reduce", 992), ("all_reduce", 65536), ("reduce_scatter", 992), ("reduce_scatter", 65536)]
    for row in content["rows"]:
        assert row["wrong"] == {}
        assert {"parallel_state", "gloo"} <= row["us"].keys() or {"coordinator", "gloo"} <= row["us"].keys()
    assert {row["case"]["kind"] for row in content["rows"] if row["case"]["part"] == "messages"} == set(KINDS)
    assert content["rows"][-1]["case"]["part"] == "start-up"
    text = (folder / "index.html").read_text()
    assert "SIGILL" in text[text.index("left out: ") :]
    assert text.count("<polyline") > 10
    assert str(tmp_path) not in (folder / "report.json").read_text()
    table = (folder / "table.txt").read_text()
    assert "# reduce_scatter, 2 ranks: gloo" in table
    assert table in out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_all_and_leaves_an_earlier_report(tmp_path: Path, number: signal.Signals) -> None:
    page.write(tmp_path, findings())
    before = {name: (tmp_path / name).read_bytes() for name in FILES}
    words = ["--quick", "--no-peers", "--ranks", "2", "--report", str(tmp_path)]
    process = Program("import os\nos.setsid()\n" + report_of(words), environment())
    workers: list[int] = []
    deadline = time.monotonic() + 120
    while len(workers) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        workers = [int(pid) for pid in children.read_text(encoding="utf-8").split()]
    time.sleep(1)
    os.kill(process.pid, number)
    said, err = process.communicate(60)
    assert process.returncode == 128 + number, said
    assert err.splitlines() == [f"python benchmarks/report.py: {ENDS[number]}"]
    assert "the report of 2030-01-01 00:00 UTC stays" in said
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == before
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_report_that_is_being_drawn_is_completed(tmp_path: Path, number: signal.Signals) -> None:
    code = f"""
import os
from harness import comparison, page
from tests.internals.test_bench import findings

class Measured(comparison.Bench):
    def run(self):
        self.findings.rows = findings().rows

def interrupted(*arguments):
    os.kill(os.getpid(), {int(number)})
    return draw(*arguments)

draw, page.draw, comparison.Bench = page.draw, interrupted, Measured
"""
    process = Program(code + report_of(["--no-peers", "--ranks", "2", "--report", str(tmp_path)]), environment())
    said, err = process.communicate(DEADLINE_S)
    assert process.returncode == 128 + number, said + err
    assert err.splitlines() == [f"python benchmarks/report.py: {ENDS[number]}"]
    assert {each.name for each in tmp_path.iterdir()} == set(FILES)
    assert not json.loads((tmp_path / "report.json").read_text())["interrupted"]


COMMANDS = {
    "bench": [sys.executable, "-m", "parallel_state", "bench", "--quick"],
    "report": [sys.executable, "benchmarks/report.py", "--quick", "--no-peers"],
}
IMPORTING = "import time: "
ENDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_import_that_is_interrupted_ends_with_one_line(command: str, number: signal.Signals) -> None:
    """The signal arrives during torch's import, which drops an exception that a signal handler raises."""
    variables = {**environment(), "PYTHONPATH": str(ROOT), "PYTHONPROFILEIMPORTTIME": "1"}
    process = subprocess.Popen(
        COMMANDS[command], cwd=ROOT, env=variables, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.endswith(" torch._C\n"):
                os.kill(process.pid, number)
                break
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + number, out + err
    said = [line for line in err.splitlines() if not line.startswith(IMPORTING)]
    assert not out and len(said) == 1, said
    assert said[0].endswith(ENDS[number])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_keeps_what_was_measured(tmp_path: Path, number: signal.Signals) -> None:
    file = tmp_path / "found.json"
    words = ["--ranks", "2", "--sizes", "1024", "--operations", "barrier", "all_reduce", "all_gather", "broadcast"]
    code = "import os\nos.setsid()\n" + module("parallel_state", ["bench", *words, "--json", str(file)])
    process = Program(code, environment())
    deadline = time.monotonic() + 120
    while not (file.exists() and file.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    if number == signal.SIGINT:  # a terminal sends Ctrl-C to all processes
        os.killpg(process.pid, number)
    else:
        os.kill(process.pid, number)
    out, err = process.communicate(60)
    assert process.returncode == 128 + number
    assert "barrier, 2 ranks, bfloat16: us" in out and "broadcast, 2" not in out
    assert err.splitlines()[-1] == f"python -m parallel_state: {ENDS[number]}" and "Traceback" not in err
    rows = json.loads(file.read_text())["rows"]
    assert rows[0]["case"]["operation"] == "barrier" and rows[0]["us"]


@pytest.mark.slow
def test_a_launcher_that_cannot_start_is_left_out_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An MPI's folder, or the Python in it, is gone. The line has the reason, not the launcher's banner."""
    banner = tmp_path / "mpiexec"
    banner.write_text("#!/bin/sh\nprintf 'no python there\\n-----\\n' >&2\nexit 3\n")
    banner.chmod(0o755)
    left_out: dict[str, str] = {}
    teams = [
        Team(name, "tests.internals.benchmark_team", 2, {}, launcher=[launcher])
        for name, launcher in (("gone", str(tmp_path / "nowhere")), ("broken", str(banner)))
    ]
    with started(teams, left_out) as ready:
        assert not ready
    assert left_out == {
        "gone": f"not all of 2 ranks came ([Errno 2] No such file or directory: '{tmp_path / 'nowhere'}')",
        "broken": "not all of 2 ranks came (exit code 3, no python there)",
    }
    assert capsys.readouterr().err.splitlines() == [f"left out: {name}: {why}" for name, why in left_out.items()]


@pytest.mark.parametrize(
    ("run", "arguments", "variables", "said"),
    [
        (report.main, "--report setup.py", {}, "--report: setup.py is no folder"),
        (command.main, "--ranks 1", {}, "--ranks must be from 2 to 64, but is 1"),
        (command.main, "--sizes 0", {}, "argument --sizes: must be a whole number of at least 1, but is 0"),
        (report.main, "--no-peers", {**RANK, "LOCAL_RANK": "0"}, "it starts ranks of its own"),
        (command.main, "", RANK, "LOCAL_RANK is not"),
        (report.main, "--no-peers --ranks 1", {}, "--ranks must be from 2 to 64, but is 1"),
    ],
    ids=["report", "ranks", "sizes", "launcher", "half a launcher", "ranks of a page"],
)
def test_what_cannot_work_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    run: Callable[[list[str]], int],
    arguments: str,
    variables: dict[str, str],
    said: str,
) -> None:
    monkeypatch.chdir(ROOT)
    for name in os.environ.keys() - environment().keys():
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        run(arguments.split())
    assert ended.value.code == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert said in last


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout")
def test_a_commit_that_isnt_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--against", "no-such-commit", "--device", "cpu"]) == 2
    assert "--against must name a commit that is here, but 'no-such-commit' isn't" in capsys.readouterr().err


@pytest.mark.skipif(not LONG or not (ROOT / ".git").exists(), reason="compiles the last commit; needs a checkout")
def test_this_tree_beside_the_last_commit(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--against HEAD --quick --device cpu --ranks 2 --operations all_reduce --sizes 8192"
    code = report.main(words.split())
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("all_reduce 8 KiB, coordinator ")]
    assert len(rows) == 1
    before_us, now_us, ratio, low, _, high = rows[0].split()[4:10]
    assert float(low) <= float(ratio) <= float(high)
    assert min(float(before_us), float(now_us)) > 0
    assert code == any(line.startswith("slower, ") for line in lines)
