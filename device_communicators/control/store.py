"""A client of the key-value store that a `World` serves, as a store of torch.

The compiled library does the input and output in the calling thread, without the interpreter lock. Python checks for
signals every 50 ms. Both sides prove that they know the listener's token. Each request and reply has a MAC. Nothing is
encrypted.

Belongs here: the client, and the words for what answers in its place. Doesn't: the server (csrc/store.h, in the core).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import time
import weakref
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist

from device_communicators.base.errors import ConfigMismatchError, InvalidArgumentError
from device_communicators.base.host import resolve
from device_communicators.base.limits import name_shortage

MOST_BYTES = (32 << 20) - 4096
"""Of one request or reply: kMostStoreBytes in csrc/store.h."""
MAGIC = b"\0PSCTRL1"
"""The first bytes of a listener of the control plane."""
_MOST_PARTS = 1 << 17
_SET, _GET, _ADD, _WAIT, _CHECK, _COMPARE_SET, _DELETE, _COUNT, _APPEND, _HOLD, _QUESTION = range(1, 12)
"""StoreCall in csrc/store.h."""
_WAITING = (_GET, _WAIT)
_HEAD, _LENGTH = struct.Struct("<BI"), struct.Struct("<I")
_SLICE_S = 0.05
_PAUSE_S = 0.02
_CONNECT_S = 2.0
_MOST_KEPT = 4
_SHOWN_BYTES = 48
_NEXT_ADDRESS = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""A name may have several addresses; a server may listen at one of them."""


class ForeignServiceError(Exception):
    """A service answered that is no store for this process. The text describes it."""


def in_words(answer: bytes) -> str:
    """Describes the service that answered with these bytes, and quotes the first of them."""
    if answer.startswith(MAGIC):
        return (
            "the store of another launch listens there, which accepts only the ranks of that launch. If a rank of it "
            "has started this program, the rank's variables were inherited: give this program an address of its own, "
            "and unset RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for it"
        )
    kind = "SSH" if answer.startswith(b"SSH-") else "HTTP" if answer.startswith(b"HTTP/") else "a service"
    return f"{kind} listens there, not a store of torch or parallel_state: it answered {answer[:_SHOWN_BYTES]!r}"


class ControlStore(dist.Store):
    """The store of one world. Any thread may call it; threads don't wait for each other.

    Raises DistStoreError if a wait ends without its keys or a request is wrong, and DistNetworkError without a server.
    The cause of the latter is a PermissionError if the server doesn't know the token, ForeignServiceError for another
    service, and ConfigMismatchError for another version.

    torch's C++ code doesn't keep it alive: the caller keeps a reference as long as torch uses it.
    """

    served_by: int | None = None
    """The global rank that serves it; None for a launcher."""

    def __init__(
        self, library: Any, address: tuple[str, int], token: str, timeout_s: float, name: str = "the store"
    ) -> None:
        """Connects at the first request. `library`: the loaded C++ library. `timeout_s`: of each request.

        `set_timeout` changes the timeout. `name` describes the store in errors.
        """
        super().__init__()
        self.address = address
        self._name = name
        self._connections = _Connections.of(library, address, token)
        self._held: list[_Connection] = []
        self.set_timeout(timedelta(seconds=timeout_s))

    def __str__(self) -> str:
        return f"{self._name} at {self.address[0]}:{self.address[1]}"

    def reach(self, deadline: float) -> None:
        """Returns once the server answers. Raises DistNetworkError at the deadline."""
        while True:
            try:
                self._ask(_CHECK, [], timeout_s=max(0.0, deadline - time.monotonic()))
                return
            except dist.DistNetworkError as error:
                wrong = (PermissionError, ForeignServiceError, ConfigMismatchError)
                if isinstance(error.__cause__, wrong) or time.monotonic() + _PAUSE_S > deadline:
                    raise
                time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Closes connections that no request uses, and ends each `hold`. The next request connects again."""
        for connection in self._held:
            connection.close()
        self._held.clear()
        self._connections.close()

    def clone(self) -> ControlStore:
        """Returns this store: its requests never wait for each other."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(_SET, [key, value])

    def hold(self, key: str, value: str | bytes) -> None:
        """Sets a key until this process exits or `close`: the server then replaces KEY by gone/KEY.

        `delete_key` before that removes both. Key and value together have at most 64 KiB.
        """
        connection = self._connections.connect()
        try:
            self._ask(_HOLD, [key, value], connection)
        except BaseException:
            connection.close()
            raise
        self._held.append(connection)

    def question(self, text: str) -> bytes:
        """Returns the reply of the server's program; see `World.meet`, on_question."""
        return self._ask(_QUESTION, [text])[0]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask(_SET, [part for pair in zip(keys, values, strict=True) for part in pair])

    def get(self, key: str) -> bytes:
        return self._ask(_GET, [key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._ask(_GET, keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask(_WAIT, keys, timeout_s=None if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(_CHECK, keys) == [b"1"]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(_ADD, [key, str(amount)])[0])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._ask(_COMPARE_SET, [key, expected_value, desired_value])[0]

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(_APPEND, [key, value])

    def delete_key(self, key: str) -> bool:
        return self._ask(_DELETE, [key]) == [b"1"]

    def num_keys(self) -> int:
        return int(self._ask(_COUNT, [])[0])

    def has_extended_api(self) -> bool:
        return True

    # torch's C++ code looks these up by their C++ names.
    getNumKeys = num_keys  # noqa: N815
    deleteKey = delete_key  # noqa: N815

    def _ask(
        self,
        call: int,
        parts: Sequence[str | bytes],
        connection: _Connection | None = None,
        timeout_s: float | None = None,
    ) -> list[bytes]:
        request = _packed(call, parts)
        own: timedelta = self.timeout  # type: ignore[attr-defined]  # torch keeps it: a prefix sets it, too
        limit_s = own.total_seconds() if timeout_s is None else timeout_s
        try:
            reply = self._connections.ask(request, limit_s, connection)
        except TimeoutError as error:
            if call in _WAITING and error.errno != errno.ETIMEDOUT:
                raise dist.DistStoreError(
                    f"wait timeout after {limit_s * 1000:.0f} ms, keys: {_names(parts)} ({self})"
                ) from error
            raise dist.DistNetworkError(f"{self} did not answer within {limit_s:g} s") from error
        except PermissionError as error:
            raise dist.DistNetworkError(f"{self} and this process don't share a secret: {error}") from error
        except ConnectionResetError as error:
            raise dist.DistNetworkError(f"{self} has ended: {error}") from error
        except ConnectionAbortedError as error:
            raise dist.DistNetworkError(f"{self} closes each connection") from error
        except (OSError, ForeignServiceError, ConfigMismatchError) as error:
            raise dist.DistNetworkError(f"{self} can't be reached: {error}") from error
        if reply[0] != 0:
            raise dist.DistStoreError(f"{self}: {_parts(reply)[0].decode(errors='replace')}")
        return _parts(reply)


class _Connections:
    """The connections of this process to one server. Stores of one server share them."""

    _all: ClassVar[weakref.WeakValueDictionary[tuple[tuple[str, int], str], _Connections]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, library: Any, address: tuple[str, int], token: str) -> None:
        self._library, self._address, self._token = library, address, token.encode()
        self._free: deque[_Connection] = deque()
        """Its methods are atomic: a lock could be held when a fork copies it."""

    @classmethod
    def of(cls, library: Any, address: tuple[str, int], token: str) -> _Connections:
        key = address, token
        return cls._all.get(key) or cls._all.setdefault(key, cls(library, address, token))

    def close(self) -> None:
        while (connection := self._take()) is not None:
            connection.close()

    def connect(self) -> _Connection:
        return _Connection(self._library)

    def ask(self, request: bytes, limit_s: float, connection: _Connection | None = None) -> bytes:
        """Returns the reply. Raises OSError, ForeignServiceError and ConfigMismatchError.

        Retries if the server closes a connection before it is identified, as it does when strangers crowd it, and
        replaces a kept connection that the server has closed. An own `connection` stays open; a kept one is given back.
        """
        began = time.monotonic()
        deadline, connected_by = began + limit_s, began + max(limit_s, _CONNECT_S)
        used = connection or self._take() or self.connect()
        hosts: list[str] = []
        try:
            while True:
                try:
                    if not used.is_open:
                        hosts = hosts or [str(where[0]) for *_, where in resolve(*self._address)]
                        used.open(hosts[0], self._address[1], self._token)
                    reply = used.ask(request, deadline, connected_by)
                    break
                except _StaleError:
                    used.close()
                except ConnectionAbortedError:
                    used.close()
                    if time.monotonic() + _PAUSE_S > connected_by:
                        raise
                    time.sleep(_PAUSE_S)
                except OSError as error:
                    used.close()
                    if error.errno not in _NEXT_ADDRESS or len(hosts) < 2:
                        raise
                    del hosts[0]
        except BaseException:  # a reply that arrives later belongs to no other request
            used.close()
            raise
        if connection is None:
            if len(self._free) < _MOST_KEPT:
                self._free.append(used)
            else:
                used.close()
        return reply

    def _take(self) -> _Connection | None:
        while True:
            try:
                connection = self._free.pop()
            except IndexError:
                return None
            if connection.pid == os.getpid():
                return connection


class _StaleError(OSError):
    """The server closed a kept connection."""


class _Connection:
    """A connection of one thread at a time."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._handle = 0
        self._buffer: Any = None
        self.pid = os.getpid()

    def __del__(self) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        return self._handle > 0

    def open(self, host: str, port: int, token: bytes) -> None:
        """Begins to connect. `host`: a numeric address."""
        code = self._library.ps_store_open(host.encode(), port, token)
        if code < 0:
            raise name_shortage(OSError(-code, os.strerror(-code)), "connecting to a store")
        self._handle = code

    def ask(self, request: bytes, deadline: float, connected_by: float) -> bytes:
        """Returns the reply. Raises TimeoutError; with errno ETIMEDOUT if the server was not identified."""
        content: bytes | None = request
        size, until = len(request), connected_by
        while True:
            slice_s = min(_SLICE_S, max(0.0, until - time.monotonic()))
            code = -self._library.ps_store_ask(self._handle, content, size, slice_s)
            content, size = None, 0
            if code == 0:
                return self._text()
            if code == errno.EINPROGRESS:
                until = connected_by
            elif code == errno.EAGAIN:
                until = deadline
            else:
                raise self._error(code)
            if time.monotonic() >= until:
                raise TimeoutError(errno.ETIMEDOUT if code == errno.EINPROGRESS else code, os.strerror(code))

    def close(self) -> None:
        handle, self._handle = self._handle, 0
        if handle > 0 and self.pid == os.getpid():
            self._library.ps_store_close(handle)

    def _text(self) -> bytes:
        buffer = ctypes.create_string_buffer(1 << 12)
        size = self._library.ps_store_take(self._handle, buffer, len(buffer))
        if size > len(buffer):
            buffer = ctypes.create_string_buffer(size)
            self._library.ps_store_take(self._handle, buffer, size)
        return ctypes.string_at(buffer, size)

    def _error(self, code: int) -> Exception:
        if code == errno.ESTALE:
            return _StaleError()
        if code == errno.EKEYREJECTED:
            return PermissionError(
                "the server can't prove that it has the secret. Give each node the same secret_file, or free the port"
            )
        if code == errno.EPROTO:
            return ForeignServiceError(in_words(self._text()))
        if code == errno.EPROTONOSUPPORT:
            return ConfigMismatchError(
                f"the server has protocol version {self._text().decode()}: install the same package on all hosts"
            )
        if code == errno.EBADMSG:
            return ConnectionResetError("the server sent a reply with a wrong MAC, or a frame that is no reply")
        if code in (errno.ECONNRESET, errno.EPIPE, errno.ESRCH):
            return ConnectionResetError("the connection was closed")
        return OSError(code, os.strerror(code))


def _packed(call: int, parts: Sequence[str | bytes]) -> bytes:
    encoded = [part.encode() if isinstance(part, str) else bytes(part) for part in parts]
    size = sum(_LENGTH.size + len(part) for part in encoded) + _HEAD.size
    if size > MOST_BYTES or len(encoded) > _MOST_PARTS:
        raise InvalidArgumentError(
            f"one call to the store must have at most {_MOST_PARTS} keys and values of {MOST_BYTES} bytes, but has "
            f"{len(encoded)} of {size}; send large things through a group"
        )
    pieces = [_HEAD.pack(call, len(encoded))]
    for part in encoded:
        pieces += _LENGTH.pack(len(part)), part
    return b"".join(pieces)


def _parts(reply: bytes) -> list[bytes]:
    _, count = _HEAD.unpack_from(reply)
    at, parts = _HEAD.size, []
    for _ in range(count):
        (size,) = _LENGTH.unpack_from(reply, at)
        at += _LENGTH.size + size
        parts.append(reply[at - size : at])
    return parts


def _names(parts: Sequence[str | bytes]) -> str:
    names = [part if isinstance(part, str) else part.decode(errors="replace") for part in parts]
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
