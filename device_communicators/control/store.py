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
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from device_communicators.base.errors import ConfigMismatchError, InvalidArgumentError
from device_communicators.base.helper_threads import Call
from device_communicators.base.host import is_numeric, resolve
from device_communicators.base.limits import name_shortage

MOST_BYTES = (32 << 20) - 4096
"""Of one request or reply: kMostStoreBytes in csrc/store.h."""
MAGIC = b"\0PSCTRL1"
"""The first bytes of a listener of the control plane."""
_MOST_PARTS = 1 << 17
_SET, _GET, _ADD, _WAIT, _CHECK, _COMPARE_SET, _DELETE, _COUNT, _APPEND, _HOLD, _QUESTION = range(1, 12)
"""StoreCall in csrc/store.h."""
_HEAD, _LENGTH = struct.Struct("<BI"), struct.Struct("<I")
_SLICE_S = 0.05
_PAUSE_S = 0.02
_CONNECT_S = 2.0
_SHOWN_BYTES = 48


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

    torch's C++ code doesn't keep it alive, and needs the interpreter lock to call it: c10d/control_store.py gives torch
    another one where that can be compiled.
    """

    served_by: int | None = None
    """The global rank that serves it; None for a launcher."""
    access = "the job's secret"
    """What it requires of a client, in words."""

    def __init__(
        self, library: Any, address: tuple[str, int], token: str, timeout_s: float, name: str = "the store"
    ) -> None:
        """Connects at the first request. `library`: the loaded C++ library. `timeout_s`: of each request.

        `set_timeout` changes the timeout. `name` describes the store in errors.
        """
        super().__init__()
        self.address = address
        self._name = name
        self.library, self._token = library, token
        self._client = 0
        """The library's client, which stores of one server share; 0 until the server's name is resolved."""
        self._is_numeric = is_numeric(address[0])
        self._held: list[_Request] = []
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
        for request in self._held:
            request.close()
        self._held.clear()
        self.library.ps_store_close(self._client)

    def clone(self) -> ControlStore:
        """Returns this store: its requests never wait for each other."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(_SET, [key, value])

    def hold(self, key: str, value: str | bytes) -> None:
        """Sets a key until this process exits or `close`: the server then replaces KEY by gone/KEY.

        `delete_key` before that removes both. Key and value together have at most 64 KiB.
        """
        self._ask(_HOLD, [key, value], holds=True)

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
        self, call: int, parts: Sequence[str | bytes], *, timeout_s: float | None = None, holds: bool = False
    ) -> list[bytes]:
        content = _packed(call, parts)
        own: timedelta = self.timeout  # type: ignore[attr-defined]  # torch keeps it: a prefix sets it, too
        limit_s = own.total_seconds() if timeout_s is None else timeout_s
        try:
            request = _Request(self.library, self.client(limit_s), content, limit_s)
            try:
                code, text = request.wait()
            except BaseException:  # a signal's handler raised
                request.close()
                raise
            if code == errno.ETIME:
                raise dist.DistStoreError(f"wait timeout after {limit_s * 1000:.0f} ms, keys: {_names(parts)} ({self})")
            if code != 0:
                raise _error_of(code, text)
        except TimeoutError as error:
            raise dist.DistNetworkError(f"{self} did not answer within {limit_s:g} s") from error
        except PermissionError as error:
            raise dist.DistNetworkError(f"{self} and this process don't share a secret: {error}") from error
        except ConnectionResetError as error:
            raise dist.DistNetworkError(f"{self} has ended: {error}") from error
        except ConnectionAbortedError as error:
            raise dist.DistNetworkError(f"{self} closes each connection") from error
        except (OSError, ForeignServiceError, ConfigMismatchError) as error:
            if not self._is_numeric:  # its name may lead elsewhere by now
                self._client = 0
            raise dist.DistNetworkError(f"{self} can't be reached: {error}") from error
        if text[0] != 0:
            raise dist.DistStoreError(f"{self}: {_parts(text)[0].decode(errors='replace')}")
        if holds:
            self._held.append(request)
        return _parts(text)

    def client(self, limit_s: float = _CONNECT_S) -> int:
        """Returns the handle of the library's client (csrc/guest.h). Looks up the server's name first, if it has one.

        Raises OSError if the name can't be resolved within `limit_s`, or 2 s if that is longer.
        """
        if self._client == 0:
            numeric = self.address[0] if self._is_numeric else ",".join(self._look_up(max(limit_s, _CONNECT_S)))
            self._client = self.library.ps_store_client(numeric.encode(), self.address[1], self._token.encode())
        return self._client

    def _look_up(self, limit_s: float) -> list[str]:
        """Returns the numeric addresses of the server's name. A name server may take longer than `limit_s`."""
        look_up = Call(lambda: resolve(*self.address))
        if not look_up.wait(time.monotonic() + limit_s, lambda: False):
            raise TimeoutError(f"the name {self.address[0]!r} was not resolved")
        return [str(where[0]) for *_, where in look_up.result()]


class _Request:
    """A request of one thread. `hold` keeps it: the server notices its end."""

    def __init__(self, library: Any, client: int, content: bytes, limit_s: float) -> None:
        self._library = library
        self._handle = library.ps_store_ask(client, content, len(content), limit_s, _CONNECT_S)
        if self._handle < 0:
            raise OSError(-self._handle, os.strerror(-self._handle))

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Gives the connection back, or closes it if the reply has not arrived. Twice is fine."""
        handle, self._handle = self._handle, 0
        if handle > 0:
            self._library.ps_store_end(handle)

    def wait(self) -> tuple[int, bytes]:
        """Returns 0 and the reply, or an errno of `Request::wait` in csrc/guest.h and its text."""
        while (code := -self._library.ps_store_wait(self._handle, _SLICE_S)) == errno.EAGAIN:
            pass
        buffer = ctypes.create_string_buffer(1 << 12)
        size = self._library.ps_store_take(self._handle, buffer, len(buffer))
        if size > len(buffer):
            buffer = ctypes.create_string_buffer(size)
            self._library.ps_store_take(self._handle, buffer, size)
        return code, ctypes.string_at(buffer, size)


def _error_of(code: int, text: bytes) -> BaseException:
    """Returns the exception for an errno of `Request::wait`."""
    words = text.decode(errors="replace")
    if code == errno.EKEYREJECTED:
        return PermissionError(words)
    if code == errno.EPROTO:
        return ForeignServiceError(in_words(text))
    if code == errno.EPROTONOSUPPORT:
        return ConfigMismatchError(words)
    if code in (errno.EBADMSG, errno.ECONNRESET, errno.EPIPE):
        return ConnectionResetError(words)
    return name_shortage(OSError(code, words or os.strerror(code)), "connecting to a store")


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
