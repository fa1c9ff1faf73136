"""Makes tensors over memory that torch did not allocate, by DLPack.

When no tensor uses the memory any more, torch calls a deleter in any thread. The deleter drops the memory's owner, a
Python object whose `__del__` frees the memory.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any, ClassVar

import torch
from torch import Tensor

_DEVICE_TYPES = {"cpu": 1, "cuda": 2}
_UNSIGNED = 1


class _DLTensor(ctypes.Structure):
    _fields_: ClassVar = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", c_void_p),
        ("byte_offset", c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_: ClassVar = [("tensor", _DLTensor), ("manager_ctx", c_void_p), ("deleter", c_void_p)]


_ALIVE: dict[int, tuple[object, ...]] = {}
"""Objects that a tensor keeps alive, by the address of its _DLManagedTensor."""


def _make_deleter() -> Any:
    drop = _ALIVE.pop  # bound now: at exit, globals are deleted before the last tensors

    @ctypes.CFUNCTYPE(None, c_void_p)
    def delete(managed: int) -> None:
        drop(managed, None)

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(delete))  # never freed, for the same reason
    return delete


_DELETE = _make_deleter()
_NEW_CAPSULE = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, ctypes.c_char_p, c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def tensor_over(address: int, size_bytes: int, device: torch.device, owner: object) -> Tensor:
    """Returns a uint8 tensor over the memory at `address`. The tensor and its views keep `owner` alive."""
    shape = (c_int64 * 1)(size_bytes)
    managed = _DLManagedTensor(
        _DLTensor(address, _DEVICE_TYPES[device.type], device.index or 0, 1, _UNSIGNED, 8, 1, shape),
        None,
        ctypes.cast(_DELETE, c_void_p),
    )
    key = ctypes.addressof(managed)
    _ALIVE[key] = managed, shape, owner
    return torch.from_dlpack(_NEW_CAPSULE(key, b"dltensor", None))
