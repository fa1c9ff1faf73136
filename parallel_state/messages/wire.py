"""The format of a message: a head (header and body), and the tensors.

The body is the codec's metadata and one byte per tensor: 1 if only a slice is sent. If a value can't be encoded, the
body is the error's text. If messages are sent as transfers, the head is split, because a receiver must know the size of
each transfer beforehand:

    frame     [4096]   the head or its beginning
    rest      [n]      the remaining bytes of the head, if any
    tensors            one transfer each
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from device_communicators.base import settings
from device_communicators.base.errors import (
    CollectiveMismatchError,
    InvalidArgumentError,
    MessageDecodeError,
    RemoteError,
)
from device_communicators.base.torch_internals import mark_constant
from device_communicators.calls.memory import dense
from device_communicators.cpu.types import Packed, Pinned
from device_communicators.routing.communicator import GroupContext
from parallel_state.messages.codec import coding as codec
from parallel_state.messages.codec import values as codec_values
from parallel_state.messages.codec.types import MAX_TENSOR_BYTES, UnfitError, dense_tensor
from parallel_state.messages.slices import AllGatherGroup, Cut, can_be_cut, cut_of, cut_tensors

FRAME_BYTES = 4096
_HEADER = struct.Struct("<4sBxHIIQQ")  # magic, kind, slices, tensors, unused, body bytes, tensor bytes
HEADER_BYTES = _HEADER.size
_INLINE_BYTES = FRAME_BYTES - HEADER_BYTES
_LONG_BYTES = 64 << 10
_MAGIC = b"PSM1"
_VALUE, _ERROR, _LIST = 0, 1, 2
_DIGEST_BYTES = 16
_DIGEST = re.compile(f"[0-9a-f]{{{2 * _DIGEST_BYTES}}}", re.ASCII)
CPU = torch.device("cpu")
POOLED_BYTES = 128 << 10
"""Received tensors of at least this size reuse memory through `group.empty`: page faults in new memory cost much."""
LENT_BYTES = 128 << 10
"""Messages with at least this total tensor size are read in the sender's memory. Equals `Lender::kLeastBytes`."""
LEFT, DONE, NO_ROOM = range(3)
"""Results of a send in C++: left to Python, done, or no room to send. Equal `Outcome` in csrc/messages.h."""
STARTED = 4
"""Equals `kStarted` in csrc/messages_api.cpp. STARTED + n means that transfer number n was started."""
NO_BYTES = torch.empty(0, dtype=torch.uint8, device=CPU)
NOTHING = object()


class Header(NamedTuple):
    kind: int
    slices: int
    """Number of slices of each sliced tensor; 0 if the sender has no all-gather group."""
    tensors: int
    body_bytes: int
    tensor_bytes: int
    """Total size of the tensors. A sliced tensor counts with its full size."""

    @property
    def is_error(self) -> bool:
        return self.kind == _ERROR

    @property
    def rest_bytes(self) -> int:
        return max(0, self.body_bytes - _INLINE_BYTES)


@dataclass(slots=True)
class Outgoing:
    """A message to send. If `error` is set, `head` contains its text. `more`: the rest of a long head. `counted`: the
    operation's name in statistics, if not the usual one.
    """

    head: bytes
    tensors: list[Tensor]
    error: Exception | None = None
    counted: str = ""
    more: Pinned | None = None

    @property
    def cpu_bytes(self) -> int:
        return sum([tensor.nbytes for tensor in self.tensors if tensor.is_cpu])

    @property
    def counted_bytes(self) -> int:
        more_bytes = 0 if self.more is None else self.more.nbytes
        return max(FRAME_BYTES, len(self.head) + more_bytes) + self.cpu_bytes

    @property
    def whole_head(self) -> bytes:
        return self.head if self.more is None else b"".join((self.head, *self.more.views()))

    @property
    def frame(self) -> Tensor:
        return torch.frombuffer(bytearray(self.whole_head[:FRAME_BYTES].ljust(FRAME_BYTES, b"\0")), dtype=torch.uint8)

    @property
    def rest(self) -> Tensor | None:
        rest = bytearray(self.whole_head[FRAME_BYTES:])
        return torch.frombuffer(rest, dtype=torch.uint8) if rest else None


def encode(
    obj: Any,
    must_be: type | None = None,
    all_gather_group: AllGatherGroup | None = None,
    all_gather_tensors: Mapping[str, bool] | None = None,
    *,
    allow_pickle: bool,
) -> Outgoing:
    """Encodes `obj`. After an error, doesn't raise, but returns a message with the error's text. `must_be`: required
    type.
    """
    part = cut_of(all_gather_group, all_gather_tensors)
    if must_be is None or isinstance(obj, must_be):
        packed = codec_values.pack(obj, part)
        if packed is not None:
            return of_packed(packed, part)
    whole: set[int] = set()
    slices = part.slices
    try:
        if slices > 1 and all_gather_tensors and isinstance(obj, dict):
            obj, whole = _kept_whole(obj, all_gather_tensors)
        encoded = _encode_checked(obj, allow_pickle, must_be)
        tensors = [dense(tensor.detach()) for tensor in encoded.tensors]
    except Exception as error:  # of any kind, because the readers wait
        text = str(error).encode(errors="replace")[:_INLINE_BYTES]
        return Outgoing(head_of(Header(_ERROR, 0, 0, len(text), 0), text), [], error)
    tensor_bytes = sum(tensor.nbytes for tensor in tensors)
    cut = [False] * len(tensors)
    if slices > 1:
        cut = [
            can_be_cut(tensor.numel(), slices) and id(original) not in whole
            for tensor, original in zip(tensors, encoded.tensors, strict=True)
        ]
        tensors = cut_tensors(tensors, cut, slices, part.mine)
    header = Header(_VALUE, slices, len(tensors), len(encoded.metadata) + len(cut), tensor_bytes)
    return Outgoing(head_of(header, encoded.metadata, bytes(cut)), tensors)


def of_packed(packed: Packed, cut: Cut) -> Outgoing:
    tensors = [x.detach() if x.requires_grad else x for x in packed.tensors]
    if any(packed.is_cut):
        tensors = cut_tensors(tensors, packed.is_cut, cut.slices, cut.mine)
    if packed.more.nbytes > _LONG_BYTES:
        return Outgoing(packed.start, tensors, more=packed.more)
    return Outgoing(b"".join((packed.start, *packed.more.views())), tensors)


def parse_frame(frame: Tensor, context: GroupContext, src: int) -> Header:
    data = bytes_of(frame)
    if len(data) != FRAME_BYTES:
        raise not_a_message(f"its frame has {len(data)} bytes, not {FRAME_BYTES}", context, src)
    header = parse_header(data, context, src)
    if header.is_error:
        raise remote_error(data[_HEADER.size : _HEADER.size + header.body_bytes], context, src)
    return header


def parse_header(data: bytes | memoryview, context: GroupContext, src: int, head_bytes: int | None = None) -> Header:
    """Reads and checks the header of a message from group rank `src`. `head_bytes`: size of header and body, if
    known.
    """
    if len(data) < _HEADER.size:
        raise not_a_message(
            f"its {len(data)} bytes are fewer than the {_HEADER.size} of a message's header", context, src
        )
    magic, kind, slices, tensors, _, body_bytes, tensor_bytes = _HEADER.unpack_from(data)
    limit = settings.MAX_METADATA_BYTES.get()
    problem = None
    if magic != _MAGIC:
        problem = f"it begins with {magic!r}, not {_MAGIC!r}"
    elif kind not in (_VALUE, _ERROR, _LIST):
        problem = f"its kind is {kind}"
    elif kind == _ERROR and (body_bytes > _INLINE_BYTES or tensors or tensor_bytes):
        problem = "it has an error's text that is longer than the frame, or tensors after the text"
    elif kind != _ERROR and body_bytes > limit:
        problem = f"its metadata has {body_bytes} bytes, more than {limit} ({settings.MAX_METADATA_BYTES.name})"
    elif tensors > body_bytes:
        problem = f"it announces {tensors} tensors in {body_bytes} bytes"
    elif tensor_bytes >= MAX_TENSOR_BYTES:
        problem = f"it announces tensors of {tensor_bytes} bytes"
    elif head_bytes is not None and HEADER_BYTES + body_bytes != head_bytes:
        problem = f"its header announces {body_bytes} bytes, but {head_bytes - HEADER_BYTES} follow"
    if problem is not None:
        raise not_a_message(problem, context, src)
    return Header(kind, slices, tensors, body_bytes, tensor_bytes)


def head_of_list(form: str, tensors: Sequence[Tensor]) -> bytes:
    """Returns the head of a message with the tensors of a `TensorDictSpec`. `form`: the spec's text or digest.

    `write_list_head` in csrc/messages.h writes the same head.
    """
    return head_of_sizes(form, tuple([tensor.nbytes for tensor in tensors]))


@lru_cache(maxsize=256)
def head_of_sizes(form: str, sizes: tuple[int, ...]) -> bytes:
    digest = form if _DIGEST.fullmatch(form) else digest_of(form)
    body = bytes.fromhex(digest) + struct.pack(f"<{len(sizes)}Q", *sizes)
    return head_of(Header(_LIST, 0, len(sizes), len(body), sum(sizes)), body)


def check_list(expected: bytes, header: Header, body: bytes | memoryview, context: GroupContext, src: int) -> None:
    """Raises CollectiveMismatchError if `header` and `body`, received from rank `src`, differ from the bytes
    `expected`.
    """
    body = bytes(body)
    if head_of(header, body) == expected:
        return
    if header.kind != _LIST:
        found = "sent none with a spec, but this rank receives with one"
    elif body[:_DIGEST_BYTES] != expected[HEADER_BYTES : HEADER_BYTES + _DIGEST_BYTES]:
        found = "used another spec than this rank: other keys, shapes, dtypes or constants, or another order"
    else:
        found = "cut other tensors into slices; pass the same all_gather_group and all_gather_tensors on both sides"
    raise _list_mismatch(found, context, src)


def digest_of(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()


mark_constant(digest_of)  # compiled functions call it with constants only


def _list_mismatch(found: str, context: GroupContext, src: int) -> CollectiveMismatchError:
    return CollectiveMismatchError(
        f"sender and receivers of a tensor dict must pass equal specs, but rank {src} of {context} {found}. This group "
        "is unusable now; pass spec=TensorDictSpec.of(…) of the same dict on every rank, or on none",
        group=context.name,
        rank=context.rank,
        suspect_ranks=[context.ranks[src]],
    )


def remote_error(text: bytes | memoryview, context: GroupContext, src: int) -> RemoteError:
    return RemoteError(
        f"rank {src} of group {context.name!r} (global rank {context.ranks[src]}) could not send: "
        f"{str(text, errors='replace')}",
        rank=context.ranks[src],
    )


def body_of(header: Header, frame: Tensor, rest: Tensor | None) -> bytes:
    body = bytes_of(frame)[_HEADER.size : _HEADER.size + header.body_bytes]
    return body if rest is None else body + bytes_of(rest)


def read_body(
    header: Header, body: bytes | memoryview, context: GroupContext, src: int, allow_pickle: bool
) -> tuple[codec.Message, list[bool]]:
    """Decodes the body of a message from rank `src`. Also returns a list with True for each tensor that was sent as a
    slice.
    """
    if header.kind == _LIST:
        raise _list_mismatch("sent a tensor dict with a spec, but this rank receives without a spec", context, src)
    end = header.body_bytes - header.tensors
    try:
        message = codec.read(body[:end], allow_pickle=allow_pickle)
        cut = [flag != 0 for flag in body[end:]]
        if len(message.tensors) != len(cut):
            raise MessageDecodeError(
                f"the message's header announces {len(cut)} tensors, its metadata {len(message.tensors)}"
            )
        tensor_bytes = sum(metadata.nbytes for metadata in message.tensors)
        if tensor_bytes != header.tensor_bytes:
            raise MessageDecodeError(
                f"the message's header announces {header.tensor_bytes} bytes of tensors, its metadata {tensor_bytes}"
            )
        for metadata, sliced in zip(message.tensors, cut, strict=True):
            if sliced and not can_be_cut(prod(metadata.shape), header.slices):
                raise MessageDecodeError(
                    f"the message's tensor of shape {list(metadata.shape)} can't be cut into {header.slices} slices"
                )
    except MessageDecodeError as error:
        raise malformed(error, context, src) from error
    return message, cut


def build(message: codec.Message, tensors: list[Tensor], context: GroupContext, src: int) -> Any:
    try:
        return message.build(tensors)
    except MessageDecodeError as error:
        raise malformed(error, context, src) from error


def rest_buffer(header: Header) -> Tensor | None:
    return torch.empty(header.rest_bytes, dtype=torch.uint8, device=CPU) if header.rest_bytes else None


def _encode_checked(obj: Any, allow_pickle: bool, must_be: type | None) -> codec.Encoded:
    if must_be is not None and not isinstance(obj, must_be):
        what = "a tensor dict" if must_be is dict else "an object list"
        raise InvalidArgumentError(
            f"{what} must be a {must_be.__name__}, but is a {type(obj).__name__}; "
            "for other types use the call that takes any object, such as send_object or broadcast_object"
        )
    return codec.encode(obj, allow_pickle=allow_pickle)


def _kept_whole(tensors: dict[Any, Any], all_gather_tensors: Mapping[str, bool]) -> tuple[dict[Any, Any], set[int]]:
    tensors = tensors.copy()
    whole = set()
    for key, gather in all_gather_tensors.items():
        if not gather and isinstance(tensors.get(key), Tensor):
            with contextlib.suppress(UnfitError):  # the codec raises it with the key
                tensors[key] = dense_tensor(tensors[key])  # else the codec makes it dense, which changes its id
                whole.add(id(tensors[key]))
    return tensors, whole


def head_of(header: Header, *body: bytes) -> bytes:
    kind, slices, tensors, body_bytes, tensor_bytes = header
    return b"".join((_HEADER.pack(_MAGIC, kind, slices, tensors, 0, body_bytes, tensor_bytes), *body))


def bytes_of(x: Tensor) -> bytes:
    return ctypes.string_at(x.data_ptr(), x.numel()) if x.numel() else b""


def not_a_message(problem: str, context: GroupContext, src: int) -> MessageDecodeError:
    return _decode_error(
        f"sent something that isn't a message: {problem}. All ranks must make the same calls in the same order, with "
        "the same version of parallel_state",
        context,
        src,
    )


def malformed(error: MessageDecodeError, context: GroupContext, src: int) -> MessageDecodeError:
    return _decode_error(f"sent a message that can't be decoded: {error}", context, src)


def _decode_error(what: str, context: GroupContext, src: int) -> MessageDecodeError:
    text = f"rank {src} of group {context.name!r} (global rank {context.ranks[src]}) {what}"
    return MessageDecodeError(text, group=context.name, rank=context.rank, suspect_ranks=[context.ranks[src]])


def split_by_device(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    on_device = [tensor for tensor in tensors if not tensor.is_cpu]
    return (tensors, ()) if not on_device else ([tensor for tensor in tensors if tensor.is_cpu], on_device)


def device_for(device_type: str, own: torch.device) -> torch.device:
    if device_type == "cpu":
        return CPU
    return own if own.type == device_type else torch.device(device_type)
