"""Compiles, loads and launches the kernels of `csrc`. `Call`, the constants and the kernel names mirror `call.cuh`.

`PeerKernels.load` loads all kernels at once: CUDA forbids loading during a CUDA graph capture.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import io
import logging
import threading
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from device_communicators.base import build_cache, settings
from device_communicators.base.build_cache import CacheError

MAX_RANKS = 8
MAX_BLOCKS = 128
MAX_THREADS = 512
PART_PACKETS = 256
"""Packets that a block sends to each rank in one round (*epoch*). A packet has 8 data bytes."""
STAGE_BYTES = 32 << 10
"""Bytes of staging memory per block and round."""
REGION_ALIGNMENT = 256
PACKETS_OFFSET = 64 << 10
STAGES_OFFSET = PACKETS_OFFSET + 2 * MAX_BLOCKS * MAX_RANKS * PART_PACKETS * 16
REGION_BYTES = STAGES_OFFSET + 2 * MAX_BLOCKS * STAGE_BYTES
"""Bytes of GPU memory that each rank shares with its peers; enough for tensors of any size. The memory must be zero
before any rank's first launch.
"""


class Call(ctypes.Structure):
    """The argument of every kernel. Unused addresses are 0."""

    _fields_: ClassVar = [
        ("regions", c_uint64 * MAX_RANKS),
        *((name, c_uint64) for name in (
            "input", "output", "residual", "residual_out", "weight", "scale", "scale_out", "report", "abort", "numel",
            "deadline_ns")),
        *((name, c_uint32) for name in ("rank", "size", "operation", "rows", "hidden")),
        ("eps", c_float),
    ]  # fmt: skip


_SUMS = ("all_reduce_push", "all_reduce_pull", "all_reduce_two_shot", "reduce_scatter_push", "reduce_scatter_pull")
_NORMS = tuple(f"all_reduce_add_rms_norm{kind}" for kind in ("", "_static_fp8", "_token_fp8"))
_DTYPES = ("float32", "float16", "bfloat16")
KERNELS: tuple[str, ...] = (
    *(f"{what}_{dtype}" for what in _SUMS for dtype in _DTYPES),
    *("all_gather_push", "all_gather_pull"),
    *(f"{what}_{dtype}" for what in _NORMS for dtype in _DTYPES),
)
"""Kernels by their number in `Call.operation`. New names must be appended."""
OPERATIONS = {name: number for number, name in enumerate(KERNELS)}


class Launcher(Protocol):
    def launch(self, name: str, blocks: int, threads: int, call: Call, stream: int) -> None:
        """Launches the kernel `name` with a copy of `call`, its argument. The launcher's device must be current. CUDA
        graphs can capture the launch. Raises KernelError.
        """

    def resident_blocks(self, name: str, threads: int) -> int:
        """Returns the maximum number of blocks of a launch of the kernel `name`: all must run at the same time, because
        they wait for peers.

        Uses at most half the multiprocessors. Otherwise two launches could each get a part of the GPU and deadlock.
        """


class KernelError(RuntimeError):
    pass


@dataclass(frozen=True)
class KernelReport:
    reason: str
    """Reason why the kernel ended: "deadline" or "abort"."""
    peer: int
    """The rank in the group that the kernel waited for; 255 if it waited for its own blocks."""
    kernel: str
    block: int
    epoch: int


def read_report(word: int) -> KernelReport | None:
    if word == 0:
        return None
    operation = word >> 40 & 0xFF
    return KernelReport(
        reason={1: "deadline", 2: "abort"}.get(word >> 56, f"code {word >> 56}"),
        peer=word >> 48 & 0xFF,
        kernel=KERNELS[operation] if operation < len(KERNELS) else f"kernel {operation}",
        block=word >> 32 & 0xFF,
        epoch=word & 0xFFFFFFFF,
    )


THREADS = {"push": 256, "pull": 512, "two_shot": 512}
_BYTES = {"push": 8, "pull": 16, "two_shot": 16}


def grid(how: str, nbytes: int, size: int, limit: int) -> tuple[int, int]:
    """Returns the number of blocks (0: launch nothing) and of threads per block for the algorithm `how`. `nbytes`:
    message size. `size`: number of ranks. `limit`: the minimum `resident_blocks` of all ranks.
    """
    shards = size if how == "two_shot" else 1  # the threads of a block sum one shard of the bytes that it stages
    each = min(_BYTES[how] * THREADS[how] * shards, STAGE_BYTES)
    return min(-(-nbytes // each), limit, MAX_BLOCKS), THREADS[how]


def norm_grid(row_bytes: int, rows: int, limit: int) -> tuple[int, int]:
    """Returns the number of blocks and of threads per block for a fused norm. Returns 0 blocks if one row needs more
    than `limit` blocks. `limit`: as in `grid`.
    """
    members = -(-row_bytes // (8 * PART_PACKETS))
    if members == 0:
        return 0, THREADS["push"]
    return min(rows, min(limit, MAX_BLOCKS) // members) * members, THREADS["push"]


logger = logging.getLogger("parallel_state")

SOURCES = Path(__file__).with_name("csrc")
_UNIT = "kernels.cu"
_STANDARD = "c++17"
_INSTALL = "`pip install parallel-state[cuda]` installs cuda-core, cuda-bindings and NVRTC"


def source_files() -> tuple[Path, ...]:
    return tuple(sorted(path for path in SOURCES.iterdir() if path.suffix in (".cu", ".cuh")))


def nvrtc_version() -> tuple[int, int]:
    _, nvrtc = _packages()
    try:
        error, major, minor = nvrtc.nvrtcVersion()
    except Exception as problem:  # the error types of cuda-bindings' library finder are not public
        raise KernelError(f"NVRTC can't be loaded: {_first_line(problem)}; {_INSTALL}") from problem
    if int(error) != 0:
        raise KernelError(
            f"the version of the CUDA compiler NVRTC is unknown, because nvrtcVersion returned error {int(error)}"
        )
    return int(major), int(minor)


def program_options(core: Any, arch: str, sources: Path = SOURCES, **more: Any) -> Any:
    """Returns NVRTC options for `arch`, such as "sm_90". They make unmarked functions device functions. Otherwise NVRTC
    before 13.3 rejects device calls in a generic lambda. `core`: the module cuda.core. `more`: further options.
    """
    return core.ProgramOptions(
        name=_UNIT, arch=arch, std=_STANDARD, include_path=str(sources), device_as_default_execution_space=True, **more
    )


def compile_kernels(arch: str, sources: Path = SOURCES, log: io.StringIO | None = None) -> bytes:
    """Compiles the kernels to a cubin for `arch`, such as "sm_90", and returns it. `log` receives the assembler's
    report.
    """
    nvrtc_version()  # raises a clearer error if the library is missing
    core, _ = _packages()
    try:
        options = program_options(core, arch, sources, **({} if log is None else {"ptxas_options": ["-v"]}))
        program = core.Program((sources / _UNIT).read_text(), "c++", options)
        made = program.compile("cubin", logs=log)
    except Exception as problem:
        raise KernelError(f"NVRTC can't compile the kernels for {arch}: {_first_line(problem)}") from problem
    return bytes(made.code)


def cubin(arch: str) -> bytes:
    target = build_cache.cache_folder() / f"cuda_{arch}_{_digest(arch, nvrtc_version())}.cubin"
    try:
        flaw = _flaw_of(target)
        if flaw is not None and settings.BUILD.get() == "never":
            raise KernelError(
                f"the CUDA kernels are unavailable: {flaw}, and {settings.BUILD.name}=never forbids compiling them; "
                "unset it"
            )
        if flaw is not None:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            build_cache.check_owner(target.parent)
            with build_cache.locked(target.with_suffix(".lock")):
                if _flaw_of(target) is not None:
                    logger.info("compiling the CUDA kernels once for %s (%s=never disables)", arch, settings.BUILD.name)
                    build_cache.write_sealed(target, compile_kernels(arch))
        return build_cache.read_sealed(target)
    except (OSError, CacheError) as problem:
        raise KernelError(
            f"the folder for compiled CUDA kernels can't be used: {build_cache.about_cache(problem)}"
        ) from problem


def _flaw_of(target: Path) -> str | None:
    build_cache.check_owner(target.parent)
    return build_cache.flaw_of(target) if target.exists() else "they aren't compiled"


def _digest(arch: str, version: tuple[int, int]) -> str:
    content = hashlib.sha256(f"{arch} {version} {_STANDARD}".encode())
    for path in source_files():
        content.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return content.hexdigest()[:16]


def _packages() -> tuple[Any, Any]:
    try:
        from cuda import core
        from cuda.bindings import nvrtc
    except ImportError as problem:
        raise KernelError(
            f"a Python package for CUDA can't be imported: {_first_line(problem)}; {_INSTALL}"
        ) from problem
    return core, nvrtc


def _first_line(problem: BaseException) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()] or [type(problem).__name__]
    return next((line for line in lines if "error" in line and ":" in line), lines[0])


_LIBRARY = "libcuda.so.1"
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuFuncGetAttribute": (POINTER(c_int), c_int, c_void_p),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (POINTER(c_int), c_void_p, c_int, c_size_t),
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
}
_PACKAGES = "parallel-state[cuda12] for CUDA 12 (`pip install 'cuda-bindings<13' nvidia-cuda-nvrtc-cu12`)"
_MULTIPROCESSORS, _CAPABILITY_MAJOR, _CAPABILITY_MINOR = 16, 75, 76  # CUdevice_attribute
_REGISTERS = 4  # CUfunction_attribute


class LaunchConfig(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, c_uint) for name in (
            "blocks", "blocks_y", "blocks_z", "threads", "threads_y", "threads_z", "shared_bytes")),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("attribute_count", c_uint),
    ]  # fmt: skip


class _Prepared(threading.local):
    """A thread's buffers for launches. Each thread needs its own, because launches release the GIL.

    The constructor also sets the CUDA context of a thread that has none. torch.cuda.set_device doesn't do this for the
    current device (pytorch #152667, triton #3729).
    """

    def __init__(self, driver: _Driver, context: c_void_p) -> None:
        if not driver.get("cuCtxGetCurrent", c_void_p).value:
            driver.call("cuCtxSetCurrent", context)
        self.config = LaunchConfig(1, 1, 1, 1, 1, 1)
        self.argument = (c_void_p * 1)()
        self.pointers = (ctypes.addressof(self.config), ctypes.addressof(self.argument))


class PeerKernels:
    """The loaded kernels of one device. Kernels are never unloaded, because CUDA graphs can still use them."""

    def __init__(self, driver: _Driver, device: int) -> None:
        self._driver = driver
        self._functions: dict[str, tuple[c_void_p, int]] = {}
        self._resident: dict[tuple[str, int], int] = {}
        major, minor = (driver.attribute(device, which) for which in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR))
        self.arch = f"sm_{major}{minor}"
        self._multiprocessors = driver.attribute(device, _MULTIPROCESSORS)
        image = cubin(self.arch)
        self._context = driver.get("cuDevicePrimaryCtxRetain", c_void_p, device)
        self._prepared = _Prepared(driver, self._context)
        with self._current():
            module = driver.get("cuModuleLoadData", c_void_p, image)
            for name in KERNELS:
                function = driver.get("cuModuleGetFunction", c_void_p, module, name.encode())
                driver.get("cuFuncGetAttribute", c_int, _REGISTERS, function)  # forces lazy loading
                self._functions[name] = (function, OPERATIONS[name])
                self.resident_blocks(name, MAX_THREADS)

    @staticmethod
    @functools.cache
    def load(device: int) -> PeerKernels:
        driver = _load_driver()
        nvrtc = nvrtc_version()
        if nvrtc[0] > driver.version[0]:
            raise KernelError(
                f"the CUDA driver is for CUDA {driver.version[0]}.{driver.version[1]}, so it can't load kernels that "
                f"NVRTC {nvrtc[0]}.{nvrtc[1]} compiles; update the driver, or install packages for its version: "
                f"{_PACKAGES}"
            )
        return PeerKernels(driver, device)

    def launch(self, name: str, blocks: int, threads: int, call: Call, stream: int) -> None:
        function, call.operation = self._functions[name]
        prepared = self._prepared
        config = prepared.config
        config.blocks, config.threads, config.stream = blocks, threads, stream
        prepared.argument[0] = ctypes.addressof(call)
        where, arguments = prepared.pointers
        error = self._driver.cuLaunchKernelEx(where, function, arguments, None)
        if error:
            raise KernelError(f"{name} can't be launched: {self._driver.name_of(error)}")

    def resident_blocks(self, name: str, threads: int) -> int:
        known = self._resident.get((name, threads))
        if known is None:
            with self._current():
                each = self._driver.get(
                    "cuOccupancyMaxActiveBlocksPerMultiprocessor", c_int, self._functions[name][0], threads, 0
                )
            known = self._resident[name, threads] = min(each.value * self._multiprocessors, self._multiprocessors // 2)
        return known

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        self._driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._driver.get("cuCtxPopCurrent_v2", c_void_p)


class _Driver:
    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        for name, arguments in _FUNCTIONS.items():
            getattr(library, name).argtypes = arguments
        self._library = library
        self.cuLaunchKernelEx = library.cuLaunchKernelEx
        self.call("cuInit", 0)
        version = self.get("cuDriverGetVersion", c_int).value
        self.version = (version // 1000, version % 1000 // 10)

    def call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._library, name)(*arguments)
        if error:
            raise KernelError(f"CUDA's function {name} failed: {self.name_of(error)}")

    def get(self, name: str, kind: type[Any], *arguments: Any) -> Any:
        result = kind()
        self.call(name, byref(result), *arguments)
        return result

    def attribute(self, device: int, which: int) -> int:
        return int(self.get("cuDeviceGetAttribute", c_int, which, self.get("cuDeviceGet", c_int, device)).value)

    def name_of(self, error: int) -> str:
        text = c_char_p()
        if self._library.cuGetErrorName(error, byref(text)) != 0 or not text.value:
            return f"error {error}"
        return text.value.decode()


@functools.cache
def _load_driver(path: str = _LIBRARY) -> _Driver:
    try:
        return _Driver(path)
    except (OSError, AttributeError) as problem:
        raise KernelError(
            f"the kernels can't be loaded, because the CUDA driver is missing or too old: {problem}"
        ) from problem
