"""The kernels of `csrc` on a GPU: loaded once for a device, and launched at a low cost for the host.

The driver is called through ctypes: one call with everything prepared, a few microseconds less than any wrapper that
looks at each argument. All kernels are loaded and resolved in `load`, as nothing may be loaded while a graph is
captured, and as a load may wait for kernels that run, which may wait for this rank. How kernels are compiled is
`cuda.build`; what they are told is `cuda.driver`. Not run on a GPU: the tests give it a libcuda of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any, ClassVar

from device_communicators.cuda import build as cuda_build
from device_communicators.cuda.driver import KERNELS, MAX_THREADS, OPERATIONS, Call, KernelError

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
_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_: ClassVar = [("id", c_int), ("padding", c_int), ("value", c_int * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_: ClassVar = [
        ("blocks", c_uint),
        ("blocks_y", c_uint),
        ("blocks_z", c_uint),
        ("threads", c_uint),
        ("threads_y", c_uint),
        ("threads_z", c_uint),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(LaunchAttribute)),
        ("attribute_count", c_uint),
    ]


class _Prepared(threading.local):
    """What a launch fills in and passes on: a thread's own, as the call into the driver lets other threads run.

    A thread that made no CUDA call yet has device 0 and no context, in which no kernel can be launched; neither
    torch.cuda.device nor set_device makes one for the device that is the current one already (pytorch #152667, triton
    #3729; autograd's threads are such). Made for each thread at its first launch, so a launch asks no more.
    """

    def __init__(self, driver: _Driver, context: c_void_p, start_early: bool) -> None:
        if not driver.get("cuCtxGetCurrent", c_void_p).value:
            driver.call("cuCtxSetCurrent", context)
        self.config = LaunchConfig(1, 1, 1, 1, 1, 1)
        self.argument = (c_void_p * 1)()
        self.pointers = (ctypes.addressof(self.config), ctypes.addressof(self.argument))
        if start_early:
            self.attribute = LaunchAttribute(_STREAM_SERIALIZATION)
            self.attribute.value[0] = 1
            self.config.attributes = ctypes.pointer(self.attribute)
            self.config.attribute_count = 1


class PeerKernels:
    """The loaded kernels of one device: a `Launcher`. Never unloaded, as a graph may hold them."""

    def __init__(self, driver: _Driver, device: int, start_early: bool = False) -> None:
        """`start_early`: a launch may begin while the kernel before it ends (programmatic dependent launch).

        `load` doesn't ask for it: it gains nothing before something ahead of a kernel lets it start, and what it does
        within captures is to be seen on a GPU first. Raises KernelError.
        """
        self._driver = driver
        self._functions: dict[str, tuple[c_void_p, int]] = {}
        self._resident: dict[tuple[str, int], int] = {}
        major, minor = (driver.attribute(device, which) for which in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR))
        self.arch = f"sm_{major}{minor}"
        if start_early and major < 9:
            raise KernelError(f"a kernel can start early from sm_90 on, but the device is {self.arch}")
        self._multiprocessors = driver.attribute(device, _MULTIPROCESSORS)
        image = cuda_build.cubin(self.arch)
        self._context = driver.get("cuDevicePrimaryCtxRetain", c_void_p, device)
        self._prepared = _Prepared(driver, self._context, start_early)
        with self._current():
            module = driver.get("cuModuleLoadData", c_void_p, image)
            for name in KERNELS:
                function = driver.get("cuModuleGetFunction", c_void_p, module, name.encode())
                driver.get("cuFuncGetAttribute", c_int, _REGISTERS, function)  # loads it, if loading is lazy
                self._functions[name] = (function, OPERATIONS[name])
                self.resident_blocks(name, MAX_THREADS)

    @staticmethod
    @functools.cache
    def load(device: int) -> PeerKernels:
        """Those of a device, by torch's number, compiled at the first use on this machine. Raises KernelError."""
        driver = _load_driver()
        nvrtc = cuda_build.nvrtc_version()
        if nvrtc[0] > driver.version[0]:
            raise KernelError(
                f"the driver is for CUDA {driver.version[0]}.{driver.version[1]}, which can't load what NVRTC "
                f"{nvrtc[0]}.{nvrtc[1]} makes; update the driver, or install what matches it: {_PACKAGES}"
            )
        return PeerKernels(driver, device)

    def launch(self, name: str, blocks: int, threads: int, call: Call, stream: int) -> None:
        """See Launcher. The current device must be this one's, which a stream of 0 wouldn't tell."""
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
        """See Launcher."""
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
        """Within: the device's context is this thread's."""
        self._driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._driver.get("cuCtxPopCurrent_v2", c_void_p)


class _Driver:
    """libcuda's functions; each failure raises KernelError."""

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
            raise KernelError(f"{name} failed: {self.name_of(error)}")

    def get(self, name: str, kind: type[Any], *arguments: Any) -> Any:
        """What a function gives through its first argument."""
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
        raise KernelError(f"no CUDA driver that these kernels can use: {problem}") from problem
