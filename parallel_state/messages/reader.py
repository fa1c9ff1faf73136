"""Builds received objects, and carries messages by a group's send, recv and broadcast (*transfers*).

To receive, a medium (shared memory, connections or a process group) passes the message's header to a Reader's
`take_head`, fills the tensors, and calls `build`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from device_communicators.base import settings
from device_communicators.base.errors import (
    CollectiveMismatchError,
    CommunicationError,
    GroupDestroyedError,
    UnsupportedError,
)
from device_communicators.calls.user_call import UserCall
from device_communicators.cpu.types import PastPython
from device_communicators.routing.route import Route
from device_communicators.routing.started import Handle
from parallel_state.messages import buffers, wire
from parallel_state.messages.buffers import Buffers
from parallel_state.messages.codec import coding as codec
from parallel_state.messages.codec.types import TensorMetadata
from parallel_state.messages.slices import AllGatherGroup, Cut
from parallel_state.messages.wire import FRAME_BYTES, NOTHING, Header, Outgoing


class Owner(Protocol):
    route: Route
    allow_pickle: bool

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...


class Reader:
    is_list = False
    posted: Any = None
    found: Any = NOTHING
    _message: codec.Message | None = None
    _sliced: Sequence[bool] = ()
    _tensors: Sequence[Tensor] = ()

    def __init__(
        self,
        owner: Owner,
        src: int,
        group: AllGatherGroup | None = None,
        out: Buffers | None = None,
        views: bool = False,
        *,
        gathers: bool = True,
    ) -> None:
        """Prepares to receive an object from group rank `src`. `owner`: the messenger or another allocator of tensors.
        `out` and `views`: as in recv_tensor_dict.

        With `gathers`, slices of tensors are all-gathered over `group` as they arrive. Otherwise `build` gathers them.
        """
        self.src = src
        self._owner = owner
        self._group = group
        self._out = out
        gather: Callable[[Tensor, list[int]], Tensor] | None = None
        slices, given = 0, None
        if group is not None and gathers:
            slices, gather = group.world_size, self._gather
        if out is not None and type(out.tensors) is dict:
            given = out.tensors
        self.wanted: tuple[Any, ...] = (settings.MAX_METADATA_BYTES.get(), slices, gather, given, views, None, 0)
        """Arguments of the C++ class `Received`, explained in csrc/messages_api.cpp."""

    def take_bytes(self, head: bytes, head_bytes: int, tensor_bytes: int | None) -> list[Tensor]:
        header = wire.parse_header(head, self._owner.route.context, self.src, head_bytes)
        return self.take_head(header, memoryview(head)[wire.HEADER_BYTES :], tensor_bytes)

    def take_head(self, header: Header, body: bytes | memoryview, tensor_bytes: int | None = None) -> list[Tensor]:
        """Decodes a message's header and body. Returns the tensors into which the caller must receive.

        `tensor_bytes`: the size of the CPU tensors that have arrived, if known.
        """
        owner, src, context = self._owner, self.src, self._owner.route.context
        if header.is_error:
            raise wire.remote_error(body, context, src)
        self._message, self._sliced = wire.read_body(header, body, context, src, owner.allow_pickle)
        group = self._group
        if any(self._sliced) and (group is None or header.slices != group.world_size):
            raise CollectiveMismatchError(
                f"sender and receiver must pass all-gather groups of equal size, but rank {src} of {context} divided "
                f"its tensors among {header.slices} ranks, and this rank's all_gather_group has "
                f"{'no' if group is None else group.world_size} ranks; pass the same all_gather_group on both sides",
                group=context.name,
                rank=context.rank,
            )
        tensors = self._message.tensors
        parts = [header.slices if is_cut else 1 for is_cut in self._sliced]
        if tensor_bytes is not None:
            expected = sum([x.nbytes // n for x, n in zip(tensors, parts, strict=True) if x.device_type == "cpu"])
            if expected != tensor_bytes:
                found = f"{tensor_bytes} bytes of tensors follow its metadata, which announces {expected}"
                raise wire.not_a_message(found, context, src)
        self._tensors = made = [allocate(owner, each, src, n) for each, n in zip(tensors, parts, strict=True)]
        return made

    def build(self) -> Any:
        value, out = self.found, self._out
        if value is NOTHING:
            value = self._build()
        return value if out is None else buffers.place(self._owner.route.context, self.src, value, out)

    def _build(self) -> Any:
        message = self._message
        if message is None:
            raise RuntimeError("the message has not arrived")
        each = zip(self._tensors, message.tensors, self._sliced, strict=True)
        tensors = [self._gather(x, whole.shape) if is_cut else x for x, whole, is_cut in each]
        return wire.build(message, tensors, self._owner.route.context, self.src)

    def _gather(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return x if self._group is None else self._group.all_gather(x, dim=0).view(shape)


class ListReader(Reader):
    is_list = True

    def __init__(
        self,
        owner: Owner,
        src: int,
        head: bytes,
        tensors: Sequence[Tensor] | None,
        made: Sequence[TensorMetadata] = (),
        form: int = 0,
    ) -> None:
        super().__init__(owner, src)
        self._head = head
        self._given = tensors
        self._made = made
        self.wanted = (self.wanted[0], 0, None, None, tensors is None, head, form)

    def take_head(self, header: Header, body: bytes | memoryview, tensor_bytes: int | None = None) -> list[Tensor]:
        if header.is_error:
            raise wire.remote_error(body, self._owner.route.context, self.src)
        wire.check_list(self._head, header, body, self._owner.route.context, self.src)
        given = self._given
        made = [self._owner.empty(each.shape, each.dtype) for each in self._made] if given is None else list(given)
        self._tensors = made
        return made

    def build(self) -> Any:
        return self._tensors if self.found is NOTHING else self.found


def allocate(owner: Owner, metadata: TensorMetadata, src: int, slices: int = 1) -> Tensor:
    context = owner.route.context
    shape = metadata.shape if slices == 1 else (prod(metadata.shape) // slices,)
    device = wire.CPU
    try:
        device = wire.device_for(metadata.device_type, context.device)
        if device is wire.CPU:
            return owner.empty(shape, metadata.dtype)
        return torch.empty(shape, dtype=metadata.dtype, device=device)
    except GroupDestroyedError:
        raise
    except Exception as error:  # its unread bytes block the messages after it
        raise CommunicationError(
            f"receiving from rank {src} of {context} failed, because {device} has no room for a {metadata.dtype} "
            f"tensor of shape {list(shape)}: {error}. The group is unusable now; send less at once",
            group=context.name,
            rank=context.rank,
            suspect_ranks=[context.ranks[src]],
        ) from error


# The next frame's receive may be posted before this message's body arrives.
_FRAME, BODY = 1, 2
SENT, _RECEIVED, BROADCAST = "send_message", "recv_message", "broadcast_message"
_RECEIVED_LIST, _BROADCAST_LIST = "recv_list", "broadcast_list"


def counted_name(reader: Reader, call: UserCall | None) -> str:
    if reader.is_list:
        return _RECEIVED_LIST if call is None else _BROADCAST_LIST
    return _RECEIVED if call is None else BROADCAST


class RouteMedium:
    """Carries messages as transfers: frame, rest of the head (see the module `wire`), and each non-empty tensor.

    `past_python`: the compiled library's functions that send without Python, or None.
    """

    past_python: PastPython | None = None

    def __init__(self, route: Route) -> None:
        self.route = route

    def post(
        self, obj: object, dst: int, call: UserCall | None, cut: Cut, waits: bool = False
    ) -> Outgoing | Handle | bool:
        """Tries to send the object to group rank `dst` or, if the broadcast `call` is given, to all ranks.

        Returns True if the send is complete, and a handle if it was started. Otherwise nothing was sent: returns the
        encoded message, or False if the caller must encode the object.

        `cut`: the part of each tensor to send.
        """
        return False

    def isend(self, outgoing: Outgoing, dst: int) -> list[Handle]:
        pieces = [(outgoing.frame, _FRAME), *((piece, BODY) for piece in _after_frame(outgoing))]
        tag = self.route.context.tag
        name = outgoing.counted or SENT
        parts = [self.route.start("isend", piece, dst, tag(kind), part_of=name) for piece, kind in pieces]
        self.route.count(name)
        return parts

    def send(self, outgoing: Outgoing, dst: int) -> None:
        for part in self.isend(outgoing, dst):
            part.wait()

    def broadcast(self, outgoing: Outgoing, call: UserCall) -> None:
        route, src, method = self.route, self.route.context.rank, call.method
        frame, name = outgoing.frame, outgoing.counted or BROADCAST
        # Wait for the frame first: ranks in another call detect the mismatch by it.
        route.run("broadcast_", frame, frame, src, part_of=name, method=method)
        parts = [route.start("ibroadcast_", x, src, part_of=name, method=method) for x in _after_frame(outgoing)]
        for part in parts:
            part.wait()
        route.count(name)

    def start_receive(self, reader: Reader) -> None:
        self._check_real(reader)
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8, device=wire.CPU)
        reader.posted = frame, self._receive_part(frame, reader.src, None, counted_name(reader, None), _FRAME)

    def end_receive(self, reader: Reader) -> None:
        return

    def receive(self, reader: Reader, call: UserCall | None = None) -> Sequence[Handle]:
        route, src, name = self.route, reader.src, counted_name(reader, call)
        self._check_real(reader)
        if call is None and reader.posted is None:
            self.start_receive(reader)
        route.check_usable()
        if call is None:
            frame, posted = reader.posted
            posted.wait()
        else:
            frame = torch.empty(FRAME_BYTES, dtype=torch.uint8, device=wire.CPU)
            route.run("broadcast_", frame, frame, src, part_of=name, method=call.method)
        route.count(name)
        header = wire.parse_frame(frame, route.context, src)
        rest = wire.rest_buffer(header)
        if rest is not None:
            self._receive_part(rest, src, call, name).wait()
        received = _parts_of(reader.take_head(header, wire.body_of(header, frame, rest)))
        parts = [self._receive_part(tensor, src, call, name) for tensor in received]
        for part, tensor in zip(parts, received, strict=True):
            if tensor.device.type == "cpu":  # the caller waits for others, on its own stream
                part.wait()
        return parts

    def _receive_part(self, x: Tensor, src: int, call: UserCall | None, counted: str, kind: int = BODY) -> Handle:
        if call is None:
            return self.route.start("irecv_", x, src, self.route.context.tag(kind), part_of=counted)
        return self.route.start("ibroadcast_", x, src, part_of=counted, method=call.method)

    def _check_real(self, reader: Reader) -> None:
        if self.route.context.fake:
            raise UnsupportedError(
                f"a message from rank {reader.src} can't be received: {self.route.context} uses torch's fake backend, "
                f"in which only rank {self.route.context.rank} exists. Use a backend such as gloo, or simulate()"
            )


def _after_frame(outgoing: Outgoing) -> list[Tensor]:
    rest = outgoing.rest
    return [*([] if rest is None else [rest]), *_parts_of(outgoing.tensors)]


def _parts_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.numel()]
