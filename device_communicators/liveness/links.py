"""Connections between hosts that say one thing: the process at the other end lives.

pidfds reach no other host, and heartbeats take their limit to miss somebody. So each two ranks that can't watch each
other's process hold a TCP connection; when one of them ends, however it ends, its kernel closes the connection, and the
other knows within a round trip. A closed connection alone is no death, as firewalls reset idle ones: the rank asks at
the other's port, which stays open as long as its process. Refused is dead, an answer is a new connection, silence is
left to the heartbeats.

Ports and tokens are told through the store, or have been told where the ranks met. A connection begins with the token
of who listens and the rank of who connects; a rank that goes on purpose says so before it closes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import secrets
import select
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from device_communicators.base import forks
from device_communicators.base.bounded_store import BoundedStore
from device_communicators.base.helper_threads import HelperThread
from device_communicators.base.host import connect_to, resolve
from device_communicators.liveness.health import Watcher

logger = logging.getLogger("parallel_state")

MOST_PEERS = 128
"""In larger worlds a rank holds connections only to those at its own place on the other hosts."""
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"{_TOKEN_BYTES}sI")
_WELCOME, _LEAVING = b"+", b"-"
_START_S = 1.0
_MISSING_S = 0.4
"""The time that a rank has to connect before it is asked after."""
_CONNECT_S = 5.0
_ASK_S = 1.0
_ATTEMPTS = 3
_PAUSE_S = 0.02
_STRANGER_S = 5.0
_MOST_STRANGERS = 64
_GONE = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)


def peers_of(hosts: Sequence[Sequence[int]], rank: int) -> list[int]:
    """Returns the ranks that `rank` holds connections to; `hosts` are the ranks that watch each other by pidfd."""
    own = next(host for host in hosts if rank in host)
    others = [host for host in hosts if host is not own]
    everyone = sorted(other for host in others for other in host)
    if len(everyone) <= MOST_PEERS:
        return everyone
    return sorted({host[own.index(rank) % len(host)] for host in others})


@dataclass
class LinkPlace:
    """The address at which a rank listens."""

    host: str
    port: int
    token: bytes

    def __str__(self) -> str:
        return json.dumps([self.host, self.port, self.token.hex()], separators=(",", ":"))

    @classmethod
    def parse(cls, text: str | bytes) -> LinkPlace:
        host, port, token = json.loads(text)
        return cls(host, port, bytes.fromhex(token))


class LinkPort:
    """A port of this process at which ranks of other hosts connect, and the token that they say there."""

    def __init__(self, address: str) -> None:
        """`address`: this rank's, as other hosts reach it. Raises OSError."""
        family = resolve(address, 0)[0][0]
        self.listener = socket.create_server((address, 0), family=family, backlog=4 * MOST_PEERS)
        self.listener.setblocking(False)
        self.place = LinkPlace(address, self.listener.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES))


class Links:
    """This rank's connections; one thread makes and watches them."""

    def __init__(
        self,
        hosts: Sequence[Sequence[int]],
        rank: int,
        port: LinkPort,
        watcher: Watcher,
        *,
        store: Any = None,
        places: Mapping[int, LinkPlace] | None = None,
    ) -> None:
        """`port` is closed with the links. `places`: of all ranks; else they are told through `store`.

        That is a connection of its own.
        """
        self._store = None if store is None else BoundedStore.of(store)
        self._ranks = frozenset(each for host in hosts for each in host)
        self._peers = peers_of(hosts, rank)
        self._rank = rank
        self._watcher = watcher
        self._port = port
        self._where = dict(places or {})
        self._links: dict[socket.socket, int] = {}
        self._strangers: dict[socket.socket, float] = {}
        """Connections that haven't said their token yet -> until when they may."""
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._closing = threading.Event()
        self._complete = threading.Event()
        """All peers are connected."""
        self._thread = HelperThread("links", self._run)
        forks.call_in_children(_forked)
        _OPEN.add(self)

    def start(self) -> None:
        """Tells the others where this rank listens, and waits a moment for the connections that the thread makes."""
        if self._store is not None:
            self._store.set(f"link/{self._rank}", str(self._port.place))
        self._selector.register(self._port.listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread.start()
        until = time.monotonic() + _START_S
        while not self._complete.wait(_PAUSE_S) and time.monotonic() < until:
            if self._watcher.deaths_of(self._ranks):  # it may be a peer, of which nothing will come
                break

    def close(self) -> None:
        """Says farewell on all connections, and ends the thread."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._waker.send(b"!")
        if self._thread.is_alive():
            self._thread.join(1.0)
        for link in list(self._links):
            with contextlib.suppress(OSError):
                link.send(_LEAVING)
        self.drop()

    def drop(self) -> None:
        """Closes the descriptors without a word: those of a forked child, whose parent's they are."""
        for each in (*self._links, *self._strangers, self._port.listener, self._wake, self._waker):
            each.close()
        self._selector.close()

    # In the thread.

    def _run(self) -> None:
        try:
            self._meet()
            self._ask_after_missing()
            while not self._closing.is_set():
                self._look(_STRANGER_S if self._strangers else None)
        except (OSError, RuntimeError, ValueError, KeyError) as error:  # KeyError: `close` was quicker
            if not self._closing.is_set():
                logger.warning("rank %d has no connections to other hosts (%s): a rank's end there is noticed by "
                               "heartbeats", self._rank, str(error).splitlines()[0])  # fmt: skip

    def _meet(self) -> None:
        """Connects to the lower ranks; the higher ones connect to this one."""
        for peer in self._peers:
            while not self._closing.is_set() and self._store is not None:
                if self._store.check([f"link/{peer}"]):  # its own wait logs each time that it waits in vain
                    self._where[peer] = LinkPlace.parse(self._store.get(f"link/{peer}"))
                    break
                if self._watcher.deaths_of([peer, 0]):  # nobody will tell
                    break
                self._pause()
            if peer < self._rank and peer in self._where:
                met = self._connect(peer, _CONNECT_S)
                if met is None:
                    at = self._where[peer]
                    logger.warning(
                        "rank %d can't connect to rank %d at %s port %d: the end of one is noticed by beats there",
                        self._rank, peer, at.host, at.port,
                    )  # fmt: skip
                elif not met:
                    self._watcher.report(peer, "has ended: nobody listens at its port")
        self._store = None  # whose server, if it is this process, must be able to go

    def _connect(self, peer: int, limit_s: float) -> bool | None:
        """Returns True once connected, False where nobody listens any more, None where that can't be told."""
        where = self._where[peer]
        try:
            link = connect_to((where.host, where.port), limit_s)
        except OSError as error:
            return False if error.errno == errno.ECONNREFUSED else None
        try:
            link.sendall(_HELLO.pack(where.token, self._rank))
            welcome = self._recv_and_serve(link, limit_s)
        except OSError:
            welcome = b""
        if welcome != _WELCOME:
            link.close()
            return None
        self._keep(link, peer)
        return True

    def _recv_and_serve(self, link: socket.socket, limit_s: float) -> bytes:
        """Receives one byte, and greets who connects meanwhile: two ranks may ask each other at the same time."""
        until = time.monotonic() + limit_s
        link.setblocking(False)
        while time.monotonic() < until and not self._closing.is_set():
            if select.select([link], [], [], 0)[0]:
                return link.recv(1)
            self._pause()
        return b""

    def _pause(self) -> None:
        """Greets who connects, for a moment; links are read when this is over."""
        if self._serve(_PAUSE_S):
            time.sleep(_PAUSE_S / 4)

    def _keep(self, link: socket.socket, peer: int) -> None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # for firewalls that forget idle connections
        idle = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))  # Linux's name, and macOS'
        if idle is not None:
            link.setsockopt(socket.IPPROTO_TCP, idle, 30)
        link.setblocking(False)
        self._links[link] = peer
        self._selector.register(link, selectors.EVENT_READ)
        self._watcher.link(peer, True)
        if set(self._peers) <= set(self._links.values()):
            self._complete.set()

    def _ask_after_missing(self) -> None:
        """Reports higher ranks that have ended before they connected; the lower ones were asked by connecting."""
        until = time.monotonic() + _MISSING_S
        while not self._complete.is_set() and not self._closing.is_set() and (left_s := until - time.monotonic()) > 0:
            self._look(left_s)
        for peer in self._peers:
            self._look(0.0)
            if self._closing.is_set():
                return
            if peer > self._rank and peer in self._where and peer not in self._links.values():
                where = self._where[peer]
                try:
                    connect_to((where.host, where.port), _MISSING_S).close()
                except ConnectionRefusedError:
                    self._watcher.report(peer, "has ended: nobody listens at its port")
                except OSError:  # the heartbeats will tell
                    continue

    def _look(self, limit_s: float | None) -> None:
        for link in self._serve(limit_s):
            if link in self._links:
                self._read(link)

    def _serve(self, limit_s: float | None) -> list[Any]:
        """Greets who connects, until that time or other news; returns the links with something to say."""
        links = []
        for key, _ in self._selector.select(limit_s):
            ready = key.fileobj
            if ready is self._wake:
                return []
            if ready is self._port.listener:
                self._accept()
            elif ready in self._strangers:
                self._greet(ready)
            else:
                links.append(ready)
        now = time.monotonic()
        for stranger in [each for each, until in self._strangers.items() if until < now]:
            self._forget(stranger)
        return links

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            stranger, _ = self._port.listener.accept()
            if len(self._strangers) >= _MOST_STRANGERS:
                stranger.close()
                return
            stranger.setblocking(False)
            self._strangers[stranger] = time.monotonic() + _STRANGER_S
            self._selector.register(stranger, selectors.EVENT_READ)

    def _greet(self, stranger: socket.socket) -> None:
        hello = b""
        with contextlib.suppress(OSError):
            hello = stranger.recv(_HELLO.size)
        self._forget(stranger, close=False)
        token, rank = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", -1)
        if not secrets.compare_digest(token, self._port.place.token):
            stranger.close()
            return
        try:
            stranger.send(_WELCOME)
        except OSError:
            stranger.close()
            return
        self._keep(stranger, rank)

    def _forget(self, stranger: socket.socket, close: bool = True) -> None:
        del self._strangers[stranger]
        self._selector.unregister(stranger)
        if close:
            stranger.close()

    def _read(self, link: socket.socket) -> None:
        """Reads a farewell, or the end, of a connection."""
        code = 0
        try:
            word = link.recv(1)
        except BlockingIOError:
            return
        except OSError as error:
            word, code = b"", error.errno or 0
        peer = self._links.pop(link)
        self._selector.unregister(link)
        link.close()
        if peer not in self._links.values():
            self._watcher.link(peer, False)
        if word == _LEAVING:
            self._watcher.note_left(peer)
        if word == _LEAVING or self._closing.is_set() or (code and code not in _GONE):
            return
        if self._is_gone(peer):
            self._watcher.report(peer, "has ended: its host has closed its connections, and nobody listens at its port")

    def _is_gone(self, peer: int) -> bool:
        if peer not in self._where:
            return False
        for _ in range(_ATTEMPTS):
            answer = self._connect(peer, _ASK_S)
            if answer is not None:
                return not answer
            if self._closing.wait(_PAUSE_S):  # the kernel is still closing what the process had
                break
        return False


_OPEN: weakref.WeakSet[Links] = weakref.WeakSet()


def _forked() -> None:
    """Closes a child's copies of its parent's connections, which would stay open beyond the parent's end."""
    for links in list(_OPEN):
        with contextlib.suppress(OSError):
            links.drop()
    _OPEN.clear()
