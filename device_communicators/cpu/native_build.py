"""The build of the C++ here and in `control/`: which files and flags, in which two builds. Used by `native`, setup.py.

Needs nothing of this package, so that setup.py can load it by its path. No `-march=native`: the kernels choose their
instruction set at run time, and what is built here may run elsewhere.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent / "csrc"
CONTROL = Path(__file__).parents[1] / "control" / "csrc"
FOLDERS = (SOURCES, CONTROL)
_OF_TORCH = ("bindings.cpp", "direct.cpp", "ops.cpp")
"""In the full build only."""
_FLAGS = ("-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off", "-pthread")
"""Without contraction: an instruction set that has fused multiply-add would round otherwise than one that hasn't."""
BUILD_TIMEOUT_S = 600
BUILD_FOLDER = ".build-"
"""In the names of folders in which something is compiled."""


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
    """The build of torch that it belongs to, wherever that is installed; empty: any."""
    include_flags: tuple[str, ...] = ()
    """Folders of headers, which tell no builds apart: environments with one torch share what is compiled."""
    folders: tuple[Path, ...] = FOLDERS
    """The folders of the sources and their own headers."""

    def digest(self) -> str:
        """Tells builds apart: by sources, flags, machine and torch."""
        facts = [platform.machine(), self.for_torch, *_FLAGS, *self.flags]
        content = hashlib.sha256("\0".join(facts).encode())
        content.update(sources_digest(self.folders).encode())
        return content.hexdigest()[:16]


def plain_recipe() -> Recipe:
    return Recipe(
        "the shared-memory collectives",
        "_native.so",
        tuple(path for path in _cpp_files() if path.name not in _OF_TORCH),
        ("-std=c++17",),
    )


def full_recipe() -> Recipe:
    """Returns the build for the installed torch; ImportError without one."""
    import torch

    return Recipe(
        "the shared-memory collectives and ops",
        f"_native_torch{torch.__version__.replace('+', '_')}.so",
        _cpp_files(),
        **torch_flags(_cpp_files()),
    )


def torch_flags(sources: Sequence[Path], libraries: Sequence[str] = ("torch_cpu", "c10")) -> dict[str, Any]:
    """Returns what a `Recipe` of sources that include torch's headers needs to be compiled for the installed torch."""
    import torch

    root = Path(torch.__file__).parent
    include = root / "include"
    return {
        "flags": ("-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"),
        "link_flags": (f"-L{root / 'lib'}", *(f"-l{name}" for name in libraries)),
        "for_torch": f"{torch.__version__} {torch.version.git_version} {_headers_digest(include, sources)}",
        "include_flags": (
            "-isystem", str(include),
            "-isystem", str(include / "torch" / "csrc" / "api" / "include"),
        ),
    }  # fmt: skip


def _headers_digest(include: Path, sources: Sequence[Path]) -> str:
    """Digests torch's headers that the sources include by name, and those that its build wrote.

    Tells builds of one version apart that somebody made himself.
    """
    text = "\n".join(source.read_text() for source in sources)
    named = re.findall(r"^#include <(.+)>", text, re.MULTILINE)
    content = hashlib.sha256()
    for name in sorted(
        {*named, "torch/headeronly/macros/cmake_macros.h", "torch/headeronly/version.h", "ATen/Config.h"}
    ):
        path = include / name
        if path.is_file():  # else the C++ library's, or another version of torch's
            content.update(name.encode() + b"\0" + path.read_bytes())
    return content.hexdigest()[:16]


def _cpp_files() -> tuple[Path, ...]:
    return tuple(path for folder in FOLDERS for path in sorted(folder.iterdir()) if path.suffix == ".cpp")


def sources_digest(folders: Sequence[Path] = FOLDERS) -> str:
    content = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.iterdir()):
        if path.suffix in (".cpp", ".h", ".inc"):
            content.update(path.name.encode() + b"\0" + path.read_bytes())
    return content.hexdigest()[:16]


def is_current(packaged: Path) -> bool:
    """Returns True if a library that lies beside the sources was made of them: it may be older than an edit."""
    stamp = packaged.with_suffix(".digest")
    return stamp.exists() and stamp.read_text().strip() == sources_digest()


def usable_cores() -> set[int]:
    """Returns the cores that this process may run on: all of them where the system doesn't say, as on macOS."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def find_compiler() -> tuple[str, ...] | None:
    """Returns the compiler's command: $CXX, split as a shell would (`ccache g++`), or the first that is installed."""
    if given := shlex.split(os.environ.get("CXX", "")):
        return tuple(given)
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    return None if found is None else (found,)


def compile_library(
    recipe: Recipe, target: Path, compiler: Sequence[str], seal: Callable[[bytes], bytes] | None = None
) -> None:
    """Makes `target`, whole or not at all, writable by its owner only. Raises BuildError.

    `seal` is called with the library, and gives what is written.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.stem}{BUILD_FOLDER}") as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in recipe.sources]
        commands = [
            [*compiler, *_FLAGS, *recipe.flags, *recipe.include_flags, "-c", str(source), "-o", str(made)]
            for source, made in zip(recipe.sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(len(usable_cores())) as workers:
            list(workers.map(_run, commands))
        made = Path(folder) / "library.so"
        _run([*compiler, "-shared", "-pthread", "-o", str(made), *map(str, objects), *recipe.link_flags])
        if seal is not None:
            # A seal lies behind the last section, where no loader looks. Written anew as a whole: what a linker left
            # out as holes would be missed when the library is loaded from a file system that is full by then.
            made.write_bytes(seal(made.read_bytes()))
        made.chmod(0o755)  # by a umask of 002 a whole group could write to it
        made.rename(target)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=BUILD_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{command[0]} can't be run: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        wrong = next((line for line in lines if "error" in line), lines[0] if lines else str(done.returncode))
        raise BuildError(f"{command[0]} failed: {wrong}")
