"""Carries the parts of a message to the other ranks: through a queue in shared memory, or as transfers of the route.

Both bring the same messages, in order, and count them alike. A receiver asks for the head, allocates what that tells
of, and has the tensors read into it. What a message means is in `messenger`; who waits for whom, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from device_communicators.base import settings
from device_communicators.base.errors import CollectiveMismatchError, UnsupportedError
from device_communicators.calls.memory import as_bytes
from device_communicators.calls.recorder import Operation
from device_communicators.calls.user_call import DTYPE_NUMBERS, UserCall, transfer_method
from device_communicators.cpu.channels import MESSAGES, Channels
from device_communicators.cpu.message_queue import LEFT_TO_PYTHON, POSTED, Expected, Message, Sender, pieces_of
from device_communicators.cpu.plain_tree import PastPython
from device_communicators.routing.route import Route
from device_communicators.routing.started import Handle
from device_communicators.routing.states import WAITS, end_wait, waiting_for
from parallel_state.collectives.ops import ordering_token
from parallel_state.messages import wire
from parallel_state.messages.codec import values as codec_values
from parallel_state.messages.codec.types import TensorMetadata
from parallel_state.messages.known_heads import Template
from parallel_state.messages.wire import (
    FRAME_BYTES,
    HEADER_BYTES,
    NOTHING,
    Head,
    Outgoing,
    TensorList,
    split_by_device,
)

# Kinds of transfers; 0 is send and recv of plain tensors. Frames have a tag of their own: a receive of the next one
# may be posted before the body of this one arrives, and would take it in.
_FRAME, _BODY = 1, 2
_MOST_PACKED_BYTES = 1 << 20
"""Of CPU tensors that travel with the head of a message to all."""
_SENT, _RECEIVED, _BROADCAST = "send_message", "recv_message", "broadcast_message"
"""The names under which messages are counted: one call each, however many transfers it takes."""


class IncomingMessage:
    """A message to come, of one sender. `with` it from its head to its last byte."""

    def __init__(self, route: Route, src: int, counted: str, call: UserCall | None) -> None:
        self._route = route
        self._src = src
        self._call = call
        self._counted = counted or (_RECEIVED if call is None else _BROADCAST)

    likely: Template | None = None
    """What the message probably is, judged by those before it."""

    def remember(self, template: Template) -> None:
        """Notes what this message was, for those that follow it."""

    def reserve(self, calls: int) -> None:
        """Keeps the sender's next message from calls that come past Python until as many are taken back."""

    def expect(self, head: bytes, tensors: Sequence[Tensor]) -> None:
        """Tells where the tensors go of a message with this head: see `__enter__`. Not every transport makes use of it.

        Contiguous tensors on the CPU, of as many bytes as the head tells of.
        """

    def __enter__(self) -> Head | None:
        """Waits for the head, which is valid until the message is read; None for the expected message, which is."""
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        """Leaves the sender's messages to others."""

    def check_size(self, size_bytes: int) -> None:
        """Raises MessageDecodeError where it is known that more or less of CPU tensors follows the head."""

    def want_views(self) -> None:
        """Tells the sender that it may lend the tensors of messages, from some size on: see `borrow`."""

    def borrow(self, tensors: Sequence[TensorMetadata]) -> list[Tensor] | None:
        """Returns views of the message's tensors where the sender has lent all; then `read_into` them reads nothing."""
        return None

    def read_into(self, tensors: Sequence[Tensor]) -> list[Handle]:
        """Receives the tensors. What is still under way when it returns are those of the group's device."""
        raise NotImplementedError

    def _start(self, x: Tensor, kind: int = _BODY) -> Handle:
        """Starts the transfer of one part."""
        route, call = self._route, self._call
        if call is None:
            return route.start("irecv_", x, self._src, route.context.tag(kind), part_of=self._counted)
        return route.start("ibroadcast_", x, self._src, part_of=self._counted, method=call.method)


class Transport(Protocol):
    """Carries the messages of one group."""

    takes_many: bool
    """True where many small CPU tensors cost no more than one of their size."""
    past_python: PastPython | None = None
    """Carries what it can without Python in between."""

    def post(self, obj: object, dst: int) -> bool | Outgoing:
        """Sends an object, or a TensorList, if that takes no more than a moment: True. Else False, or its message."""

    def packed(self) -> Outgoing | None:
        """Returns the message of an object that had no room past Python; None where it has tensors."""
        return None

    def likely(self, src: int, method: str) -> Template | None:
        """Returns what the next message of `src` probably is that `method` receives, judged by those before it."""
        return None

    def isend(self, outgoing: Outgoing, dst: int) -> list[Handle]:
        """Starts to send; nothing is left to wait for where the list is empty."""

    def broadcast(self, encode: Callable[[], Outgoing], call: UserCall, obj: object = NOTHING) -> Exception | None:
        """Sends to all other ranks what `encode` returns; the tensors may be changed afterwards. Returns its error.

        `obj`: what that is the message of, for transports that need no encoding.
        """

    def incoming(self, src: int, counted: str = "", call: UserCall | None = None) -> IncomingMessage:
        """Returns the next message of `src` that nobody has asked for: to this rank, or to all of them in `call`."""


def transport_of(route: Route) -> Transport:
    """Returns queues where all ranks share a host, on which they agreed when the group was made."""
    if route.context.fake:
        return FakeTransport(route)
    memory = route.context.host_memory
    channels = None if memory is None else memory.channels
    return RouteTransport(route) if channels is None else QueueTransport(route, channels)


class FakeTransport(Transport):
    """Sends nowhere, and receives nothing: for torch's `fake` backend."""

    takes_many = True

    def __init__(self, route: Route) -> None:
        self.route = route

    def post(self, obj: object, dst: int) -> bool | Outgoing:
        return False

    def isend(self, outgoing: Outgoing, dst: int) -> list[Handle]:
        self.route.count(outgoing.counted or _SENT)
        return []

    def broadcast(self, encode: Callable[[], Outgoing], call: UserCall, obj: object = NOTHING) -> Exception | None:
        outgoing = encode()
        self.route.count(outgoing.counted or _BROADCAST)
        return outgoing.error

    def incoming(self, src: int, counted: str = "", call: UserCall | None = None) -> IncomingMessage:
        raise UnsupportedError(
            f"a message of rank {src} needs that rank, but {self.route.context} is of torch's fake backend: only rank "
            f"{self.route.context.rank} exists; use a backend such as gloo, or simulate()"
        )


# Each part a transfer of its own.


class RouteTransport(Transport):
    """Sends each part as a transfer of its own, over the transport of the group's tensors.

    A tensor without elements is no part: the head describes it.
    """

    takes_many = False

    def __init__(self, route: Route) -> None:
        self.route = route

    def post(self, obj: object, dst: int) -> bool | Outgoing:
        return False

    def isend(self, outgoing: Outgoing, dst: int) -> list[Handle]:
        rest = [] if outgoing.rest is None else [outgoing.rest]
        pieces = [(outgoing.frame, _FRAME), *((piece, _BODY) for piece in [*rest, *_parts_of(outgoing.tensors)])]
        tag = self.route.context.tag
        name = outgoing.counted or _SENT
        parts = [self.route.start("isend", piece, dst, tag(kind), part_of=name) for piece, kind in pieces]
        self.route.count(name)
        return parts

    def broadcast(self, encode: Callable[[], Outgoing], call: UserCall, obj: object = NOTHING) -> Exception | None:
        route, src, method, outgoing = self.route, self.route.context.rank, call.method, encode()
        # First, and waited for, the head or its beginning, by which ranks in another call notice.
        name = outgoing.counted or _BROADCAST
        if sized_bytes := self.sized_bytes:
            head, pieces = wire.packed(outgoing, min(sized_bytes, _MOST_PACKED_BYTES))
            route.run("broadcast_sized", None, head, src, len(head), part_of=name, method=method)
            route.count(name, 0, max(FRAME_BYTES, len(head)))
            parts = _broadcast_each(route, pieces, src, name, method)
        else:
            route.run("broadcast_", outgoing.frame, outgoing.frame, src, part_of=name, method=method)
            pieces = ([] if outgoing.rest is None else [outgoing.rest]) + _parts_of(outgoing.tensors)
            parts = [route.start("ibroadcast_", piece, src, part_of=name, method=method) for piece in pieces]
        for part in parts:
            part.wait()
        route.count(name)
        return outgoing.error

    @property
    def sized_bytes(self) -> int:
        """Returns up to how many bytes a message to all is one transfer; 0 where none is."""
        return next((each.sized_bytes for each in self.route.communicators if each.sized_bytes), 0)

    def incoming(self, src: int, counted: str = "", call: UserCall | None = None) -> IncomingMessage:
        if call is not None and self.sized_bytes:
            return _PackedMessage(self.route, src, counted, call)
        return _FramedMessage(self.route, src, counted, call)


def _parts_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.numel()]


def _broadcast_each(route: Route, tensors: Sequence[Tensor], src: int, name: str, method: str) -> list[Handle]:
    """Broadcasts those of the CPU one after the other, as the communicators do that know hosts; starts the others."""
    parts = []
    for tensor in _parts_of(tensors):
        if tensor.device.type == "cpu":
            route.run("broadcast_", tensor, tensor, src, part_of=name, method=method)
        else:
            parts.append(route.start("ibroadcast_", tensor, src, part_of=name, method=method))
    return parts


class _FramedMessage(IncomingMessage):
    """A message that comes as a frame, perhaps the rest of its head, and its tensors."""

    def __init__(self, route: Route, src: int, counted: str, call: UserCall | None) -> None:
        super().__init__(route, src, counted, call)
        self._frame = torch.empty(FRAME_BYTES, dtype=torch.uint8, device=wire.CPU)
        self._posted = self._start(self._frame, _FRAME) if call is None else None

    def __enter__(self) -> Head:
        route, frame, src = self._route, self._frame, self._src
        route.check_usable()  # after a failure, or the end, of the group nothing more comes
        if self._posted is not None:
            self._posted.wait()
        elif self._call is not None:
            route.run("broadcast_", frame, frame, src, part_of=self._counted, method=self._call.method)
        route.count(self._counted)
        header = wire.parse_frame(frame, route.context, src)
        rest = wire.rest_buffer(header)
        if rest is not None:
            self._start(rest).wait()
        return Head(header, wire.body_of(header, frame, rest), header.tensors > 0)

    def read_into(self, tensors: Sequence[Tensor]) -> list[Handle]:
        received = _parts_of(tensors)
        parts = [self._start(tensor) for tensor in received]
        for part, tensor in zip(parts, received, strict=True):
            if tensor.device.type == "cpu":  # others by who wants them: on the caller's stream, not on this thread's
                part.wait()
        return parts


class _PackedMessage(_FramedMessage):
    """A message to all that comes as one transfer of its head, and of its CPU tensors if they are small."""

    _tensors: Tensor

    def __enter__(self) -> Head:
        route, src, call = self._route, self._src, self._call
        route.check_usable()
        method = "" if call is None else call.method
        most_bytes = HEADER_BYTES + settings.MAX_METADATA_BYTES.get() + _MOST_PACKED_BYTES
        data = route.run("broadcast_sized", None, None, src, most_bytes, part_of=self._counted, method=method)
        route.count(self._counted, 1, max(FRAME_BYTES, len(data)))
        head, self._tensors = wire.unpacked(data, route.context, src)
        return head

    def read_into(self, tensors: Sequence[Tensor]) -> list[Handle]:
        on_cpu, on_device = split_by_device(tensors)
        sizes: list[int] = [tensor.nbytes for tensor in on_cpu]
        expected, found_bytes = sum(sizes), self._tensors.numel()
        if expected and not found_bytes:
            method = "" if self._call is None else self._call.method
            return _broadcast_each(self._route, tensors, self._src, self._counted, method)
        if expected != found_bytes:
            found = f"{found_bytes} bytes of tensors follow its metadata, which tells of {expected}"
            raise wire.not_a_message(found, self._route.context, self._src)
        for tensor, data in zip(on_cpu, self._tensors.split(sizes), strict=True):
            as_bytes(tensor).copy_(data)
        return [self._start(tensor) for tensor in _parts_of(on_device)]


# One message of a queue.


class QueueTransport:
    """Carries head and CPU tensors in one piece through shared memory, tensors of a device as transfers."""

    takes_many = True

    def __init__(self, route: Route, channels: Channels) -> None:
        self.route = route
        self.channels = channels
        self.templates: dict[tuple[int, str], tuple[Template, bool]] = {}
        """By source and receiving method: that of the last dict, and whether the one before was the same."""
        collectives = route.context.collectives
        self.can_borrow = collectives is not None and collectives.library.has_ops
        """True where tensors that a sender lends can be had as views."""
        self._objects = codec_values.use_library()  # which is there where the queues are
        self.past_python: PastPython | None = self._objects.past_python

    def post(self, obj: object, dst: int) -> bool | Outgoing:
        route, started = self.route, time.monotonic()
        name = obj.counted if type(obj) is TensorList else _SENT
        route.check_usable()
        route.check_recordable(name)
        limit = settings.MAX_METADATA_BYTES.get()
        try:
            sender = self.channels.sender(dst, MESSAGES)
            posted = self._post(sender, obj, limit, 0)
        except Exception as error:
            self._note(name, 0, dst, started)
            raise route.failure_of(error, "isend", started)  # noqa: B904  (the same error, noted by the route)
        if posted is True:
            self._note_posted(name, sender, dst, started)
        return posted

    def _post(self, sender: Sender, obj: object, limit: int, number: int) -> bool | Outgoing:
        """Writes all of a message at once: True. Else False, or what was packed and has no room; no tensors then."""
        if type(obj) is TensorList:
            head, tensors, _ = obj
            return sender.post(lambda end: self._objects.post_list(end, tensors, head, number)) == POSTED
        status = sender.post(lambda end: self._objects.post(end, obj, limit, number))
        if status in (POSTED, LEFT_TO_PYTHON):
            return status == POSTED
        return self.packed() or False

    def packed(self) -> Outgoing | None:
        packed = self._objects.packed()
        return None if packed is None else Outgoing(packed.start, [], known_bytes=0, pinned=packed.more)

    def likely(self, src: int, method: str) -> Template | None:
        last, in_a_row = self.templates.get((src, method), (None, False))
        return last if in_a_row else None

    def isend(self, outgoing: Outgoing, dst: int) -> list[Handle]:
        route, started = self.route, time.monotonic()
        name = outgoing.counted or _SENT
        on_cpu, on_device = outgoing.split_by_device()
        route.check_usable()
        route.check_recordable(name)
        try:
            work = self.channels.sender(dst, MESSAGES).isend(_message_of(outgoing, on_cpu, 0))
        except Exception as error:
            self._note(name, _size_of(outgoing), dst, started)
            raise route.failure_of(error, "isend", started)  # noqa: B904  (the same error, noted by the route)
        # It waited for nobody: the receiver has it a moment earlier.
        record = self._note(name, _size_of(outgoing), dst, started)
        parts: list[Handle] = []
        if work.is_completed():
            record.ended_s = time.monotonic()
        else:
            parts.append(Handle(route, record, work, outgoing.frame))
        if not on_device:
            return parts
        tag = route.context.tag(_BODY)
        return parts + [route.start("isend", tensor, dst, tag, part_of=name) for tensor in on_device]

    def broadcast(self, encode: Callable[[], Outgoing], call: UserCall, obj: object = NOTHING) -> Exception | None:
        route, started = self.route, time.monotonic()
        name = obj.counted if type(obj) is TensorList else _BROADCAST
        route.check_usable()
        route.check_recordable(name)
        limit = settings.MAX_METADATA_BYTES.get()
        number = self.channels.begin_broadcast()
        try:
            self.announce(call)
            sender = self.channels.sender(None, MESSAGES)
            posted = obj is not NOTHING and self._post(sender, obj, limit, number)
        except Exception as error:
            self._note(name, 0, -1, started, call)
            raise route.failure_of(error, call.method, started)  # noqa: B904  (the same error, noted by the route)
        if posted is not True:
            return self._send_to_all(posted or encode(), number, call, started)
        self._note_posted(name, sender, -1, started, call)
        return None

    def _send_to_all(self, outgoing: Outgoing, number: int, call: UserCall, started: float) -> Exception | None:
        route, name = self.route, outgoing.counted or _BROADCAST
        record = self._note(name, _size_of(outgoing), -1, started, call)
        on_cpu, on_device = outgoing.split_by_device()
        try:
            with waiting_for(route.context, record):
                message = _message_of(outgoing, on_cpu, number)
                self.channels.sender(None, MESSAGES).send(message, call.method)
        except Exception as error:
            raise route.failure_of(error, call.method, started)  # noqa: B904  (the same error, noted by the route)
        record.ended_s = time.monotonic()
        src, method = route.context.rank, call.method
        for part in [route.start("ibroadcast_", x, src, part_of=name, method=method) for x in on_device]:
            part.wait()
        return outgoing.error

    def announce(self, call: UserCall) -> None:
        """Takes the call's place among the group's collectives: ranks that are in another one find out, as does this.

        The queue itself can't tell: a rank that is in a collective doesn't look there.
        """
        if (collectives := self.route.context.collectives) is not None:
            collectives.announce(call.root, self.channels.spin_ns, call)

    def compare(self, call: UserCall, error: CollectiveMismatchError) -> None:
        """Raises the error that names both calls, where another rank is known to have been in another one."""
        if (collectives := self.route.context.collectives) is not None:
            try:
                collectives.call("compare", user_call=call)
            except CollectiveMismatchError as named:
                raise named from error

    def _note(self, name: str, size_bytes: int, dst: int, started_s: float, call: UserCall | None = None) -> Operation:
        """Records and counts a message that is sent."""
        record = self.route.note(name, None, call, peer=dst, started_s=started_s)
        self.route.count(name, 1, size_bytes)
        return record

    def _note_posted(self, name: str, sender: Sender, dst: int, started_s: float, call: UserCall | None = None) -> None:
        head_bytes, tensor_bytes = sender.posted_bytes
        record = self._note(name, max(FRAME_BYTES, head_bytes) + tensor_bytes, dst, started_s, call)
        record.ended_s = time.monotonic()

    def incoming(self, src: int, counted: str = "", call: UserCall | None = None) -> IncomingMessage:
        return _QueuedMessage(self, src, counted, call)


def _message_of(outgoing: Outgoing, on_cpu: Sequence[Tensor], number: int) -> Message:
    return Message(outgoing.head, on_cpu, number, outgoing.pinned or outgoing.more_head)


def _size_of(outgoing: Outgoing) -> int:
    """Returns the bytes under which a message is counted."""
    more_bytes = len(outgoing.more_head) if outgoing.pinned is None else outgoing.pinned.nbytes
    return max(FRAME_BYTES, len(outgoing.head) + more_bytes) + outgoing.cpu_bytes


class _QueuedMessage(IncomingMessage):
    """A message that comes through a queue."""

    _record: Operation
    _thread: int
    _outer_wait: Any
    _head_bytes: int
    _tensor_bytes: int

    def __init__(self, transport: QueueTransport, src: int, counted: str, call: UserCall | None) -> None:
        super().__init__(transport.route, src, counted, call)
        self._route.check_usable()
        self._route.check_recordable(self._counted)
        channels = transport.channels
        self._number = 0 if call is None else channels.begin_broadcast()
        self._transport = transport
        self._method = transfer_method() if call is None else call.method
        self.likely = transport.likely(src, self._method)
        self._wants_views = self._has_borrowed = False
        self._expected: Expected | None = None
        self._expected_bytes = 0
        self._receiver = channels.receiver(src, MESSAGES, broadcast=call is not None)
        self._operation = "recv" if call is None else call.method
        if self._receiver.is_held_here:  # a handler of signals, whose message would be another call's
            raise self._receiver.in_a_handler(self._operation)

    def remember(self, template: Template) -> None:
        templates, key = self._transport.templates, (self._src, self._method)
        last = templates.get(key)
        templates[key] = template, last is not None and last[0] is template

    def reserve(self, calls: int) -> None:
        self._receiver.reserve(calls)

    def expect(self, head: bytes, tensors: Sequence[Tensor]) -> None:
        self._expected = Expected(head, *pieces_of(tensors))
        self._expected_bytes = sum([tensor.nbytes for tensor in tensors])

    def __enter__(self) -> Head | None:
        route = self._route
        route.check_usable()
        peer = self._src if self._call is None else -1
        record = self._record = route.note(self._counted, None, self._call, peer=peer)
        thread = self._thread = threading.get_ident()  # as `waiting_for`, which takes 1 µs more
        self._outer_wait, WAITS[thread] = WAITS.get(thread), (route.context, record)
        lock = self._receiver.lock
        try:
            lock.acquire()
            return self._next()
        except BaseException:
            if lock._is_owned():
                lock.release()
            end_wait(thread, self._outer_wait)
            raise

    def __exit__(self, *_: object) -> None:
        self._receiver.lock.release()
        end_wait(self._thread, self._outer_wait)

    def _next(self) -> Head | None:
        """Returns the head; a long one is read once it is known to be of a size that is accepted."""
        receiver, operation, call, expected = self._receiver, self._operation, self._call, self._expected
        if call is None:
            is_read = receiver.take(operation) if expected is None else receiver.take(operation, expected)
        else:
            receiver.check(operation)
            if not receiver.has_found:  # else that call has announced itself
                self._transport.announce(call)
            try:
                is_read = receiver.take(operation) if expected is None else receiver.take(operation, expected)
            except CollectiveMismatchError as error:  # as another rank tells, which knows its own call
                self._transport.compare(call, error)
                raise
            if receiver.fingerprint != self._number:
                raise self._other_number(receiver.fingerprint)
        if is_read and expected is not None:
            self._head_bytes = len(expected.head)
            self._end(self._expected_bytes)
            return None
        plain = receiver.plain_head()
        if plain is not None:
            self._head_bytes, self._tensor_bytes = len(plain), 0
            return Head(None, plain, False, True)
        head = receiver.head()
        self._head_bytes = head.head_bytes
        if head.data:
            self._tensor_bytes = head.left_bytes
            return Head(None, head.data, head.left_bytes != 0)
        self._tensor_bytes = head.left_bytes - head.head_bytes
        start = receiver.read_on(HEADER_BYTES, operation) if head.head_bytes else b""
        header = wire.parse_header(start, self._route.context, self._src, head.head_bytes)
        return Head(header, receiver.read_on(header.body_bytes, operation), self._tensor_bytes != 0)

    def check_size(self, size_bytes: int) -> None:
        if self._tensor_bytes != size_bytes:
            found = f"{self._tensor_bytes} bytes of tensors follow its metadata, which tells of {size_bytes}"
            raise wire.not_a_message(found, self._route.context, self._src)

    def read_into(self, tensors: Sequence[Tensor]) -> list[Handle]:
        if not tensors and not self._tensor_bytes:
            self._end(0)
            return []
        on_cpu, on_device = split_by_device(tensors)
        size_bytes = sum([tensor.nbytes for tensor in on_cpu])
        self.check_size(size_bytes)
        if size_bytes and not self._has_borrowed:
            self._receiver.read(*pieces_of(on_cpu), self._operation)
        self._end(size_bytes)
        return [self._start(tensor) for tensor in on_device] if on_device else []

    def want_views(self) -> None:
        self._wants_views = self._transport.can_borrow
        if self._wants_views:
            self._receiver.want_loans(True)

    def borrow(self, tensors: Sequence[TensorMetadata]) -> list[Tensor] | None:
        if not self._wants_views or not self._receiver.is_lent:
            return None
        layout: list[int] = []
        for dtype, shape, device_type in tensors:
            if device_type != "cpu" or dtype not in DTYPE_NUMBERS:
                return None
            layout += (DTYPE_NUMBERS[dtype], len(shape), *shape)
        key, of_all = self._route.context.key, self._call is not None
        found = torch.ops.parallel_state.borrow(ordering_token(wire.CPU), self._src, of_all, layout, key)
        self._has_borrowed = bool(found)
        return found or None

    def _end(self, tensor_bytes: int) -> None:
        """Counts the message, which has come."""
        self._record.ended_s = time.monotonic()
        self._route.count(self._counted, 1, max(FRAME_BYTES, self._head_bytes) + tensor_bytes)

    def _other_number(self, number: int) -> CollectiveMismatchError:
        """Tells of ranks that are not in the same call: a writer, who doesn't wait for its readers, can't notice."""
        return self._receiver.mismatch(
            f"this rank is in the group's message number {self._number} to all ranks, and rank {self._src} sent "
            f"its number {number}; another `src`, or another order of calls, was given on some rank",
            self._operation,
        )
