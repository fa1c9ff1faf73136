"""The store of a job, for processes that know its secret: one thread in the process that started the job.

A torch TCPStore takes whoever connects, and what is in a store decides which processes form a group. On one node a
socket in a folder of mode 0700 would let the kernel authenticate; over several nodes (`secret_file`) only a handshake
can, and torch's store has none. So there is one store with one handshake for both cases, instead of two stores.

A connection that has not proven itself may send 64 bytes, has `HANDSHAKE_S` for it, and is closed earlier where too
many are in that state: the oldest goes first, as a rank's handshake takes milliseconds. What goes over the connection
is in `store.protocol`, the ranks' end in `store.client`.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence

from device_communicators.base.errors import MessageDecodeError
from device_communicators.base.helper_threads import HelperThread
from device_communicators.liveness.health import WakeEvent
from parallel_state.store import protocol

logger = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
_STRANGERS = 64  # at once, beside two connections of each rank
_ACCEPTS = 64  # at once, before those that are there already are looked after
_FULL_S = 0.1  # without a free descriptor: before the next look for connections
_CLOSE_S = 5.0
_READ_BYTES = 256 << 10
_OVERHEAD_BYTES = 1024  # of a reply, at most

Reply = Callable[[protocol.Message], None]


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
        self._thread = HelperThread("store", self._serve)
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
                for key, events in self._selector.select(self._wait_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is not None and key.data.open:  # an earlier event may have closed it
                        self._attend(key.data, events)
                self._refuse_late()
        finally:
            for key in list(self._selector.get_map().values()):
                if key.data is not None:
                    key.data.close()
            self._selector.close()
            self._listener.close()

    def _wait_s(self) -> float | None:
        """Returns the time until something is due even if nothing comes; None if nothing is."""
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

    def _refuse_late(self) -> None:
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
    """Joins a socket and its session."""

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

    def read(self) -> protocol.Message | None:
        """Reads what is there, up to a request. EOFError at the end."""
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
        """Writes as much of the output as the socket takes now; the rest follows."""
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

    def reply(self, message: protocol.Message) -> None:
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


class Session:
    """Takes a connection's bytes and gives its requests; what is to be sent collects in `output`."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = os.urandom(protocol.NONCE_BYTES)
        self._incoming: protocol.Direction | None = None
        self._outgoing: protocol.Direction | None = None
        self._input = bytearray()
        self._wanted = protocol.ANSWER_BYTES
        self._mac: bytes | None = None
        self.asked = False
        """True while a request waits for its reply; a client sends none meanwhile."""
        self.output = bytearray(protocol.MAGIC + self._nonce)

    @property
    def authenticated(self) -> bool:
        """Returns True once the client has proven that it knows the secret."""
        return self._incoming is not None

    @property
    def may_read(self) -> int:
        """Returns how many bytes to read: never more than what is due, so that nobody fills the memory."""
        return min(self._wanted - len(self._input), _READ_BYTES)

    def feed(self, data: bytes) -> protocol.Message | None:
        """Takes what came, `may_read` bytes at most; a request where one is complete. MessageDecodeError: close it."""
        if self.asked:
            raise MessageDecodeError("a client must wait for the reply, but sent more")
        self._input += data
        if len(self._input) < self._wanted:
            return None
        received, self._input = self._input, bytearray()
        if self._incoming is None:
            self._authenticate(received)
        elif self._mac is None:
            self._wanted, self._mac = protocol.length_in(received)
            return None
        else:
            request = self._incoming.open(self._mac, received)
            self.asked = True
            self._await_header()
            return request
        self._await_header()
        return None

    def _await_header(self) -> None:
        self._wanted, self._mac = protocol.HEADER.size, None

    def reply(self, message: protocol.Message) -> None:
        """Answers the request that `feed` gave."""
        if self._outgoing is None or not self.asked:
            raise MessageDecodeError("a reply must follow a request")
        self.asked = False
        self.output += self._outgoing.seal(protocol.packed(message))

    def _authenticate(self, answer: bytearray) -> None:
        nonces = self._nonce + answer[: protocol.NONCE_BYTES]
        if not hmac.compare_digest(answer[protocol.NONCE_BYTES :], protocol.proof(self._secret, b"client", nonces)):
            self.output += protocol.REFUSED
            raise MessageDecodeError("a client must prove that it knows the job's secret, but its MAC is wrong")
        keys = protocol.keys_of(self._secret, nonces)
        self._incoming, self._outgoing = protocol.Direction(keys.to_server), protocol.Direction(keys.to_client)
        self.output += protocol.proof(self._secret, b"server", nonces)


class Table:
    """Holds keys and values, and who waits for which; gives the answers that torch's TCPStore gives.

    A request is answered at once, or, where it waits for keys, when the last of them is set. One thread calls it.
    """

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._asking: dict[Reply, tuple[protocol.Message, set[bytes]]] = {}
        self._waiting: dict[bytes, dict[Reply, None]] = {}
        self._acts = {
            protocol.SET: self._set,
            protocol.ADD: self._add,
            protocol.CHECK: self._check,
            protocol.COMPARE_SET: self._compare_set,
            protocol.DELETE: self._delete,
            protocol.COUNT: self._count,
            protocol.APPEND: self._append,
            protocol.MULTI_SET: self._set,
        }

    def ask(self, request: protocol.Message, reply: Reply) -> None:
        """Calls `reply`, once, now or later; each asker has one of its own, and one request at a time."""
        if request.code in (protocol.GET, protocol.WAIT):
            self._await(request, reply)
            return
        act = self._acts.get(request.code)
        try:
            if act is None:
                raise ValueError(f"there is no request of code {request.code}")
            answer = protocol.Message(protocol.DONE, act(request.parts))
        except ValueError as error:
            answer = protocol.Message(protocol.FAILED, [str(error).encode()])
        reply(answer)

    def forget(self, reply: Reply) -> None:
        """Drops the waits of a closed connection."""
        _, missing = self._asking.pop(reply, (None, set[bytes]()))
        for key in missing:
            self._stop_waiting(key, reply)

    def _await(self, request: protocol.Message, reply: Reply) -> None:
        missing = {key for key in request.parts if key not in self._values}
        if missing:
            self._asking[reply] = request, missing
            for key in missing:
                self._waiting.setdefault(key, {})[reply] = None
            return
        found = [self._values[key] for key in request.parts] if request.code == protocol.GET else []
        size = sum(map(len, found)) + 8 * len(found) + _OVERHEAD_BYTES
        if size > protocol.MAX_CONTENT_BYTES:
            problem = f"{len(found)} values have {size} bytes; ask for fewer at once"
            reply(protocol.Message(protocol.FAILED, [problem.encode()]))
        else:
            reply(protocol.Message(protocol.DONE, found))

    def _stop_waiting(self, key: bytes, reply: Reply) -> None:
        waiting = self._waiting.get(key, {})
        waiting.pop(reply, None)
        if not waiting:
            self._waiting.pop(key, None)

    def _store(self, key: bytes, value: bytes) -> None:
        if len(key) + len(value) > protocol.MAX_CONTENT_BYTES - _OVERHEAD_BYTES:
            raise ValueError(f"a value and its key must have less than {protocol.MAX_CONTENT_BYTES} bytes")
        self._values[key] = value
        for reply in self._waiting.pop(key, ()):
            request, missing = self._asking[reply]
            missing.discard(key)
            if not missing:
                del self._asking[reply]
                self._await(request, reply)  # again: another of its keys may have been deleted

    def _set(self, parts: Sequence[bytes]) -> Sequence[bytes]:
        if not parts or len(parts) % 2:
            raise ValueError(f"keys and values must come in pairs, but are {len(parts)}")
        for key, value in zip(parts[::2], parts[1::2], strict=True):
            self._store(key, value)
        return []

    def _add(self, parts: Sequence[bytes]) -> Sequence[bytes]:
        key, amount = _exactly(2, parts)
        total = b"%d" % (_number(self._values.get(key, b"0")) + _number(amount))
        self._store(key, total)
        return [total]

    def _check(self, parts: Sequence[bytes]) -> Sequence[bytes]:
        return [b"1" if all(key in self._values for key in parts) else b"0"]

    def _compare_set(self, parts: Sequence[bytes]) -> Sequence[bytes]:
        key, expected, desired = _exactly(3, parts)
        found = self._values.get(key)
        if found == expected or (found is None and not expected):
            self._store(key, desired)
            return [desired]
        return [expected if found is None else found]

    def _delete(self, parts: Sequence[bytes]) -> Sequence[bytes]:
        (key,) = _exactly(1, parts)
        return [b"0" if self._values.pop(key, None) is None else b"1"]

    def _count(self, parts: Sequence[bytes]) -> Sequence[bytes]:
        _exactly(0, parts)
        return [b"%d" % len(self._values)]

    def _append(self, parts: Sequence[bytes]) -> Sequence[bytes]:
        key, more = _exactly(2, parts)
        self._store(key, self._values.get(key, b"") + more)
        return []


def _exactly(count: int, parts: Sequence[bytes]) -> Sequence[bytes]:
    if len(parts) != count:
        raise ValueError(f"the request takes {count} parts, but has {len(parts)}")
    return parts


def _number(text: bytes) -> int:
    if len(text) > 20:
        raise ValueError(f"add needs a number of at most 20 digits, but the value has {len(text)} bytes")
    return int(text)
