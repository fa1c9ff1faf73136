from __future__ import annotations

import itertools
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from ctypes import c_void_p
from pathlib import Path

import pytest
import torch

from device_communicators.cpu import native, native_build
from tests.cases import each
from tests.helpers.compiled import kept

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "device_communicators" / "cpu" / "csrc"
DEADLINE_S = 300
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
)  # fmt: skip
REDUCTIONS = 6
"""Numbered as in reduce.h."""
COUNT = 1031
SOURCES_OF_A_SUM = (2, 3, 4, 5, 8)


def _fingerprints(compiler: Sequence[str], *runner: str) -> dict[str, set[str]]:
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


def _drawn(dtype: torch.dtype, draw: torch.Generator) -> torch.Tensor:
    if not dtype.is_floating_point:
        return torch.randint(0, 256, (COUNT * dtype.itemsize,), dtype=torch.uint8, generator=draw).view(dtype)
    numbers = torch.randn(COUNT, dtype=torch.float64, generator=draw)
    numbers[::8] *= 0
    numbers[1::8] *= torch.finfo(dtype).tiny
    return (numbers * torch.randint(1, 6, (COUNT,), generator=draw)).to(dtype)


def test_every_instruction_set_gives_the_same_bits() -> None:
    library = native.load()
    draw = torch.Generator().manual_seed(7)
    instruction_sets = set()

    def check(dtype: torch.dtype, reduction: int, sources: int) -> None:
        inputs = [_drawn(dtype, draw) for _ in range(sources)]
        given = (c_void_p * sources)(*(each.data_ptr() for each in inputs))
        found = {}
        for name in (b"plain", b"avx2", b"avx512"):
            outs = torch.empty(2, COUNT, dtype=dtype)
            pointers = (c_void_p * 2)(*(out.data_ptr() for out in outs))
            number = DTYPES.index(dtype)
            if library.ps_reduce(name, pointers, 2, given, sources, COUNT, number, reduction) == 0:
                found[name] = [bytes(out.view(torch.uint8).tolist()) for out in outs]
        assert all(each == [found[b"plain"][0]] * 2 for each in found.values()), sorted(found)
        instruction_sets.update(found)

    each(itertools.product(DTYPES, range(REDUCTIONS), SOURCES_OF_A_SUM), check)
    assert library.ps_instruction_set() in instruction_sets


def test_another_processor_gives_the_same_bits() -> None:
    """ARM in emulation, if its tools are installed."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
    if compiler is None or emulator is None:
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64-static")
    found = _fingerprints([compiler], emulator)
    assert len(found) == len(DTYPES) * REDUCTIONS * len(SOURCES_OF_A_SUM)
    assert found == _fingerprints(_own_compiler())
