"""The process in which `peer_probe` tries peer access: started as a script, knows nothing but Python and libcuda.

What is tried between GPUs A and B, with peer access enabled: a kernel on A stores into B's memory, a kernel on A loads
from B's memory, and A's copy engine copies to B. The memory's owner puts in what is loaded and looks at what was
stored, through its own context: writes that land in a mirror of the memory that only A sees would read back right on A
(NCCL issue 2335), and there are drivers that report success and corrupt the data (open-gpu-kernel-modules issue 1257).

Arguments: one JSON object, `{"library": …, "uuids": [[16 bytes as hex], …], "pairs": [[0, 1], …]}`; devices come in the
order of CUDA_VISIBLE_DEVICES. Answers: a line "probe begin N" before pair N, and "probe {json}" after it.

The driver's functions are those of cuda.h 12.8; the kernel has been through ptxas 12.8 (sm_50 to sm_120) and 13.5 (from
sm_75). Not run on a GPU: the tests give it a libcuda of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from array import array
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

WORDS = 1 << 18
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid": (c_void_p, c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuCtxEnablePeerAccess": (c_void_p, c_uint),
    "cuCtxDisablePeerAccess": (c_void_p,),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuMemcpyPeerAsync": (c_uint64, c_void_p, c_uint64, c_void_p, c_size_t, c_void_p),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, POINTER(c_void_p), c_void_p),
}
_COPY_WORDS = b"""
.version 6.4
.target sm_50
.address_size 64
.visible .entry copy_words(.param .u64 to, .param .u64 from, .param .u32 words)
{
    .reg .pred %done;
    .reg .b32 %word, %end, %step, %size, %block, %thread, %value;
    .reg .b64 %to, %from, %at, %place;
    ld.param.u64 %to, [to];
    ld.param.u64 %from, [from];
    ld.param.u32 %end, [words];
    cvta.to.global.u64 %to, %to;
    cvta.to.global.u64 %from, %from;
    mov.u32 %size, %ntid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %word, %block, %size, %thread;
    mov.u32 %step, %nctaid.x;
    mul.lo.u32 %step, %step, %size;
next:
    setp.ge.u32 %done, %word, %end;
    @%done bra end;
    mul.wide.u32 %at, %word, 4;
    add.u64 %place, %from, %at;
    ld.volatile.global.u32 %value, [%place];
    add.u64 %place, %to, %at;
    st.volatile.global.u32 [%place], %value;
    add.u32 %word, %word, %step;
    bra next;
end:
    ret;
}
\0"""


class CudaError(Exception):
    """A function of the driver failed."""


class Cuda:
    """libcuda, whose functions raise."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        for name, arguments in _FUNCTIONS.items():
            getattr(self._library, name).argtypes = arguments

    def __call__(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = c_char_p()
            self._library.cuGetErrorName(code, byref(text))
            raise CudaError(f"{name}: {(text.value or b'error').decode()} ({code})")


class Device:
    """A GPU's primary context with a buffer of WORDS in it; close it."""

    def __init__(self, cuda: Cuda, index: int) -> None:
        self.number, self.context, self.buffer = c_int(), c_void_p(), c_uint64()
        self._cuda = cuda
        cuda("cuDeviceGet", byref(self.number), index)
        cuda("cuDevicePrimaryCtxRetain", byref(self.context), self.number)
        try:
            self.use()
            cuda("cuMemAlloc_v2", byref(self.buffer), 4 * WORDS)
        except CudaError:
            cuda("cuDevicePrimaryCtxRelease_v2", self.number)
            raise

    def use(self) -> None:
        self._cuda("cuCtxSetCurrent", self.context)

    def fill(self, words: array[int]) -> None:
        self.use()
        self._cuda("cuMemcpyHtoD_v2", self.buffer, words.buffer_info()[0], 4 * WORDS)

    def finish(self) -> None:
        """Waits for what was started on this device."""
        self.use()
        self._cuda("cuCtxSynchronize")

    def read(self) -> array[int]:
        self.use()
        words = array("I", bytes(4 * WORDS))
        self._cuda("cuMemcpyDtoH_v2", words.buffer_info()[0], self.buffer, 4 * WORDS)
        return words

    def close(self) -> None:
        """Gives everything back, also after an error that has spoilt the context: the next pair gets a new one."""
        with contextlib.suppress(CudaError):
            self.use()
            self._cuda("cuMemFree_v2", self.buffer)
        with contextlib.suppress(CudaError):
            self._cuda("cuDevicePrimaryCtxRelease_v2", self.number)


def pattern(seed: int) -> array[int]:
    """Words that differ from place to place, so that data in the wrong place shows."""
    return array("I", ((place * 2654435761 + seed * 40503 + 1) & 0xFFFFFFFF for place in range(WORDS)))


def wrong(found: array[int], wanted: array[int]) -> str | None:
    """Returns how they differ."""
    if found == wanted:
        return None
    places = [place for place, (one, two) in enumerate(zip(found, wanted, strict=True)) if one != two]
    first = places[0]
    return f"{len(places)} of {WORDS} words are wrong, the first at {first}: {found[first]:#x}, not {wanted[first]:#x}"


def check_uuid(cuda: Cuda, index: int, uuid: str) -> None:
    number, found = c_int(), (ctypes.c_ubyte * 16)()
    cuda("cuDeviceGet", byref(number), index)
    cuda("cuDeviceGetUuid", ctypes.addressof(found), number)
    if bytes(found).hex() != uuid:
        raise CudaError(f"CUDA's device {index} has the UUID {bytes(found).hex()}, not {uuid}")


def probe(cuda: Cuda, index: int, peer_index: int) -> tuple[bool, str]:
    """Probes if GPU `index` can use the memory of `peer_index`, and says what was found. With itself: the kernel."""
    one = Device(cuda, index)
    try:
        two = Device(cuda, peer_index)
        try:
            if index != peer_index:
                able = c_int()
                cuda("cuDeviceCanAccessPeer", byref(able), one.number, two.number)
                if not able.value:
                    return False, "cuDeviceCanAccessPeer says no"
                one.use()
                cuda("cuCtxEnablePeerAccess", two.context, 0)
            try:
                return exchange(cuda, one, two)
            except CudaError as error:  # an access that the hardware refused, say
                return False, str(error)
            finally:
                if index != peer_index:
                    with contextlib.suppress(CudaError):
                        one.use()
                        cuda("cuCtxDisablePeerAccess", two.context)
        finally:
            two.close()
    finally:
        one.close()


def exchange(cuda: Cuda, one: Device, two: Device) -> tuple[bool, str]:
    kernel = CopyKernel(cuda, one)
    tried: list[str] = []
    for what, copy in (("stores", kernel.copy), ("copies", lambda to, source: copy_engine(cuda, to, source))):
        if what == "stores" and kernel.problem:
            continue
        data = pattern(len(tried))
        one.fill(data)
        two.fill(array("I", bytes(4 * WORDS)))
        copy(two, one)
        one.finish()
        if found := wrong(two.read(), data):
            return False, f"of {what} to the peer {found}"
        tried.append(what)
    if kernel.problem is None:
        data = pattern(len(tried))
        two.fill(data)
        one.fill(array("I", bytes(4 * WORDS)))
        kernel.copy(one, two)
        one.finish()
        if found := wrong(one.read(), data):
            return False, f"of loads from the peer {found}"
        tried.append("loads")
    kernel.close()
    not_tried = "" if kernel.problem is None else f"; loads and stores weren't tried: {kernel.problem}"
    return True, f"{', '.join(tried)} came back right{not_tried}"


def copy_engine(cuda: Cuda, to: Device, source: Device) -> None:
    source.use()
    cuda("cuMemcpyPeerAsync", to.buffer, to.context, source.buffer, source.context, 4 * WORDS, None)


class CopyKernel:
    """Copies words with loads and stores of a device's cores; `problem` says why where the driver can't compile it."""

    def __init__(self, cuda: Cuda, device: Device) -> None:
        self.problem: str | None = None
        self._cuda, self._device = cuda, device
        self._module, self._function = c_void_p(), c_void_p()
        device.use()
        try:
            cuda("cuModuleLoadData", byref(self._module), _COPY_WORDS)
            cuda("cuModuleGetFunction", byref(self._function), self._module, b"copy_words")
        except CudaError as error:
            self.problem = str(error)

    def copy(self, to: Device, source: Device) -> None:
        self._device.use()
        arguments = (to.buffer, source.buffer, c_uint(WORDS))
        pointers = (c_void_p * 3)(*(ctypes.addressof(argument) for argument in arguments))
        self._cuda("cuLaunchKernel", self._function, 32, 1, 1, 256, 1, 1, 0, None, pointers, None)

    def close(self) -> None:
        if self.problem is None:
            self._device.use()
            self._cuda("cuModuleUnload", self._module)


def start(library: str) -> Cuda:
    cuda = Cuda(library)
    cuda("cuInit", 0)
    return cuda


def end_with_parent() -> None:
    """Ends a probe that hangs together with the process that asked for it."""
    pr_set_pdeathsig, sigkill = 1, 9
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, sigkill, 0, 0, 0)


def main() -> None:
    end_with_parent()
    task = json.loads(sys.argv[1])
    cuda: Cuda | None = None
    for number, (index, peer_index) in enumerate(task["pairs"]):
        print(f"probe begin {number}", flush=True)
        works: bool | None = None
        try:
            if cuda is None:
                cuda = start(task["library"])
            for each in (index, peer_index):
                check_uuid(cuda, each, task["uuids"][each])
            works, reason = probe(cuda, index, peer_index)
        except (CudaError, OSError, AttributeError) as error:
            reason = str(error)
        print("probe " + json.dumps({"pair": number, "works": works, "reason": reason}), flush=True)


if __name__ == "__main__":
    main()
