"""Encodes objects without pickle, in this format.

    metadata = version: u8 | length of table: u32, little-endian | table | body
    table    = nothing, or msgpack: one [dtype, shape, device type] per tensor
    body     = msgpack: the object

Tensors are sent separately from the metadata.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from device_communicators.base import settings
from device_communicators.base.errors import MessageDecodeError, MessageEncodeError
from parallel_state.messages.codec import types as codec_types
from parallel_state.messages.codec import values as codec_values
from parallel_state.messages.codec.types import TensorMetadata, is_registered, register_type
from parallel_state.messages.codec.values import MAX_DEPTH, to_msgpack

__all__ = ["MAX_DEPTH", "Encoded", "Message", "TensorMetadata", "encode", "is_registered", "read", "register_type"]

FORMAT_VERSION = 1

_HEADER = struct.Struct("<BI")
_PICKLE_MARK = 0x80  # of pickle protocols 2 to 5
_PLAIN = _HEADER.pack(FORMAT_VERSION, 0)


class Encoded(NamedTuple):
    metadata: bytes
    tensors: list[torch.Tensor]


def encode(obj: object, *, allow_pickle: bool = False) -> Encoded:
    """Encodes an object. If a value can't be sent, raises MessageEncodeError with the keys that lead to this value.

    The returned tensors are detached, not copied. With `allow_pickle`, values of other types are pickled, including
    subclasses of known types.
    """
    try:
        try:
            encoded = _encode(obj, allow_pickle, careful=False)
        except (OverflowError, UnicodeEncodeError):
            # An int of more than 64 bits or a lone surrogate, which msgspec rejects.
            encoded = _encode(obj, allow_pickle, careful=True)
    except codec_values.RefusedError as refused:
        raise MessageEncodeError(refused.text()) from refused.__cause__
    except (RecursionError, ValueError, OverflowError) as error:
        raise MessageEncodeError(f"the object can't be encoded: {error}") from error
    limit, size = settings.MAX_METADATA_BYTES.get(), len(encoded.metadata) + len(encoded.tensors)  # one flag per tensor
    if size > limit:
        raise MessageEncodeError(
            f"the object without its tensors must be at most {limit} bytes, but is {size}; "
            f"send large data as tensors, or raise {settings.MAX_METADATA_BYTES.name} on every rank"
        )
    return encoded


def _encode(obj: object, allow_pickle: bool, careful: bool) -> Encoded:
    encoder = codec_values.Encoder(allow_pickle, careful)
    body = to_msgpack(encoder.pack(obj))
    if not encoder.tensors:
        return Encoded(_PLAIN + body, [])
    table = to_msgpack(codec_types.tensor_rows(encoder.tensors))
    return Encoded(_HEADER.pack(FORMAT_VERSION, len(table)) + table + body, encoder.tensors)


class Message:
    """Metadata of a received object. The caller receives `tensors` in order, then calls `build`."""

    __slots__ = ("_allow_pickle", "_body", "_value", "tensors")

    tensors: list[TensorMetadata]

    def __init__(self, tensors: list[TensorMetadata], body: memoryview, allow_pickle: bool) -> None:
        self.tensors = tensors
        self._allow_pickle = allow_pickle
        self._body = bytes(body) if tensors else b""
        self._value = None if tensors else _decode(body, (), allow_pickle)

    def build(self, tensors: Sequence[torch.Tensor] = ()) -> Any:
        """Returns the object; call this once. `tensors`: those that `self.tensors` describes."""
        return _decode(self._body, tensors, self._allow_pickle) if self.tensors else self._value


def read(data: bytes | bytearray | memoryview, *, allow_pickle: bool = False) -> Message:
    """Parses a message's metadata. Raises only MessageDecodeError, even for bytes of a hostile peer.

    The caller can reuse `data` afterwards.
    """
    view = memoryview(data).cast("B")
    limit = settings.MAX_METADATA_BYTES.get()
    if len(view) > limit:
        name = settings.MAX_METADATA_BYTES.name
        raise MessageDecodeError(
            f"a message's metadata must be at most {limit} bytes ({name}), but is {len(view)}; raise {name} everywhere"
        )
    if len(view) < _HEADER.size:
        raise MessageDecodeError(f"a message's metadata must be {_HEADER.size} bytes or more, but is {len(view)}")
    version, table_bytes = _HEADER.unpack_from(view)
    if version != FORMAT_VERSION:
        hint = ", as a pickle does" if version == _PICKLE_MARK else ""
        raise MessageDecodeError(
            f"a message's metadata must begin with format version {FORMAT_VERSION}, but begins with {version}{hint}; "
            f"every rank must run the same version of parallel_state"
        )
    body_at = _HEADER.size + table_bytes
    if body_at > len(view):
        raise MessageDecodeError(
            f"a message is malformed: its metadata is {len(view)} bytes, but its table of tensors {table_bytes}"
        )
    table, problem = view[_HEADER.size : body_at], "the tensor table of a message is malformed"
    tensors = _decoded(problem, codec_types.read_tensor_rows, table) if table_bytes else []
    return Message(tensors, view[body_at:], allow_pickle)


def _decode(body: bytes | memoryview, tensors: Sequence[torch.Tensor], allow_pickle: bool) -> Any:
    return _decoded("bytes from a peer are not a message", codec_values.Decoder(tensors, allow_pickle).value, body)


def _decoded(problem: str, decode: Callable[[Any], Any], data: bytes | memoryview) -> Any:
    try:
        return decode(data)
    except MessageDecodeError:
        raise
    except Exception as error:
        raise MessageDecodeError(f"decoding failed, because {problem}: {error!r:.300}") from error
