"""How `csrc/` is compiled: which files, which flags, in which two builds. Used by `native` and by setup.py.

Needs nothing of this package, so that setup.py can load it by its path. No `-march=native`: the kernels choose their
instruction set at run time, and what is built here may run elsewhere.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_SOURCES = Path(__file__).parent / "csrc"
_BINDINGS = "bindings.cpp"
_FLAGS = ("-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off", "-pthread")
"""Without contraction: an instruction set that has fused multiply-add would round otherwise than one that hasn't."""
_BUILD_TIMEOUT_S = 600


class BuildError(Exception):
    """The library can't be compiled; the text says why."""


@dataclass(frozen=True)
class Recipe:
    """One build of the sources."""

    what: str
    packaged_name: str
    """Under which name a wheel brings it, beside this file."""
    sources: tuple[Path, ...]
    flags: tuple[str, ...] = ()
    link_flags: tuple[str, ...] = ()
    for_torch: str = ""
    """The version of torch that it belongs to; empty: any."""

    def digest(self) -> str:
        """Tells builds apart: by sources, flags, machine and torch."""
        facts = [platform.machine(), self.for_torch, *_FLAGS, *self.flags]
        content = hashlib.sha256("\0".join(facts).encode())
        content.update(sources_digest().encode())
        return content.hexdigest()[:16]


def plain_recipe() -> Recipe:
    return Recipe(
        "the shared-memory collectives",
        "_native.so",
        tuple(path for path in _cpp_files() if path.name != _BINDINGS),
        ("-std=c++17",),
    )


def full_recipe() -> Recipe:
    """The build for the installed torch; ImportError without one."""
    import torch

    root = Path(torch.__file__).parent
    include = root / "include"
    return Recipe(
        "the shared-memory collectives and ops",
        f"_native_torch{torch.__version__.replace('+', '_')}.so",
        _cpp_files(),
        (
            "-std=c++20",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            "-isystem", str(include),
            "-isystem", str(include / "torch" / "csrc" / "api" / "include"),
        ),
        (f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"),
        for_torch=f"{torch.__version__} {root}",
    )  # fmt: skip


def _cpp_files() -> tuple[Path, ...]:
    return tuple(sorted(path for path in _SOURCES.iterdir() if path.suffix == ".cpp"))


def sources_digest() -> str:
    content = hashlib.sha256()
    for path in sorted(_SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h", ".inc"):
            content.update(path.name.encode() + b"\0" + path.read_bytes())
    return content.hexdigest()[:16]


def is_current(packaged: Path) -> bool:
    """Whether a library that lies beside the sources was made of them: it may be older than an edit."""
    stamp = packaged.with_suffix(".digest")
    return stamp.exists() and stamp.read_text().strip() == sources_digest()


def find_compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def compile_library(recipe: Recipe, target: Path, compiler: str) -> None:
    """Makes `target`, whole or not at all. Raises BuildError."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in recipe.sources]
        commands = [
            [compiler, *_FLAGS, *recipe.flags, "-c", str(source), "-o", str(made)]
            for source, made in zip(recipe.sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as workers:
            list(workers.map(_run, commands))
        made = Path(folder) / "library.so"
        _run([compiler, "-shared", "-pthread", "-o", str(made), *map(str, objects), *recipe.link_flags])
        made.rename(target)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{command[0]} can't be run: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        wrong = next((line for line in lines if "error" in line), lines[0] if lines else str(done.returncode))
        raise BuildError(f"{command[0]} failed: {wrong}")
