"""The bytes of a connection to the store of a job: a handshake that proves who knows the job's secret, then frames.

    server:  MAGIC, nonce_s
    client:  nonce_c, HMAC(secret, "client", nonce_s, nonce_c)
    server:  HMAC(secret, "server", nonce_s, nonce_c), or REFUSED and the end
    frame:   length of the content, HMAC(key, number, length, content), content
    content: code, number of parts, and each part with its length before it

Both nonces are new, so an old proof proves nothing. Each direction has its own key, made of the secret and both nonces,
and numbers its frames from 0: one that is repeated, left out, changed, turned round or from another connection has a
wrong MAC. Nothing is encrypted: who may read the traffic of this host, reads it. A length is checked before anything
is allocated.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from typing import NamedTuple

from device_communicators.base.errors import InvalidArgumentError, MessageDecodeError

MAGIC = b"parallel_state/1"
NONCE_BYTES = PROOF_BYTES = SECRET_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
REFUSED = bytes(PROOF_BYTES)
MAX_CONTENT_BYTES = 64 << 20
MAX_PARTS = 1 << 17

HEADER = struct.Struct(f"<I{PROOF_BYTES}s")
_CONTENT = struct.Struct("<BI")
_LENGTH = struct.Struct("<I")
_NUMBERED = struct.Struct("<QI")

SET, GET, ADD, WAIT, CHECK, COMPARE_SET, DELETE, COUNT, APPEND, MULTI_SET = range(1, 11)
DONE, FAILED = 0, 255
"""The codes of replies: parts are the answer; or a text that says what was wrong with the request."""


class Message(NamedTuple):
    """A request or a reply."""

    code: int
    parts: Sequence[bytes]


class Keys(NamedTuple):
    """The keys of one connection."""

    to_server: bytes
    to_client: bytes


def proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    """Returns the proof that the one in this role, `client` or `server`, knows the secret."""
    return hmac.digest(secret, MAGIC + role + nonces, "sha256")


def keys_of(secret: bytes, nonces: bytes) -> Keys:
    return Keys(proof(secret, b"to server", nonces), proof(secret, b"to client", nonces))


class Direction:
    """The frames that go one way over one connection."""

    def __init__(self, key: bytes) -> None:
        self._key = hmac.new(key, digestmod="sha256")
        self._number = 0

    def seal(self, content: bytes) -> bytes:
        """Returns the next frame."""
        return HEADER.pack(len(content), self._mac(content)) + content

    def open(self, mac: bytes, content: bytes | bytearray) -> Message:
        """Returns the next frame's message; MessageDecodeError where it isn't the one that the other side sent next."""
        if not hmac.compare_digest(mac, self._mac(content)):
            raise MessageDecodeError("a frame's MAC is wrong: it was not sent by a process of this job, or not now")
        return unpacked(content)

    def _mac(self, content: bytes | bytearray) -> bytes:
        mac = self._key.copy()
        mac.update(_NUMBERED.pack(self._number, len(content)))
        mac.update(content)
        self._number += 1
        return mac.digest()


def length_in(header: bytes | bytearray) -> tuple[int, bytes]:
    """Returns length and MAC of the content that follows; MessageDecodeError for a length that can't be."""
    length, mac = HEADER.unpack(header)
    if not _CONTENT.size <= length <= MAX_CONTENT_BYTES:
        raise MessageDecodeError(
            f"a frame's content must have {_CONTENT.size} to {MAX_CONTENT_BYTES} bytes, but claims {length}"
        )
    return length, mac


def packed(message: Message) -> bytes:
    """Returns the content of a frame; InvalidArgumentError for what is too large."""
    size = _CONTENT.size + sum(_LENGTH.size + len(part) for part in message.parts)
    if size > MAX_CONTENT_BYTES or len(message.parts) > MAX_PARTS:
        raise InvalidArgumentError(
            f"one call to the store must have at most {MAX_PARTS} keys and values of {MAX_CONTENT_BYTES} bytes, but "
            f"has {len(message.parts)} of {size}; send large things through a group"
        )
    pieces = [_CONTENT.pack(message.code, len(message.parts))]
    for part in message.parts:
        pieces += _LENGTH.pack(len(part)), part
    return b"".join(pieces)


def unpacked(content: bytes | bytearray) -> Message:
    """Returns the message of a frame's content; MessageDecodeError where it isn't exactly one."""
    if len(content) < _CONTENT.size:
        raise MessageDecodeError(f"a message of the store must have {_CONTENT.size} bytes, but has {len(content)}")
    code, count = _CONTENT.unpack_from(content)
    at, view, parts = _CONTENT.size, memoryview(content), []
    if count > min(MAX_PARTS, (len(content) - at) // _LENGTH.size):
        raise MessageDecodeError(f"a message of {len(content)} bytes can't have the {count} parts that it claims")
    for _ in range(count):
        if len(content) - at < _LENGTH.size:
            raise MessageDecodeError(f"a message of {len(content)} bytes ends before its {count} parts do")
        (length,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size
        if length > len(content) - at:
            raise MessageDecodeError(f"a part claims {length} bytes, but its message has {len(content) - at} more")
        parts.append(bytes(view[at : at + length]))
        at += length
    if at != len(content):
        raise MessageDecodeError(f"a message has {len(content) - at} bytes behind its last part")
    return Message(code, parts)
