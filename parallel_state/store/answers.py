"""Asks what listens at the address of a store: torch's TCPStore, the store of `launch`, or another service.

torch's own client is asked only after that: it waits on a service that isn't a store for its whole timeout, in C++, in
a thread that can't be broken off and that ends the process by SIGABRT if it returns while the interpreter exits.

torch's client begins with the same bytes, on torch 2.3 to 2.15: VALIDATE and a magic number, PING and a nonce, which
the server returns.
"""

from __future__ import annotations

import os
import socket
import struct
import time

from device_communicators.host import connect_to
from parallel_state.store import protocol

_VALIDATE, _MAGIC_NUMBER, _PING = 0, 0x3C85F7CE, 13
_NONCE_BYTES = 4
_LINES = b"\r\n\r\n"
"""Sent after `_QUIET_S`: a service that reads lines answers then. To a TCPStore it is the begin of another PING."""
_QUIET_S = 1.0
_REST_S = 0.1
_LEAST_S = 0.1
"""A last look, at the deadline, takes so long: else it would report silence, whatever the looks before it found."""
_SHOWN_BYTES = 48


class ForeignServiceError(Exception):
    """Something answered that is no store for this process; the text says what."""


def ask_for_store(address: tuple[str, int], deadline: float) -> None:
    """Returns once a TCPStore has answered at `address`.

    Raises ForeignServiceError for another answer, and OSError where nothing answers: no server, a silent one
    (TimeoutError, at the deadline), or one that closes the connection, as a store that is just being closed does, and
    a proxy whose server isn't there yet.
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
            raise TimeoutError("what is there doesn't answer")
        answer += _receive(connection, protocol.GREETING_BYTES, time.monotonic() + _REST_S, closed=b"")
    raise ForeignServiceError(in_words(answer))


def in_words(answer: bytes) -> str:
    """Returns what a service is that answered with these bytes, of which the first ones are shown."""
    if answer.startswith(protocol.MAGIC):
        return (
            "the store of another launch listens there, which takes only the ranks of that launch. If a rank of it has "
            "started this program, the rank's variables were inherited: give this program an address of its own, and "
            "unset RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for it"
        )
    kind = "SSH" if answer.startswith(b"SSH-") else "HTTP" if answer.startswith(b"HTTP/") else "a service"
    return f"{kind} listens there, not a store of torch or parallel_state: it answered {answer[:_SHOWN_BYTES]!r}"


def _receive(connection: socket.socket, count: int, until: float, closed: bytes | None = None) -> bytes:
    """Returns what comes until then, at most `count` bytes; `closed`, or ConnectionResetError, at the end of all."""
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
                raise ConnectionResetError("what listens there closes each connection without an answer")
            break
        received += data
    return received
