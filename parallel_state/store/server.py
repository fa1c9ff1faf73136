"""The store of a job, for processes that know its secret: one thread in the process that started the job.

Belongs here: sockets, and who is turned away when. A connection that has not proven itself may send 64 bytes, has
`HANDSHAKE_S` for it, and is closed earlier where too many are in that state: the oldest goes first, as a rank's
handshake takes milliseconds. What does not belong here: the bytes (`store.session`), the requests
(`store.table`).
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time

from device_communicators.errors import MessageDecodeError
from device_communicators.liveness.health import WakeEvent
from parallel_state.store.protocol import Message
from parallel_state.store.session import Session
from parallel_state.store.table import Table

logger = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
_STRANGERS = 64  # at once, beside two connections of each rank
_ACCEPTS = 64  # at once, before those that are there already are looked after
_FULL_S = 0.1  # without a free descriptor: before the next look for connections
_CLOSE_S = 5.0


class ControlServer:
    """Serves from its creation to `close`, which forgets all keys."""

    def __init__(
        self, listener: socket.socket, secret: bytes, world_size: int, handshake_s: float = HANDSHAKE_S
    ) -> None:
        """Takes the listening socket over."""
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._listener.setblocking(False)
        self._secret = secret
        self._handshake_s = handshake_s
        self._most_strangers = _STRANGERS + 2 * world_size
        self._table = Table()
        self._strangers: dict[_Connection, None] = {}  # the oldest first
        self._refused = 0
        self._closing = False
        self._full_until = 0.0
        self._selector = selectors.DefaultSelector()
        self._wake = WakeEvent()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="parallel_state-store")
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and all connections. Twice is fine."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(_CLOSE_S)
        self._wake.close()  # not by the thread, which may end before it is woken

    def _serve(self) -> None:
        try:
            while not self._closing:
                for key, events in self._selector.select(self._patience_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is not None and key.data.open:  # an earlier event may have closed it
                        self._attend(key.data, events)
                self._turn_away_the_late()
        finally:
            for key in list(self._selector.get_map().values()):
                if key.data is not None:
                    key.data.close()
            self._selector.close()
            self._listener.close()

    def _patience_s(self) -> float | None:
        """Until there is something to do even if nothing comes; None: no such time."""
        now = time.monotonic()
        limits = [next(iter(self._strangers)).deadline] if self._strangers else []
        if self._full_until:
            limits.append(self._full_until)
        return max(0.0, min(limits) - now) if limits else None

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                accepted, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # of the one that went away meanwhile; or no descriptor is free
                self._selector.unregister(self._listener)
                self._full_until = time.monotonic() + _FULL_S
                return
            connection = _Connection(accepted, address, self._secret, time.monotonic() + self._handshake_s, self)
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            self._strangers[connection] = None
            if len(self._strangers) > self._most_strangers:
                oldest = next(iter(self._strangers))
                self._refuse(oldest, f"more than {self._most_strangers} others came before it had proven itself")
            self._attend(connection, selectors.EVENT_WRITE)

    def _turn_away_the_late(self) -> None:
        now = time.monotonic()
        if self._full_until and now >= self._full_until:
            self._full_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
        for connection in list(self._strangers):
            if connection.deadline > now:
                return
            self._refuse(connection, f"it has not proven itself within {self._handshake_s:g} s")

    def _attend(self, connection: _Connection, events: int) -> None:
        was_stranger = connection in self._strangers
        try:
            if events & selectors.EVENT_READ:
                request = connection.read()
                if connection.session.authenticated:
                    self._strangers.pop(connection, None)
                if request is not None:
                    self._table.ask(request, connection.reply)
            connection.write()
        except MessageDecodeError as error:
            with contextlib.suppress(OSError):
                connection.write()  # that it is refused
            self._refuse(connection, str(error))
        except (OSError, EOFError) as error:
            if was_stranger:
                self._refuse(connection, f"it ended before it had proven itself ({error})")
            else:
                self.drop(connection)
        except Exception:  # a fault of ours must end one connection, not the store
            logger.exception("the store of this job failed over a request from %s", connection.peer)
            self.drop(connection)

    def _refuse(self, connection: _Connection, reason: str) -> None:
        self.drop(connection)
        self._refused += 1
        if str(self._refused).strip("0") == "1":  # 1, 10, 100, …: nobody shall fill the log
            logger.warning(
                "the store of this job refused a connection from %s: %s (the %d. one)",
                connection.peer, reason, self._refused,
            )  # fmt: skip

    def drop(self, connection: _Connection) -> None:
        """Closes it, and forgets what it waited for."""
        self._strangers.pop(connection, None)
        self._table.forget(connection.reply)
        if connection.open:
            self._selector.unregister(connection.socket)
            connection.close()

    def expect(self, connection: _Connection, events: int) -> None:
        self._selector.modify(connection.socket, events, connection)


class _Connection:
    """A socket and how far it is."""

    def __init__(
        self,
        accepted: socket.socket,
        address: tuple[object, ...],
        secret: bytes,
        deadline: float,
        server: ControlServer,
    ) -> None:
        accepted.setblocking(False)
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = accepted
        self.peer = f"{address[0]}:{address[1]}"
        self.session = Session(secret)
        self.deadline = deadline
        self.open = True
        self._server = server
        self._writes = False

    def read(self) -> Message | None:
        """What can be read now, up to a request. EOFError at the end."""
        while True:
            try:
                data = self.socket.recv(max(1, self.session.may_read))
            except BlockingIOError:
                return None
            if not data:
                raise EOFError("closed")
            request = self.session.feed(data)
            if request is not None:
                return request

    def write(self) -> None:
        """What can be written now of the output; the rest when the socket takes more."""
        output = self.session.output
        while output and self.open:
            try:
                sent = self.socket.send(memoryview(output)[: 256 << 10])
            except BlockingIOError:
                break
            del output[:sent]
        if self.open and bool(output) != self._writes:
            self._writes = bool(output)
            self._server.expect(self, selectors.EVENT_READ | (selectors.EVENT_WRITE if output else 0))

    def reply(self, message: Message) -> None:
        """Answers its request, which may be another connection's doing: so nothing may be raised here."""
        if not self.open:
            return
        try:
            self.session.reply(message)
            self.write()
        except (OSError, MessageDecodeError):
            self._server.drop(self)

    def close(self) -> None:
        self.open = False
        self.socket.close()
