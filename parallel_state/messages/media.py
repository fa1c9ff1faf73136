"""Carries messages through the compiled library.

Tensors on a device such as a GPU always go by transfers (the group's send, recv and broadcast).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

from torch import Tensor

from device_communicators.base import settings
from device_communicators.base.errors import CollectiveMismatchError, RemoteError
from device_communicators.calls.recorder import Operation
from device_communicators.calls.user_call import TRANSFERS, UserCall, message_word, transfer_number
from device_communicators.cpu.channels import MESSAGES, Channels
from device_communicators.cpu.message_queue import Message, Receiver, Sender, pieces_of
from device_communicators.cpu.message_streams import (
    MessageStreams,
    StreamReceiver,
    StreamSender,
    ToAllReceiver,
    ToAllSender,
)
from device_communicators.cpu.plain_tree import PastPython
from device_communicators.routing.route import Route
from device_communicators.routing.started import Handle
from device_communicators.routing.waits import waiting_for
from parallel_state.messages import wire
from parallel_state.messages.codec import values as codec_values
from parallel_state.messages.reader import BODY, BROADCAST, SENT, Reader, RouteMedium, counted_name
from parallel_state.messages.slices import Cut
from parallel_state.messages.wire import (
    DONE,
    FRAME_BYTES,
    NO_ROOM,
    STARTED,
    Outgoing,
    split_by_device,
)

_OF_LISTS = ("send_tensor_dict with a spec", "recv_tensor_dict with a spec")


def medium_of(route: Route) -> RouteMedium:
    """Returns the medium for the route's group. Its class is the same on all ranks."""
    memory = route.context.host_memory
    if memory is None or (memory.channels is None and memory.collectives is None):
        return RouteMedium(route)
    return LibraryMedium(route, memory.channels or memory.streams)


def _method_of(reader: Reader) -> int:
    """Returns the GroupCoordinator method that receives the message of `reader`, as an index of TRANSFERS. Errors name
    this method.

    A receive with a spec first completes earlier receives. If these have no spec, their method is recv_tensor_dict.
    """
    number = transfer_number("recv_tensor_dict")
    return number if reader.is_list or TRANSFERS[number] not in _OF_LISTS else TRANSFERS.index("recv_tensor_dict")


_Receiver = Receiver | StreamReceiver | ToAllReceiver


class LibraryMedium(RouteMedium):
    def __init__(self, route: Route, channels: Channels | MessageStreams | None) -> None:
        """`channels`: send messages to single ranks. If None, messages are sent as transfers over `route`."""
        super().__init__(route)
        self.channels = channels
        self._queues, self._streams = cast(Channels, channels), cast(MessageStreams, channels)
        self._open: set[tuple[int, bool]] = set()
        collectives = route.context.collectives
        self._group = getattr(collectives, "number", 0)
        self._hosts = None if isinstance(channels, Channels) else collectives
        self._objects = codec_values.use_library()
        is_on_host = route.context.device.type == "cpu" and not route.context.simulated
        self.past_python: PastPython | None = self._objects.past_python if is_on_host else None

    def post(
        self, obj: object, dst: int, call: UserCall | None, cut: Cut, waits: bool = False
    ) -> Outgoing | Handle | bool:
        past, key, limit = self.past_python, self.route.context.key, settings.MAX_METADATA_BYTES.get()
        if past is None:
            return False
        if call is None:
            outcome = past.send_object(key, dst, transfer_number("send_tensor_dict"), obj, limit, *cut, waits)
        else:
            outcome = past.broadcast_object(key, message_word(call.method, call.root), obj, limit)
        if outcome >= STARTED:
            return self._started(outcome - STARTED, dst)
        return outcome == DONE or (outcome == NO_ROOM and wire.of_packed(self._objects.packed(), cut))

    def _receiver(self, src: int, call: UserCall | None) -> _Receiver:
        if call is None:
            return cast("Channels | MessageStreams", self.channels).message_receiver(src)
        if self._hosts is None:
            return self._queues.receiver(src, MESSAGES, broadcast=True)
        return ToAllReceiver(self._hosts, src, call)

    def _started(self, number: int, dst: int) -> Handle:
        work = self._streams.message_sender(dst).started(number)
        return Handle(self.route, self.route.note(SENT, None, None, peer=dst), work, wire.NO_BYTES)

    def isend(self, outgoing: Outgoing, dst: int) -> list[Handle]:
        if self.channels is None:
            return super().isend(outgoing, dst)
        route, started = self.route, time.monotonic()
        name = outgoing.counted or SENT
        on_cpu, on_device = split_by_device(outgoing.tensors)
        route.check_usable()
        route.check_recordable(name)
        try:
            work = self.channels.message_sender(dst).isend(Message(outgoing.head, on_cpu, 0, outgoing.more or b""))
        except Exception as error:
            self._note_sent(outgoing, name, dst, started)
            raise route.failure_of(error, "isend", started)  # noqa: B904  (the same error, noted by the route)
        record = self._note_sent(outgoing, name, dst, started)
        parts: list[Handle] = []
        if work.is_completed():
            record.ended_s = time.monotonic()
        else:
            parts.append(Handle(route, record, work, outgoing.frame))
        return parts + self._start_sending(on_device, dst, None, name)

    def send(self, outgoing: Outgoing, dst: int) -> None:
        for part in super().isend(outgoing, dst) if self.channels is None else self._write(outgoing, dst, None):
            part.wait()

    def broadcast(self, outgoing: Outgoing, call: UserCall) -> None:
        for part in self._write(outgoing, None, call):
            part.wait()

    def _write(self, outgoing: Outgoing, dst: int | None, call: UserCall | None) -> list[Handle]:
        route, started, hosts = self.route, time.monotonic(), self._hosts
        name = outgoing.counted or (SENT if call is None else BROADCAST)
        operation = "send" if call is None else call.method
        on_cpu, on_device = split_by_device(outgoing.tensors)
        route.check_usable()
        route.check_recordable(name)
        number = self._queues.begin_broadcast() if call is not None and hosts is None else 0
        record = self._note_sent(outgoing, name, -1 if dst is None else dst, started, call)
        try:
            with waiting_for(route.context, record):
                if call is not None and hosts is None:
                    self.announce(call)
                sender: Sender | StreamSender | ToAllSender
                if call is not None and hosts is not None:
                    sender = ToAllSender(hosts, self._objects.past_python, call)
                else:
                    sender = self._queues.sender(None, MESSAGES) if dst is None else self._queues.message_sender(dst)
                sender.send(Message(outgoing.head, on_cpu, number, outgoing.more or b""), operation)
        except Exception as error:
            raise route.failure_of(error, operation, started)  # noqa: B904  (the same error, noted by the route)
        record.ended_s = time.monotonic()
        return self._start_sending(on_device, dst, call, name)

    def _start_sending(
        self, tensors: Sequence[Tensor], dst: int | None, call: UserCall | None, name: str
    ) -> list[Handle]:
        route = self.route
        if call is None:
            return [route.start("isend", x, dst, route.context.tag(BODY), part_of=name) for x in tensors]
        src, method = route.context.rank, call.method
        return [route.start("ibroadcast_", x, src, part_of=name, method=method) for x in tensors]

    def announce(self, call: UserCall) -> None:
        """Numbers the broadcast `call` as one of the group's collectives.

        A peer in another collective reads no messages, but compares calls of equal number, and so detects the mismatch.
        """
        if (collectives := self.route.context.collectives) is not None:
            collectives.announce(call.root, self._queues.spin_ns, call)

    def _note_sent(
        self, outgoing: Outgoing, name: str, dst: int, started_s: float, call: UserCall | None = None
    ) -> Operation:
        record = self.route.note(name, None, call, peer=dst, started_s=started_s)
        self.route.count(name, 1, outgoing.counted_bytes)
        return record

    def start_receive(self, reader: Reader) -> None:
        if self.channels is None:
            super().start_receive(reader)
            return
        self.route.check_usable()
        self.route.check_recordable(counted_name(reader, None))
        receiver = self.channels.message_receiver(reader.src)
        if receiver.is_held_here:  # in a signal handler, which would receive another call's message
            raise receiver.in_a_handler("recv")
        receiver.reserve(1)

    def end_receive(self, reader: Reader) -> None:
        if self.channels is not None:
            self.channels.message_receiver(reader.src).reserve(-1)

    def receive(self, reader: Reader, call: UserCall | None = None) -> Sequence[Handle]:
        src, past, key = reader.src, self.past_python, self.route.context.key
        if call is None and self.channels is None:
            return super().receive(reader)
        on_device: list[Tensor] = []

        def take(head: bytes, head_bytes: int, tensor_bytes: int) -> bytes:
            on_cpu, others = split_by_device(reader.take_bytes(head, head_bytes, tensor_bytes))
            on_device.extend(others)
            return pieces_of(on_cpu)[0] or b""

        found: Any = NotImplemented
        if past is not None:
            end = src, call is not None
            if end not in self._open:
                self._receiver(src, call)
                self._open.add(end)
            if call is None:
                found = past.receive_value(key, src, _method_of(reader), *reader.wanted, take)
            else:
                found = past.receive_broadcast_value(key, message_word(call.method, src), *reader.wanted, take)
        if found is NotImplemented:
            with nullcontext() if call is None else self.route.alone(call):
                found = self._receive_recorded(reader, call, take)
        if found is not take:
            reader.found = found
            return ()
        return [self._receive_part(x, src, call, counted_name(reader, call)) for x in on_device]

    def _receive_recorded(self, reader: Reader, call: UserCall | None, take: Any) -> Any:
        route, name, operation = self.route, counted_name(reader, call), "recv" if call is None else call.method
        started, is_queued = time.monotonic(), call is not None and self._hosts is None
        route.check_usable()
        route.check_recordable(name)
        receiver = self._receiver(reader.src, call)
        if not isinstance(receiver, ToAllReceiver) and receiver.is_held_here:
            raise receiver.in_a_handler(operation)
        number = self._queues.begin_broadcast() if is_queued else 0
        record = route.note(name, None, call, peer=-1 if call is not None else reader.src)
        with waiting_for(route.context, record), receiver.lock:
            self._check(receiver, call, operation)
            if call is not None and is_queued and not cast(Receiver, receiver).has_found:
                self.announce(call)
            try:
                past = self._objects.past_python
                found = receiver.receive(past, number, self._group, *reader.wanted, take)
            except RemoteError:
                self._end(record, name, receiver)
                raise
            except Exception as error:
                raise route.failure_of(error, operation, started)  # noqa: B904  (the same error, noted by the route)
            if found is NotImplemented:
                self._check(receiver, call, operation)
                end = cast(Receiver, receiver)
                raise end.mismatch(  # the writer doesn't wait for its readers, so it can't detect this
                    f"this rank receives the group's broadcast message number {number}, but rank {reader.src} sent "
                    f"number {end.fingerprint}. Make the calls in the same order, with the same `src`, on all ranks",
                    operation,
                )
            self._end(record, name, receiver)
        return found

    def _end(self, record: Operation, name: str, receiver: _Receiver) -> None:
        record.ended_s = time.monotonic()
        head_bytes, tensor_bytes = receiver.found_bytes
        self.route.count(name, 1, max(FRAME_BYTES, head_bytes) + tensor_bytes)

    def _check(self, receiver: _Receiver, call: UserCall | None, operation: str) -> None:
        try:
            receiver.check(operation)
        except CollectiveMismatchError as error:  # another rank's report, which contains that rank's call only
            collectives = self.route.context.collectives
            if call is not None and collectives is not None:
                try:
                    collectives.call("compare", user_call=call)
                except CollectiveMismatchError as named:
                    raise named from error
            raise
