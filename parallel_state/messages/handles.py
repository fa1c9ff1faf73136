"""Messages under way: handles of what is sent and received, and the reader that makes an object of what comes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from device_communicators.base.errors import CollectiveMismatchError, MessageDecodeError
from device_communicators.base.helper_threads import HelperThread
from device_communicators.base.host_calls import host_call
from device_communicators.calls.user_call import handler_error
from device_communicators.routing.route import Route
from device_communicators.routing.started import WAITED_FOR, Handle
from parallel_state.messages import buffers, known_heads, wire
from parallel_state.messages.all_gather_group import AllGatherGroup
from parallel_state.messages.buffers import Buffers
from parallel_state.messages.codec import coding as codec
from parallel_state.messages.wire import Head

if TYPE_CHECKING:  # loaded when a group is made
    from parallel_state.messages.transports import IncomingMessage, Transport


class HandleOwner(Protocol):
    """As much of a group's messenger as its handles need."""

    route: Route
    transport: Transport
    allow_pickle: bool

    def receive_meanwhile(self) -> None: ...

    def pending_up_to(self, handle: ReceiveHandle, src: int) -> list[ReceiveHandle]: ...

    def forget(self, handle: ReceiveHandle, src: int) -> None: ...

    def tensors_of(
        self, likely: known_heads.Template, all_gather_group: AllGatherGroup | None, out: Buffers | None
    ) -> list[Tensor] | None: ...

    def split_head(self, incoming: IncomingMessage, head: Head, src: int) -> tuple[wire.Header, bytes | memoryview]: ...

    def allocate(self, metadata: codec.TensorMetadata, src: int, slices: int = 1) -> Tensor: ...

    def failure_of(self, error: Exception) -> Exception: ...


class SendHandle:
    """A message on its way. Buffers are kept until it is sent; `wait()` before you change the tensors you sent."""

    def __init__(self, messenger: HandleOwner, parts: Sequence[Handle]) -> None:
        self._messenger = messenger
        self._parts = list(parts)

    @host_call(WAITED_FOR)
    def is_completed(self) -> bool:
        return all(part.is_completed() for part in self._parts)

    @host_call(WAITED_FOR)
    def wait(self) -> None:
        """Returns once the buffers may be reused; raises what went wrong on the way."""
        if self._parts:
            self._messenger.receive_meanwhile()
        for part in self._parts:
            part.wait()
        self._parts.clear()

    @property
    @host_call(WAITED_FOR)
    def has_ended(self) -> bool:
        """Returns True once nothing reads the buffers any more."""
        return all(part.has_ended for part in self._parts)

    @property
    @host_call(WAITED_FOR)
    def needs_a_thread(self) -> bool:
        return any(part.needs_a_thread for part in self._parts)

    @host_call(WAITED_FOR)
    def run_to_end(self) -> None:
        """Releases each buffer as it is sent; for the thread that takes care of sends that nobody waits for."""
        for part in list(self._parts):
            part.run_to_end()

    @host_call(WAITED_FOR)
    def __iter__(self) -> Iterator[SendHandle]:
        """Serves code that expects a list of handles, as vLLM's `isend_tensor_dict` gives."""
        return iter((self,))


class ReceiveHandle:
    """A message to come. `wait()` returns the object; `is_completed()` tells whether all of it is here."""

    def __init__(
        self,
        messenger: HandleOwner,
        src: int,
        all_gather_group: AllGatherGroup | None,
        out: Buffers | None,
        views: bool = False,
    ) -> None:
        self._messenger = messenger
        self._src = src
        self.incoming = messenger.transport.incoming(src)
        self._message = ObjectReader(messenger, self.incoming, src, all_gather_group, out, views)
        self._lock = threading.RLock()
        self._waiter: threading.Thread | None = None
        self._arrived = False
        self._built = False
        self._error: Exception | None = None
        self._value: Any = None
        self._to_fill: dict[Any, Any] | None = None
        self._parts: list[Handle] = []

    @host_call(WAITED_FOR)
    def is_completed(self) -> bool:
        """Returns True once all bytes are here (a thread takes them in from the first call on)."""
        if self._waiter is None and not self._arrived:
            self._waiter = HelperThread("receive", self.take_in)
            self._waiter.start()
        return self._arrived and all(part.is_completed() for part in self._parts)

    @host_call(WAITED_FOR)
    def wait(self) -> Any:
        """Returns the object; raises the error of the sender (RemoteError) or of the transfer. May be repeated."""
        self.take_in()
        if self._error is not None:
            raise self._error
        if not self._built:
            for part in self._parts:
                part.wait()
            try:
                self._value = self._message.build()
            except Exception as error:
                self._error = self._messenger.failure_of(error)
                raise self._error  # noqa: B904  (the same error, noted by the route)
            self._built = True
        if self._to_fill is not None:
            self._to_fill.update(self._value)
        return self._value

    @host_call(WAITED_FOR)
    def __iter__(self) -> Iterator[Any]:
        """Serves vLLM's `tensors, handles, postprocess = group.irecv_tensor_dict()`; waiting for the handles fills
        the dict."""
        self._to_fill = {} if self._to_fill is None else self._to_fill
        return iter((self._to_fill, [self], []))

    @host_call(WAITED_FOR)
    def take_in(self) -> None:
        """Receives everything that was sent point to point; earlier messages of the same sender first."""
        for handle in self._messenger.pending_up_to(self, self._src):
            if handle._lock._is_owned():  # type: ignore[attr-defined]
                raise handler_error("wait", str(self._messenger.route.context), "recv")
            with handle._lock:
                if not handle._arrived:
                    try:
                        handle._parts = handle._message.receive()
                    except Exception as error:
                        handle._error = self._messenger.failure_of(error)
                    handle._arrived = True
            self._messenger.forget(handle, self._src)


class NoSend(SendHandle):
    """A dict that is sent in a group of one rank: nowhere. It gives no handles where a list of them is expected."""

    def __init__(self, messenger: HandleOwner) -> None:
        super().__init__(messenger, ())

    def __iter__(self) -> Iterator[SendHandle]:
        return iter(())


class NoReceive(ReceiveHandle):
    """A dict that is received in a group of one rank: None."""

    def __init__(self) -> None:
        """Takes no turn among the messages that come."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def take_in(self) -> None:
        """Does nothing: nothing comes."""

    def __iter__(self) -> Iterator[Any]:
        return iter((None, [], []))


class ObjectReader:
    """Receives one message into tensors of its own, and builds the object."""

    def __init__(
        self,
        messenger: HandleOwner,
        incoming: IncomingMessage,
        src: int,
        all_gather_group: AllGatherGroup | None = None,
        out: Buffers | None = None,
        views: bool = False,
    ) -> None:
        self._messenger = messenger
        self._views = views
        self._incoming = incoming
        self._src = src
        self._all_gather_group = all_gather_group
        self._out = out
        self._message: codec.Message | None = None
        self._sliced: list[bool] = []
        self._tensors: list[Tensor] = []
        self._plain: tuple[Any] | None = None
        self._cache_key = b""
        self._template: known_heads.Template | None = None

    def receive(self) -> list[Handle]:
        """Waits for the message; returns the transfers of device tensors, which may be under way still."""
        likely = None if self._views else self._incoming.likely
        if self._views:
            self._incoming.want_views()
        if likely is not None and not self._expects(likely):
            likely = None
        with self._incoming as head:
            if head is None:
                self._template = likely
                return []
            self._tensors = []
            if not self._is_cached(head):
                self._decode(head)
            return self._incoming.read_into(self._tensors)

    def _expects(self, likely: known_heads.Template) -> bool:
        """Makes the tensors of the message that probably comes, while there is time: before it has come."""
        tensors = self._messenger.tensors_of(likely, self._all_gather_group, self._out)
        if tensors is None:
            return False
        self._tensors = tensors
        self._incoming.expect(likely.head, tensors)
        return True

    def _is_cached(self, head: Head) -> bool:
        """Returns True for a whole head that needs no decoding: without tensors, or known from before."""
        messenger, src = self._messenger, self._src
        if head.header is not None:
            return False
        if head.is_plain:
            try:
                self._plain = codec.read_plain(head.body[wire.PLAIN_BYTES :], messenger.allow_pickle)
            except MessageDecodeError as error:
                raise wire.malformed(error, messenger.route.context, src) from error
            return self._plain is not None
        if not head.has_tensors or messenger.allow_pickle or len(head.body) > known_heads.MOST_CACHED_BYTES:
            return False
        known = bytes(head.body)
        template = self._template = known_heads.template_of(known)
        if template is None or not template.can_be_gathered(self._all_gather_group):
            self._cache_key, self._template = known, None
            return False
        self._incoming.remember(template)
        within = None if self._out is None else template.within(self._out.tensors)
        self._tensors = within or self._allocate(template.tensors, template.cut, template.slices)
        return True

    def _decode(self, head: Head) -> None:
        """Reads the head, and allocates the tensors of which it tells."""
        messenger, src, context = self._messenger, self._src, self._messenger.route.context
        header, body = messenger.split_head(self._incoming, head, src)
        self._message, self._sliced = wire.read_body(header, body, context, src, messenger.allow_pickle)
        group = self._all_gather_group
        if any(self._sliced) and (group is None or header.slices != group.world_size):
            raise CollectiveMismatchError(
                f"sender and receiver must pass all-gather groups of one size, but rank {src} of {context} cut its "
                f"tensors into {header.slices} slices and this rank's all_gather_group has "
                f"{'no' if group is None else group.world_size} ranks; pass the same all_gather_group on both sides",
                group=context.name,
                rank=context.rank,
            )
        self._tensors = self._allocate(self._message.tensors, self._sliced, header.slices)

    def _allocate(self, tensors: Sequence[codec.TensorMetadata], cut: Sequence[bool], slices: int) -> list[Tensor]:
        """Allocates the tensors of a head, or slices of those that are cut, once as much is known to follow it."""
        parts = [slices if is_cut else 1 for is_cut in cut] or [1] * len(tensors)
        each = list(zip(tensors, parts, strict=True))
        if self._views:
            slices_of = [x if part == 1 else x._replace(shape=(prod(x.shape) // part,)) for x, part in each]
            if (borrowed := self._incoming.borrow(slices_of)) is not None:
                return borrowed
        self._incoming.check_size(sum(x.nbytes // part for x, part in each if x.device_type == "cpu"))
        return [self._messenger.allocate(x, self._src, part) for x, part in each]

    def build(self) -> Any:
        """Returns the object, of tensors that have arrived; with the caller's buffers where there are some."""
        value, out, template = self._build(), self._out, self._template
        if out is None:
            return value
        in_place = template is not None and len(out.tensors) == len(template.places)
        return buffers.place(self._messenger.route.context, self._src, value, out, in_place)

    def _build(self) -> Any:
        if self._plain is not None:
            return self._plain[0]
        if self._template is not None:
            return self._template.fill(self._template.gather(self._tensors, self._all_gather_group))
        message, group = self._message, self._all_gather_group
        if message is None:
            raise RuntimeError("the message has not arrived")
        for index, sliced in enumerate(self._sliced):
            if sliced and group is not None:
                shape = message.tensors[index].shape
                self._tensors[index] = group.all_gather(self._tensors[index], dim=0).view(shape)
        value = wire.build(message, self._tensors, self._messenger.route.context, self._src)
        if self._cache_key and self._tensors:
            slices = 1 if group is None else group.world_size
            known_heads.remember_template(self._cache_key, message.tensors, self._tensors, value, slices, self._sliced)
        return value
