"""The compiled part: `csrc/` to a shared library, once per machine, and its functions.

The library knows neither torch nor Python, so one build serves every version of both. It is compiled at the first use
into the user's cache, under a lock; where there is no compiler, or PARALLEL_STATE_BUILD says never, `load` gives the
reason and what needs the library stays out of the routes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

from device_communicators import settings

logger = logging.getLogger("parallel_state")

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-shared", "-fno-math-errno")
_VERSION = 1
_BUILD_TIMEOUT_S = 300
_FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "ps_version": (c_int, ()),
    "ps_instruction_set": (c_char_p, ()),
    "ps_segment_bytes": (c_size_t, (c_int,)),
    "ps_group_new": (c_void_p, (c_void_p, c_int, c_int, POINTER(c_int64), c_int64, c_int)),
    "ps_group_delete": (None, (c_void_p,)),
    "ps_group_failure": (None, (c_void_p, POINTER(c_int64))),
    "ps_barrier": (c_int, (c_void_p, c_double)),
    "ps_all_reduce": (c_int, (c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, c_double)),
    "ps_reduce_scatter": (c_int, (c_void_p, c_void_p, c_void_p, c_size_t, c_size_t, c_int, c_int, c_double)),
    "ps_all_gather": (c_int, (c_void_p, c_void_p, c_void_p, c_size_t, c_size_t, c_double)),
    "ps_gatherv": (c_int, (c_void_p, POINTER(c_void_p), POINTER(c_size_t), c_void_p, c_double)),
    "ps_broadcast": (c_int, (c_void_p, c_void_p, c_size_t, c_int, c_double)),
    "ps_scatter": (c_int, (c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_double)),
    "ps_all_to_all": (c_int, (c_void_p, c_void_p, c_void_p, POINTER(c_size_t), POINTER(c_size_t), c_double)),
}


class NativeUnavailableError(Exception):
    """The library can't be had; the text says why, for `explain()`. Never leaves this package."""


def load() -> ctypes.CDLL:
    """The library with its functions' types; compiles it where that hasn't been done. Raises NativeUnavailableError."""
    found = _load()
    if isinstance(found, str):
        raise NativeUnavailableError(found)
    return found


@functools.cache
def _load() -> ctypes.CDLL | str:
    try:
        library = ctypes.CDLL(str(_built()))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except NativeUnavailableError as error:
        return str(error)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        return f"the compiled library can't be made or loaded: {error}"
    if library.ps_version() != _VERSION:
        return f"the compiled library has version {library.ps_version()}, not {_VERSION}; clear {_cache()}"
    return library


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "parallel_state"


def _built() -> Path:
    sources = sorted(path for path in _SOURCES.iterdir() if path.suffix in (".cpp", ".h", ".inc"))
    content = hashlib.sha256(platform.machine().encode() + " ".join(_FLAGS).encode())
    for path in sources:
        content.update(path.name.encode() + path.read_bytes())
    target = _cache() / f"{content.hexdigest()[:16]}.so"
    if target.exists():
        return target
    if settings.BUILD.get() == "never":
        raise NativeUnavailableError(f"it isn't compiled, and {settings.BUILD.name} is never")
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NativeUnavailableError("there is no C++ compiler (c++, g++, clang++ or $CXX) to build it with")
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # what lies there is loaded as code
    with _locked(target.with_suffix(".lock")):
        if not target.exists():
            _compile(compiler, [path for path in sources if path.suffix == ".cpp"], target)
    return target


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, sources: list[Path], target: Path) -> None:
    logger.warning(
        "compiling the shared-memory collectives, once for this machine (PARALLEL_STATE_BUILD=never forbids)"
    )
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "library.so"
        done = subprocess.run(
            [compiler, *_FLAGS, "-o", str(made), *map(str, sources)],
            capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S,
        )  # fmt: skip
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            raise NativeUnavailableError(f"{compiler} failed: {lines[0] if lines else done.returncode}")
        made.rename(target)  # whole or not at all
