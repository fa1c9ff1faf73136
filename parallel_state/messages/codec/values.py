"""Encodes nested values with msgspec. Values that msgpack lacks become msgpack extensions (Ext).

Subclasses and tuples also become Exts, because msgspec would decode them to another type.
"""

from __future__ import annotations

import collections
import functools
import pickle
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from operator import countOf
from typing import Any

import msgspec
import torch

from device_communicators.base import settings
from device_communicators.base.errors import MessageDecodeError
from device_communicators.calls.user_call import DTYPE_NUMBERS
from device_communicators.cpu.types import Packed, PlainObjects
from parallel_state.messages.codec import types as codec_types
from parallel_state.messages.codec.types import DTYPE_NAMES, DTYPES

MAX_DEPTH = 100

MOST_NUMBERS = 256
"""A dict with more keys than this, not all str or bytes, is encoded as an Ext. This limits the decoding time."""
_UNCHECKED_BYTES = 16 << 10
"""Larger message bodies are decoded only after `_key_check`. In smaller ones, dict keys with colliding hashes cost only
some milliseconds.
"""
_UNTIMED_ITEMS = 64
_BATCH_BYTES = 64 << 10
_GRACE_S = 0.1
_S_PER_BYTE = 2e-7
"""Limit of the CPU time to decode a message, per byte. Regular sets and dicts take a tenth of this."""

Ext = msgspec.msgpack.Ext
to_msgpack = msgspec.msgpack.Encoder().encode
_from_msgpack = msgspec.msgpack.decode

# Changing the meaning of a code needs a new format version.
_TUPLE, _DICT, _SET, _FROZENSET, _ORDERED_DICT, _INT, _COMPLEX, _BYTEARRAY = range(1, 9)
_TENSOR, _DTYPE, _DEVICE, _SIZE, _ARRAY, _NUMPY_SCALAR, _REGISTERED, _PICKLED = range(9, 17)

_NESTED = (_TUPLE, _DICT, _SET, _FROZENSET, _ORDERED_DICT, _SIZE, _ARRAY, _NUMPY_SCALAR, _REGISTERED)
_TEXTS = frozenset({str, bytes})

_CAREFUL = frozenset({type(None), bool, float, bytes})
_PLAIN = _CAREFUL | {int, str}
_COMPLEX_FORMAT = struct.Struct("<dd")


_objects: list[PlainObjects] = []


def use_library() -> PlainObjects:
    if not _objects:
        from device_communicators.cpu import native, plain_tree

        dtype_names = {number: DTYPE_NAMES[dtype] for dtype, number in DTYPE_NUMBERS.items()}
        _objects.append(plain_tree.PlainObjects(native.load(), MAX_DEPTH, MOST_NUMBERS, dtype_names))
    return _objects[0]


@functools.cache
def _key_check() -> Callable[[bytes], bool]:
    """Returns a function that returns False for a message body with dict keys that this library never sends.

    Such keys could have colliding hashes, and msgspec can't be stopped while it decodes them.
    """
    from device_communicators.cpu import native

    try:
        library = native.load()
    except native.NativeUnavailableError:
        return lambda data: True
    nested = sum(1 << code for code in _NESTED)
    return lambda data: bool(library.ps_plain_keys(data, len(data), nested, MOST_NUMBERS, MAX_DEPTH + 1))


def pack(value: object, cut: tuple[int, int, dict[str, None] | None]) -> Packed | None:
    return _objects[0].pack(value, settings.MAX_METADATA_BYTES.get(), cut) if _objects else None


class RefusedError(Exception):
    """Raised if a value can't be sent. `what` describes the value; each container around it appends its key to
    `path`.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.path: list[str] = []

    def text(self) -> str:
        what, remedy = self.args
        path = "".join(reversed(self.path))
        if len(path) > 200:
            path = f"{path[:100]}…{path[-100:]}"
        return f"value{' at ' if path else ''}{path} is {what}; {remedy}"


class Encoder:
    """Encodes a value. With `careful`, checks that msgpack can represent each int and str; this is slower."""

    __slots__ = ("_allow_pickle", "_indices", "plain", "tensors")

    def __init__(self, allow_pickle: bool, careful: bool) -> None:
        self.plain = _CAREFUL if careful else _PLAIN
        self.tensors: list[torch.Tensor] = []
        self._indices: dict[int, tuple[int, torch.Tensor]] = {}  # by id; the reference keeps the id unique
        self._allow_pickle = allow_pickle

    def pack(self, value: object, depth: int = 0) -> object:
        return _PACKERS[type(value)](self, value, depth)

    def sequence(self, values: Sequence[object], depth: int) -> Sequence[object]:
        if depth >= MAX_DEPTH:
            raise _too_deep()
        plain = self.plain
        if values:
            cls = type(values[0])
            if cls in plain and countOf(map(type, values), cls) == len(values):
                return values
        packed: list[object] = []
        try:
            for value in values:
                cls = type(value)
                packed.append(value if cls in plain else _PACKERS[cls](self, value, depth + 1))
        except RefusedError as refused:
            refused.path.append(f"[{len(packed)}]")
            raise
        return packed

    def mapping(self, values: dict[Any, object], depth: int) -> object:
        if depth >= MAX_DEPTH:
            raise _too_deep()
        plain = self.plain
        keys = _TEXTS & plain if len(values) > MOST_NUMBERS else plain
        for key in values:
            if type(key) not in keys:
                return Ext(_DICT, self.pairs(values, depth))
        packed: dict[Any, object] | None = None
        try:
            for key, value in values.items():
                cls = type(value)
                if cls not in plain:
                    if packed is None:
                        packed = values.copy()
                    packed[key] = _PACKERS[cls](self, value, depth + 1)
        except RefusedError as refused:
            refused.path.append(f"[{_label(key)}]")
            raise
        return values if packed is None else packed

    def pairs(self, values: Mapping[Any, object], depth: int) -> bytes:
        if depth >= MAX_DEPTH:
            raise _too_deep()
        packed: list[object] = []
        key: object = None
        try:
            for key, value in values.items():
                packed.append(self.pack(key, depth + 1))
                packed.append(self.pack(value, depth + 1))
        except RefusedError as refused:
            at_key = len(packed) % 2 == 0
            refused.path.append(f".keys()[{len(packed) // 2}]" if at_key else f"[{_label(key)}]")
            raise
        return to_msgpack(packed)

    def tensor(self, value: torch.Tensor, depth: int) -> object:
        known = self._indices.get(id(value))
        if known is None:
            try:
                dense = codec_types.dense_tensor(value)
            except codec_types.UnfitError as error:
                return self.refuse(value, str(error))
            known = self._indices[id(value)] = (len(self.tensors), value)
            self.tensors.append(dense)
        return Ext(_TENSOR, known[0].to_bytes(4, "little"))

    def numpy(self, value: Any, depth: int) -> object:
        try:
            parts = codec_types.numpy_parts(value)
        except codec_types.UnfitError as error:
            return self.refuse(value, str(error))
        return Ext(_ARRAY if type(value).__name__ == "ndarray" else _NUMPY_SCALAR, to_msgpack(parts))

    def registered(self, value: object, depth: int) -> object:
        if depth >= MAX_DEPTH:
            raise _too_deep()
        entry = codec_types.registered_class(type(value))
        try:
            parts = entry.take(value)
        except AttributeError as error:
            return self.refuse(value, f"a {entry.name} with a field that was never set ({error})")
        packed: dict[str, object] = {}
        field = ""
        try:
            for field, part in zip(entry.fields, parts, strict=True):
                packed[field] = self.pack(part, depth + 1)
        except RefusedError as refused:
            refused.path.append(f".{field}")
            raise
        return Ext(_REGISTERED, to_msgpack((entry.name, packed)))

    def unknown(self, value: object, depth: int) -> object:
        cls = type(value)
        name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
        what = f"an {name}" if name[0] in "aeiou" else f"a {name}"
        for base in cls.__mro__:
            if base in _PACKERS or codec_types.is_registered(base):
                what += f", which is not sent as its base {base.__qualname__}"
                break
        return self.refuse(value, what)

    def refuse(self, value: object, what: str) -> object:
        if not self._allow_pickle:
            raise RefusedError(
                what,
                "convert the value, register its class (dataclass, enum, Struct or named tuple) on every rank with "
                "parallel_state.register_type(cls), or give the group allow_pickle=True on every rank",
            )
        try:
            return Ext(_PICKLED, pickle.dumps(value, protocol=5))
        except Exception as error:  # __reduce__ is the caller's code
            raise RefusedError(what, f"the value can't be pickled either: {error!r}") from error


def _too_deep() -> RefusedError:
    remedy = "flatten the object, and look for a container that holds itself"
    return RefusedError(f"nested more than {MAX_DEPTH} deep", remedy)


def _label(key: object) -> str:
    try:
        text = repr(key)
    except Exception:
        text = f"<{type(key).__name__}>"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _pack_int(encoder: Encoder, value: int, depth: int) -> object:
    if -(1 << 63) <= value < 1 << 64:
        return value
    return Ext(_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _pack_str(encoder: Encoder, value: str, depth: int) -> object:
    if encoder.plain is _CAREFUL:
        try:
            value.encode()
        except UnicodeEncodeError:
            return encoder.refuse(value, "a str with a lone surrogate, which UTF-8 can't represent")
    return value


def _pack_as_is(encoder: Encoder, value: object, depth: int) -> object:
    return value


_Packer = Callable[[Encoder, Any, int], object]


class _Packers(dict[type, _Packer]):
    def __missing__(self, cls: type) -> _Packer:
        if codec_types.is_registered(cls):
            packer: _Packer = Encoder.registered
        elif codec_types.is_numpy(cls):
            packer = Encoder.numpy
        else:
            return Encoder.unknown  # the class may be registered later
        self[cls] = packer
        return packer


_PACKERS = _Packers(
    {
        type(None): _pack_as_is,
        bool: _pack_as_is,
        int: _pack_int,
        float: _pack_as_is,
        str: _pack_str,
        bytes: _pack_as_is,
        list: Encoder.sequence,
        dict: Encoder.mapping,
        tuple: lambda encoder, value, depth: Ext(_TUPLE, to_msgpack(encoder.sequence(value, depth))),
        set: lambda encoder, value, depth: Ext(_SET, to_msgpack(encoder.sequence([*value], depth))),
        frozenset: lambda encoder, value, depth: Ext(_FROZENSET, to_msgpack(encoder.sequence([*value], depth))),
        collections.OrderedDict: lambda encoder, value, depth: Ext(_ORDERED_DICT, encoder.pairs(value, depth)),
        complex: lambda encoder, value, depth: Ext(_COMPLEX, _COMPLEX_FORMAT.pack(value.real, value.imag)),
        bytearray: lambda encoder, value, depth: Ext(_BYTEARRAY, value),
        torch.Tensor: Encoder.tensor,
        torch.nn.Parameter: Encoder.tensor,
        torch.dtype: lambda encoder, value, depth: Ext(_DTYPE, DTYPE_NAMES[value].encode()),
        torch.device: lambda encoder, value, depth: Ext(_DEVICE, str(value).encode()),
        torch.Size: lambda encoder, value, depth: Ext(_SIZE, to_msgpack(encoder.sequence(tuple(value), depth))),
    }
)


class Decoder:
    """Decodes a message body. The methods can raise any exception; the caller raises MessageDecodeError instead."""

    __slots__ = ("_allow_pickle", "_depth", "_left_s", "_tensors")

    def __init__(self, tensors: Sequence[torch.Tensor], allow_pickle: bool) -> None:
        self._tensors = tensors
        self._allow_pickle = allow_pickle
        self._depth = 0
        self._left_s = _GRACE_S

    def value(self, data: bytes | memoryview) -> Any:
        if len(data) > _UNCHECKED_BYTES:
            self._left_s += len(data) * _S_PER_BYTE
            if not _key_check()(bytes(data)):
                raise MessageDecodeError(
                    "a message is malformed: a dict has keys of an unsupported type, or is nested too deep"
                )
        return _from_msgpack(data, ext_hook=self._ext)

    def items(self, data: memoryview) -> list[Any]:
        items = _from_msgpack(data, ext_hook=self._ext)
        if type(items) is not list:
            raise MessageDecodeError(
                f"a message is malformed: the items of a set or dict must be a list, but are a {type(items).__name__}"
            )
        return items

    def distinct(self, data: memoryview) -> frozenset[Any]:
        items = self.items(data)
        made = frozenset(items) if len(items) <= _UNTIMED_ITEMS else frozenset(self._timed(items, len(data), set()))
        if len(made) != len(items):
            raise MessageDecodeError("a message is malformed: it holds a set with duplicates")
        return made

    def _timed(self, items: Sequence[Any], size_bytes: int, made: Any) -> Any:
        batch = max(1, min(1024, len(items) * _BATCH_BYTES // size_bytes))
        started = time.thread_time()
        left_s = self._left_s
        for start in range(0, len(items), batch):
            made.update(items[start : start + batch])
            self._left_s = left_s - (time.thread_time() - started)
            if self._left_s < 0:
                raise MessageDecodeError(
                    f"a message holds a set or dict of {len(items)} items that collide: too many hashes are equal, so "
                    "decoding would take too long; send a list"
                )
        return made

    def pairs(self, data: memoryview) -> dict[Any, Any]:
        items = self.items(data)
        made: dict[Any, Any] = {}
        pairs = list(zip(items[::2], items[1::2], strict=True))
        if len(pairs) <= _UNTIMED_ITEMS:
            made.update(pairs)
        else:
            self._timed(pairs, len(data), made)
        if 2 * len(made) != len(items):
            raise MessageDecodeError("a message is malformed: it holds a dict with duplicate keys")
        return made

    def size(self, data: memoryview) -> torch.Size:
        items = self.items(data)
        if not all(type(item) is int for item in items):
            raise MessageDecodeError("a message is malformed: it holds a torch.Size with other values than ints")
        return torch.Size(items)

    def tensor(self, data: memoryview) -> torch.Tensor:
        index = int.from_bytes(data, "little")
        if index >= len(self._tensors):
            raise MessageDecodeError(
                f"a message is malformed: it refers to tensor number {str(index)[:20]}, but has {len(self._tensors)}"
            )
        return self._tensors[index]

    def numpy_scalar(self, data: memoryview) -> Any:
        array = codec_types.numpy_array(self.items(data))
        if array.ndim:
            raise MessageDecodeError("a message is malformed: it holds a numpy scalar with a shape")
        return array[()]

    def registered(self, data: memoryview) -> object:
        name, values = self.items(data)
        return codec_types.build_registered(name, values)

    def pickled(self, data: memoryview) -> object:
        if not self._allow_pickle:
            raise MessageDecodeError(
                "a message holds a pickled value, which is not loaded: its sender passed allow_pickle=True, this rank "
                "did not; pass allow_pickle=True on every rank if you trust all ranks, or register the value's class"
            )
        return pickle.loads(data)

    def _ext(self, code: int, data: memoryview) -> object:
        unpack = _UNPACKERS.get(code)
        if unpack is None:
            raise MessageDecodeError(f"a message is malformed: it holds the unknown extension code {code}")
        self._depth += 1
        if self._depth > MAX_DEPTH + 1:  # one for a value within the innermost container
            raise MessageDecodeError(f"a message's containers are nested more than {MAX_DEPTH} deep")
        value = unpack(self, data)
        self._depth -= 1
        return value


_UNPACKERS: dict[int, Callable[[Decoder, memoryview], object]] = {
    _TUPLE: lambda decoder, data: tuple(decoder.items(data)),
    _DICT: Decoder.pairs,
    _SET: lambda decoder, data: set(decoder.distinct(data)),
    _FROZENSET: Decoder.distinct,
    _ORDERED_DICT: lambda decoder, data: collections.OrderedDict(decoder.pairs(data)),
    _INT: lambda decoder, data: int.from_bytes(data, "little", signed=True),
    _COMPLEX: lambda decoder, data: complex(*_COMPLEX_FORMAT.unpack(data)),
    _BYTEARRAY: lambda decoder, data: bytearray(data),
    _TENSOR: Decoder.tensor,
    _DTYPE: lambda decoder, data: DTYPES[str(data, "ascii")],
    _DEVICE: lambda decoder, data: codec_types.read_device(str(data, "ascii")),
    _SIZE: Decoder.size,
    _ARRAY: lambda decoder, data: codec_types.numpy_array(decoder.items(data)),
    _NUMPY_SCALAR: Decoder.numpy_scalar,
    _REGISTERED: Decoder.registered,
    _PICKLED: Decoder.pickled,
}
