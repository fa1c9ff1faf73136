"""Encodes Python objects in C++ (csrc/pack.h), which reads objects of Python and torch directly from memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from device_communicators.calls.user_call import DTYPE_NUMBERS
from device_communicators.cpu.first_call import find_wrap
from device_communicators.cpu.native import NativeLibrary

_Type = ctypes.c_void_p
_NAME = ctypes.c_char_p
_LEAVES = {"str": str, "int": int, "float": float, "none": type(None), "bool": bool, "bytes": bytes}


class _Python(ctypes.Structure):
    _fields_ = (
        *((name, _Type) for name in ("type_of", "list_size", "list_item", "dict_next", "list", "dict")),
        ("leaves", ctypes.POINTER(_Type)),
        ("leaf_count", ctypes.c_ssize_t),
        ("others", ctypes.POINTER(_Type)),
        ("other_count", ctypes.c_ssize_t),
        ("dict_size", _Type),
        ("texts", ctypes.POINTER(_Type)),
        ("text_count", ctypes.c_ssize_t),
        ("most_other_keys", ctypes.c_ssize_t),
        ("type_at", ctypes.c_ssize_t),
        *((name, _Type) for name in ("utf8", "integer", "number", "forget_error")),
        *((f"{name}_type", _Type) for name in _LEAVES),
        ("true_object", _Type),
        ("describe", _Type),
        ("tensor_at", ctypes.c_ssize_t),
        ("dtype_names", ctypes.POINTER(_NAME)),
        ("dtype_count", ctypes.c_ssize_t),
        *((name, _Type) for name in ("tuple_item", "dict_item")),
        ("depth", ctypes.c_int),
        *((name, _Type) for name in ("make_text", "make_unsigned", "make_number")),
        *((name, _Type) for name in ("make_list", "set_item", "make_dict", "set_key", "call")),
        *((name, _Type) for name in ("none_object", "false_object", "not_implemented")),
        ("dtype_bytes", ctypes.POINTER(ctypes.c_int64)),
        *((name, _Type) for name in ("make_tensor", "view_tensor", "wrap")),
    )


_FUNCTIONS = {
    "type_of": "PyObject_Type",
    "list_size": "PyList_Size",
    "list_item": "PyList_GetItem",
    "dict_next": "PyDict_Next",
    "dict_size": "PyDict_Size",
    "utf8": "PyUnicode_AsUTF8AndSize",
    "integer": "PyLong_AsLongLongAndOverflow",
    "number": "PyFloat_AsDouble",
    "forget_error": "PyErr_Clear",
    "tuple_item": "PyTuple_GetItem",
    "dict_item": "PyDict_GetItem",
    "make_text": "PyUnicode_DecodeUTF8",
    "make_unsigned": "PyLong_FromUnsignedLongLong",
    "make_number": "PyFloat_FromDouble",
    "make_list": "PyList_New",
    "set_item": "PyList_SetItem",
    "make_dict": "PyDict_New",
    "set_key": "PyDict_SetItem",
    "call": "PyObject_Vectorcall",
}
_MOST_LONG, _MOST_TENSORS = 64, 64  # as csrc/pack.h
_MOST_PIECES = 2 + 2 * _MOST_LONG + _MOST_TENSORS
_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Pinned(NamedTuple):
    """Parts of memory as (address, size), and the objects that own the memory."""

    pieces: tuple[tuple[int, int], ...]
    keeps: object

    @property
    def nbytes(self) -> int:
        return sum([size for _, size in self.pieces])

    def views(self) -> list[Any]:
        return [(ctypes.c_char * size).from_address(at) for at, size in self.pieces if size]


class Packed(NamedTuple):
    start: bytes
    more: Pinned
    tensors: list[torch.Tensor]
    is_cut: bytes
    """For each tensor: 1 if only this rank's slice is sent."""


_Cut = tuple[int, int, "dict[str, None] | None"]
"""Number of slices, index of this rank's slice, and keys of the tensors that are sent whole."""
_WHOLE: _Cut = (0, 0, None)


class _FormWords(ctypes.Structure):
    _fields_ = (
        ("keys", _Type),
        ("layout", ctypes.POINTER(ctypes.c_int64)),
        *((name, ctypes.c_int64) for name in ("count", "words", "entries")),
    )


class Form:
    """Keys, dtypes (as c10::ScalarType) and shapes of a dict's CPU tensors, as a `TensorDictSpec` fixes them in
    advance. `entries`: number of all entries, also those that aren't tensors.
    """

    def __init__(
        self, keys: Sequence[str], dtypes: Sequence[int], shapes: Sequence[Sequence[int]], entries: int
    ) -> None:
        self._keys = tuple(keys)
        layout: list[int] = []
        for dtype, shape in zip(dtypes, shapes, strict=True):
            layout += (dtype, len(shape), *shape)
        self._layout = (ctypes.c_int64 * len(layout))(*layout)
        self._words = _FormWords(id(self._keys), self._layout, len(self._keys), len(layout), entries)
        self.address = ctypes.addressof(self._words)


class PastPython:
    """Has C++ functions as attributes, which send and receive messages without Python code (csrc/messages.h).

    Functions for one peer first take the group's key (see `NativeGroup.serve`), the peer's rank in the group, and the
    method's index in `user_call.TRANSFERS`. Functions for broadcasts first take the key and `UserCall.word`. The last
    four functions, from `receive_at` on, have other arguments. A result is a message, or an `Outcome` number
    (csrc/messages.h).
    """

    def __init__(self, library: NativeLibrary, python: int) -> None:
        def method(name: str) -> Callable[..., Any]:
            return library.method(name, python)

        self.send_dict: Callable[[str, int, int, dict[str, Any], int, bytes], int] = method("ps_sending_dict")
        """Sends a dict. Last arguments: the dict, its `Form`'s address, and the message's head."""
        self.broadcast_dict: Callable[[str, int, dict[str, Any], int, bytes], int] = method("ps_broadcasting_dict")
        self.send_object: Callable[..., int] = method("ps_sending_object")
        """Sends an object. Last arguments: the object, the maximum number of bytes, a `_Cut`'s fields, and True to wait
        until a send between hosts is complete.

        If the send isn't complete, returns 4 (`kStarted`) plus the transfer's number.
        """
        self.broadcast_object: Callable[[str, int, object, int], int] = method("ps_broadcasting_object")
        self.receive: Callable[[str, int, int, bytes, list[Any]], int] = method("ps_receiving")
        """Receives tensors. Last arguments: the expected head, and the tensors to fill."""
        self.receive_broadcast: Callable[[str, int, bytes, list[Any]], int] = method("ps_receiving_broadcast")
        self.receive_value: Callable[..., Any] = method("ps_receiving_value")
        """Receives a message. Last arguments: those of `Received` in csrc/messages_api.cpp. If the result is
        NotImplemented, Python code must receive the message.
        """
        self.receive_broadcast_value: Callable[..., Any] = method("ps_receiving_broadcast_value")
        self.receive_at: Callable[..., Any] = method("ps_queue_receiving")
        """Receives a message from a queue."""
        self.receive_over: Callable[..., Any] = method("ps_transfers_receiving")
        """Receives a message from one rank of another host."""
        self.broadcast_between: Callable[..., int] = method("ps_group_broadcasting")
        self.receive_between: Callable[..., Any] = method("ps_group_receiving")
        """Receives a broadcast message in a group on several hosts."""


class PlainObjects:
    """Encodes Python objects in C++. The C++ functions hold the GIL, unlike usual ctypes functions."""

    def __init__(
        self, library: NativeLibrary, depth: int, most_other_keys: int, dtype_names: Mapping[int, str]
    ) -> None:
        """`depth`: maximum nesting of containers. `most_other_keys`: maximum number of keys that are neither str nor
        bytes. `dtype_names`: names of torch's dtypes by c10::ScalarType.
        """
        self._depth = depth
        self._python = _python(library, depth, most_other_keys, dtype_names)
        self._address = address = ctypes.addressof(self._python[0])
        size, whole = ctypes.c_uint64, ctypes.c_int
        self.past_python = PastPython(library, address)
        self._pack = _keeping_the_gil(library.ps_pack, ctypes.py_object, _Type, whole, size, size, size, _Type)
        self._packed = _keeping_the_gil(library.ps_packed, _Type, whole, _Type, _Type)

    def pack(self, value: object, limit: int, cut: _Cut = _WHOLE) -> Packed | None:
        return self.packed() if self.takes_apart(value, limit, cut) else None

    def takes_apart(self, value: object, limit: int, cut: _Cut = _WHOLE) -> bool:
        """Encodes `value`; `packed` then returns the result. Returns False if only Python can encode `value`, or if its
        encoding (without header and tensor data) exceeds `limit` bytes. `cut`: how tensors are sliced; default: not at
        all.
        """
        slices, mine, whole = cut
        kept = None if whole is None else id(whole)
        return bool(self._pack(value, self._address, self._depth, limit, slices, mine, kept))

    def packed(self) -> Packed:
        try:
            return self._copied(*self.pieces())
        finally:
            self.free()

    def _copied(self, pieces: list[tuple[int, int]], heads: int, objects: list[object]) -> Packed:
        start, *body = pieces[:heads]
        # The next message overwrites what the library wrote: every second piece, consecutively.
        (first, _), (last, last_bytes) = body[0], body[-1]
        written = ctypes.string_at(first, last + last_bytes - first)
        moved = (ctypes.cast(ctypes.c_char_p(written), _Type).value or 0) - first
        body[::2] = [(at + moved, size) for at, size in body[::2]]
        tensors = [each for each in objects if isinstance(each, _TENSORS)]
        more = Pinned(tuple(body), (written, objects))
        return Packed(ctypes.string_at(*start), more, tensors, written[len(written) - len(tensors) :])

    def free(self) -> None:
        self._packed(None, 0, None, None)

    def pieces(self) -> tuple[list[tuple[int, int]], int, list[object]]:
        """Returns the last encoded object's parts as (address, size), how many parts form the message's header, and the
        objects that own the parts.
        """
        found, counts = (ctypes.c_uint64 * (2 * _MOST_PIECES))(), (ctypes.c_int * 2)()
        held = (_Type * (_MOST_LONG + _MOST_TENSORS))()
        count = self._packed(found, _MOST_PIECES, counts, held)
        heads, held_count = counts
        objects = []
        for at in held[:held_count]:
            objects.append(ctypes.cast(at or 0, ctypes.py_object).value)
            _let_go(at)  # the library's
        flat = found[: 2 * count]
        return list(zip(flat[::2], flat[1::2], strict=True)), heads, objects


_let_go = ctypes.PYFUNCTYPE(None, _Type)(("Py_DecRef", ctypes.pythonapi))


def _keeping_the_gil(function: Any, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(ctypes.c_int, *arguments)(ctypes.cast(function, _Type).value or 0)


def _python(
    library: NativeLibrary, depth: int, most_other_keys: int, dtype_names: Mapping[int, str]
) -> tuple[_Python, Sequence[object]]:
    functions = {field: ctypes.cast(getattr(ctypes.pythonapi, name), _Type) for field, name in _FUNCTIONS.items()}
    leaves, others, texts = map(_addresses, ([*_LEAVES.values()], _TENSORS, (str, bytes)))
    names = (_NAME * (max(dtype_names) + 1))()
    for number, name in dtype_names.items():
        names[number] = name.encode()
    sizes = (ctypes.c_int64 * len(names))()
    for dtype, number in DTYPE_NUMBERS.items():
        if number < len(sizes):
            sizes[number] = dtype.itemsize
    types: dict[str, Any] = {f"{name}_type": id(kind) for name, kind in _LEAVES.items()}
    wrap = find_wrap() if library.has_ops and tensor_at() else None
    if wrap is not None:
        types["make_tensor"] = ctypes.cast(library.ps_make_tensor, _Type)
        types["view_tensor"] = ctypes.cast(library.ps_view_tensor, _Type)
    python = _Python(
        list=id(list), dict=id(dict), leaves=leaves, leaf_count=len(leaves), others=others, other_count=len(others),
        texts=texts, text_count=len(texts), most_other_keys=most_other_keys, type_at=type_at(), true_object=id(True),
        describe=ctypes.cast(library.ps_describe_tensor, _Type) if library.has_ops else None,
        tensor_at=tensor_at(), dtype_names=names, dtype_count=len(names), depth=depth, dtype_bytes=sizes,
        none_object=id(None), false_object=id(False), not_implemented=id(NotImplemented), wrap=wrap, **types,
        **functions,
    )  # fmt: skip
    return python, (leaves, others, texts, names, sizes)


def type_at() -> int:
    """Returns the byte offset of the type pointer in a Python object, or 0 if unknown. C++ then calls the slower
    PyObject_Type.
    """
    at = object.__basicsize__ - ctypes.sizeof(_Type)
    for probe in (object(), 1, "", [], {}, None, int, type_at):
        if at <= 0 or _Type.from_address(id(probe) + at).value != id(type(probe)):
            return 0
    return at


def tensor_at() -> int:
    """Returns the byte offset of the pointer to TensorImpl in a Python tensor, or 0 if it differs between tensors."""
    plain = torch.empty(2, device="cpu")
    probes = [plain, torch.nn.Parameter(plain), torch.empty(2, 2, device="cpu").t()]
    for at in range(object.__basicsize__, torch.Tensor.__basicsize__, ctypes.sizeof(_Type)):
        if all(_Type.from_address(id(probe) + at).value == getattr(probe, "_cdata", None) for probe in probes):
            return at
    return 0


def _addresses(types: Sequence[type]) -> ctypes.Array[ctypes.c_void_p]:
    return (_Type * len(types))(*map(id, types))
