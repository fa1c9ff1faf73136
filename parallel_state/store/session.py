"""The server's end of one connection to the store of a job, as a function of the bytes that come in.

Belongs here: how far a connection is, and what it may send next. What does not: sockets and deadlines
(`store.server`), what a request does (`store.table`).
"""

from __future__ import annotations

import hmac
import os

from device_communicators.errors import MessageDecodeError
from parallel_state.store.protocol import (
    ANSWER_BYTES,
    HEADER,
    MAGIC,
    NONCE_BYTES,
    REFUSED,
    Direction,
    Message,
    keys_of,
    length_in,
    packed,
    proof,
)

_READ_BYTES = 256 << 10


class Session:
    """Takes bytes, gives requests; what is to be sent collects in `output`."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = os.urandom(NONCE_BYTES)
        self._incoming: Direction | None = None
        self._outgoing: Direction | None = None
        self._input = bytearray()
        self._wanted = ANSWER_BYTES
        self._mac: bytes | None = None
        self.asked = False
        """Whether a request waits for its reply; a client sends none meanwhile."""
        self.output = bytearray(MAGIC + self._nonce)

    @property
    def authenticated(self) -> bool:
        """Whether the client has proven that it knows the secret."""
        return self._incoming is not None

    @property
    def may_read(self) -> int:
        """How many bytes to ask the socket for: never more than what is due, so that nobody fills the memory."""
        return min(self._wanted - len(self._input), _READ_BYTES)

    def feed(self, data: bytes) -> Message | None:
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
            self._wanted, self._mac = length_in(received)
            return None
        else:
            request = self._incoming.open(self._mac, received)
            self.asked = True
            self._await_header()
            return request
        self._await_header()
        return None

    def _await_header(self) -> None:
        self._wanted, self._mac = HEADER.size, None

    def reply(self, message: Message) -> None:
        """Answers the request that `feed` gave."""
        if self._outgoing is None or not self.asked:
            raise MessageDecodeError("a reply must follow a request")
        self.asked = False
        self.output += self._outgoing.seal(packed(message))

    def _authenticate(self, answer: bytearray) -> None:
        nonces = self._nonce + answer[:NONCE_BYTES]
        if not hmac.compare_digest(answer[NONCE_BYTES:], proof(self._secret, b"client", nonces)):
            self.output += REFUSED
            raise MessageDecodeError("a client must prove that it knows the job's secret, but its MAC is wrong")
        keys = keys_of(self._secret, nonces)
        self._incoming, self._outgoing = Direction(keys.to_server), Direction(keys.to_client)
        self.output += proof(self._secret, b"server", nonces)
