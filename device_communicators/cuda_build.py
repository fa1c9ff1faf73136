"""How `csrc/cuda` is compiled: NVRTC through `cuda.core`, to a cubin for one architecture, kept in the user's cache.

Needs no GPU, no driver and no nvcc; needs the packages of the extra `cuda`. NVRTC must not be of a newer major version
than the driver, which then can't load what it makes: `cuda_kernels` looks at that. Loading is there as well.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from device_communicators import native, settings
from device_communicators.cuda_call import KernelError
from device_communicators.native_build import BuildError

logger = logging.getLogger("parallel_state")

SOURCES = Path(__file__).parent / "csrc" / "cuda"
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
    target = native.cache_folder() / f"cuda_{arch}_{_digest(arch, nvrtc_version())}.cubin"
    try:
        native.check_private(target)
        if target.exists():
            return target.read_bytes()
        if settings.BUILD.get() == "never":
            raise KernelError(f"the kernels aren't compiled, and {settings.BUILD.name} is never")
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        native.check_private(target)
        with native.locked(target.with_suffix(".lock")):
            if not target.exists():
                logger.info("compiling the CUDA kernels, once for %s (%s=never forbids)", arch, settings.BUILD.name)
                _write_whole(target, compile_kernels(arch))
            return target.read_bytes()
    except (OSError, BuildError) as problem:
        raise KernelError(f"the kernels' cache can't be used: {problem}") from problem


def _digest(arch: str, version: tuple[int, int]) -> str:
    content = hashlib.sha256(f"{arch} {version}".encode())
    for path in [Path(__file__), *source_files()]:  # this file has the options
        content.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return content.hexdigest()[:16]


def _write_whole(target: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


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
