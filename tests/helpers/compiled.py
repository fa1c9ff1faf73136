"""Compiles test sources and caches the results by digest in the user's cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from device_communicators.c10d import creation
from device_communicators.cpu import native_build

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parallel_state_tests"
"""Computed at import, because some tests change the variable."""
_KEPT_S = 60 * 86_400


def c10d_module() -> Path:
    return Path(creation.load().__file__)


def kept(name: str, facts: Sequence[object], sources: Iterable[Path], make: Callable[[Path], object]) -> Path:
    content = hashlib.sha256(repr([str(fact) for fact in facts]).encode())
    for path in sorted(sources):
        content.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    folder = _folder()
    target = folder / f"{content.hexdigest()[:24]}-{name}"
    with open(folder / f"{target.name}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=folder) as work:
                make(Path(work) / name)
                (Path(work) / name).rename(target)
            _forget_old(folder)
    os.utime(target)
    return target


def plain_library(compiler: Sequence[str], more: Sequence[Path] = (), flags: Sequence[str] = ()) -> Path:
    """Compiles the library at -O0 with the sources `more`. `flags` apply to these only."""
    recipe = native_build.plain_recipe()
    command = [*compiler, *native_build._FLAGS, *native_build.objects_recipe().flags, "-O0"]

    def archive(made: Path) -> None:
        objects = [made.with_name(f"{source.stem}.o") for source in recipe.sources]
        pairs = zip(recipe.sources, objects, strict=True)
        with ThreadPoolExecutor(len(native_build.usable_cores())) as workers:
            list(workers.map(lambda pair: _run(*command, "-c", pair[0], "-o", pair[1]), pairs))
        _run("ar", "rcs", made, *objects)

    def link(made: Path) -> None:
        all_of_it = ("-Wl,--whole-archive", objects, "-Wl,--no-whole-archive")
        _run(*command, *flags, "-shared", *more, *all_of_it, "-o", made, *recipe.link_flags)

    objects = kept("plain.a", [*command, recipe.digest()], [], archive)
    return kept("plain.so", [*command, *flags, recipe.digest()], more, link)


def _run(*command: str | Path) -> None:
    subprocess.run([*map(str, command)], check=True, timeout=native_build.BUILD_TIMEOUT_S)


def _folder() -> Path:
    try:
        _CACHE.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(_CACHE, os.W_OK):
            return _CACHE
    except OSError:
        pass
    other = Path(tempfile.gettempdir()) / f"parallel_state_tests_{os.geteuid()}"
    other.mkdir(mode=0o700, exist_ok=True)
    return other


def _forget_old(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file() and path.stat().st_mtime < time.time() - _KEPT_S:
            path.unlink(missing_ok=True)
