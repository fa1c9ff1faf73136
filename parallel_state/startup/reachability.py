"""Checks that all hosts reach each other at the addresses that gloo announces: gloo's own error would name no host.

Each host's lead (its lowest rank) connects to the control plane of every other host's lead. The lead checks that the
expected process answers, because several hosts can have the same address (docker bridges).
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Mapping, Sequence

from device_communicators.base.errors import RendezvousError, format_ranks
from device_communicators.control.client import ask
from device_communicators.control.plane import MOST_VALUE_BYTES, Verdict
from device_communicators.cpu import native
from device_communicators.liveness.health import Watcher, describe_deaths, kind_of_deaths
from parallel_state.startup import interfaces
from parallel_state.startup.interfaces import Address

_LIMIT_S = 20.0
"""Limit of the check, which also takes at most half of the time until the start-up's deadline."""
_OWN_HOST_S = 2.0
_OF_ANOTHER = (errno.EKEYREJECTED, errno.EPROTO, errno.EPROTONOSUPPORT, errno.EBADMSG, errno.ECONNABORTED)
_PURPOSE = "hosts reach each other"
_Pair = tuple[int, int, str]
"""A rank, a second rank that the first can't reach, and the reason."""


def check_all_hosts(rank: int, places: Mapping[int, Address], watcher: Watcher, deadline: float, where: str) -> None:
    """Raises a CommunicationError unless all hosts reach each other. Every rank must call this before `deadline`
    (monotonic).

    `rank`: this rank. `places`: each global rank's Address. `where`: the rendezvous address, for errors.
    """
    leads, ranks = leads_of(places), sorted(places)
    if len(leads) < 2 or not watcher.watches(ranks):
        return
    until = time.monotonic() + min(_LIMIT_S, max(0.0, deadline - time.monotonic()) / 2)
    limit_s = until - time.monotonic()
    own = _encode(rank, _unreached(places, rank, leads, limit_s / 2) if rank in leads else {})
    verdict, pairs = _agree(watcher, ranks, own, until - time.monotonic(), ranks)
    if verdict.kind == "agreed":
        if pairs:
            raise _not_reached(places, rank, *_worst(pairs), where)
        return
    deaths = watcher.await_death_of(ranks, None if verdict.kind == "ended" else 0.0)
    dead = {death.rank for death in deaths}
    ended = dead.union(verdict.ranks if verdict.kind == "ended" else ())
    closed = [lead for lead in leads if ended.issuperset(_of_host(places, lead))]
    # If a whole host refuses connections, its ranks are reported as exited: check for unreached hosts first.
    if not dead - {rank for lead in closed for rank in _of_host(places, lead)}:
        _, pairs = _agree(watcher, _of_host(places, rank), own, _OWN_HOST_S)
        pairs = [pair for pair in pairs if verdict.kind != "ended" or pair[1] in closed]
        if pairs:
            raise _not_reached(places, rank, *_worst(pairs), where)
    silent = f"ranks {format_ranks(verdict.ranks)} did not take part within {limit_s:.1f} s"
    raise kind_of_deaths(deaths, RendezvousError)(
        f"rank {rank} of {len(places)} checks that all hosts reach each other, but {describe_deaths(deaths) or silent}"
        "; see the logs of these ranks",
        operation="rendezvous",
        rank=rank,
        suspect_ranks=[death.rank for death in deaths] or verdict.ranks,
    )


def leads_of(places: Mapping[int, Address]) -> list[int]:
    lowest: dict[tuple[str, str], int] = {}
    for rank in sorted(places):
        place = places[rank]
        if place.address and place.network:
            lowest.setdefault((place.network, place.address), rank)
    return list(lowest.values()) if len({places[rank].network for rank in lowest.values()}) > 1 else []


def _of_host(places: Mapping[int, Address], rank: int) -> list[int]:
    return [each for each, place in places.items() if place[:2] == places[rank][:2]]


def _agree(
    watcher: Watcher, ranks: Sequence[int], value: bytes, timeout_s: float, watched: Sequence[int] = ()
) -> tuple[Verdict, list[_Pair]]:
    """Exchanges `value`, this rank's findings, between all `ranks`, which must all call this. Ends early if one of
    `watched` exits.

    Returns the control plane's result, and each failed connection.
    """
    verdict = watcher.agree(f"{_PURPOSE}/{len(ranks)}", 1, ranks, value, max(0.1, timeout_s), watched)
    verdict = verdict or Verdict("agreed", [], [])  # the control plane of this process ended
    reports = [json.loads(each) for each in verdict.values]
    return verdict, [(by, to, why) for by, found in reports for why, unreached in found.items() for to in unreached]


def _encode(rank: int, found: Mapping[int, str]) -> bytes:
    by_reason: dict[str, list[int]] = {}
    for unreached, why in found.items():
        by_reason.setdefault(why[:200], []).append(unreached)
    while len(value := json.dumps([rank, by_reason], separators=(",", ":")).encode()) > MOST_VALUE_BYTES:
        by_reason.popitem()
    return value


def _unreached(places: Mapping[int, Address], rank: int, leads: Sequence[int], limit_s: float) -> dict[int, str]:
    found: dict[int, str] = {}
    servers: dict[int, tuple[str, int, str]] = {}
    for lead in leads:
        endpoint = places[lead].for_control.endpoint
        if lead != rank and endpoint is not None:
            try:
                servers[lead] = endpoint.server()
            except OSError as error:
                found[lead] = f"{error} (port {endpoint.port})"
    for lead, (code, text) in ask(native.load(), servers, rank, b"", limit_s).items():
        port = servers[lead][1]
        if code == errno.ETIMEDOUT:
            found[lead] = f"no answer at port {port} within {limit_s:.1f} s"
        elif code in _OF_ANOTHER:
            found[lead] = f"another process answers at that address (port {port})"
        elif code != 0:
            found[lead] = f"{text.decode()} (port {port})"
    return found


def _worst(pairs: Sequence[_Pair]) -> _Pair:
    ends = [end for by, to, _ in pairs for end in (by, to)]
    suspect = max(sorted(set(ends), reverse=True), key=ends.count)
    return next((pair for pair in pairs if pair[1] == suspect), pairs[0])


def _not_reached(places: Mapping[int, Address], rank: int, by: int, to: int, why: str, where: str) -> RendezvousError:
    unreached = _of_host(places, to)
    return RendezvousError(
        f"rank {rank} of {len(places)} can't start: ranks {format_ranks(unreached)} on {places[to]} are not reached "
        f"from {places[by]}: {why}; this rank is on {places[rank]}. The rendezvous was at {where}. "
        f"{interfaces.firewall_advice()}",
        operation="rendezvous",
        rank=rank,
        suspect_ranks=unreached,
    )
