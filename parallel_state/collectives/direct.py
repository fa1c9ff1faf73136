"""The fast path of a group's methods, which bypasses torch's dispatcher: the functions of `csrc/direct.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from device_communicators.calls.user_call import DTYPE_NUMBERS
from device_communicators.cpu.types import NativeLibrary

_Address = ctypes.c_void_p
_FUNCTIONS = {
    "call": "PyObject_Vectorcall",
    "integer": "PyLong_AsLongLongAndOverflow",
    "utf8": "PyUnicode_AsUTF8AndSize",
    "list_size": "PyList_Size",
    "list_item": "PyList_GetItem",
    "tuple_size": "PyTuple_Size",
    "tuple_item": "PyTuple_GetItem",
    "hold": "Py_IncRef",
    "let_go": "Py_DecRef",
    "set_error": "PyErr_SetString",
    "clear_error": "PyErr_Clear",
}
_OBJECTS = {
    "tensor_type": torch.Tensor, "parameter_type": torch.nn.Parameter, "int_type": int, "str_type": str,
    "list_type": list, "tuple_type": tuple, "size_type": torch.Size, "none": None, "not_implemented": NotImplemented,
    "runtime_error": RuntimeError,
}  # fmt: skip


class _Facts(ctypes.Structure):
    _fields_ = (
        ("type_at", ctypes.c_ssize_t),
        ("tensor_at", ctypes.c_ssize_t),
        *((name, _Address) for name in _OBJECTS),
        ("dtypes", ctypes.POINTER(_Address)),
        ("dtype_count", ctypes.c_ssize_t),
        ("wrap", _Address),
        *((name, _Address) for name in _FUNCTIONS),
    )


def _not_here(*_: object) -> Any:
    return NotImplemented


class DirectCalls:
    """Has a C++ function for each op, for calls outside compiled code.

    A function returns NotImplemented if the caller must call the registered op.
    """

    all_reduce: Callable[..., Any]
    all_reduce_: Callable[..., Any]
    all_gather: Callable[..., Any]
    all_gather_into: Callable[..., Any]
    reduce_scatter: Callable[..., Any]
    reduce_scatter_into: Callable[..., Any]
    all_to_all: Callable[..., Any]
    all_to_all_into: Callable[..., Any]
    broadcast: Callable[..., Any]
    broadcast_: Callable[..., Any]
    gather: Callable[..., Any]
    scatter: Callable[..., Any]
    barrier: Callable[..., Any]
    send: Callable[..., Any]
    recv: Callable[..., Any]

    def __init__(self) -> None:
        self._facts: _Facts | None = None
        self.straight: Callable[[Any], Any] = _not_here
        """Returns its argument if that tensor can bypass torch's dispatcher, else NotImplemented."""
        for name in self.__class__.__annotations__:
            setattr(self, name, _not_here)

    def use(self, library: NativeLibrary) -> None:
        if self._facts is not None or not library.has_ops:
            return
        from device_communicators.cpu.first_call import find_wrap
        from device_communicators.cpu.plain_tree import tensor_at, type_at

        facts = _Facts(type_at=type_at(), tensor_at=tensor_at(), wrap=find_wrap())
        if not (facts.type_at and facts.tensor_at and facts.wrap):
            return
        for name, thing in _OBJECTS.items():
            setattr(facts, name, id(thing))
        for field, name in _FUNCTIONS.items():
            setattr(facts, field, ctypes.cast(getattr(ctypes.pythonapi, name), _Address))
        facts.dtypes = dtypes = (_Address * (max(DTYPE_NUMBERS.values()) + 1))()
        facts.dtype_count = len(dtypes)
        for dtype, number in DTYPE_NUMBERS.items():
            dtypes[number] = id(dtype)
        self._facts = facts  # the library uses it until the process exits
        library.ps_set_direct(ctypes.byref(facts))
        for name in self.__class__.__annotations__:
            twin = getattr(torch.ops.parallel_state_python, name).default
            setattr(self, name, library.method(f"ps_direct_{name}", twin))
        self.straight = library.method("ps_direct_straight")


DIRECT = DirectCalls()
