"""Measures the links between hosts over TCP: reachability, speed, clock offsets.

One rank of each host listens at gloo's address. A firewall or a wrong interface therefore has the same effect as in the
job.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import statistics
import struct
import time
from collections.abc import Sequence

import msgspec

from device_communicators.base.helper_threads import HelperThread
from device_communicators.base.host import connect_to
from parallel_state.tools.check.facts import Facts, Link

_TOKEN_BYTES = 16
_CONNECT_S = 3.0
_LIMIT_S = 4.0
_ECHO, _DATA = b"e", b"d"
_STAMP = struct.Struct("<d")
_COUNT = struct.Struct("<q")
_BLOCK = bytes(1 << 18)
_RETRANSMITTED, _SEGMENTS, _DUPLICATES = 100, 136, 216
"""Offsets of tcpi_total_retrans, tcpi_segs_out and tcpi_dsack_dups in Linux' struct tcp_info."""
_MOST_HOSTS_IN_ALL_PAIRS = 24
_NEIGHBOURS = 8


class Listener:
    """Answers other hosts' measurements. `entry`: this listener's [address, port, token], or [] if listening failed."""

    def __init__(self, address: str) -> None:
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._socket: socket.socket | None = None
        self.entry: list[str] = []
        self.problem: OSError | None = None
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._socket = socket.create_server((address, 0), family=family, backlog=1024)
            self.entry = [address, str(self._socket.getsockname()[1]), self._token.hex()]
            HelperThread("check", self._accept, self._socket).start()
        except OSError as error:
            self.problem = error

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._socket.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                HelperThread("check-answer", self._answer, listener.accept()[0]).start()

    def _answer(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError, struct.error):
            peer.settimeout(_LIMIT_S)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.sendall(self._token)
            while request := peer.recv(1):
                if request == _ECHO:
                    peer.sendall(_STAMP.pack(time.time()))
                elif request == _DATA:
                    left = _COUNT.unpack(_receive(peer, _COUNT.size))[0]
                    buffer = bytearray(len(_BLOCK))
                    while left > 0:
                        count = peer.recv_into(buffer, min(left, len(buffer)))
                        if count == 0:
                            return
                        left -= count
                    peer.sendall(_ECHO)


def _receive(peer: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        data = peer.recv(count - len(found))
        if not data:
            raise ConnectionResetError("the other host closed the connection before the measurement was done")
        found += data
    return found


def schedule(leaders: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Returns the rounds in which hosts measure their links. `leaders`: one rank of each host.

    A round is a list of pairs (measuring rank, measured rank). For up to 24 hosts, returns all pairs; a host is in at
    most one pair of a round. With more hosts, each host measures only to the hosts at distances 1, 2, 4, ….
    """
    count = len(leaders)
    if count < 2:
        return []
    if count > _MOST_HOSTS_IN_ALL_PAIRS:
        rounds = []
        for step in [1 << power for power in range(_NEIGHBOURS) if 1 << power < count]:
            pairs = [(leaders[at], leaders[(at + step) % count]) for at in range(count)]
            rounds += [pairs[0::2], pairs[1::2]]
        return rounds
    places: list[int | None] = [*leaders, *([None] if count % 2 else [])]
    half, rounds = len(places) // 2, []
    for _ in range(len(places) - 1):
        pairs = [
            (one, two)
            for one, two in zip(places[:half], reversed(places[half:]), strict=True)
            if one is not None and two is not None
        ]
        rounds += [pairs, [(two, one) for one, two in pairs]]
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def measure(source: int, target: int, entry: Sequence[str], budget_s: float) -> Link:
    link = Link(source, target)
    address, port, token = entry
    try:
        with connect_to((address, int(port)), _CONNECT_S) as peer:
            link.kind = "broken"
            peer.settimeout(_LIMIT_S)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _receive(peer, _TOKEN_BYTES).hex() != token:
                link.kind, link.problem = "stranger", f"another machine or process answers at {address}"
                return link
            _measure_latency(peer, link)
            _measure_bandwidth(peer, link, budget_s)
            info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            again, link.segments, duplicates = (
                int.from_bytes(info[at : at + 4], "little") for at in (_RETRANSMITTED, _SEGMENTS, _DUPLICATES)
            )
            link.retransmitted = max(0, again - duplicates)  # packets received twice were late, not lost
            link.kind = ""
    except ConnectionRefusedError:
        link.kind, link.problem = "refused", f"{address} refuses connections (a firewall, or another host's address)"
    except TimeoutError:
        silent = not link.kind
        link.kind = "silent" if silent else "broken"
        link.problem = f"no answer from {address} within {_CONNECT_S if silent else _LIMIT_S:g} s"
    except OSError as error:
        link.kind = link.kind or "unreachable"
        link.problem = error.strerror or str(error)
    return link


def _measure_latency(peer: socket.socket, link: Link) -> None:
    trips, best_s = [], float("inf")
    for _ in range(40):
        before_s, started = time.time(), time.perf_counter()
        peer.sendall(_ECHO)
        theirs = _STAMP.unpack(_receive(peer, _STAMP.size))[0]
        took_s = time.perf_counter() - started
        trips.append(took_s * 1e6)
        if took_s < best_s:
            best_s = took_s
            link.clock_offset_s, link.clock_error_s = theirs - (before_s + took_s / 2), took_s / 2
    link.rtt_us = statistics.median(trips)


def _measure_bandwidth(peer: socket.socket, link: Link, budget_s: float) -> None:
    size, until = len(_BLOCK), time.monotonic() + budget_s
    runs = 0
    while runs < 3 and (time.monotonic() < until or runs == 0):
        started = time.perf_counter()
        peer.sendall(_DATA + _COUNT.pack(size))
        for _ in range(size // len(_BLOCK)):
            peer.sendall(_BLOCK)
        _receive(peer, 1)
        took_s = time.perf_counter() - started
        link.bytes_per_s = max(link.bytes_per_s, size / took_s)
        if took_s < budget_s / 4 and size < 1 << 28:
            size *= 2
        else:
            runs += 1


def better(one: Link, two: Link) -> Link:
    if one is two or two.problem:
        return two
    best = one if one.rtt_us < two.rtt_us else two
    fewer = min(one, two, key=lambda link: link.retransmitted / max(1, link.segments))
    return msgspec.structs.replace(
        best,
        bytes_per_s=max(one.bytes_per_s, two.bytes_per_s),
        retransmitted=fewer.retransmitted,
        segments=fewer.segments,
    )


def host_leaders(arrivals: Sequence[Facts]) -> list[int]:
    found: dict[str, int] = {}
    for number, facts in enumerate(arrivals, 1):
        if facts.probe:
            found.setdefault(facts.host_key, number)
    return list(found.values())
