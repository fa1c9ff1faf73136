"""Makes the TCP connections between ranks of a group that share no memory."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from device_communicators.base import limits, settings
from device_communicators.base.errors import CollectiveTimeoutError, CommunicationError
from device_communicators.base.host import gloo_addresses, resolve
from device_communicators.base.member import GroupMember
from device_communicators.liveness.health import Watcher, describe_deaths, kind_of_deaths

logger = logging.getLogger("parallel_state")

_SLICE_S = 0.05
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<{_TOKEN_BYTES}sHH")
_MOST_UNKNOWN = 256
_BACKLOG = 512
_MOST_ADDRESSES = 4
_Key = tuple[int, int]
_STRANGER: _Key = (-1, 0)
_TCP_INFO = struct.Struct("=2x2B4x16xI28xI")
"""Fields of Linux's tcp_info: retransmits, probes, tcpi_unacked, and tcpi_last_ack_recv in ms."""
_PROBES = 2
"""After this many unanswered TCP probes, a peer can count as silent."""
_SECOND_PROBE_S = 0.4
"""The shortest time between two probes: twice TCP_RTO_MIN."""


class Meeting(NamedTuple):
    members: GroupMember
    gather: Callable[[bytes], list[bytes]]
    """Exchanges bytes: returns those of each rank. Every rank must call this."""
    watcher: Watcher
    watched: Sequence[int]
    """Global ranks whose death ends the wait for connections."""
    timeout_s: float

    def has_lost_a_rank(self) -> bool:
        return bool(self.watcher.deaths_of(self.watched))


class Connections:
    """A rank's TCP connections to peers: rank in the group -> connections, which both ranks of a pair list in the same
    order.
    """

    def __init__(
        self, sockets: Mapping[int, Sequence[socket.socket]], early_bytes: Mapping[int, int], granted_bytes: int
    ) -> None:
        """`early_bytes`: peer -> bytes that this rank may send before the peer's receive begins. `granted_bytes`: how
        many each peer may send to this rank.
        """
        self.sockets = dict(sockets)
        self.granted_bytes = granted_bytes
        self.early_bytes = dict(early_bytes)
        self._unanswered: dict[socket.socket, float] = {}

    def silent_peers(self, limit_s: float) -> list[int]:
        """Returns the peers (ranks in the group) whose hosts acknowledged nothing for `limit_s`. Silence is measured
        from call to call, so call this several times within `limit_s`.
        """
        found, now = [], time.monotonic()
        for rank, connections in list(self.sockets.items()):
            for connection in connections:
                try:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                except OSError:
                    continue
                retransmits, probes, unacked, last_ack_ms = _TCP_INFO.unpack(info)
                waited_s = _SECOND_PROBE_S if probes >= _PROBES and last_ack_ms / 1000 > 1.25 * _SECOND_PROBE_S else 0.0
                since = self._unanswered.get(connection, now - waited_s)
                if (not (unacked and retransmits) and probes < _PROBES) or last_ack_ms / 1000 < now - since:
                    self._unanswered.pop(connection, None)
                    continue
                self._unanswered[connection] = since
                if now - since > limit_s and rank not in found:
                    found.append(rank)
        return found

    def close(self) -> None:
        for connections in self.sockets.values():
            for connection in connections:
                connection.close()
        self.sockets = {}

    def release(self) -> None:
        """Forgets the sockets without closing them: the C++ group owns the descriptors now."""
        for connections in self.sockets.values():
            for connection in connections:
                connection.detach()
        self.sockets = {}


def connect(meeting: Meeting, peers: Sequence[int], address: str | None = None) -> Connections:
    """Connects this rank with `peers` (ranks in the group). Every rank must call this, and each peer must list this
    rank. `address`: where this rank listens; None for the addresses that gloo uses. If one rank can't listen, all raise
    CommunicationError.
    """
    started = time.monotonic()
    members, ranks, rank = meeting.members, meeting.members.ranks, meeting.members.rank
    token, wanted = secrets.token_bytes(_TOKEN_BYTES), _connections(members, len(peers))
    with contextlib.ExitStack() as stack:
        listeners: list[socket.socket] = []
        problem, at = "", ""
        if peers:
            try:
                for at in (gloo_addresses() if address is None else [address])[: min(wanted, _MOST_ADDRESSES)]:
                    if not at:
                        raise OSError(
                            "the network interface in GLOO_SOCKET_IFNAME has no address; set GLOO_SOCKET_IFNAME to an "
                            "interface that has an address"
                        )
                    family = resolve(at, 0)[0][0]
                    listener = socket.create_server((at, 0), family=family, backlog=_BACKLOG)
                    listeners.append(stack.enter_context(listener))
            except OSError as error:
                problem = f"{at}: {error}"
        ends = [] if problem else [each.getsockname()[:2] for each in listeners]
        granted_bytes = settings.EARLY_BYTES.get()
        place = [ends, token.hex(), wanted, granted_bytes, problem]
        places = [json.loads(each) for each in meeting.gather(json.dumps(place).encode())]
        for other, (*_, what) in enumerate(places):
            if what:
                text = f"global rank {ranks[other]} of {members} can't listen at {what}"
                raise _not_connected(meeting, text, [other], started)
        made: dict[_Key, socket.socket] = {}
        keys = [(other, number) for other in peers for number in range(min(wanted, places[other][2]))]
        deadline = started + meeting.timeout_s
        other, where = -1, ""
        try:
            for other, number in keys:
                if other < rank:
                    ends_there, secret, *_ = places[other]
                    end = ends_there[number % len(ends_there)]
                    where = f" at {end[0]} port {end[1]}"
                    made[other, number] = _greet(meeting, end, secret, number, deadline)
            other, where = -1, ", which " + " and ".join(f"{at} port {port}" for at, port in ends) + " is open for"
            _accept(meeting, listeners, token, [key for key in keys if key[0] > rank], made, deadline)
        except BaseException as error:
            for connection in made.values():
                connection.close()
            if not isinstance(error, OSError):
                raise
            missing = [other] if other >= 0 else sorted({each for each, number in keys if (each, number) not in made})
            names = ", ".join(str(ranks[each]) for each in missing)
            text = f"global rank {ranks[rank]} of {members} can't be connected to global ranks {names}{where}: {error}"
            raise _not_connected(meeting, text, missing, started) from error
    for connection in made.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
    sockets = {other: [made[key] for key in keys if key[0] == other] for other in peers}
    return Connections(sockets, {other: places[other][3] for other in peers}, granted_bytes)


def _connections(members: GroupMember, peers: int) -> int:
    wanted = settings.CONNECTIONS.get()
    shortage = limits.descriptor_shortage(2 * wanted * peers) if wanted > 1 else ""  # the group may need as many again
    if shortage:
        logger.warning("%s has one connection to each rank instead of %d: %s", members, wanted, shortage)
    return 1 if shortage else wanted


def _not_connected(meeting: Meeting, text: str, missing: Sequence[int], started: float) -> CommunicationError:
    members = meeting.members
    suspects = [members.ranks[rank] for rank in missing]
    deaths = meeting.watcher.await_word_of(suspects, meeting.watched)
    if deaths:
        kind, suspects = kind_of_deaths(deaths, CollectiveTimeoutError), [death.rank for death in deaths]
        why, elapsed_s = describe_deaths(deaths), time.monotonic() - started
        return members.lost(kind, "connect", why, "look at that rank's log", elapsed_s, suspects)
    text += (
        ". Open all TCP ports between the hosts, and set GLOO_SOCKET_IFNAME on each to the interface that leads to the "
        "others"
    )
    return members.failure(CommunicationError, text, "connect", started=started, suspect_ranks=suspects)


def _greet(meeting: Meeting, end: Sequence[Any], token: str, number: int, deadline: float) -> socket.socket:
    family, kind, protocol, _, target = resolve(end[0], end[1])[0]
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(family, kind, protocol))
        connection.setblocking(False)
        error = connection.connect_ex(target)
        poll = select.poll()
        poll.register(connection, select.POLLOUT)
        while error == errno.EINPROGRESS:
            if poll.poll(1000 * _SLICE_S):
                error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            else:
                _check_time(meeting, deadline)
        if error:
            raise OSError(error, os.strerror(error))
        connection.sendall(_HELLO.pack(bytes.fromhex(token), meeting.members.rank, number), socket.MSG_NOSIGNAL)
        stack.pop_all()
    return connection


def _check_time(meeting: Meeting, deadline: float) -> None:
    if meeting.has_lost_a_rank():
        raise TimeoutError("another rank of the world has exited")
    if time.monotonic() > deadline:
        raise TimeoutError("timed out")


def _accept(
    meeting: Meeting,
    listeners: Sequence[socket.socket],
    token: bytes,
    keys: Sequence[_Key],
    made: dict[_Key, socket.socket],
    deadline: float,
) -> None:
    unknown: dict[int, tuple[socket.socket, bytearray]] = {}
    poll = select.poll()
    open_for = {listener.fileno(): listener for listener in listeners}
    for listener in listeners:
        poll.register(listener, select.POLLIN)
        listener.setblocking(False)
    try:
        while not all(key in made for key in keys):
            ready = [descriptor for descriptor, _ in poll.poll(1000 * _SLICE_S)]
            _check_time(meeting, deadline)
            for descriptor in ready:
                if descriptor in open_for:
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        connection, _ = open_for[descriptor].accept()
                        connection.setblocking(False)
                        unknown[connection.fileno()] = connection, bytearray()
                        poll.register(connection, select.POLLIN)
            for descriptor, (connection, hello) in list(unknown.items()):
                key = _read_hello(connection, hello, token) if descriptor in ready else None
                # No deadline: a busy host's hello may follow seconds later.
                if key is None and len(unknown) <= _MOST_UNKNOWN:
                    continue
                poll.unregister(descriptor)
                del unknown[descriptor]
                if key is not None and key in keys and key not in made:
                    made[key] = connection
                else:
                    connection.close()
    finally:
        for connection, _ in unknown.values():
            connection.close()


def _read_hello(connection: socket.socket, hello: bytearray, token: bytes) -> _Key | None:
    try:
        come = connection.recv(_HELLO.size - len(hello))
    except BlockingIOError:
        return None
    except OSError:
        return _STRANGER
    hello += come
    if not come or len(hello) < _HELLO.size:
        return None if come else _STRANGER
    said, rank, number = _HELLO.unpack(hello)
    return (rank, number) if secrets.compare_digest(said, token) else _STRANGER
