"""The port at which a rank would serve the store of the next world: reserved from the start, and told to the others.

After a failure the ranks that are left must meet at a port that all of them know already and that nobody else can have.
So each rank binds one when it joins a world whose store a rank serves, and whoever is the lowest one left listens
there. It is bound without SO_REUSEADDR: neither another server nor an outgoing connection is given it meanwhile.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
from collections.abc import Iterator

from device_communicators.base.host import address_towards, is_loopback, resolve

logger = logging.getLogger("parallel_state")

_handed_on: dict[tuple[str, int], socket.socket] = {}


class ReservedPort:
    """A port of this host that this process holds, and the address at which others reach it."""

    def __init__(self, held: socket.socket | None = None, where: str = "") -> None:
        self.where = where
        """`host:port`, as others connect to it; empty if it can't be told."""
        self._held = held

    @classmethod
    def beside(cls, server: tuple[str, int], rank: int) -> ReservedPort:
        """Returns a port on the interface that leads to `server`, rank 0's store; none where it can't be had.

        Rank 0's is at the server's own host name or address, as are those of its host's ranks where that name leads to
        loopback; where it is a service's in front of this host, which passes on one port only, rank 0 stays there.
        """
        host = address_towards(server)
        leads_to_loopback = (not host or is_loopback(host)) and not is_loopback(server[0])
        if rank == 0 or leads_to_loopback:
            host = server[0]
        if not host:
            return cls()
        try:
            if rank == 0 and not is_own_name(host):
                return cls(None, f"{host}:{server[1]}")
            held = _bind(interface_of(host))
        except OSError as error:
            logger.warning("rank %d can't serve a store after a failure, as it has no port for it: %s", rank, error)
            return cls()
        return cls(held, f"{host}:{held.getsockname()[1]}")

    @contextlib.contextmanager
    def handed_on(self) -> Iterator[None]:
        """Keeps the port, within the body, for a server of this process that `listener_at` gives it to."""
        held, self._held = self._held, None
        address = address_of(self.where) if held is not None else None
        if held is not None and address is not None:
            _handed_on[address] = held
        try:
            yield
        finally:
            if address is not None and (left := _handed_on.pop(address, None)) is not None:
                left.close()

    def close(self) -> None:
        """Gives the port back. Twice is fine."""
        if self._held is not None:
            self._held.close()
            self._held = None


def listener_at(address: tuple[str, int], backlog: int) -> socket.socket | None:
    """Returns the port that was handed on for this address, listening; None if none was."""
    held = _handed_on.pop(address, None)
    if held is not None:
        held.listen(backlog)
    return held


def address_of(where: str) -> tuple[str, int] | None:
    """Returns host and port of `host:port`; None for an empty text."""
    host, _, port = where.rpartition(":")
    return (host, int(port)) if host else None


def interface_of(host: str) -> str | None:
    """Returns where to listen: on loopback and on a literal address that is this host's, on these alone; else on all.

    A name may resolve to 127.0.1.1 on its own host, and an address may be a service's in front of it.
    """
    if host == "localhost":
        return host
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((str(ipaddress.ip_address(host)), 0))
    except (OSError, ValueError):
        return None
    return host


def is_own_name(host: str) -> bool:
    """Returns True if an address of this name is this host's own."""
    for family, kind, _, _, where in resolve(host, 0):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(where)
            return True
    return False


def _bind(host: str | None) -> socket.socket:
    on_all = host is None and socket.has_dualstack_ipv6()
    wildcard = "::" if on_all else "0.0.0.0"
    family, kind, _, _, where = resolve(host or wildcard, 0)[0]
    held = socket.socket(family, kind)
    try:
        if on_all:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind(where)
    except OSError:
        held.close()
        raise
    return held
