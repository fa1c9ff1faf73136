"""Checks in C if an object is lists and dicts of a few types and nothing else: see csrc/plain_tree.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from device_communicators.cpu.native import NativeLibrary

_Type = ctypes.c_void_p


class _Python(ctypes.Structure):
    _fields_ = (
        *((name, _Type) for name in ("type_of", "let_go", "list_size", "list_item", "dict_next", "list", "dict")),
        ("leaves", ctypes.POINTER(_Type)),
        ("leaf_count", ctypes.c_ssize_t),
        ("others", ctypes.POINTER(_Type)),
        ("other_count", ctypes.c_ssize_t),
        ("dict_size", _Type),
        ("texts", ctypes.POINTER(_Type)),
        ("text_count", ctypes.c_ssize_t),
        ("most_other_keys", ctypes.c_ssize_t),
        ("type_at", ctypes.c_ssize_t),
    )


_FUNCTIONS = ("PyObject_Type", "Py_DecRef", "PyList_Size", "PyList_GetItem", "PyDict_Next")


def checker(
    library: NativeLibrary, leaves: Sequence[type], others: Sequence[type], depth: int, most_other_keys: int
) -> Callable[[object], int]:
    """Tells whether a value is lists and dicts, at most `depth` within each other, of `leaves` and of `others`, which
    can't be keys: each exactly of its type, no subclass. A dict of more than `most_other_keys` has str and bytes for
    keys. 0: it isn't; 1: it is, without others; 2: with others."""
    api = ctypes.pythonapi
    functions = [ctypes.cast(getattr(api, name), _Type).value for name in _FUNCTIONS]
    dict_size = ctypes.cast(api.PyDict_Size, _Type).value
    texts = _addresses((str, bytes))
    python = _Python(*functions, id(list), id(dict), _addresses(leaves), len(leaves), _addresses(others), len(others),
                     dict_size, texts, len(texts), most_other_keys, _type_at())  # fmt: skip
    # A function that keeps the GIL: ctypes' usual ones let other threads run meanwhile.
    prototype = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
    function = prototype(ctypes.cast(library.ps_plain_tree, _Type).value or 0)
    address = ctypes.addressof(python)

    def look(value: object, keep: object = (python, leaves, others)) -> int:
        return function(value, address, depth)

    return look


def _type_at() -> int:
    """Returns where an object has the address of its type, which every build of CPython puts last in its header.

    0 where a look at some objects doesn't find it there: then PyObject_Type is asked, which takes three times as long.
    """
    at = object.__basicsize__ - ctypes.sizeof(_Type)
    for probe in (object(), 1, "", [], {}, None, int, _type_at):
        if at <= 0 or _Type.from_address(id(probe) + at).value != id(type(probe)):
            return 0
    return at


def _addresses(types: Sequence[type]) -> ctypes.Array[ctypes.c_void_p]:
    return (_Type * len(types))(*map(id, types))
