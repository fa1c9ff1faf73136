"""Questions between the processes of one host: what are you at? A thread of each answers, whatever the others do.

It listens at an abstract UNIX socket that is named after its PID and its PID namespace, as containers may share all
else; so no file is left, however it ends. It answers processes of its own user, and root. An answer is a line of JSON.
Who is stopped, or holds the interpreter's lock, doesn't answer: each question has a deadline. Outside of Linux nobody
listens.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from device_communicators.base import forks
from device_communicators.base.helper_threads import HelperThread

logger = logging.getLogger("parallel_state")

IS_THERE = sys.platform.startswith("linux")
"""True where processes can be asked."""
_PREFIX = "parallel_state/"
_MOST_BYTES = 1 << 20
_WAITING = 64
_TALK_S = 1.0
_CREDENTIALS = struct.Struct("3i")


def _address_of(pid: int | str) -> str:
    return f"\0{_PREFIX}{os.stat('/proc/self/ns/pid').st_ino}/{pid}"


class AnswerThread:
    """The thread that answers: `answer(question)` returns what JSON can hold."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self._answer = answer
        self._listener: socket.socket | None = None
        self._thread = HelperThread("answers", self._run)
        if not IS_THERE:
            return
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(_address_of(os.getpid()))
            self._listener.listen(_WAITING)
        except OSError as error:
            logger.debug("process %d can't listen to questions: %s", os.getpid(), error)
            self.drop()
            return
        forks.call_in_children(_forked)
        _OPEN.add(self)
        self._thread.start()

    def close(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # which ends `accept`
            self._thread.join(_TALK_S)
            self.drop()

    def drop(self) -> None:
        """Closes the descriptor, which in a forked child is its parent's."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def _run(self) -> None:
        listener = self._listener
        while listener is not None:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_TALK_S)
                self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] not in (0, os.geteuid()):
            return
        question = connection.recv(256).decode(errors="replace").strip()
        try:
            answer = self._answer(question)
        except Exception as error:  # a group that ends meanwhile; who asks must not wait, nor this thread end
            answer = {"error": f"{type(error).__name__}: {error}"}
        connection.sendall(json.dumps(answer).encode())


_OPEN: weakref.WeakSet[AnswerThread] = weakref.WeakSet()


def _forked() -> None:
    for each in list(_OPEN):
        each.drop()
    _OPEN.clear()


def ask(pids: Mapping[int, int], question: str, limit_s: float) -> dict[int, Any]:
    """Returns the answers of these processes of this host, by their keys; who doesn't answer in time is left out."""
    answers: dict[int, Any] = {}
    if not IS_THERE:
        return answers
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for key, pid in pids.items():
            connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            connection.setblocking(False)
            with contextlib.suppress(OSError):  # nobody listens
                connection.connect(_address_of(pid))
                connection.send(question.encode())
                selector.register(connection, selectors.EVENT_READ, (key, bytearray()))
        until = time.monotonic() + limit_s
        while selector.get_map() and (left_s := until - time.monotonic()) > 0:
            for ready, _ in selector.select(left_s):
                key, received = ready.data
                try:
                    part = ready.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                except BlockingIOError:
                    continue
                except OSError:
                    part = b""
                received += part
                if not part or len(received) > _MOST_BYTES:
                    selector.unregister(ready.fileobj)
                    with contextlib.suppress(ValueError):
                        answers[key] = json.loads(received)
    return answers


def listening() -> list[int]:
    """Returns the PIDs of this host's processes that listen to questions, in this network namespace."""
    try:
        with open("/proc/net/unix", encoding="ascii", errors="replace") as file:
            names = [line.split()[-1] for line in file]
    except OSError:
        return []
    prefix = "@" + _address_of("")[1:]
    return sorted({int(name.removeprefix(prefix)) for name in names if name.startswith(prefix)})
