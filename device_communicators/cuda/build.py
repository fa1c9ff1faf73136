"""How `peer/csrc` is compiled: NVRTC through `cuda.core`, to a cubin for one architecture, kept in the user's cache.

Needs no GPU, no driver and no nvcc; needs the packages of the extra `cuda`. NVRTC must not be of a newer major version
than the driver, which then can't load what it makes: `peer.kernels` looks at that. Loading is there as well.
"""

from __future__ import annotations

import hashlib
import io
import logging
from pathlib import Path
from typing import Any

from device_communicators import build_cache, settings
from device_communicators.build_cache import CacheError
from device_communicators.cuda.driver import KernelError

logger = logging.getLogger("parallel_state")

SOURCES = Path(__file__).parents[1] / "peer" / "csrc"
_UNIT = "kernels.cu"
_INSTALL = "`pip install parallel-state[cuda]` brings cuda-core, cuda-bindings and NVRTC"


def source_files() -> tuple[Path, ...]:
    return tuple(sorted(path for path in SOURCES.iterdir() if path.suffix in (".cu", ".cuh")))


def nvrtc_version() -> tuple[int, int]:
    """Of the NVRTC that would be used. Raises KernelError."""
    _, nvrtc = _packages()
    try:
        error, major, minor = nvrtc.nvrtcVersion()
    except Exception as problem:  # what the library's finder raises is not public
        raise KernelError(f"NVRTC can't be loaded: {_first_line(problem)}; {_INSTALL}") from problem
    if int(error) != 0:
        raise KernelError(f"NVRTC doesn't tell its version: error {int(error)}")
    return int(major), int(minor)


def compile_kernels(arch: str, sources: Path = SOURCES, log: io.StringIO | None = None) -> bytes:
    """The kernels for `arch` ("sm_90"), as a cubin. Raises KernelError.

    `log` takes what the assembler says of each kernel's registers and memory.
    """
    nvrtc_version()  # the clearer message where the library is missing
    core, _ = _packages()
    try:
        verbose: dict[str, Any] = {} if log is None else {"ptxas_options": ["-v"]}
        options = core.ProgramOptions(name=_UNIT, arch=arch, std="c++17", include_path=str(sources), **verbose)
        program = core.Program((sources / _UNIT).read_text(), "c++", options)
        made = program.compile("cubin", logs=log)
    except Exception as problem:
        raise KernelError(f"NVRTC can't compile the kernels for {arch}: {_first_line(problem)}") from problem
    return bytes(made.code)


def cubin(arch: str) -> bytes:
    """The kernels for `arch`, from the cache, or compiled by one of the processes that ask. Raises KernelError."""
    target = build_cache.cache_folder() / f"cuda_{arch}_{_digest(arch, nvrtc_version())}.cubin"
    try:
        flaw = _flaw_of(target)
        if flaw is not None and settings.BUILD.get() == "never":
            raise KernelError(f"the kernels can't be had: {flaw}, and {settings.BUILD.name} is never")
        if flaw is not None:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            build_cache.check_owner(target.parent)
            with build_cache.locked(target.with_suffix(".lock")):
                if _flaw_of(target) is not None:
                    logger.info("compiling the CUDA kernels, once for %s (%s=never forbids)", arch, settings.BUILD.name)
                    build_cache.write_sealed(target, compile_kernels(arch))
        return build_cache.read_sealed(target)
    except (OSError, CacheError) as problem:
        raise KernelError(f"the kernels' cache can't be used: {build_cache.about_cache(problem)}") from problem


def _flaw_of(target: Path) -> str | None:
    """Returns why the kernels must be compiled first; None where the cache has them whole."""
    build_cache.check_owner(target.parent)
    return build_cache.flaw_of(target) if target.exists() else "they aren't compiled"


def _digest(arch: str, version: tuple[int, int]) -> str:
    content = hashlib.sha256(f"{arch} {version}".encode())
    for path in [Path(__file__), *source_files()]:  # this file has the options
        content.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return content.hexdigest()[:16]


def _packages() -> tuple[Any, Any]:
    """cuda.core and the binding of NVRTC; the oldest tried is 0.7, as those before ask for a driver to compile."""
    try:
        from cuda import core
        from cuda.bindings import nvrtc
    except ImportError as problem:
        raise KernelError(f"{_first_line(problem)}; {_INSTALL}") from problem
    return core, nvrtc


def _first_line(problem: BaseException) -> str:
    """Of a compiler's output, that with the first error."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()] or [type(problem).__name__]
    return next((line for line in lines if "error" in line and ":" in line), lines[0])
