"""Runs the kernels of peer/csrc on a CPU, a CPU thread for each CUDA thread. Ranks are threads, or processes
over shared memory. `launch` blocks until the kernel has finished, and releases the GIL."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from ctypes import POINTER, c_char_p, c_int, c_uint, c_uint64
from pathlib import Path

import pytest

from device_communicators.cpu import native_build
from device_communicators.peer.kernels import OPERATIONS, Call
from tests.helpers import compiled

ROOT = Path(__file__).resolve().parents[2]
CUDA_SOURCES = ROOT / "device_communicators" / "peer" / "csrc"
EMULATION = ROOT / "tests" / "native"
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-pthread")
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function")
DEADLINE_S = 300


class KernelTrappedError(Exception):
    pass


class CpuKernels:
    def __init__(self, max_blocks: int = 2, max_threads: int = 4, library: Path | None = None) -> None:
        self.max_blocks, self.max_threads = max_blocks, max_threads
        self._library = ctypes.CDLL(str(library or build()))
        self._library.on_cpu_launch.argtypes = (c_char_p, c_uint, c_uint, POINTER(Call))
        self._library.on_cpu_launch.restype = c_int
        self._library.on_cpu_disturb.argtypes = (c_uint, c_uint, c_uint64)
        self._library.on_cpu_disturb.restype = None
        self._library.on_cpu_layout.restype = POINTER(c_uint64)

    def launch(self, name: str, blocks: int, threads: int, call: Call, stream: int = 0) -> None:
        own = Call.from_buffer_copy(call)
        own.operation = OPERATIONS.get(name, 255)
        blocks, threads = min(blocks, self.max_blocks), min(threads, self.max_threads)
        end = self._library.on_cpu_launch(name.encode(), blocks, threads, ctypes.byref(own))
        if end == 1:
            raise KernelTrappedError(name)
        if end != 0:
            raise ValueError(f"{name} with {blocks} blocks of {threads} threads can't be launched: {end}")

    def resident_blocks(self, name: str, threads: int) -> int:
        return self.max_blocks

    def disturb(self, per_mille: int, longest_us: int = 0, seed: int = 1) -> None:
        """Delays `per_mille` of 1,000 accesses to shared memory in this process."""
        self._library.on_cpu_disturb(per_mille, longest_us, seed)

    def layout(self, count: int) -> list[int]:
        return self._library.on_cpu_layout()[:count]


@functools.cache
def build(*flags: str, sources: Path = CUDA_SOURCES) -> Path:
    compiler = native_build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    includes = [f"-I{sources}", f"-I{EMULATION}"]
    command = [*compiler, *FLAGS, *WARNINGS, *flags, *includes, str(EMULATION / "cuda_on_cpu.cpp")]

    def make(target: Path) -> None:
        done = subprocess.run([*command, "-o", str(target), "-ldl"], capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 0, done.stderr

    files = [path for path in [*sources.iterdir(), *EMULATION.glob("*on_cpu*")] if path.is_file()]
    return compiled.kept("cuda_on_cpu.so", [*compiler, *FLAGS, *WARNINGS, *flags], files, make)
