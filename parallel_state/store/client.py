"""A rank's end of the store of its job: a torch Store whose connections prove that both sides know the job's secret.

Each request has a connection for itself until its reply is there, so threads don't wait for each other; free ones are
kept. The server wakes who waits. A request whose time is up takes its connection with it.
"""

from __future__ import annotations

import hmac
import os
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from device_communicators.base.host import connect_to
from device_communicators.base.torch_internals import default_store
from parallel_state.store import protocol
from parallel_state.store.answers import ForeignServiceError, in_words

_PAUSE_S = 0.02
_CONNECT_S = 2.0
_MOST_KEPT = 4


class ControlStore(dist.Store):
    """The store at an address, for processes that know the secret. From any thread.

    torch calls it from C++ through a wrapper that doesn't keep it alive: whoever hands it to torch holds it for as long
    as torch has it (`JOB_STORE` does).
    """

    def __init__(self, address: tuple[str, int], secret: bytes, timeout_s: float) -> None:
        """Connects at the first request. `timeout_s`: of each request, until `set_timeout` says otherwise."""
        super().__init__()
        self.address = address
        self._secret = secret
        self._lock = threading.Lock()
        self._free: list[_Connection] = []
        self._pid = os.getpid()
        self.set_timeout(timedelta(seconds=timeout_s))

    def __str__(self) -> str:
        return f"launch's store at {self.address[0]}:{self.address[1]}"

    def reach(self, deadline: float) -> None:
        """Connects now, once the server is there. Raises DistNetworkError at the deadline."""
        while True:
            try:
                self._give_back(self._connect(deadline))
                return
            except dist.DistNetworkError as error:
                if (
                    isinstance(error.__cause__, (PermissionError, ForeignServiceError))
                    or time.monotonic() + _PAUSE_S > deadline
                ):
                    raise
                time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Closes the connections that are free; the next request makes a new one."""
        with self._lock:
            free, self._free = self._free, []
        for connection in free:
            connection.close()

    def clone(self) -> ControlStore:
        """Returns itself: requests have connections of their own anyway."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(protocol.SET, [key, value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask(protocol.MULTI_SET, [part for pair in zip(keys, values, strict=True) for part in pair])

    def get(self, key: str) -> bytes:
        return self._ask(protocol.GET, [key], waits=True)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._ask(protocol.GET, keys, waits=True))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask(protocol.WAIT, keys, waits=True, timeout=timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(protocol.CHECK, keys) == [b"1"]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(protocol.ADD, [key, str(amount)])[0])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._ask(protocol.COMPARE_SET, [key, expected_value, desired_value])[0]

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(protocol.APPEND, [key, value])

    def delete_key(self, key: str) -> bool:
        return self._ask(protocol.DELETE, [key]) == [b"1"]

    def num_keys(self) -> int:
        return int(self._ask(protocol.COUNT, [])[0])

    def has_extended_api(self) -> bool:
        return True

    # The names by which torch's C++ looks for what Python calls otherwise.
    getNumKeys = num_keys  # noqa: N815
    deleteKey = delete_key  # noqa: N815

    def _ask(
        self, code: int, parts: Sequence[str | bytes], waits: bool = False, timeout: timedelta | None = None
    ) -> Sequence[bytes]:
        """Returns the answer; DistStoreError if what is waited for doesn't come, DistNetworkError without a server."""
        encoded = [part.encode() if isinstance(part, str) else bytes(part) for part in parts]
        request = protocol.packed(protocol.Message(code, encoded))
        own: timedelta = self.timeout  # type: ignore[attr-defined]  # kept by torch: it is set through prefixes, too
        limit_s = (own if timeout is None else timeout).total_seconds()
        deadline = time.monotonic() + limit_s
        # A wait may be meant to be short; a store that takes longer to reach has not gone for that.
        connection = self._take() or self._connect(max(deadline, time.monotonic() + _CONNECT_S))
        try:
            reply = connection.ask(request, deadline)
        except TimeoutError as error:
            connection.close()
            if waits:
                raise dist.DistStoreError(
                    f"wait timeout after {limit_s * 1000:.0f} ms, keys: {_names(parts)}"
                ) from error
            raise dist.DistNetworkError(f"{self} did not answer within {limit_s:g} s") from error
        except OSError as error:
            connection.close()
            raise dist.DistNetworkError(f"{self} has ended: {error}") from error
        except BaseException:  # an interrupt: the reply would be taken for that of the next request
            connection.close()
            raise
        self._give_back(connection)
        if reply.code != protocol.DONE:
            raise dist.DistStoreError(b"".join(reply.parts).decode(errors="replace"))
        return reply.parts

    def _take(self) -> _Connection | None:
        with self._lock:
            if self._pid != os.getpid():  # forked: the connections are the parent's
                self._free, self._pid = [], os.getpid()
            return self._free.pop() if self._free else None

    def _give_back(self, connection: _Connection) -> None:
        with self._lock:
            if self._pid == os.getpid() and len(self._free) < _MOST_KEPT:
                self._free.append(connection)
                return
        connection.close()

    def _connect(self, deadline: float) -> _Connection:
        """Connects; again where the server closes it amid the handshake, as it does when strangers crowd it."""
        while True:
            try:
                return _Connection(self.address, self._secret, deadline)
            except (EOFError, ConnectionResetError, BrokenPipeError) as error:
                if time.monotonic() + _PAUSE_S > deadline:
                    raise dist.DistNetworkError(f"{self} closes each connection") from error
                time.sleep(_PAUSE_S)
            except ForeignServiceError as error:
                raise dist.DistNetworkError(f"{self} can't be reached: {error}") from error
            except PermissionError as error:
                raise dist.DistNetworkError(f"{self} and this process don't share a secret: {error}") from error
            except OSError as error:
                raise dist.DistNetworkError(f"{self} can't be reached: {error}") from error


class _Connection:
    """A connection whose handshake has been done. Raises OSError, TimeoutError among them, and EOFError."""

    def __init__(self, address: tuple[str, int], secret: bytes, deadline: float) -> None:
        self._socket = connect_to(address, _left_s(deadline))
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._shake_hands(secret, deadline)
        except BaseException:
            self._socket.close()
            raise

    def _shake_hands(self, secret: bytes, deadline: float) -> None:
        greeting = bytearray()
        while len(greeting) < protocol.GREETING_BYTES:
            greeting += self._receive_some(protocol.GREETING_BYTES - len(greeting), deadline)
            if not greeting.startswith(protocol.MAGIC[: len(greeting)]):  # at once: more may never come
                raise ForeignServiceError(in_words(bytes(greeting)))
        own = os.urandom(protocol.NONCE_BYTES)
        nonces = bytes(greeting[len(protocol.MAGIC) :]) + own
        self._send(own + protocol.proof(secret, b"client", nonces), deadline)
        theirs = self._receive(protocol.PROOF_BYTES, deadline)
        if theirs == protocol.REFUSED:
            raise PermissionError("it refused the proof; each node needs the same secret_file")
        if not hmac.compare_digest(theirs, protocol.proof(secret, b"server", nonces)):
            raise PermissionError("it can't prove that it knows it; another process may have taken the port")
        keys = protocol.keys_of(secret, nonces)
        self._outgoing, self._incoming = protocol.Direction(keys.to_server), protocol.Direction(keys.to_client)

    def ask(self, request: bytes, deadline: float) -> protocol.Message:
        try:
            self._send(self._outgoing.seal(request), deadline)
            length, mac = protocol.length_in(self._receive(protocol.HEADER.size, deadline))
            return self._incoming.open(mac, self._receive(length, deadline))
        except EOFError as error:
            raise ConnectionResetError(str(error)) from error

    def close(self) -> None:
        self._socket.close()

    def _send(self, data: bytes, deadline: float) -> None:
        self._socket.settimeout(_left_s(deadline))
        self._socket.sendall(data)

    def _receive(self, count: int, deadline: float) -> bytearray:
        received = bytearray()
        while len(received) < count:
            received += self._receive_some(count - len(received), deadline)
        return received

    def _receive_some(self, at_most: int, deadline: float) -> bytes:
        self._socket.settimeout(_left_s(deadline))
        data = self._socket.recv(min(at_most, 1 << 20))
        if not data:
            raise EOFError("the other side closed the connection")
        return data


def _left_s(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _names(parts: Sequence[str | bytes]) -> str:
    names = [part if isinstance(part, str) else part.decode(errors="replace") for part in parts]
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")


class JobStore:
    """Keeps the store that this process was given by the `launch` that started it, as long as it runs."""

    def __init__(self) -> None:
        self._store: ControlStore | None = None
        self._all: list[ControlStore] = []

    def put(self, store: ControlStore | None) -> None:
        """Keeps `store`; None takes it back: a process group that was left behind still finds it, closed."""
        before, self._store = self._store, store
        if before is not None:
            before.close()
        if store is not None:
            self._all.append(store)

    def try_get(self, host: str, port: int) -> ControlStore | None:
        """Returns the store at this address; None if launch gave none, or one elsewhere."""
        store = self._store
        return store if store is not None and store.address == (host, port) else None


JOB_STORE = JobStore()


def store_in_words() -> str:
    """Returns which store the default group was made through, and who may come to it."""
    if not dist.is_initialized():
        return "none: torch.distributed has no default group"
    store: Any = default_store().raw
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, ControlStore):
        return f"launch's at {store.address[0]}:{store.address[1]}, which asks for the job's secret"
    if isinstance(store, dist.TCPStore):
        return f"TCPStore at {store.host}:{store.port}, which takes whoever reaches it"
    if met_at := getattr(store, "met_at", ""):
        return f"{store}, which asks for a token that the ranks got at {met_at}"
    return type(store).__name__
