"""Handles of started sends and receives."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from device_communicators.base.helper_threads import HelperThread
from device_communicators.base.host_calls import host_call
from device_communicators.calls.user_call import handler_error
from device_communicators.routing.route import Route
from device_communicators.routing.started import WAITED_FOR, Handle
from parallel_state.messages.medium import Medium
from parallel_state.messages.reader import Reader


class HandleOwner(Protocol):
    route: Route
    medium: Medium

    def receive_meanwhile(self) -> None: ...

    def pending_up_to(self, handle: ReceiveHandle) -> list[ReceiveHandle]: ...

    def forget(self, handle: ReceiveHandle) -> None: ...

    def failure_of(self, error: Exception) -> Exception: ...


class SendHandle:
    """A started send, made of `parts`. It keeps the tensors alive until sent; change them only after `wait()`."""

    def __init__(self, messenger: HandleOwner, parts: Sequence[Handle]) -> None:
        self._messenger = messenger
        self._parts = list(parts)

    @host_call(WAITED_FOR)
    def is_completed(self) -> bool:
        return all(part.is_completed() for part in self._parts)

    @host_call(WAITED_FOR)
    def wait(self) -> None:
        """Waits until the tensors can be changed. Raises the send's error if it failed."""
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
    """A started receive of an object, which `reader` builds."""

    def __init__(self, messenger: HandleOwner, reader: Reader) -> None:
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
        """Yields `tensors, handles, postprocess`, as vLLM's callers expect. The handle's `wait()` fills `tensors`."""
        self._to_fill = {} if self._to_fill is None else self._to_fill
        return iter((self._to_fill, [self], []))

    @host_call(WAITED_FOR)
    def take_in(self) -> None:
        """Receives this message after those of all earlier handles for the same sender."""
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

    def __init__(self, messenger: HandleOwner) -> None:
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
