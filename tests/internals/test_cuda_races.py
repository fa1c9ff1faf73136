"""The kernels of peer/csrc under ThreadSanitizer: flags order what ranks exchange."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from device_communicators.cpu import native_build
from tests.helpers.compiled import kept
from tests.helpers.cuda_on_cpu import CUDA_SOURCES, EMULATION

pytestmark = pytest.mark.slow

DEADLINE_S = 300
FLAGS = ("-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread", "-rdynamic")


def run(folder: Path, *flags: str, weakened: tuple[str, str] | None = None) -> tuple[int, str]:
    compiler = native_build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    for path in EMULATION.glob("*on_cpu.h"):
        text = path.read_text()
        (folder / path.name).write_text(text.replace(*weakened) if weakened else text)
    for path in EMULATION.glob("cuda_*.cpp"):
        (folder / path.name).write_text(path.read_text())
    command = [*compiler, *FLAGS, *flags, f"-I{folder}", f"-I{CUDA_SOURCES}", str(folder / "cuda_races.cpp")]

    def build(path: Path) -> None:
        built = subprocess.run([*command, "-o", str(path), "-ldl"], capture_output=True, text=True, timeout=DEADLINE_S)
        if built.returncode != 0 and "tsan" in built.stderr:
            pytest.skip("the compiler has no ThreadSanitizer")
        assert built.returncode == 0, built.stderr

    sources = [path for path in (*folder.iterdir(), *CUDA_SOURCES.iterdir()) if path.is_file()]
    program = kept("races", (*compiler, *FLAGS, *flags), sources, build)
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run([program], capture_output=True, text=True, timeout=DEADLINE_S, env=environment)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel's address layout is not one that ThreadSanitizer knows")
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["-DPLAIN_DATA"], id="staged data is plain memory"),
        pytest.param([], id="all kernels", marks=pytest.mark.long),
    ],
)
def test_no_race(tmp_path: Path, flags: list[str]) -> None:
    code, output = run(tmp_path, *flags)
    assert code == 0, output[:3000]
    assert " calls, 0 wrong results" in output
    assert "data race" not in output


@pytest.mark.parametrize("order", ["ACQUIRE", pytest.param("RELEASE", marks=pytest.mark.long)])
def test_a_weaker_flag_is_noticed(tmp_path: Path, order: str) -> None:
    code, output = run(tmp_path, "-DPLAIN_DATA", weakened=(f"__ATOMIC_{order}", "__ATOMIC_RELAXED"))
    assert code != 0
    assert "data race" in output
