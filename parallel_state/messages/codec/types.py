"""Encodes and decodes tensors' metadata, devices, numpy values and registered classes."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar, overload

import msgspec
import torch

from device_communicators.base.errors import InvalidArgumentError, MessageDecodeError
from device_communicators.base.torch_internals import is_wrapped_tensor
from device_communicators.calls.memory import dtype_refusal, with_values

T = TypeVar("T")

MAX_DIMS = 64

MAX_TENSOR_BYTES = 1 << 48


class UnfitError(Exception): ...


class RegisteredType(NamedTuple):
    cls: type
    name: str
    fields: tuple[str, ...]
    take: Callable[[Any], Sequence[object]]
    make: Callable[[list[Any]], object]


_by_class: dict[type, RegisteredType] = {}
_by_name: dict[str, RegisteredType] = {}


@overload
def register_type(cls: type[T], *, name: str | None = None) -> type[T]: ...
@overload
def register_type(cls: None = None, *, name: str | None = None) -> Callable[[type[T]], type[T]]: ...
def register_type(cls: type | None = None, *, name: str | None = None) -> Any:
    """Allows values of a class in messages. Call this function, or use it as a decorator, on every rank.

    `cls` is a dataclass, an enum, a `msgspec.Struct` or a named tuple. Subclasses must be registered separately. `name`
    is by default `module.qualname`. A receiver sets the fields without calling `__new__`, `__init__` or
    `__post_init__`, and without checking their types. Only a Struct is built by its constructor.

    Raises InvalidArgumentError for any other kind of class, and for a name that another class already has.
    """
    if cls is None:
        return functools.partial(register_type, name=name)
    if not isinstance(cls, type):
        raise InvalidArgumentError(f"`cls` must be a class, but is {cls!r}")
    wire_name = f"{cls.__module__}.{cls.__qualname__}" if name is None else name
    if not isinstance(wire_name, str) or not wire_name:
        raise InvalidArgumentError(f"`name` must be a non-empty str, but is {wire_name!r}")
    known = _by_class.get(cls)
    if known is not None and known.name != wire_name:
        raise InvalidArgumentError(f"{cls!r} is registered as {known.name!r} already, not as {wire_name!r}")
    entry = _by_name.setdefault(wire_name, _describe(cls, wire_name))
    if entry.cls is not cls:
        raise InvalidArgumentError(f"the name {wire_name!r} belongs to {entry.cls!r}; give {cls!r} another `name`")
    _by_class[cls] = entry
    return cls


def is_registered(cls: type) -> bool:
    """Returns True if `register_type` was called for this class, not just for a base class."""
    return cls in _by_class


def registered_class(cls: type) -> RegisteredType:
    return _by_class[cls]


def build_registered(name: object, values: object) -> object:
    entry = _by_name.get(name) if isinstance(name, str) else None
    if entry is None:
        known = ", ".join(sorted(_by_name)[:20]) or "none"
        raise MessageDecodeError(
            f"a message holds a value of type {str(name)[:200]!r}, which is not registered on this rank "
            f"(known: {known}); call parallel_state.register_type for it on every rank"
        )
    if not isinstance(values, dict) or values.keys() != set(entry.fields):
        found = sorted(str(key)[:60] for key in values)[:50] if isinstance(values, dict) else type(values).__name__
        raise MessageDecodeError(
            f"fields of {entry.name!r} must be {sorted(entry.fields)}, but are {found} in the message; "
            f"every rank must run the same version of the class"
        )
    return entry.make([values[field] for field in entry.fields])


def _describe(cls: type, name: str) -> RegisteredType:
    if issubclass(cls, enum.Flag):
        return RegisteredType(cls, name, ("value",), lambda flag: (flag._value_,), lambda values: cls(values[0]))
    if issubclass(cls, enum.Enum):
        members = cls.__members__
        return RegisteredType(cls, name, ("name",), lambda member: (member._name_,), lambda values: members[values[0]])
    if issubclass(cls, msgspec.Struct):
        fields = cls.__struct_fields__
        return RegisteredType(
            cls, name, fields, _getter(fields), lambda values: cls(**dict(zip(fields, values, strict=True)))
        )
    if dataclasses.is_dataclass(cls):
        try:
            object.__new__(cls)
        except TypeError as error:
            raise InvalidArgumentError(f"{cls!r} can't be registered, only plain dataclasses can: {error}") from error
        fields = tuple(field.name for field in dataclasses.fields(cls))
        return RegisteredType(cls, name, fields, _getter(fields), functools.partial(_build_dataclass, cls, fields))
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return RegisteredType(cls, name, tuple(cls._fields), tuple, lambda values: tuple.__new__(cls, values))
    raise InvalidArgumentError(
        f"`cls` must be a dataclass, an enum.Enum, a msgspec.Struct or a named tuple, but is {cls!r}"
    )


def _getter(fields: tuple[str, ...]) -> Callable[[Any], Sequence[object]]:
    return lambda value: [getattr(value, field) for field in fields]


def _build_dataclass(cls: type, fields: tuple[str, ...], values: list[Any]) -> object:
    made: object = object.__new__(cls)
    for field, value in zip(fields, values, strict=True):
        object.__setattr__(made, field, value)  # a frozen class has its own __setattr__, which raises
    return made


DTYPE_NAMES: dict[torch.dtype, str] = {
    dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_TENSOR_DTYPES = {name: (dtype, dtype.itemsize) for name, dtype in DTYPES.items() if dtype_refusal(dtype) is None}


class TensorMetadata(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    device_type: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def dense_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor` dense and detached, without a copy if possible."""
    if tensor.layout is not torch.strided:
        raise UnfitError(f"a tensor of layout {tensor.layout}, but only dense strided tensors can be sent")
    if tensor.is_nested:
        raise UnfitError(
            "a nested tensor, but only dense strided tensors can be sent; send the list that unbind() returns"
        )
    refusal = dtype_refusal(tensor.dtype)
    if refusal is not None:
        raise UnfitError(refusal)
    if tensor.is_meta:
        raise UnfitError("a meta tensor, which has no data; send its shape and dtype")
    if is_wrapped_tensor(tensor):
        raise UnfitError(
            "a tensor inside a torch.func transform (grad, vmap, …), which has no memory of its own; send the result "
            "of the transform"
        )
    if tensor.requires_grad or type(tensor) is torch.nn.Parameter:
        tensor = tensor.detach()
    return with_values(tensor)


def tensor_rows(tensors: Sequence[torch.Tensor]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(DTYPE_NAMES[t.dtype], tuple(t.shape), "cpu" if t.is_cpu else t.device.type) for t in tensors]


_Dim = Annotated[int, msgspec.Meta(ge=0, lt=MAX_TENSOR_BYTES)]
_Shape = Annotated[tuple[_Dim, ...], msgspec.Meta(max_length=MAX_DIMS)]
_decode_rows = msgspec.msgpack.Decoder(list[tuple[str, _Shape, str]]).decode


def read_tensor_rows(data: memoryview) -> list[TensorMetadata]:
    tensors = []
    claimed = 0
    for name, shape, device in _decode_rows(data):
        if name not in _TENSOR_DTYPES:
            raise MessageDecodeError(f"a message claims a tensor of dtype {name[:40]!r}, which no dense tensor has")
        dtype, itemsize = _TENSOR_DTYPES[name]
        # Sizes of 0 are left out: otherwise the product is 0 whatever a damaged message claims for the other dims.
        claimed += itemsize * math.prod(filter(None, shape))
        tensors.append(TensorMetadata(dtype, shape, _device_type(device)))
    if claimed >= MAX_TENSOR_BYTES:
        raise MessageDecodeError(f"the message is damaged: it announces {claimed} bytes of tensors; the limit is 2**48")
    return tensors


@functools.lru_cache(maxsize=32)
def _device_type(name: str) -> str:
    if name == "meta" or torch.device(name).type != name:
        raise MessageDecodeError(
            f"a message claims a tensor on the device type {name!r}, on which no tensor has memory"
        )
    return name


def read_device(text: str) -> torch.device:
    """Returns the device named `text`. Raises MessageDecodeError for a large index, which torch would truncate."""
    device = torch.device(text)
    if str(device) != text:
        raise MessageDecodeError(f"a message holds the device {text[:40]!r}, which is not a device of torch")
    return device


_NUMPY_DTYPE = re.compile(r"[<>|][biufcmMSUV][1-9][0-9]{0,8}(\[[0-9A-Za-z/]{1,20}\])?")


def is_numpy(cls: type) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    return cls is numpy.ndarray or (issubclass(cls, numpy.generic) and cls.__module__ == "numpy")


def numpy_parts(value: Any) -> tuple[str, tuple[int, ...], str, bytes]:
    """Returns a numpy value's dtype, shape, memory order (`C` or `F`) and bytes."""
    import numpy

    array = numpy.asarray(value)
    spec = array.dtype.str
    # The names of ml_dtypes' bfloat16 (<V2) and of structured dtypes (|V12) are ambiguous.
    if not _NUMPY_DTYPE.fullmatch(spec) or numpy.dtype(spec) != array.dtype:
        raise UnfitError(
            f"a numpy value of dtype {array.dtype}, but only numbers, bools, times and fixed-size strings can be sent"
        )
    if array.dtype.kind in "SU" and array is not value and array[()] != value:
        raise UnfitError(f"a {type(value).__name__} that ends in NUL, which numpy would remove; send a str or bytes")
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    return spec, array.shape, order, array.tobytes(order)  # type: ignore[arg-type]


def numpy_array(parts: list[Any]) -> Any:
    try:
        import numpy
    except ImportError as error:
        raise MessageDecodeError("a message holds a numpy value, but numpy is not installed on this rank") from error
    spec, shape, order, data = parts
    if not _NUMPY_DTYPE.fullmatch(spec) or order not in ("C", "F") or type(data) is not bytes:
        raise MessageDecodeError("a message is malformed: it holds a numpy value with a wrong dtype, order or data")
    dtype = numpy.dtype(spec)
    if len(shape) > MAX_DIMS or not all(0 <= size < MAX_TENSOR_BYTES for size in shape):
        raise MessageDecodeError("a message is malformed: it holds a numpy value with a malformed shape")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise MessageDecodeError(
            f"a numpy value of dtype {dtype} and shape {shape} must have {math.prod(shape) * dtype.itemsize} bytes, "
            f"but the message holds {len(data)}"
        )
    return numpy.ndarray(tuple(shape), dtype, bytearray(data), order=order)
