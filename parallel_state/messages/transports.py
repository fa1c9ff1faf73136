"""How the parts of a message reach the other ranks: through a queue in shared memory, or as transfers of the route.

Both bring the same messages, in order, and count them alike. What a message means, and who waits for whom, is in
`messages`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from device_communicators.cpu.channels import MESSAGES, Channels
from device_communicators.cpu.message_queue import Head, Message, Receiver, pieces_of
from device_communicators.errors import CollectiveMismatchError, UnsupportedError
from device_communicators.routing.recorder import Operation
from device_communicators.routing.reports import WAITS, end_wait, waiting_for
from device_communicators.routing.route import Route
from device_communicators.routing.started import Handle
from device_communicators.routing.user_call import UserCall
from parallel_state.messages import wire
from parallel_state.messages.codec import values as codec_values
from parallel_state.messages.wire import FRAME_BYTES, HEADER_BYTES, Header, Outgoing, by_place

# Kinds of transfers; 0 is send and recv of plain tensors. Frames have a tag of their own: a receive of the next one
# may be posted before the body of this one arrives, and would take it in.
_FRAME, _BODY = 1, 2
_SENT, _RECEIVED, _BROADCAST = "send_message", "recv_message", "broadcast_message"
"""Under which names messages are counted: one call each, however many transfers it takes."""


class Plan(Protocol):
    """What a reader makes of a message's head: the tensors in which to receive."""

    def recall(self, head: memoryview, has_tensors: bool) -> Sequence[Tensor] | None:
        """For a whole head, valid during the call, that needs little reading; None for another."""

    def plan(self, header: Header, body: bytes | memoryview) -> Sequence[Tensor]:
        """For a checked header and its body, which is valid during the call."""


class Incoming(Protocol):
    """A message to come, of one sender."""

    def receive(self, plan: Plan) -> list[Handle]:
        """Waits for the message. What is still under way when it returns are tensors of the group's device."""


class Transport(Protocol):
    """Carries the messages of one group."""

    takes_many: bool
    """Whether many small CPU tensors cost no more than one of their size."""

    def isend(self, outgoing: Outgoing, dst: int) -> list[Handle]:
        """Starts to send; nothing is left to wait for where the list is empty."""

    def broadcast(self, outgoing: Outgoing, call: UserCall) -> None:
        """Sends to all other ranks, which receive from `broadcast_of`; the tensors may be changed afterwards."""

    def incoming(self, src: int, counted: str = _RECEIVED) -> Incoming:
        """The next message of `src` that nobody has asked for."""

    def broadcast_of(self, src: int, call: UserCall, counted: str = _BROADCAST) -> Incoming:
        """The next message of `src` to all; every rank is in `call`."""


def transport_of(route: Route) -> Transport:
    """By queue where all ranks share a host, which they agreed on when the group was made."""
    if route.context.fake:
        return FakeTransport(route)
    memory = route.context.host_memory
    channels = None if memory is None else memory.channels
    return RouteTransport(route) if channels is None else QueueTransport(route, channels)


class FakeTransport:
    """On torch's `fake` backend: what is sent goes nowhere, and nobody says anything."""

    takes_many = True

    def __init__(self, route: Route) -> None:
        self.route = route

    def isend(self, outgoing: Outgoing, dst: int) -> list[Handle]:
        self.route.count(outgoing.counted or _SENT)
        return []

    def broadcast(self, outgoing: Outgoing, call: UserCall) -> None:
        self.route.count(outgoing.counted or _BROADCAST)

    def incoming(self, src: int, counted: str = _RECEIVED) -> Incoming:
        raise UnsupportedError(
            f"a message of rank {src} needs that rank, but {self.route.context} is of torch's fake backend: only rank "
            f"{self.route.context.rank} exists; use a backend such as gloo, or simulate()"
        )

    def broadcast_of(self, src: int, call: UserCall, counted: str = _BROADCAST) -> Incoming:
        return self.incoming(src)


# Each part a transfer of its own.


class RouteTransport:
    """Over whatever carries the group's tensors."""

    takes_many = False

    def __init__(self, route: Route) -> None:
        self.route = route

    def isend(self, outgoing: Outgoing, dst: int) -> list[Handle]:
        rest = [] if outgoing.rest is None else [outgoing.rest]
        pieces = [(outgoing.frame, _FRAME), *((piece, _BODY) for piece in [*rest, *outgoing.tensors])]
        tag = self.route.context.tag
        name = outgoing.counted or _SENT
        parts = [self.route.start("isend", piece, dst, tag(kind), part_of=name) for piece, kind in pieces]
        self.route.count(name)
        return parts

    def broadcast(self, outgoing: Outgoing, call: UserCall) -> None:
        route, src, method = self.route, self.route.context.rank, call.method
        # First, and waited for, what tells ranks that are in another call.
        name = outgoing.counted or _BROADCAST
        route.run("broadcast_", outgoing.frame, outgoing.frame, src, part_of=name, method=method)
        pieces = ([] if outgoing.rest is None else [outgoing.rest]) + outgoing.tensors
        for part in [route.start("ibroadcast_", piece, src, part_of=name, method=method) for piece in pieces]:
            part.wait()
        route.count(name)

    def incoming(self, src: int, counted: str = _RECEIVED) -> Incoming:
        return _PostedFrame(self.route, src, counted)

    def broadcast_of(self, src: int, call: UserCall, counted: str = _BROADCAST) -> Incoming:
        return _BroadcastFrame(self.route, src, call, counted)


class _Frame:
    """A message that comes as a frame, perhaps the rest of its head, and its tensors."""

    def __init__(self, route: Route, src: int, counted: str) -> None:
        self._route = route
        self._src = src
        self._counted = counted
        self._frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)

    def _start(self, x: Tensor, kind: int) -> Handle:
        raise NotImplementedError

    def _take_frame(self) -> None:
        raise NotImplementedError

    def receive(self, plan: Plan) -> list[Handle]:
        route, context = self._route, self._route.context
        route.check_usable()  # after a failure, or the end, of the group nothing more comes
        self._take_frame()
        route.count(self._counted)
        header = wire.parse_frame(self._frame, context, self._src)
        rest = wire.rest_buffer(header)
        if rest is not None:
            self._start(rest, _BODY).wait()
        tensors = plan.plan(header, wire.body_of(header, self._frame, rest))
        parts = [self._start(tensor, _BODY) for tensor in tensors]
        for part, tensor in zip(parts, tensors, strict=True):
            if tensor.device.type == "cpu":  # others by who wants them: on the caller's stream, not on this thread's
                part.wait()
        return parts


class _PostedFrame(_Frame):
    def __init__(self, route: Route, src: int, counted: str) -> None:
        super().__init__(route, src, counted)
        self._handle = self._start(self._frame, _FRAME)

    def _take_frame(self) -> None:
        self._handle.wait()

    def _start(self, x: Tensor, kind: int) -> Handle:
        return self._route.start("irecv_", x, self._src, self._route.context.tag(kind), part_of=self._counted)


class _BroadcastFrame(_Frame):
    def __init__(self, route: Route, src: int, call: UserCall, counted: str) -> None:
        super().__init__(route, src, counted)
        self._method = call.method

    def _take_frame(self) -> None:
        frame = self._frame
        self._route.run("broadcast_", frame, frame, self._src, part_of=self._counted, method=self._method)

    def _start(self, x: Tensor, kind: int) -> Handle:
        return self._route.start("ibroadcast_", x, self._src, part_of=self._counted, method=self._method)


# One message of a queue.


class QueueTransport:
    """Head and CPU tensors in one piece through shared memory; tensors of a device are transfers of the route."""

    takes_many = True

    def __init__(self, route: Route, channels: Channels) -> None:
        self.route = route
        self.channels = channels
        codec_values.use_library()  # which is there where the queues are

    def isend(self, outgoing: Outgoing, dst: int) -> list[Handle]:
        route, started = self.route, time.monotonic()
        name = outgoing.counted or _SENT
        record = self._begin(name, outgoing)
        record.peer = dst
        here, there = by_place(outgoing.tensors) if outgoing.tensors else ((), ())
        try:
            work = self.channels.sender(dst, MESSAGES).isend(Message(outgoing.head, here, 0, outgoing.more_head))
        except Exception as error:
            raise route.failure_of(error, "isend", started)  # noqa: B904  (the same error, noted by the route)
        if work.is_completed():
            record.ended_s = time.monotonic()
            if not there:
                return []
        parts = [] if work.is_completed() else [Handle(route, record, work, outgoing.frame)]
        tag = route.context.tag(_BODY)
        return parts + [route.start("isend", tensor, dst, tag, part_of=name) for tensor in there]

    def broadcast(self, outgoing: Outgoing, call: UserCall) -> None:
        route, started = self.route, time.monotonic()
        name = outgoing.counted or _BROADCAST
        record = self._begin(name, outgoing, call)
        here, there = by_place(outgoing.tensors) if outgoing.tensors else ((), ())
        self.channels.broadcasts += 1
        try:
            with waiting_for(route, record):
                self.announce(call)
                sender = self.channels.sender(None, MESSAGES)
                message = Message(outgoing.head, here, self.channels.broadcasts, outgoing.more_head)
                sender.send(message, call.method)
        except Exception as error:
            raise route.failure_of(error, call.method, started)  # noqa: B904
        record.ended_s = time.monotonic()
        src, method = route.context.rank, call.method
        for part in [route.start("ibroadcast_", x, src, part_of=name, method=method) for x in there]:
            part.wait()

    def announce(self, call: UserCall) -> None:
        """Takes the call's place among the group's collectives: ranks that are in another one find out, as does this.

        The queue itself can't tell: a rank that is in a collective doesn't look there.
        """
        memory = self.route.context.host_memory
        if memory is not None and memory.collectives is not None:
            memory.collectives.call("announce", call.root, told=call)

    def compare(self, call: UserCall, error: CollectiveMismatchError) -> None:
        """Raises the error that names both calls, where another rank is known to have been in another one."""
        memory = self.route.context.host_memory
        if memory is not None and memory.collectives is not None:
            try:
                memory.collectives.call("compare", told=call)
            except CollectiveMismatchError as named:
                raise named from error

    def _begin(self, name: str, outgoing: Outgoing, call: UserCall | None = None) -> Operation:
        self.route.check_usable()
        self.route.check_recordable(name)
        record = self.route.note(name, None, call)
        size_bytes = sum([tensor.nbytes for tensor in outgoing.tensors if tensor.is_cpu]) if outgoing.tensors else 0
        self.route.count(name, 1, max(FRAME_BYTES, len(outgoing.head) + len(outgoing.more_head)) + size_bytes)
        return record

    def incoming(self, src: int, counted: str = _RECEIVED) -> Incoming:
        self.route.check_usable()
        self.route.check_recordable(counted)
        return _Queued(self, src, self.channels.receiver(src, MESSAGES), counted)

    def broadcast_of(self, src: int, call: UserCall, counted: str = _BROADCAST) -> Incoming:
        self.route.check_usable()
        self.route.check_recordable(counted)
        self.channels.broadcasts += 1
        return _QueuedBroadcast(self, src, self.channels.receiver(src, MESSAGES, broadcast=True), counted, call)


class _Queued:
    """A message that comes through a queue."""

    operation = "recv"

    def __init__(
        self, transport: QueueTransport, src: int, receiver: Receiver, counted: str, call: UserCall | None = None
    ) -> None:
        self.route = transport.route
        self._call = call
        self._src = src
        self._receiver = receiver
        self._number = transport.channels.broadcasts
        self._counted = counted
        self._peer = src if call is None else -1

    def receive(self, plan: Plan) -> list[Handle]:
        route = self.route
        route.check_usable()
        record = route.note(self._counted, None, self._call)
        record.peer = self._peer
        thread = threading.get_ident()  # as `waiting_for`, which takes 1 µs more
        before, WAITS[thread] = WAITS.get(thread), (route, record)
        try:
            return self._receive(plan, record)
        finally:
            end_wait(thread, before)

    def _receive(self, plan: Plan, record: Operation) -> list[Handle]:
        route, receiver = self.route, self._receiver
        with receiver.lock:
            head = self._next()
            self._check(head)
            tensors = plan.recall(head.data, head.left_bytes != 0) if head.data else None
            if tensors is None:
                header, body = self._read_head(head)
                if header.is_error:
                    route.count(self._counted, 1, FRAME_BYTES)
                    raise wire.remote_error(body, route.context, self._src)
                tensors = plan.plan(header, body)
            here, there = by_place(tensors) if tensors else ((), ())
            size_bytes = sum([tensor.nbytes for tensor in here])
            left_bytes = head.left_bytes if head.data else head.left_bytes - head.head_bytes
            if left_bytes != size_bytes:
                told = f"{left_bytes} bytes of tensors follow its metadata, which tells of {size_bytes}"
                raise wire.not_a_message(told, route.context, self._src)
            if left_bytes:
                receiver.read(*pieces_of(here), self.operation)
        record.ended_s = time.monotonic()
        route.count(self._counted, 1, max(FRAME_BYTES, head.head_bytes) + size_bytes)
        return [self._start(tensor) for tensor in there] if there else []

    def _read_head(self, head: Head) -> tuple[Header, memoryview]:
        """The checked header, and the body; a long one is read when it is known to be of a size that is accepted."""
        context, src, data = self.route.context, self._src, head.data
        if not data and head.head_bytes:
            data = self._receiver.read_on(HEADER_BYTES, self.operation)
        header = wire.parse_header(data, context, src)
        if HEADER_BYTES + header.body_bytes != head.head_bytes:
            told = f"its header tells of {header.body_bytes} bytes, but has {head.head_bytes - HEADER_BYTES} after it"
            raise wire.not_a_message(told, context, src)
        if head.data:
            return header, data[HEADER_BYTES:]
        return header, self._receiver.read_on(header.body_bytes, self.operation)

    def _next(self) -> Head:
        return self._receiver.next(self.operation)

    def _check(self, head: Head) -> None:
        """Whether it is the message that this rank expects."""

    def _start(self, tensor: Tensor) -> Handle:
        context = self.route.context
        return self.route.start("irecv_", tensor, self._src, context.tag(_BODY), part_of=self._counted)


class _QueuedBroadcast(_Queued):
    def __init__(self, transport: QueueTransport, src: int, receiver: Receiver, counted: str, call: UserCall) -> None:
        super().__init__(transport, src, receiver, counted, call)
        self._collective = call
        self._transport = transport
        self.operation = call.method

    def _next(self) -> Head:
        self._transport.announce(self._collective)
        try:
            return super()._next()
        except CollectiveMismatchError as error:  # as another rank tells, which knows its own call
            self._transport.compare(self._collective, error)
            raise

    def _check(self, head: Head) -> None:
        """A writer doesn't wait for its readers; so ranks that are not in the same call are told by its number."""
        if head.fingerprint != self._number:
            raise self._receiver.mismatch(
                f"this rank is in the group's message number {self._number} to all ranks, and rank {self._src} sent "
                f"its number {head.fingerprint}; another `src`, or another order of calls, was given on some rank",
                self.operation,
            )

    def _start(self, tensor: Tensor) -> Handle:
        return self.route.start("ibroadcast_", tensor, self._src, part_of=self._counted, method=self.operation)
