"""Compiles the C++ sources, at run time and in setup.py.

Each library links a few sources with the *base*, an object file of all other sources.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

SOURCES = Path(__file__).parent / "csrc"
CONTROL = Path(__file__).parents[1] / "control" / "csrc"
FOLDERS = (SOURCES, CONTROL)
_OF_TORCH = ("bindings.cpp", "direct.cpp", "ops.cpp")
_FLAGS = ("-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off", "-pthread")
"""Floating-point contraction is off: results would differ on processors without fused multiply-add."""
_TOGETHER = (
    ("-O3", "add_rms_norm reduce"),
    ("-O1", "agreement core end_listeners guest hmac record"),
    ("-O1", "driver driver_api frame machine store"),
    ("-O3", "all_reduce arena c_api chained_all_reduce collectives forks handle host_group interrupt liveness"),
    ("-O3", "connections hosts_group queue queue_api rings"),
    ("-O3", "messages messages_api pack progress streams"),
    ("-O3", "loans plain_tree shared_inputs transfers transfers_api unpack wait windows"),
    ("-O3", "hosts_blocks hosts_reductions"),
)
"""Each row is one unit: optimization level and files, the slowest unit first. Names in unnamed namespaces must differ
within a row.
"""
WITH_TORCH = ("--param", "ggc-min-heapsize=1000000")
"""Flags of a unit with torch's headers: GCC collects garbage only at 1 GB, because each collection is slow."""
BUILD_TIMEOUT_S = 600
BUILD_FOLDER = ".build-"
_running: set[subprocess.Popen[str]] = set()
_stopping = threading.Event()


class BuildError(Exception):
    """A compile failed."""


class BuildStoppedError(BuildError):
    """A signal ended the compiler, for example Ctrl-C."""


class Unit(NamedTuple):
    """C++ sources that are compiled together, so that headers are read only once."""

    sources: tuple[Path, ...]
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    what: str
    packaged_name: str
    """File name in a wheel. Object files end with .o."""
    units: tuple[Unit, ...]
    flags: tuple[str, ...] = ()
    link_flags: tuple[str, ...] = ()
    for_torch: str = ""
    """The required build of torch; empty for any."""
    for_minor: str = ""
    """For a file in a wheel: the required minor version of torch, and its headers' digest."""
    include_flags: tuple[str, ...] = ()
    """Flags that `digest` ignores, so that different environments share compiled files."""
    folders: tuple[Path, ...] = FOLDERS
    """Folders of headers that are included by relative path."""
    base: Recipe | None = None
    usual_cpu_s: float = 0.0
    """Approximate CPU time of the compile on GCC 12, without `base`."""

    @property
    def sources(self) -> tuple[Path, ...]:
        of_base = () if self.base is None else self.base.sources
        return (*of_base, *(source for unit in self.units for source in unit.sources))

    @property
    def suffix(self) -> str:
        return Path(self.packaged_name).suffix

    def digest(self) -> str:
        facts = [platform.machine(), self.for_torch, *_FLAGS, *self.flags]
        for unit in self.units:
            facts += [*unit.flags, *(source.name for source in unit.sources)]
        content = hashlib.sha256("\0".join(facts).encode())
        headers = (path for path in _inputs(self.folders) if path.suffix != ".cpp")
        content.update(_digest_of((*self.sources, *headers)).encode())
        return content.hexdigest()[:16]

    def packaged_digest(self) -> str:
        return replace(self, for_torch=self.for_minor).digest()


def objects_recipe() -> Recipe:
    files = {path.stem: path for path in _cpp_files() if path.name not in _OF_TORCH}
    units = [Unit(tuple(files.pop(name) for name in names.split()), (level,)) for level, names in _TOGETHER]
    units += [Unit((path,)) for path in files.values()]
    flags = ("-std=c++17", "-D_GLIBCXX_USE_CXX11_ABI=1")
    return Recipe("the objects without torch", "_native_objects.o", tuple(units), flags, usual_cpu_s=90.0)


def plain_recipe() -> Recipe:
    return Recipe("the shared-memory collectives", "_native.so", (), base=objects_recipe())


def full_recipe() -> Recipe:
    """Returns the recipe of the library with torch ops. Raises ImportError if torch is missing."""
    sources = tuple(SOURCES / name for name in ("ops.cpp", "direct.cpp", "bindings.cpp"))
    flags = torch_flags(sources)
    flags["link_flags"] += ("-Wl,-z,defs",)  # fails with a base that needs another C++ library
    return Recipe(
        "the shared-memory collectives and ops",
        f"_native_torch{torch_minor()}.so",
        (Unit(sources, ("-O2", *WITH_TORCH)),),
        base=objects_recipe(),
        usual_cpu_s=18.0,
        **flags,
    )


def torch_minor() -> str:
    """Returns torch's minor version, such as 2.15. For a build that isn't a release, returns the full version: its ABI
    can differ.
    """
    import torch

    release = re.fullmatch(r"(\d+\.\d+)\.\d+(\+.*)?", torch.__version__)
    return torch.__version__.replace("+", "_") if release is None else release[1]


def torch_flags(sources: Sequence[Path], libraries: Sequence[str] = ("torch_cpu", "c10")) -> dict[str, Any]:
    """Returns arguments of `Recipe` for `sources` that include torch's headers, linked with torch's `libraries`. Raises
    BuildError if torch uses the old C++ ABI.
    """
    import torch

    if not torch.compiled_with_cxx11_abi():
        raise BuildError(
            f"torch {torch.__version__} was built with _GLIBCXX_USE_CXX11_ABI=0, for which this library can't be "
            "compiled; install a torch that was built with _GLIBCXX_USE_CXX11_ABI=1"
        )
    root = Path(torch.__file__).parent
    include = root / "include"
    headers = _headers_digest(include, sources)
    return {
        "flags": ("-std=c++20", "-D_GLIBCXX_USE_CXX11_ABI=1"),
        "link_flags": (f"-L{root / 'lib'}", *(f"-l{name}" for name in libraries)),
        "for_torch": f"{torch.__version__} {torch.version.git_version} {headers}",
        "for_minor": f"{torch_minor()} {headers}",
        "include_flags": (
            "-isystem", str(include),
            "-isystem", str(include / "torch" / "csrc" / "api" / "include"),
        ),
    }  # fmt: skip


def _headers_digest(include: Path, sources: Sequence[Path]) -> str:
    text = "\n".join(source.read_text() for source in sources)
    named = re.findall(r"^#include <(.+)>", text, re.MULTILINE)
    content = hashlib.sha256()
    for name in sorted({*named, "torch/headeronly/macros/cmake_macros.h", "ATen/Config.h"}):
        path = include / name
        if path.is_file():  # else another library's, or version's
            content.update(name.encode() + b"\0" + path.read_bytes())
    return content.hexdigest()[:16]


def _cpp_files() -> tuple[Path, ...]:
    return tuple(path for folder in FOLDERS for path in sorted(folder.iterdir()) if path.suffix == ".cpp")


def sources_digest() -> str:
    return _digest_of(_inputs(FOLDERS))


def _inputs(folders: Sequence[Path]) -> list[Path]:
    return [path for folder in folders for path in folder.iterdir() if path.suffix in (".cpp", ".h", ".inc")]


def _digest_of(files: Iterable[Path]) -> str:
    content = hashlib.sha256()
    for path in sorted(files):
        content.update(path.name.encode() + b"\0" + path.read_bytes())
    return content.hexdigest()[:16]


def flaw_of_packaged(folder: Path, recipe: Recipe) -> str | None:
    """Checks the wheel's compiled file for `recipe` in `folder`. Returns None if it is usable, "" if there is none,
    else why it is unusable.
    """
    packaged = folder / recipe.packaged_name
    try:
        digest, content = packaged.with_suffix(".digest").read_text().split()
        if hashlib.sha256(packaged.read_bytes()).hexdigest() != content:
            return f"the wheel's {packaged.name} is damaged: its checksum is wrong"
    except (OSError, ValueError):
        kind, of_torch, _ = packaged.name.partition("torch")
        others = [path.name for path in sorted(folder.glob(f"{kind}torch*.so"))] if of_torch else []
        return f"the wheel has {', '.join(others)}, but no {packaged.name}" if others else ""
    return None if digest == recipe.packaged_digest() else f"the wheel's {packaged.name} has other sources or headers"


def package(recipe: Recipe, folder: Path, compiler: Sequence[str], base: Callable[[], Path] | None = None) -> Path:
    target = folder / recipe.packaged_name
    if flaw_of_packaged(folder, recipe) is not None:
        compile_library(recipe, target, compiler, base=base)
        content = hashlib.sha256(target.read_bytes()).hexdigest()
        target.with_suffix(".digest").write_text(f"{recipe.packaged_digest()} {content}\n")
    return target


def usable_cores() -> set[int]:
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


_CORES = threading.BoundedSemaphore(len(usable_cores()))


def find_compiler() -> tuple[str, ...] | None:
    if given := shlex.split(os.environ.get("CXX", "")):
        return tuple(given)
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    return None if found is None else (found,)


def compile_library(
    recipe: Recipe,
    target: Path,
    compiler: Sequence[str],
    seal: Callable[[bytes], bytes] | None = None,
    base: Callable[[], Path] | None = None,
) -> None:
    """Compiles `recipe` and writes the library to `target` atomically, writable only by its owner. `compiler`: command.
    `seal` converts the library's bytes before they are written. `base` returns the path of the compiled `recipe.base`;
    None: also compiles it.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.stem}{BUILD_FOLDER}") as folder:
        objects = _compile_units(recipe, Path(folder), compiler)
        if recipe.base is not None:
            objects += _compile_units(recipe.base, Path(folder), compiler) if base is None else [base()]
        made = Path(folder) / f"library{recipe.suffix}"
        kind = ("-r", "-nostdlib") if recipe.suffix == ".o" else ("-shared", "-pthread")
        _run([*compiler, *kind, "-o", str(made), *map(str, objects), *recipe.link_flags])
        if seal is not None:
            # Loaders ignore the seal. Rewrites the whole file: a linker's holes can't be filled on a full file system.
            made.write_bytes(seal(made.read_bytes()))
        made.chmod(0o755)  # even with a umask of 002
        made.rename(target)


def _compile_units(recipe: Recipe, folder: Path, compiler: Sequence[str]) -> list[Path]:
    objects = [folder / f"{unit.sources[-1].stem}.o" for unit in recipe.units]
    commands = []
    for unit, made in zip(recipe.units, objects, strict=True):
        *before, last = map(str, unit.sources)
        included = [word for source in before for word in ("-include", source)]
        flags = [*_FLAGS, *recipe.flags, *unit.flags, *recipe.include_flags]
        commands.append([*compiler, *flags, *included, "-c", last, "-o", str(made)])

    def run(command: list[str]) -> None:
        with _CORES:
            _run(command)

    with threads_that_compile(max(1, len(commands))) as workers:
        list(workers.map(run, commands))
    return objects


def _run(command: list[str]) -> None:
    try:
        # In a process group, because the compiler's child processes would outlive it.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            encoding="utf-8", errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise BuildError(f"the C++ compiler {command[0]} can't be run: {error}") from error
    with process:
        _running.add(process)
        try:
            if _stopping.is_set():
                _kill(process)
            _, wrong = process.communicate(timeout=BUILD_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            _kill(process)
            raise BuildError(f"the C++ compiler {command[0]} took longer than {BUILD_TIMEOUT_S} s") from error
        except BaseException:
            _kill(process)
            raise
        finally:
            _running.discard(process)
    if process.returncode < 0:
        raise BuildStoppedError(f"the C++ compiler {command[0]} was stopped by signal {-process.returncode}")
    if process.returncode != 0:
        lines = wrong.strip().splitlines()
        shown = next((line for line in lines if "error" in line), lines[0] if lines else str(process.returncode))
        raise BuildError(f"the C++ compiler {command[0]} failed: {shown}")


@contextlib.contextmanager
def threads_that_compile(number: int) -> Iterator[ThreadPoolExecutor]:
    """Yields `number` threads for compiles. If the with-block raises KeyboardInterrupt or SystemExit, kills all
    compilers of this process, and starts no others.
    """
    interrupted = False
    try:
        with ThreadPoolExecutor(number) as workers:
            try:
                yield workers
            except Exception:
                raise
            except BaseException:
                interrupted = True
                _stopping.set()
                for process in list(_running):
                    _kill(process)
                raise
    finally:
        if interrupted:
            _stopping.clear()


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
