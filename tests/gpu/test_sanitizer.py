"""compute-sanitizer's memcheck and racecheck of `benchmarks/peer_kernels.py --check`, which runs one kernel at
a time: the tool may serialize kernels, and two that wait for each other would hang."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness.teams import python_path

from device_communicators.peer import kernels as peer_kernels
from device_communicators.peer.kernels import KernelError
from tests.gpu.ranks import needs_a_gpu

ROOT = Path(__file__).resolve().parents[2]
TOOL = "compute-sanitizer"
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
CHECK_S = 900
FOUND = 86


def tool() -> str | None:
    homes = [f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return shutil.which(TOOL) or shutil.which(TOOL, path=os.pathsep.join([*homes, *PLACES]))


def command(which: str, check: str, ranks: int) -> list[str]:
    options = ["--tool", check, "--error-exitcode", str(FOUND), "--kernel-name", "kernel_substring=all_reduce"]
    options += ["--report-api-errors", "no"]  # the driver may decline some of torch's queries
    script = [sys.executable, "benchmarks/peer_kernels.py", "--check", "--ranks", str(ranks)]
    return [which, *options, *script, "--sizes", "1024", "16384", "--norm-sizes", "8192", "16384"]


def problem(code: int, said: str, checks: int) -> str | None:
    if code == FOUND:
        return "the tool has found errors"
    if code != 0:
        return f"exit code {code}"
    counts = re.findall(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", said)
    if not counts:
        return "the tool has looked at nothing"
    if any(int(count) for count in counts):
        return "the tool has found something"
    right = said.count(": right (")
    if right != checks:
        return f"{right} of {checks} cases are right"
    return None if "(fused, eager" in said else "the fused kernel was not run"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("check", ["memcheck", "racecheck"])
def test_a_kernel_alone(check: str, ranks: int) -> None:
    needs_a_gpu("the tool checks only kernels on a GPU")
    which = tool()
    if which is None:
        pytest.skip(f"there is no {TOOL}, which comes with the CUDA toolkit")
    try:
        peer_kernels.nvrtc_version()
    except KernelError as error:
        pytest.skip(str(error))
    done = _run(command(which, check, ranks))
    said = done.stdout + done.stderr
    assert problem(done.returncode, said, checks=4) is None, said[-6000:]


def _run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    return subprocess.run(
        arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=CHECK_S
    )  # fmt: skip
