from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gpu_proof
import pytest
import torch
from harness.teams import python_path

from tests.extent import LONG
from tests.helpers import nccl_stand_in
from tests.programs import FORK_SERVERS, Program, script

ROOT = Path(__file__).resolve().parents[2]
DRY_S = 550
FORK_SERVER = f"""{FORK_SERVERS}
from multiprocessing.forkserver import ensure_running
from tests import workers

workers.modules_of_tests.add(workers.COMPILING)
workers.fork_context()
ensure_running()
"""
"""Forks the fork server before pytest opens anything."""


def run(folder: Path, *arguments: str, **variables: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPU_TESTS", "PARALLEL_STATE"))}
    environment = {
        **kept,
        "GPU_TESTS_REPORT": str(folder),
        "PYTHONPATH": python_path(ROOT),
        "COLUMNS": "500",
        **variables,
    }
    words = ["-q", "-p", "no:cacheprovider", "tests/gpu", *arguments]
    before = FORK_SERVER if "GPU_TESTS" in variables else ""
    code = f"import os, pytest, sys\nos.chdir({str(ROOT)!r})\n{before}sys.exit(pytest.main({words!r}))\n"
    program = Program(code, environment)
    said = "".join(program.communicate(DRY_S))
    assert program.returncode == 0, said[-6000:]
    return said


@pytest.mark.slow
def test_every_gpu_test_runs_dry_and_is_reported(tmp_path: Path) -> None:
    if nccl_stand_in.compiler() is None:
        pytest.skip("there is no C compiler for the stand-in of NCCL")
    run(tmp_path, GPU_TESTS="dry")
    (file,) = tmp_path.glob("dry-run-*.json")
    content = json.loads(file.read_text())
    assert content["complete"]
    assert content["outcomes"]["passed"] > (65 if LONG else 25)
    assert set(content["outcomes"]) == {"passed", "skipped"}
    skipped = [check for check in content["checks"] if check["outcome"] == "skipped"]
    assert all(check["reason"].startswith("a dry run: ") for check in skipped)
    assert len(skipped) < 24
    text = file.with_suffix(".md").read_text()
    assert text.startswith("# GPU tests on dry run, ")
    assert all(f"| {check['name']}" in text for check in content["checks"])


OF_CALLS = {
    "first": ({"machine", "compile", "check", "kernels"}, {"kernels.json", "kernels.svg"}),
    "second": ({"host", "command"}, {"collectives.json"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("call", list(OF_CALLS))
def test_the_gpu_days_script_runs_dry(tmp_path: Path, call: str) -> None:
    program = Program(
        script(ROOT / "benchmarks" / "gpu_proof.py", [call, str(tmp_path), "--dry"]),
        {**os.environ, "PYTHONPATH": python_path(ROOT)},
    )
    said = "".join(program.communicate(DRY_S))
    assert program.returncode == 0, said
    content = json.loads((tmp_path / "proof.json").read_text())
    assert content["what"] == "a dry run on the CPU: nothing here was seen on a GPU"
    assert list(content["calls"]) == [call]
    steps = content["calls"][call]
    assert list(steps) == [step.name for step in gpu_proof.steps_of(call, [])]
    ran, files = OF_CALLS[call]
    assert {name for name, step in steps.items() if step["outcome"] == "passed"} == ran
    assert {step["outcome"] for name, step in steps.items() if name not in ran} == {"skipped"}
    assert {each.name for each in tmp_path.iterdir()} == {"proof.json", "logs.tgz"} | files
    if call == "first":
        assert steps["machine"]["found"]["packages"]["msgspec"] != "none"
        assert steps["compile"]["found"]["kernels"].startswith("sm_90, NVRTC ")
    else:
        assert [row["case"]["ranks"] for row in json.loads((tmp_path / "collectives.json").read_text())["rows"]] == [2]


def test_without_a_gpu_they_say_why_they_are_skipped(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    said = run(tmp_path, "-rs", "-vv")
    for name in (name for step in (*gpu_proof.FIRST, *gpu_proof.SECOND) for name in step.tests):
        assert f"tests/gpu/{name} SKIPPED" in said, f"the GPU script selects a test that doesn't exist: {name}"
    assert "needs a GPU: " in said
    assert " passed" not in said
    assert not list(tmp_path.iterdir()), "a run without checks must write no report"


def test_a_borrowed_environment_has_what_the_package_needs() -> None:
    """The Makefile repeats the dependencies: a Python that lends its torch can be too old to read pyproject.toml."""
    (needed,) = re.findall(r"^dependencies = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    (named,) = re.findall(r"^NEEDED := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r'"(.*?)"', needed)) <= set(re.findall(r'"(.*?)"', named))


def make(*arguments: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    command = ["make", "--no-print-directory", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("variables", [{}, {"GPU_TESTS_REPORT": "/somewhere"}, {"GPU_TESTS": "dry"}], ids=str)
def test_the_report_goes_where_the_caller_says(variables: dict[str, str]) -> None:
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    for each in (
        {"arguments": [], **variables},
        {"arguments": [f"{name}={value}" for name, value in variables.items()]},
    ):
        arguments = each.pop("arguments")
        said = make("-n", "-o", ".venv/.installed", "run-gpu-tests", *arguments, **each)  # type: ignore[arg-type]
        assert ("GPU_TESTS_REPORT=benchmarks/results" in said) == (not variables)


def test_a_borrowed_environment_needs_neither_ensurepip_nor_an_index(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    (tmp_path / "ensurepip.py").write_text("raise ImportError('Debian has it in a package of its own')")
    lacking = {"PYTHONPATH": python_path(tmp_path), "PIP_NO_INDEX": "1"}
    venv = tmp_path / "venv"
    make(f"{venv}/.installed", "BORROW=1", f"VENV={venv}", f"PYTHON={sys.executable}", **lacking)
    code = "import msgspec, parallel_state, sys; print(sys.prefix, parallel_state.__file__)"
    done = subprocess.run(
        [venv / "bin" / "python", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == [str(venv), str(ROOT / "parallel_state" / "__init__.py")], done.stderr


def test_what_a_fork_server_imports_leaves_cuda_alone() -> None:
    """After a process asks CUDA for devices, its forks can't use them. Importing Triton asks, too."""
    ours = "[*PRELOADED, 'parallel_state.launch.worker', 'parallel_state.launch.preload']"
    code = f"""
import importlib, sys
from tests.workers import PRELOADED
def asked(*_): raise SystemExit("CUDA was asked")
import torch
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = asked
for name in {ours}:
    importlib.import_module(name)
print([name for name in ("torch.distributed._symmetric_memory", "triton", "torch._inductor") if name in sys.modules])
"""
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
