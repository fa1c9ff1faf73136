"""Sends requests to another process's control plane: to its key-value store, or to its Python code. Doesn't import
torch, so that `debug --live` starts fast.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

from device_communicators.base.errors import ConfigMismatchError, InvalidArgumentError
from device_communicators.base.limits import name_shortage

MOST_BYTES = (32 << 20) - 4096
"""Largest request in bytes; copy of kMostStoreBytes in csrc/store.h."""
MAGIC = b"\0PSCTRL1"
_MOST_PARTS = 1 << 17
CHECK, _QUESTION = 5, 11
"""Values of StoreCall in csrc/store.h."""
_HEAD, _LENGTH = struct.Struct("<BI"), struct.Struct("<I")
_SLICE_S = 0.05
_PAUSE_S = 0.001
CONNECT_S = 2.0
_SHOWN_BYTES = 48
_Key = TypeVar("_Key", bound=Hashable)


class ForeignServiceError(Exception):
    pass


def in_words(answer: bytes) -> str:
    if answer.startswith(MAGIC):
        return (
            "the store of another launch listens there, which accepts only the ranks of that launch. If a rank of it "
            "has started this program, the rank's variables were inherited: give this program an address of its own, "
            "and unset RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for it"
        )
    kind = "SSH" if answer.startswith(b"SSH-") else "HTTP" if answer.startswith(b"HTTP/") else "a service"
    return f"{kind} listens there, not a store of torch or parallel_state: it answered {answer[:_SHOWN_BYTES]!r}"


def ask(
    library: Any, servers: Mapping[_Key, tuple[str, int, str]], rank: int, question: bytes, limit_s: float
) -> dict[_Key, tuple[int, bytes]]:
    """Sends `question` to the processes `servers`, each given by numeric address, port and secret. Returns the replies,
    which a function in each process computes (`on_question` of `World.meet`). `rank`: the asking process's global rank,
    or -1.

    A reply is (0, bytes), or an error as (errno, text). ETIME: the process runs, but its Python code doesn't reply. If
    `question` is empty, a process replies without Python code.
    """
    content = packed(_QUESTION, [b"%d " % rank + question]) if question else packed(CHECK, [])
    asked: dict[_Key, Request] = {}
    found: dict[_Key, tuple[int, bytes]] = {}
    clients = {
        key: library.ps_store_client(host.encode(), port, token.encode())
        for key, (host, port, token) in servers.items()
    }
    try:
        for key, client in clients.items():
            asked[key] = Request(library, client, content, limit_s, limit_s)
        while len(found) < len(asked):
            for key in asked.keys() - found.keys():
                if (result := asked[key].poll(0.0)) is not None:
                    code, reply = result
                    found[key] = code, b"".join(parts_of(reply)) if code == 0 else reply
            time.sleep(_PAUSE_S)
    finally:
        for request in asked.values():
            request.close()
        for client in clients.values():
            library.ps_store_close(client)  # a kept connection per process asked would use up descriptors
    return {key: found[key] for key in servers}


class Request:
    def __init__(self, library: Any, client: int, content: bytes, limit_s: float, connect_s: float = CONNECT_S) -> None:
        """Starts a request with the bytes `content`. `client`: number of the client in C++. The request ends after
        `limit_s`, but may take `connect_s` to connect, if that is longer. The caller must call `close`: Python would
        drop a KeyboardInterrupt in `__del__`.
        """
        self._library = library
        self._handle = library.ps_store_ask(client, content, len(content), limit_s, connect_s)
        if self._handle < 0:
            raise OSError(-self._handle, os.strerror(-self._handle))

    def close(self) -> None:
        """Ends the request. If a reply arrived, keeps the connection for reuse, except after `ControlStore.hold`."""
        handle, self._handle = self._handle, 0
        if handle > 0:
            self._library.ps_store_end(handle)

    def wait(self) -> tuple[int, bytes]:
        """Waits for the reply. Returns (0, reply), or an error as (errno, text)."""
        while (result := self.poll(_SLICE_S)) is None:
            pass
        return result

    def poll(self, limit_s: float) -> tuple[int, bytes] | None:
        code = -self._library.ps_store_wait(self._handle, limit_s)
        if code == errno.EAGAIN:
            return None
        buffer = ctypes.create_string_buffer(1 << 12)
        size = self._library.ps_store_take(self._handle, buffer, len(buffer))
        if size > len(buffer):
            buffer = ctypes.create_string_buffer(size)
            self._library.ps_store_take(self._handle, buffer, size)
        return code, ctypes.string_at(buffer, size)


def error_of(code: int, text: bytes) -> BaseException:
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


def packed(call: int, parts: Sequence[str | bytes]) -> bytes:
    encoded = [part.encode() if isinstance(part, str) else bytes(part) for part in parts]
    size = sum(_LENGTH.size + len(part) for part in encoded) + _HEAD.size
    if size > MOST_BYTES or len(encoded) > _MOST_PARTS:
        raise InvalidArgumentError(
            f"one call to the store must have at most {_MOST_PARTS} keys and values, with {MOST_BYTES} bytes in total, "
            f"but has {len(encoded)} with {size} bytes; send large data through a group"
        )
    pieces = [_HEAD.pack(call, len(encoded))]
    for part in encoded:
        pieces += _LENGTH.pack(len(part)), part
    return b"".join(pieces)


def parts_of(reply: bytes) -> list[bytes]:
    _, count = _HEAD.unpack_from(reply)
    at, parts = _HEAD.size, []
    for _ in range(count):
        (size,) = _LENGTH.unpack_from(reply, at)
        at += _LENGTH.size + size
        parts.append(reply[at - size : at])
    return parts


def names(parts: Sequence[str | bytes]) -> str:
    names = [part if isinstance(part, str) else part.decode(errors="replace") for part in parts]
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
