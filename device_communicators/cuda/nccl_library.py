"""Calls NCCL through ctypes, which releases the GIL."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, c_byte, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any, ClassVar

import torch

from device_communicators.base import settings

OLDEST = 22700
"""Oldest supported version, which is part of torch 2.10."""
MULTI_RANK_GPU = 23003
"""From this version on, NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a GPU."""

SUCCESS, UNHANDLED_CUDA_ERROR, INTERNAL_ERROR, INVALID_USAGE = 0, 1, 3, 5
REMOTE_ERROR, IN_PROGRESS, TIMEOUT = 6, 7, 8
RESULTS = (
    "ncclSuccess", "ncclUnhandledCudaError", "ncclSystemError", "ncclInternalError", "ncclInvalidArgument",
    "ncclInvalidUsage", "ncclRemoteError", "ncclInProgress", "ncclTimeout",
)  # fmt: skip
"""Names of ncclResult_t, by number. The last exists since 2.31."""

DTYPES = {
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.uint32: 3, torch.int64: 4, torch.uint64: 5, torch.float16: 6,
    torch.float32: 7, torch.float64: 8, torch.bfloat16: 9, torch.float8_e4m3fn: 10, torch.float8_e5m2: 11,
}  # fmt: skip
BYTE = DTYPES[torch.uint8]
REDUCE_OPS = {"sum": 0, "product": 1, "max": 2, "min": 3, "avg": 4}
"""Numbers of ncclRedOp_t. "avg" is used only for integers, because NCCL rounds each float before the sum."""

UNDEFINED = -(2**31)
"""Value of an ncclConfig_t field that isn't set. NCCL then uses its environment variable or its default."""
_MAGIC = 0xCAFEBEEF
NO_COLOR = -1
"""Color of a rank that gets no new communicator in a split."""
SUSPEND_MEMORY = 1
COLL_SYMMETRIC = 1
"""Flag of a window for collectives. All ranks must pass tensors at the same offset in the window."""


class UniqueId(ctypes.Structure):
    _fields_: ClassVar = [("internal", c_byte * 128)]


CONFIG_FIELDS: tuple[tuple[str, Any, int], ...] = (
    ("size", c_size_t, 0),
    ("magic", c_uint, 0),
    ("version", c_uint, 0),
    ("blocking", c_int, 0),
    ("cgaClusterSize", c_int, 0),
    ("minCTAs", c_int, 0),
    ("maxCTAs", c_int, 0),
    ("netName", c_char_p, 0),
    ("splitShare", c_int, 0),
    ("trafficClass", c_int, 0),
    ("commName", c_char_p, 0),
    ("collnetEnable", c_int, 0),
    ("CTAPolicy", c_int, 0),
    ("shrinkShare", c_int, 0),
    ("nvlsCTAs", c_int, 0),
    ("nChannelsPerNetPeer", c_int, 22803),
    ("nvlinkCentricSched", c_int, 22803),
    ("graphUsageMode", c_int, 22902),
    ("numRmaCtx", c_int, 22902),
    ("maxP2pPeers", c_int, 23003),
    ("graphStreamOrdering", c_int, 23007),
    ("launchOrderImplicit", c_int, 23102),
    ("numRmaSig", c_int, 23102),
    ("rmaEagerInit", c_int, 23102),
    ("hostCftMode", c_int, 23102),
    ("nvlsHostMode", c_int, 23203),
)
"""Fields of ncclConfig_t: name, type, and the NCCL version that added it. NCCL reads only the first `size` bytes."""

_COMM, _STREAM = c_void_p, c_void_p
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...], int]] = {
    # name: result (None: ncclResult_t), arguments, the version that added the function
    "ncclGetVersion": (None, (POINTER(c_int),), 0),
    "ncclGetUniqueId": (None, (POINTER(UniqueId),), 0),
    "ncclCommInitRankConfig": (None, (POINTER(c_void_p), c_int, UniqueId, c_int, c_void_p), 0),
    "ncclCommSplit": (None, (_COMM, c_int, c_int, POINTER(c_void_p), c_void_p), 0),
    "ncclCommGetAsyncError": (None, (_COMM, POINTER(c_int)), 0),
    "ncclCommFinalize": (None, (_COMM,), 0),
    "ncclCommDestroy": (None, (_COMM,), 0),
    "ncclCommAbort": (None, (_COMM,), 0),
    "ncclGetErrorString": (c_char_p, (c_int,), 0),
    "ncclGetLastError": (c_char_p, (_COMM,), 0),
    "ncclGroupStart": (None, (), 0),
    "ncclGroupEnd": (None, (), 0),
    "ncclAllReduce": (None, (c_void_p, c_void_p, c_size_t, c_int, c_int, _COMM, _STREAM), 0),
    "ncclAllGather": (None, (c_void_p, c_void_p, c_size_t, c_int, _COMM, _STREAM), 0),
    "ncclReduceScatter": (None, (c_void_p, c_void_p, c_size_t, c_int, c_int, _COMM, _STREAM), 0),
    "ncclBroadcast": (None, (c_void_p, c_void_p, c_size_t, c_int, c_int, _COMM, _STREAM), 0),
    "ncclReduce": (None, (c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, _COMM, _STREAM), 0),
    "ncclSend": (None, (c_void_p, c_size_t, c_int, c_int, _COMM, _STREAM), 0),
    "ncclRecv": (None, (c_void_p, c_size_t, c_int, c_int, _COMM, _STREAM), 0),
    "ncclMemAlloc": (None, (POINTER(c_void_p), c_size_t), 22700),
    "ncclMemFree": (None, (c_void_p,), 22700),
    "ncclCommWindowRegister": (None, (_COMM, c_void_p, c_size_t, POINTER(c_void_p), c_int), 22700),
    "ncclCommWindowDeregister": (None, (_COMM, c_void_p), 22700),
    "ncclCommSuspend": (None, (_COMM, c_int), 22907),
    "ncclCommResume": (None, (_COMM,), 22907),
}
FUNCTIONS = tuple(_FUNCTIONS)


class NcclUnavailableError(Exception):
    """NCCL can't be loaded, or is too old."""


class NcclLibrary:
    def __init__(self, path: str) -> None:
        self.path = path
        self.missing: dict[str, str] = {}
        """Maps each function that this NCCL lacks to the reason."""
        try:
            self._library = ctypes.CDLL(path)
            number = c_int()
            self._bind("ncclGetVersion")
            self.ncclGetVersion(ctypes.byref(number))
        except (OSError, AttributeError) as error:
            raise NcclUnavailableError(f"{path} can't be loaded as NCCL: {error}") from error
        self.version = number.value
        """NCCL's version number. 22809 means 2.28.9."""
        if self.version < OLDEST:
            raise NcclUnavailableError(f"{self} is too old: {version_text(OLDEST)} or newer is needed")
        for name, (_, _, since) in _FUNCTIONS.items():
            try:
                self._bind(name)
            except AttributeError as error:
                if since == 0:
                    raise NcclUnavailableError(f"{self} can't be used, because it lacks the function {name}") from error
                self.missing[name] = (
                    f"NCCL {version_text(self.version)} has no {name}, which needs {version_text(since)}"
                )
        self._config_type = config_type(self.version)

    def _bind(self, name: str) -> None:
        result, arguments, _ = _FUNCTIONS[name]
        function = getattr(self._library, name)
        function.restype, function.argtypes = result or c_int, arguments
        setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self} has no function {name!r}")

    def __str__(self) -> str:
        return f"NCCL {version_text(self.version)} ({self.path})"

    def config(self, **fields: int | bytes) -> ctypes.Structure:
        """Returns an ncclConfig_t with these `fields`. NCCL chooses the values of other fields."""
        config = self._config_type()
        for name, kind, _ in CONFIG_FIELDS:
            if kind is c_int and hasattr(config, name):
                setattr(config, name, UNDEFINED)
        values = {"size": ctypes.sizeof(config), "magic": _MAGIC, "version": self.version, **fields}
        for name, value in values.items():
            setattr(config, name, value)
        return config

    def text_of(self, result: int) -> str:
        name = RESULTS[result] if 0 <= result < len(RESULTS) else f"result {result}"
        meaning = (self.ncclGetErrorString(result) or b"").decode(errors="surrogateescape")
        last = (self.ncclGetLastError(None) or b"").decode(errors="replace").strip()
        return f"{name}, {meaning}" + (f": {' '.join(last.split())}" if last else "")


def config_type(version: int) -> type[ctypes.Structure]:
    fields = [(name, kind) for name, kind, since in CONFIG_FIELDS if since <= version]
    return type("ncclConfig_t", (ctypes.Structure,), {"_fields_": fields})


def version_text(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def load() -> NcclLibrary:
    found = _load(settings.NCCL_LIBRARY.get())
    if isinstance(found, str):
        raise NcclUnavailableError(found)
    return found


@functools.cache
def _load(chosen: str | None) -> NcclLibrary | str:
    problems = []
    for path in candidates() if chosen is None else [chosen]:
        try:
            return NcclLibrary(path)
        except NcclUnavailableError as error:
            problems.append(str(error) if chosen is None else f"{error} ({settings.NCCL_LIBRARY.name})")
    return "; ".join(problems)


def candidates() -> list[str]:
    """Returns the paths where NCCL's library is searched, torch's own first: a second NCCL would have its own memory
    and settings.
    """
    beside_torch = Path(torch.__file__).parents[1] / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    installed = [str(beside_torch)] if beside_torch.exists() else []
    return list(dict.fromkeys([*_loaded(), *installed, "libnccl.so.2"]))


def _loaded() -> list[str]:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            paths = [line.split(maxsplit=5)[5].strip() for line in file if "libnccl.so" in line]
    except OSError:
        return []
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]
