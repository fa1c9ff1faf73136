"""Checks that a TCPStore answers at an address, before torch's own client connects.

If the service isn't a store, torch's client blocks in C++ for its whole timeout (see `stores.check_own`).

The request starts like that of torch's client (torch 2.3 to 2.15): VALIDATE and a magic number, then PING and a nonce.
A store returns the nonce.
"""

from __future__ import annotations

import os
import socket
import struct
import time

from device_communicators.base.host import connect_to
from device_communicators.control.client import ForeignServiceError, in_words

_VALIDATE, _MAGIC_NUMBER, _PING = 0, 0x3C85F7CE, 13
_NONCE_BYTES = 4
_LINES = b"\r\n\r\n"
"""Sent after `_QUIET_S` without an answer: a line-based service then answers. A TCPStore reads it as part of a PING."""
_QUIET_S = 1.0
_REST_S = 0.1
_LEAST_S = 0.3
"""Minimum time for an answer, also at the deadline: on two cores with eight busy processes one took over 0.1 s."""
_SHOWN_BYTES = 48


def ask_for_store(address: tuple[str, int], deadline: float) -> None:
    """Returns once a TCPStore has answered at `address`.

    Raises ForeignServiceError for another answer. Raises OSError without an answer: no server, a silent one
    (TimeoutError, at the deadline), or one that closes the connection. A store that shuts down closes it, and so does a
    proxy whose server hasn't started.
    """
    nonce = os.urandom(_NONCE_BYTES)
    deadline = max(deadline, time.monotonic() + _LEAST_S)
    with connect_to(address, deadline - time.monotonic()) as connection:
        connection.sendall(struct.pack("<BIB", _VALIDATE, _MAGIC_NUMBER, _PING) + nonce)
        answer = _receive(connection, _NONCE_BYTES, min(deadline, time.monotonic() + _QUIET_S))
        if not answer and time.monotonic() < deadline:
            connection.sendall(_LINES)
            answer = _receive(connection, _NONCE_BYTES, deadline)
        if answer == nonce:
            return
        if not answer:
            raise TimeoutError("the service there doesn't answer")
        answer += _receive(connection, _SHOWN_BYTES, time.monotonic() + _REST_S, closed=b"")
    raise ForeignServiceError(in_words(answer))


def _receive(connection: socket.socket, count: int, until: float, closed: bytes | None = None) -> bytes:
    """Receives at most `count` bytes.

    Raises ConnectionResetError if the service closes the connection without an answer, unless `closed` is given.
    """
    received = b""
    while len(received) < count and (left_s := until - time.monotonic()) > 0:
        connection.settimeout(left_s)
        try:
            data = connection.recv(count - len(received))
        except TimeoutError:
            break
        except ConnectionError:
            data = b""
        if not data:
            if not received and closed is None:
                raise ConnectionResetError("the service there closes each connection without an answer")
            break
        received += data
    return received
