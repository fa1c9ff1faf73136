"""Sends and receives the objects and tensor dicts of a group, in order."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from device_communicators.base.errors import InvalidArgumentError
from device_communicators.base.helper_threads import HelperThread
from device_communicators.base.host_calls import host_call
from device_communicators.calls.memory import as_bytes, copy_values, dense, dtype_refusal, is_dense
from device_communicators.calls.user_call import (
    BROADCAST_BY_SPEC,
    UserCall,
    handler_error,
    message_call,
    timed,
    transfer,
)
from device_communicators.routing.route import Route
from device_communicators.routing.started import WAITED_FOR, Handle
from parallel_state.collectives import checks
from parallel_state.collectives.ops import ordering_token
from parallel_state.messages import wire
from parallel_state.messages.buffers import Buffers
from parallel_state.messages.codec import coding as codec
from parallel_state.messages.reader import ListReader, Reader, RouteMedium, allocate
from parallel_state.messages.slices import WHOLE, AllGatherGroup, cut_of
from parallel_state.messages.wire import FRAME_BYTES, Header, Outgoing, split_by_device

_GATHERED = "all_gather_message"
_MAX_UNWAITED_SENDS = 256
_CLOSE_GRACE_S = 5.0
_SENT_LIST, _RECEIVED_LIST, _BROADCAST_LIST = "send_list", "recv_list", "broadcast_list"
_UNWAITED_S = 0.02
"""A background thread completes a send that isn't waited for within this time."""


def _all_dense(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    for x in tensors:
        if not is_dense(x):
            return [dense(x) for x in tensors]
    return tensors


def _copy_back(tensors: Sequence[Tensor], flat: Sequence[Tensor]) -> None:
    if flat is not tensors:
        for tensor, received in zip(tensors, flat, strict=True):
            if received is not tensor:
                copy_values(tensor, received)


class Messenger:
    def __init__(self, route: Route, allow_pickle: bool = False) -> None:
        from parallel_state.messages.media import medium_of

        self.route = route
        self.medium: RouteMedium = medium_of(route)
        self.allow_pickle = allow_pickle
        self.past_python = self.medium.past_python
        self._has_pool = route.context.collectives is not None
        self._token = ordering_token(wire.CPU)
        self._pending: dict[int, list[ReceiveHandle]] = {}
        """Started receives by source rank, in their order."""
        self._pending_lock = threading.RLock()  # reentrant: a signal handler may interrupt the thread that holds it
        self._unwaited: deque[SendHandle] = deque()
        """Started sends. This list keeps their buffers alive when the caller drops the handles."""
        self._unwaited_lock = threading.RLock()
        self._releaser: threading.Thread | None = None
        route.attach_messenger(self)

    def encode(self, *args: Any) -> Outgoing:
        return wire.encode(*args, allow_pickle=self.allow_pickle)

    def post(
        self,
        obj: Any,
        dst: int,
        must_be: type | None = None,
        group: AllGatherGroup | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        *,
        waits: bool = False,
    ) -> Outgoing | Handle | None:
        """Sends `obj` to group rank `dst` without Python code, if possible. Returns None if the send is complete, a
        handle if it was started, else the encoded message, which the caller must send.

        `waits`: completes the send before returning. `group`, `all_gather_tensors`: as in
        `GroupCoordinator.send_tensor_dict`.
        """
        if self._unwaited:
            self._forget_sent()
        if must_be is None or type(obj) is must_be:
            cut = WHOLE if group is None else cut_of(group, all_gather_tensors)
            posted = self.medium.post(obj, dst, None, cut, waits)
            if posted is True:
                return None
            if posted is not False:
                return posted
        return self.encode(obj, must_be, group, all_gather_tensors)

    def isend(self, outgoing: Outgoing | Handle | None, dst: int) -> SendHandle:
        """Starts to send `outgoing`, the result of `post`. Raises MessageEncodeError if the object can't be encoded."""
        if outgoing is None:
            return SendHandle(self, ())
        if self._unwaited:
            self._forget_sent()
        parts = [outgoing] if isinstance(outgoing, Handle) else self.medium.isend(outgoing, dst)
        handle = SendHandle(self, parts)
        if not handle.has_ended:
            self._track(handle)
        if isinstance(outgoing, Outgoing) and outgoing.error is not None:
            raise outgoing.error
        return handle

    def send(self, outgoing: Outgoing | Handle | None, dst: int) -> None:
        """Sends `outgoing`, the result of `post`, and returns when the tensors can be changed."""
        if outgoing is None:
            return
        if self._pending:
            self.receive_meanwhile()
        if isinstance(outgoing, Handle):
            outgoing.wait()
            return
        self.medium.send(outgoing, dst)
        if outgoing.error is not None:
            raise outgoing.error

    def irecv(
        self,
        src: int,
        all_gather_group: AllGatherGroup | None = None,
        out: Buffers | None = None,
        views: bool = False,
    ) -> ReceiveHandle:
        with self._pending_lock:
            handle = ReceiveHandle(self, Reader(self, src, all_gather_group, out, views, gathers=False))
            self._pending.setdefault(src, []).append(handle)
        return handle

    def recv(
        self,
        src: int,
        all_gather_group: AllGatherGroup | None = None,
        out: Buffers | None = None,
        views: bool = False,
    ) -> Any:
        if self._pending.get(src):
            return self.irecv(src, all_gather_group, out, views).wait()
        return self._receive(Reader(self, src, all_gather_group, out, views))

    def _receive(self, reader: Reader, call: UserCall | None = None) -> Any:
        try:
            for part in self.medium.receive(reader, call):
                part.wait()
            return reader.build()
        except Exception as error:
            raise self.failure_of(error)  # noqa: B904  (the same error, noted by the route)

    def pending_up_to(self, handle: ReceiveHandle) -> list[ReceiveHandle]:
        with self._pending_lock:
            pending = self._pending.get(handle.reader.src, [])
            return pending[: pending.index(handle) + 1] if handle in pending else [handle]

    def forget(self, handle: ReceiveHandle) -> None:
        with self._pending_lock, contextlib.suppress(ValueError):  # another thread was faster
            self._pending.get(handle.reader.src, []).remove(handle)
            self.medium.end_receive(handle.reader)

    def receive_meanwhile(self) -> None:
        """Completes started receives in threads, before this rank waits for a peer to receive.

        Otherwise two ranks that each call irecv, then send, would wait for each other. Does nothing in a group of GPUs,
        because their sends don't block the host.
        """
        if self.route.context.device.type != "cpu":
            return
        with self._pending_lock:
            last = [pending[-1] for pending in self._pending.values() if pending]
        for handle in last:
            handle.is_completed()

    def _track(self, handle: SendHandle) -> None:
        with self._unwaited_lock:
            self._unwaited.append(handle)
            oldest = self._unwaited[0] if len(self._unwaited) > _MAX_UNWAITED_SENDS else None
            if self._releaser is None and handle.needs_a_thread:
                self._releaser = HelperThread("sent", self._release_sent)
                self._releaser.start()
        if oldest is not None:
            oldest.wait()

    def _forget_sent(self) -> None:
        with self._unwaited_lock:
            for handle in list(self._unwaited):
                if handle.has_ended:
                    with contextlib.suppress(ValueError):  # a signal handler was faster
                        self._unwaited.remove(handle)

    def _release_sent(self) -> None:
        time.sleep(_UNWAITED_S)
        while True:
            self._forget_sent()
            with self._unwaited_lock:
                first = next((handle for handle in self._unwaited if handle.needs_a_thread), None)
                if first is None:
                    self._releaser = None
                    return
            first.run_to_end()
            del first  # otherwise this frame keeps its buffer alive

    @timed
    def broadcast(
        self,
        obj: Any,
        src: int,
        method: str = "broadcast_object",
        must_be: type | None = None,
        out: Buffers | None = None,
        views: bool = False,
    ) -> Any:
        checks.check_no_transform(self.route.context, method)
        call = message_call(method, src)
        if self.route.context.rank != src:
            reader = Reader(self, src, None, out, views)
            if self.past_python is not None:
                return self._receive(reader, call)
            with self.route.alone(call):
                return self._receive(reader, call)
        posted = (must_be is None or type(obj) is must_be) and self.medium.post(obj, src, call, WHOLE)
        if posted is True:
            return obj
        with self.route.alone(call):
            outgoing = posted if isinstance(posted, Outgoing) else self.encode(obj, must_be)
            self.medium.broadcast(outgoing, call)
        if outgoing.error is not None:
            raise outgoing.error
        return obj

    @timed
    def all_gather(self, obj: Any, method: str) -> list[Any]:
        checks.check_no_transform(self.route.context, method)
        with self.route.alone(UserCall(method)):
            return self._all_gather(obj, method)

    def _all_gather(self, obj: Any, method: str) -> list[Any]:
        context = self.route.context
        outgoing = self.encode(obj)
        parts = [] if outgoing.rest is None else [outgoing.rest]
        parts += [as_bytes(tensor.cpu()) for tensor in outgoing.tensors if tensor.numel()]
        mine = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=wire.CPU)
        frame = outgoing.frame
        frames = self.route.run("all_gather", frame, frame, 0, part_of=_GATHERED, method=method).view(-1, FRAME_BYTES)
        self.route.count(_GATHERED)
        try:
            headers = [wire.parse_header(wire.bytes_of(frame), context, src) for src, frame in enumerate(frames)]
            sizes = [header.rest_bytes + header.tensor_bytes for header in headers]
            rests = mine
            if any(sizes):
                rests = self.route.run("all_gatherv", mine, mine, 0, sizes, part_of=_GATHERED, method=method)
            if outgoing.error is not None:
                raise outgoing.error
            each = zip(range(context.size), headers, frames, rests.split(sizes), strict=True)
            return [obj if src == context.rank else self._value_of(src, *received) for src, *received in each]
        except Exception as error:
            raise error if error is outgoing.error else self.failure_of(error)  # noqa: B904

    def _value_of(self, src: int, header: Header, frame: Tensor, rest: Tensor) -> Any:
        offset, context = header.rest_bytes, self.route.context
        body = wire.body_of(header, frame, rest[:offset])
        if header.is_error:
            raise wire.remote_error(body, context, src)
        message, _ = wire.read_body(header, body, context, src, self.allow_pickle)
        tensors = [allocate(self, metadata, src) for metadata in message.tensors]
        for tensor in tensors:
            if tensor.nbytes:
                as_bytes(tensor).copy_(rest[offset : offset + tensor.nbytes])
            offset += tensor.nbytes
        return wire.build(message, tensors, context, src)

    # CPU tensors of a list are one message, with the digest of `form`. Others are transfers.

    @transfer("send_tensor_dict with a spec")
    def send_list(self, tensors: Sequence[Tensor], form: str, dst: int) -> None:
        on_cpu, on_device = self._split_by_device(tensors, _SENT_LIST)
        if on_cpu:
            self.send(self._list_of(on_cpu, form, _SENT_LIST), dst)
        self.route.run_list("send", on_device, dst, part_of=_SENT_LIST)

    @transfer("recv_tensor_dict with a spec")
    def recv_list(self, tensors: Sequence[Tensor], form: str, src: int) -> None:
        """Receives a dict's tensors from group rank `src` into `tensors`. `form`: text or digest of the expected
        spec.
        """
        flat = _all_dense(tensors)
        on_cpu, on_device = self._split_by_device(flat, _RECEIVED_LIST)
        if on_cpu:
            self._take_in_earlier(src)
            self._receive(ListReader(self, src, wire.head_of_list(form, on_cpu), on_cpu))
        self.route.run_list("recv", on_device, src, part_of=_RECEIVED_LIST)
        _copy_back(tensors, flat)

    @transfer("recv_tensor_dict with a spec")
    def recv_views(self, head: bytes, form: int, tensors: Sequence[codec.TensorMetadata], src: int) -> list[Tensor]:
        """Receives a spec's tensors from group rank `src`, if possible as views of the sender's memory.

        `head`: the required first bytes of the message. `form` (for C++, the address of a `Form`) and `tensors` (for
        Python) describe the tensors.
        """
        self._take_in_earlier(src)
        made: list[Tensor] = self._receive(ListReader(self, src, head, None, tensors, form))
        return made

    def broadcast_views(
        self, head: bytes, form: int, tensors: Sequence[codec.TensorMetadata], src: int
    ) -> list[Tensor]:
        reader = ListReader(self, src, head, None, tensors, form)
        made: list[Tensor] = self._receive(reader, message_call(BROADCAST_BY_SPEC, src))
        return made

    def _take_in_earlier(self, src: int) -> None:
        if self._pending.get(src):
            with self._pending_lock:
                earlier = self._pending[src][-1:]
            for handle in earlier:
                handle.take_in()

    def broadcast_list(self, tensors: Sequence[Tensor], form: str, src: int) -> None:
        call, is_src = message_call(BROADCAST_BY_SPEC, src), self.route.context.rank == src
        with self.route.alone(call):
            flat = _all_dense(tensors)
            on_cpu, on_device = self._split_by_device(flat, _BROADCAST_LIST)
            if on_cpu and is_src:
                self.medium.broadcast(self._list_of(on_cpu, form, _BROADCAST_LIST), call)
            elif on_cpu:
                self._receive(ListReader(self, src, wire.head_of_list(form, on_cpu), on_cpu), call)
            self.route.run_list("broadcast_", on_device, src, part_of=_BROADCAST_LIST, method=call.method)
        if not is_src:
            _copy_back(tensors, flat)

    def _list_of(self, tensors: Sequence[Tensor], form: str, counted: str) -> Outgoing:
        for x in tensors:
            if x.layout is not torch.strided or x.is_nested or dtype_refusal(x.dtype) is not None:
                raise InvalidArgumentError(
                    f"{counted} on {self.route.context} takes only dense tensors; send sparse and quantized "
                    "tensors in separate calls"
                )
        flat = [dense(x) for x in tensors]
        return Outgoing(wire.head_of_list(form, flat), flat, counted=counted)

    def _split_by_device(self, tensors: Sequence[Tensor], counted: str) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        context = self.route.context
        if context.device.type == "cpu" and not context.simulated:
            return tensors, ()
        self.route.check_usable(counted)
        on_cpu, on_device = split_by_device(tensors) if not context.simulated else ((), tensors)
        if not on_cpu:
            self.route.count(counted)
        return on_cpu, on_device

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self._has_pool and prod(shape) * dtype.itemsize >= wire.POOLED_BYTES:
            return torch.ops.parallel_state.empty(self._token, shape, dtype, wire.CPU, self.route.context.key)
        return torch.empty(shape, dtype=dtype, device=wire.CPU)

    def failure_of(self, error: Exception) -> Exception:
        return self.route.failure_of(error, "message", time.monotonic())

    def close(self) -> bool:
        """Waits up to 5 s for started sends without a `wait()`. Returns True if all sends are complete."""
        deadline = time.monotonic() + _CLOSE_GRACE_S
        if self.route.first_failure is None:
            while self._unwaited and time.monotonic() < deadline:
                self._forget_sent()
                time.sleep(0.001)
        with self._unwaited_lock:
            all_sent = not self._unwaited
            self._unwaited.clear()
        self._pending.clear()
        return all_sent


class SendHandle:
    """A started send, made of transfers with the handles `parts`.

    This object keeps the tensors alive until they are sent. Change the tensors only after `wait()`.
    """

    def __init__(self, messenger: Messenger, parts: Sequence[Handle]) -> None:
        self._messenger = messenger
        self._parts = list(parts)

    @host_call(WAITED_FOR)
    def is_completed(self) -> bool:
        return all(part.is_completed() for part in self._parts)

    @host_call(WAITED_FOR)
    def wait(self) -> None:
        """Waits until the tensors can be changed. If the send failed, raises its error."""
        if self._parts:
            self._messenger.receive_meanwhile()
        for part in self._parts:
            part.wait()
        self._parts.clear()

    @property
    @host_call(WAITED_FOR)
    def has_ended(self) -> bool:
        """Returns True once the send has completed or failed. The tensors are then no longer read."""
        return all(part.has_ended for part in self._parts)

    @property
    @host_call(WAITED_FOR)
    def needs_a_thread(self) -> bool:
        return any(part.needs_a_thread for part in self._parts)

    @host_call(WAITED_FOR)
    def run_to_end(self) -> None:
        for part in list(self._parts):
            part.run_to_end()

    @host_call(WAITED_FOR)
    def __iter__(self) -> Iterator[SendHandle]:
        """Yields this handle, because vLLM's callers expect a list of handles."""
        return iter((self,))


class ReceiveHandle:
    """A started receive of an object."""

    def __init__(self, messenger: Messenger, reader: Reader) -> None:
        self.reader = reader
        self._messenger = messenger
        self._lock = threading.RLock()
        self._waiter: threading.Thread | None = None
        self._arrived = False
        self._built = False
        self._error: Exception | None = None
        self._value: Any = None
        self._to_fill: dict[Any, Any] | None = None
        self._parts: Sequence[Handle] = ()
        messenger.medium.start_receive(reader)

    @host_call(WAITED_FOR)
    def is_completed(self) -> bool:
        """Returns True once the whole message has arrived. The first call starts a thread that receives the message."""
        if self._waiter is None and not self._arrived:
            self._waiter = HelperThread("receive", self.take_in)
            self._waiter.start()
        return self._arrived and all(part.is_completed() for part in self._parts)

    @host_call(WAITED_FOR)
    def wait(self) -> Any:
        """Waits for the object and returns it; can be called again.

        Raises RemoteError if the sender sent an error, or the error of a failed transfer.
        """
        self.take_in()
        if self._error is not None:
            raise self._error
        if not self._built:
            for part in self._parts:
                part.wait()
            try:
                self._value = self.reader.build()
            except Exception as error:
                self._error = self._messenger.failure_of(error)
                raise self._error  # noqa: B904  (the same error, noted by the route)
            self._built = True
        if self._to_fill is not None:
            self._to_fill.update(self._value)
        return self._value

    @host_call(WAITED_FOR)
    def __iter__(self) -> Iterator[Any]:
        """Yields `tensors, handles, postprocess`, as vLLM's callers expect. This object is the only handle. Its
        `wait()` fills `tensors`.
        """
        self._to_fill = {} if self._to_fill is None else self._to_fill
        return iter((self._to_fill, [self], []))

    @host_call(WAITED_FOR)
    def take_in(self) -> None:
        """Receives this message, after the messages of all earlier handles for the same sender."""
        for handle in self._messenger.pending_up_to(self):
            if handle._lock._is_owned():  # type: ignore[attr-defined]
                raise handler_error("wait", str(self._messenger.route.context), "recv")
            with handle._lock:
                if not handle._arrived:
                    try:
                        handle._parts = self._messenger.medium.receive(handle.reader)
                    except Exception as error:
                        handle._error = self._messenger.failure_of(error)
                    handle._arrived = True
            self._messenger.forget(handle)


class NoSend(SendHandle):
    """A send in a group of one rank. Iterates like an empty list of handles, as in vLLM."""

    def __init__(self, messenger: Messenger) -> None:
        super().__init__(messenger, ())

    def __iter__(self) -> Iterator[SendHandle]:
        return iter(())


class NoReceive(ReceiveHandle):
    def __init__(self) -> None: ...

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def take_in(self) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        return iter((None, [], []))
