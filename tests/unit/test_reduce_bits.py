"""The reductions give the same bits with every instruction set, and on another processor."""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from device_communicators.cpu import native_build
from tests.compiled import kept

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "device_communicators" / "cpu" / "csrc"
DEADLINE_S = 300
COMBINATIONS = 9 * 5 * 4  # dtypes, reductions, numbers of sources


def _fingerprints(compiler: Sequence[str], *runner: str) -> dict[str, set[str]]:
    """By dtype, reduction and number of sources: the fingerprints of all instruction sets."""
    files = [ROOT / "tests" / "native" / "reduce_bits.cpp", SOURCES / "reduce.cpp"]
    flags = ["-O3", "-std=c++17", "-fno-math-errno", "-static", f"-I{SOURCES}"]

    def build(path: Path) -> None:
        subprocess.run([*compiler, *flags, *map(str, files), "-o", str(path)], check=True, timeout=DEADLINE_S)

    program = kept("reduce_bits", (*compiler, *flags), [*files, *SOURCES.glob("*.h"), *SOURCES.glob("*.inc")], build)
    output = subprocess.run([*runner, str(program)], check=True, capture_output=True, text=True, timeout=DEADLINE_S)
    found: dict[str, set[str]] = defaultdict(set)
    for line in output.stdout.splitlines():
        _, *key, print_, same_in_all_outs = line.split()
        assert same_in_all_outs == "1", line
        found[" ".join(key)].add(print_)
    return found


def _own_compiler() -> Sequence[str]:
    compiler = native_build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    return compiler


def test_every_instruction_set_gives_the_same_bits() -> None:
    found = _fingerprints(_own_compiler())
    assert len(found) == COMBINATIONS
    assert {key: prints for key, prints in found.items() if len(prints) > 1} == {}


def test_another_processor_gives_the_same_bits() -> None:
    """An ARM in emulation, where the tools for it are installed."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
    if compiler is None or emulator is None:
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64-static")
    assert _fingerprints([compiler], emulator) == _fingerprints(_own_compiler())
