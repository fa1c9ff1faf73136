"""Other programs' services, which a rank may find at MASTER_PORT."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

SSH = b"SSH-2.0-OpenSSH_9.2\r\n"
REFUSAL = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"


def greets(connection: socket.socket) -> None:
    connection.sendall(SSH)
    connection.recv(64)


def refuses(connection: socket.socket) -> None:
    connection.recv(64)
    connection.sendall(REFUSAL)


def reads_lines(connection: socket.socket) -> None:
    received = b""
    while not received.endswith(b"\n\r\n"):
        received += connection.recv(64)
    connection.sendall(REFUSAL)


def hangs_up(connection: socket.socket) -> None:
    pass


def is_silent(connection: socket.socket) -> None:
    while connection.recv(64):
        pass


@contextmanager
def service(answer: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    def serve() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=attend, args=(listener.accept()[0],), daemon=True).start()

    def attend(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)
