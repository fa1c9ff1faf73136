"""Looks at Python objects in C: are they lists and dicts of a few types and nothing else, and what is their message.

See csrc/plain_tree.cpp and csrc/pack.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from device_communicators.cpu.native import NativeLibrary

_Type = ctypes.c_void_p
_NAME = ctypes.c_char_p
_LEAVES = {"str": str, "int": int, "float": float, "none": type(None), "bool": bool, "bytes": bytes}


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
        *((name, _Type) for name in ("utf8", "integer", "number", "bytes_size", "bytes", "forget_error")),
        *((f"{name}_type", _Type) for name in _LEAVES),
        ("true_object", _Type),
        ("describe", _Type),
        ("tensor_at", ctypes.c_ssize_t),
        ("dtype_names", ctypes.POINTER(_NAME)),
        ("dtype_count", ctypes.c_ssize_t),
        *((name, _Type) for name in ("tuple_item", "dict_item")),
        ("depth", ctypes.c_int),
        ("hold", _Type),
    )


_FUNCTIONS = {
    "type_of": "PyObject_Type",
    "let_go": "Py_DecRef",
    "list_size": "PyList_Size",
    "list_item": "PyList_GetItem",
    "dict_next": "PyDict_Next",
    "dict_size": "PyDict_Size",
    "utf8": "PyUnicode_AsUTF8AndSize",
    "integer": "PyLong_AsLongLongAndOverflow",
    "number": "PyFloat_AsDouble",
    "bytes_size": "PyBytes_Size",
    "bytes": "PyBytes_AsString",
    "forget_error": "PyErr_Clear",
    "tuple_item": "PyTuple_GetItem",
    "dict_item": "PyDict_GetItem",
    "hold": "Py_IncRef",
}
_MOST_LONG, _MOST_TENSORS = 64, 64  # as csrc/pack.h
_MOST_PIECES = 2 + 2 * _MOST_LONG + _MOST_TENSORS
_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Pinned(NamedTuple):
    """Bytes that lie where they are, one after another."""

    pieces: tuple[tuple[int, int], ...]
    """Their addresses and sizes."""
    keeps: object
    """Keeps them there."""

    @property
    def nbytes(self) -> int:
        return sum([size for _, size in self.pieces])

    def views(self) -> list[Any]:
        return [(ctypes.c_char * size).from_address(at) for at, size in self.pieces if size]


class Packed(NamedTuple):
    """The head of a message without tensors."""

    start: bytes
    more: Pinned


class _FormWords(ctypes.Structure):
    """`Form` of csrc/pack.h."""

    _fields_ = (
        ("keys", _Type),
        ("layout", ctypes.POINTER(ctypes.c_int64)),
        *((name, ctypes.c_int64) for name in ("count", "words", "entries")),
    )


class Form:
    """The form of a dict with CPU tensors, known beforehand: the keys of these, their dtypes and shapes.

    `dtypes`: as c10::ScalarType. `entries`: of the dict, which may have other values, too.
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
    """Sends and receives messages of groups without Python in between: see csrc/messages.h.

    Each call begins with a group's key; then the other rank and the number of a method in TRANSFERS, or for messages to
    all ranks their word, which has the source. It returns a number of `Outcome` there.
    """

    def __init__(self, library: NativeLibrary, python: int) -> None:
        """`python`: the address of what the library is told of Python."""

        def method(name: str) -> Callable[..., Any]:
            return library.method(name, python)

        self.send_dict: Callable[[str, int, int, dict[str, Any], int, bytes], int] = method("ps_sending_dict")
        """Of a dict, its `Form`'s address, and its head."""
        self.broadcast_dict: Callable[[str, int, dict[str, Any], int, bytes], int] = method("ps_broadcasting_dict")
        self.send_object: Callable[[str, int, int, object, int], int] = method("ps_sending_object")
        """Of an object, and how many bytes it may have. Where it has no room see `PlainObjects.packed`."""
        self.broadcast_object: Callable[[str, int, object, int], int] = method("ps_broadcasting_object")
        self.receive: Callable[[str, int, int, bytes, list[Any]], int] = method("ps_receiving")
        """Of the expected head, and the tensors to be filled."""
        self.receive_broadcast: Callable[[str, int, bytes, list[Any]], int] = method("ps_receiving_broadcast")
        self.receive_object: Callable[[str, int, int], bytes | int] = method("ps_receiving_object")
        """Returns the message of an object without tensors, or a number."""
        self.receive_broadcast_object: Callable[[str, int], bytes | int] = method("ps_receiving_broadcast_object")


class PlainObjects:
    """Asks the library of objects. Its functions keep the GIL: ctypes' usual ones let other threads run meanwhile."""

    def __init__(
        self, library: NativeLibrary, depth: int, most_other_keys: int, dtype_names: Mapping[int, str]
    ) -> None:
        """`depth`: of containers within each other. A dict of more than `most_other_keys` has str and bytes for keys.

        `dtype_names`: by c10::ScalarType; tensors of other dtypes are left to Python.
        """
        self._depth = depth
        self._python = _python(library, depth, most_other_keys, dtype_names)
        self._address = address = ctypes.addressof(self._python[0])
        size, whole = ctypes.c_uint64, ctypes.c_int
        self.past_python = PastPython(library, address)
        self._look = _keeping_the_gil(library.ps_plain_tree, ctypes.py_object, _Type, whole)
        self._pack = _keeping_the_gil(library.ps_pack, ctypes.py_object, _Type, whole, size)
        self._packed = _keeping_the_gil(library.ps_packed, _Type, whole, _Type, _Type)
        post_list = _keeping_the_gil(
            library.ps_queue_post_list, _Type, ctypes.py_object, _Type, ctypes.c_char_p, size, size
        )
        self.post: Callable[[int, object, int, int], int] = library.method("ps_posting", address)
        """Writes the message of an object of at most `limit` bytes if all of it has room: see ps_queue_post.

        Of a queue's writer, the object, the limit, and the message's fingerprint.
        """
        self.post_list: Callable[[int, list[Any], bytes, int], int] = lambda writer, tensors, head, fingerprint: (
            post_list(writer, tensors, address, head, len(head), fingerprint)
        )
        """As `post`, the message of a head and of tensors."""

    def look(self, value: object) -> int:
        """Tells whether a value is lists and dicts of None, bool, int, float, str and bytes, exactly: no subclass.

        0: it isn't; 1: it is; 2: but for tensors.
        """
        return int(self._look(value, self._address, self._depth))

    def pack(self, value: object, limit: int) -> tuple[bytes, bytes] | None:
        """Returns the head of the message of an object without tensors, in two parts; None for what Python packs."""
        if not self.takes_apart(value, limit):
            return None
        packed = self.packed()
        return None if packed is None else (packed.start, b"".join(packed.more.views()))

    def takes_apart(self, value: object, limit: int) -> bool:
        """Packs an object, whose message `packed` then tells; False for what Python packs."""
        return bool(self._pack(value, self._address, self._depth, limit))

    def packed(self) -> Packed | None:
        """Returns the head of the message that this thread packed last; None if it has tensors, empty ones included."""
        try:
            return self._copied(*self.pieces())
        finally:
            self.free()

    def _copied(self, pieces: list[tuple[int, int]], heads: int, objects: list[object]) -> Packed | None:
        if len(pieces) > heads or any(isinstance(each, _TENSORS) for each in objects):  # empty ones have no piece
            return None
        start, *body = pieces
        # Every second piece was written by the library, one behind the other, and is overwritten by the next message.
        (first, _), (last, last_bytes) = body[0], body[-1]
        written = ctypes.string_at(first, last + last_bytes - first)
        moved = (ctypes.cast(ctypes.c_char_p(written), _Type).value or 0) - first
        body[::2] = [(at + moved, size) for at, size in body[::2]]
        return Packed(ctypes.string_at(*start), Pinned(tuple(body), (written, objects)))

    def free(self) -> None:
        """Lets the next message of this thread be packed over the last one, which has been read."""
        self._packed(None, 0, None, None)

    def pieces(self) -> tuple[list[tuple[int, int]], int, list[object]]:
        """Returns addresses and sizes of the message that this thread packed last, and how many are of its head.

        The others are its tensors. The third are the objects that long texts are in.
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
    """Returns what the library is told of Python, and what must live as long."""
    functions = {field: ctypes.cast(getattr(ctypes.pythonapi, name), _Type) for field, name in _FUNCTIONS.items()}
    leaves, others, texts = map(_addresses, ([*_LEAVES.values()], _TENSORS, (str, bytes)))
    names = (_NAME * (max(dtype_names) + 1))()
    for number, name in dtype_names.items():
        names[number] = name.encode()
    types = {f"{name}_type": id(kind) for name, kind in _LEAVES.items()}
    python = _Python(
        list=id(list), dict=id(dict), leaves=leaves, leaf_count=len(leaves), others=others, other_count=len(others),
        texts=texts, text_count=len(texts), most_other_keys=most_other_keys, type_at=type_at(), true_object=id(True),
        describe=ctypes.cast(library.ps_describe_tensor, _Type) if library.has_ops else None,
        tensor_at=tensor_at(), dtype_names=names, dtype_count=len(names), depth=depth, **types, **functions,
    )  # fmt: skip
    return python, (leaves, others, texts, names)


def type_at() -> int:
    """Returns where an object has the address of its type, which every build of CPython puts last in its header.

    0 where a look at some objects doesn't find it there: then PyObject_Type is asked, which takes three times as long.
    """
    at = object.__basicsize__ - ctypes.sizeof(_Type)
    for probe in (object(), 1, "", [], {}, None, int, type_at):
        if at <= 0 or _Type.from_address(id(probe) + at).value != id(type(probe)):
            return 0
    return at


def tensor_at() -> int:
    """Returns where a tensor's object has the address of its TensorImpl; 0 where a look at some doesn't find it."""
    plain = torch.empty(2, device="cpu")
    probes = [plain, torch.nn.Parameter(plain), torch.empty(2, 2, device="cpu").t()]
    for at in range(object.__basicsize__, torch.Tensor.__basicsize__, ctypes.sizeof(_Type)):
        if all(_Type.from_address(id(probe) + at).value == getattr(probe, "_cdata", None) for probe in probes):
            return at
    return 0


def _addresses(types: Sequence[type]) -> ctypes.Array[ctypes.c_void_p]:
    return (_Type * len(types))(*map(id, types))
