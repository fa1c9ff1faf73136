"""The driver of the control plane without Python, under sanitizers: threads, forks, and out of memory."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from device_communicators.cpu import native_build
from tests.extent import LONG
from tests.helpers.compiled import kept

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[1] / "native" / "control_driver.cpp"
DEADLINE_S = 120
FLAGS = ("-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror")
# The program's operator new calls malloc. The vptr check needs a pipe, and fails without descriptors.
ADDRESS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize=vptr",
    "-fno-sanitize-recover=undefined",
    "-Wno-mismatched-new-delete",
)
PLAIN = ("-Wno-mismatched-new-delete",)
"""The address sanitizer can't follow forks."""
THREAD = ("-fsanitize=thread", "-Wno-mismatched-new-delete")


def _built(flags: tuple[str, ...]) -> Path:
    compiler = native_build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")

    def build(made: Path) -> None:
        empty = made.with_name("empty.cpp")
        empty.write_text("int main() {}\n")
        if subprocess.run([*compiler, *flags, str(empty), "-o", str(made)], capture_output=True).returncode != 0:
            pytest.skip(f"the compiler has no {flags[0]}")
        sources = sorted(native_build.CONTROL.glob("*.cpp"))
        command = [*compiler, *FLAGS, *flags, f"-I{native_build.CONTROL}", *map(str, sources), str(PROGRAM)]
        done = subprocess.run(
            [*command, "-o", str(made)], capture_output=True, text=True, timeout=native_build.BUILD_TIMEOUT_S
        )
        assert done.returncode == 0, done.stderr[:5000]

    return kept("control_driver", [*compiler, *FLAGS, *flags], [*native_build.CONTROL.iterdir(), PROGRAM], build)


@pytest.mark.parametrize(
    "flags", [PLAIN, ADDRESS, THREAD] if LONG else [PLAIN, ADDRESS], ids=lambda flags: flags[0].rpartition("=")[2]
)
@pytest.mark.parametrize(
    "arguments", [("worlds", "20"), ("throws",), ("neighbours",), ("ports",), ("guests",)], ids=lambda words: words[0]
)
def test_sanitizers_find_nothing(flags: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    environment = {**os.environ, "TSAN_OPTIONS": "exitcode=66 die_after_fork=0", "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [_built(flags), *arguments], capture_output=True, text=True, timeout=DEADLINE_S, env=environment
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel's address layout is not one that ThreadSanitizer knows")
    assert (done.returncode, done.stdout) == (0, "all holds\n"), done.stdout + done.stderr[:5000]
