"""Finds out before gloo connects the ranks whether their hosts can reach each other at the addresses gloo will tell.

gloo would wait for a connection until the deadline of an operation, and name neither host nor address. One rank of each
network listens at its address, on a port of the kernel's choice as gloo's are, connects to all others, and asks who is
there: an address may be another host's, too (a docker bridge has the same on each), lead nowhere, or be behind a
firewall that opens the store's port only. What each has found is put together by rank 0 and told to all.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from device_communicators.base.bounded_store import LAST_WORD_S, BoundedStore
from device_communicators.base.errors import CommunicationError, RendezvousError, format_ranks
from device_communicators.base.helper_threads import HelperThread
from device_communicators.liveness.health import Death, describe_deaths, kind_of_deaths
from parallel_state.startup import interfaces
from parallel_state.startup.interfaces import Address
from parallel_state.startup.watch import StartWatch

_PROOF_BYTES = 16
_ANSWER_S = 10.0
"""For all answers at most, or half of what is left of the start; a network may be slow to connect."""
_SHORTEST_S, _LONGEST_S = 0.002, 0.1
_FIRST_LOOKS_PER_S, _LOOKS_PER_S = 20_000, 4096
"""Of all ranks together at the one store, in large worlds."""


def prove(store: Any, rank: int, places: Mapping[int, Address], watch: StartWatch) -> None:
    """Returns once all hosts reach each other, or where there is one only. Every rank calls it.

    Raises RendezvousError on all ranks, with hosts, interfaces and addresses, where one doesn't reach another one;
    PeerDiedError where a rank ends, the one that serves the store included.
    """
    leaders = leaders_of(places)
    if len(leaders) < 2:
        return
    everyone = range(len(places))
    store = BoundedStore.of(store).until(watch.deadline + LAST_WORD_S, lambda: bool(watch.watcher.deaths_of(everyone)))
    try:
        verdict = _find_out(store, rank, places, watch, leaders)
    except dist.DistError as error:  # the store is lost, with the rank that serves it, most likely
        deaths = watch.watcher.await_death_of(range(len(places)))
        problem = describe_deaths(deaths) or f"the store doesn't answer: {str(error).splitlines()[0]}"
        raise _unproven(problem, deaths, rank, len(places)) from error
    if verdict is not None:
        deaths = [death for death in watch.watcher.await_death_of(range(len(places))) if death.certain]
        if deaths:  # others knew of them before, gave up, and were not reached; that takes a second more to tell
            raise _unproven(describe_deaths(deaths), deaths, rank, len(places))
        raise _not_reached(places, rank, *verdict)


def _find_out(
    store: BoundedStore, rank: int, places: Mapping[int, Address], watch: StartWatch, leaders: Sequence[int]
) -> Any:
    """Returns rank 0's verdict: None, or who doesn't reach whom and why."""

    def wait_for(ready: Callable[[], bool]) -> None:
        _wait_for(ready, store, watch, rank, len(places), leaders)

    def wait_for_leaders(key: str) -> None:  # by a counter: each of their looks at all keys would be as long as these
        wait_for(lambda: store.add(key, 0) >= len(leaders))

    def is_known() -> bool:
        return bool(store.check(["reach/verdict"]))

    if rank in leaders:
        proof = secrets.token_bytes(_PROOF_BYTES)
        with contextlib.closing(Listener(places[rank].address, partial(_tell, proof))) as listener:
            store.set(f"reach/at/{rank}", json.dumps([listener.port, proof.hex(), str(listener.problem or "")]))
            store.add("reach/listening", 1)
            wait_for_leaders("reach/listening")
            offers = _read(store, "reach/at/", leaders)
            left_s = watch.deadline - time.monotonic()
            found = _reach(places, rank, offers, min(_ANSWER_S, left_s / 2))
            store.set(f"reach/found/{rank}", json.dumps(found))
            store.add("reach/done", 1)
            if rank == leaders[0]:
                wait_for_leaders("reach/done")
                store.set("reach/verdict", json.dumps(_worst(_read(store, "reach/found/", leaders))))
            wait_for(is_known)
    else:
        wait_for(is_known)
    return json.loads(store.get("reach/verdict"))


def _read(store: BoundedStore, prefix: str, ranks: Sequence[int]) -> dict[int, Any]:
    """Returns what all of these ranks have told, in one request."""
    told = store.multi_get([f"{prefix}{rank}" for rank in ranks])
    return dict(zip(ranks, map(json.loads, told), strict=True))


def leaders_of(places: Mapping[int, Address]) -> list[int]:
    """Returns the lowest rank of each network and address that is known; ascending."""
    lowest: dict[tuple[str, str], int] = {}
    for rank in sorted(places):
        place = places[rank]
        if place.address and place.network:
            lowest.setdefault((place.network, place.address), rank)
    return list(lowest.values()) if len({places[rank].network for rank in lowest.values()}) > 1 else []


class Listener:
    """Accepts connections at a port of the kernel's choice, in a thread, until it is closed."""

    def __init__(self, address: str, answer: Callable[[socket.socket], object], name: str = "reach") -> None:
        """`answer` is given each connection, and closes it. If nobody can listen at `address`, `problem` says why."""
        self.port = 0
        self.problem: OSError | None = None
        self._socket: socket.socket | None = None
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._socket = socket.create_server((address, 0), family=family, backlog=1024)
            self.port = int(self._socket.getsockname()[1])
        except OSError as error:
            self.problem = error
        else:
            HelperThread(name, _accept, self._socket, answer).start()

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._socket.close()


def _accept(listener: socket.socket, answer: Callable[[socket.socket], object]) -> None:
    with contextlib.suppress(OSError):
        while True:
            answer(listener.accept()[0])


def _tell(proof: bytes, peer: socket.socket) -> None:
    """Sends to a connection who listens here."""
    with peer, contextlib.suppress(OSError):
        peer.settimeout(1.0)
        peer.sendall(proof)


def _reach(places: Mapping[int, Address], rank: int, offers: Mapping[int, Any], limit_s: float) -> dict[str, str]:
    """Connects to all other leaders at once; returns why some aren't reached, by rank."""
    found = {str(leader): f"it can't listen there: {problem}" for leader, (_, _, problem) in offers.items() if problem}
    waiting = {leader for leader in offers if leader != rank and str(leader) not in found}
    peers: dict[int, socket.socket] = {}
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for leader in list(waiting):
            address = places[leader].address
            peer = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
            peer.setblocking(False)
            peers[leader] = peer
            try:
                peer.connect_ex((address, offers[leader][0]))
                selector.register(peer, selectors.EVENT_READ, leader)
            except OSError as error:
                waiting.discard(leader)
                found[str(leader)] = str(error)
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                leader, answered = key.data, peers[key.data]
                selector.unregister(answered)
                waiting.discard(leader)
                try:
                    if answered.recv(_PROOF_BYTES).hex() != offers[leader][1]:
                        found[str(leader)] = "another process answers at that address"
                except OSError as error:
                    found[str(leader)] = str(error)
        found.update((str(leader), f"no answer within {limit_s:.1f} s") for leader in waiting)
    return found


def _worst(found: Mapping[int, Mapping[str, str]]) -> tuple[int, int, str] | None:
    """Returns who doesn't reach whom, and why: of all such pairs, one with the host that fails most often."""
    pairs = [(by, int(to), why) for by, each in found.items() for to, why in each.items()]
    if not pairs:
        return None
    fails = [end for by, to, _ in pairs for end in (by, to)]
    suspect = max(sorted(set(fails), reverse=True), key=fails.count)
    return next((pair for pair in pairs if pair[1] == suspect), pairs[0])


def _not_reached(places: Mapping[int, Address], rank: int, by: int, to: int, why: str) -> RendezvousError:
    unreached = [each for each, place in places.items() if place[:2] == places[to][:2]]
    return RendezvousError(
        f"rank {rank} of {len(places)} can't start: ranks {format_ranks(unreached)} on "
        f"{places[to]} are not reached from {places[by]}: {why}; this is {places[rank]}. {interfaces.advice()}",
        operation="rendezvous",
        rank=rank,
        suspect_ranks=unreached,
    )


def _wait_for(
    ready: Callable[[], bool],
    store: BoundedStore,
    watch: StartWatch,
    rank: int,
    world_size: int,
    leaders: Sequence[int],
) -> None:
    """Waits until it is so in the store, or a rank of the start ends or gives up, or until the start's deadline."""
    pause_s, everyone = max(_SHORTEST_S, world_size / _FIRST_LOOKS_PER_S), range(world_size)
    while not ready():
        deaths = watch.watcher.deaths_of(everyone)
        if deaths or time.monotonic() >= watch.deadline:
            missing: list[int] = []
            others = [leader for leader in leaders if leader != rank]
            store = store.within(LAST_WORD_S)
            with contextlib.suppress(dist.DistError):  # who doesn't listen keeps the others from finding anything
                for key in ("found", "at"):
                    missing = [leader for leader in others if not store.check([f"reach/{key}/{leader}"])] or missing
            deaths = watch.watcher.await_death_of(everyone, 0.0)  # with others that follow at once
            silent = f"ranks {format_ranks(missing)} did not take part until the deadline of the start"
            raise _unproven(describe_deaths(deaths) or silent, deaths, rank, world_size, missing)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, max(_LONGEST_S, world_size / _LOOKS_PER_S))


def _unproven(
    problem: str, deaths: Sequence[Death], rank: int, world_size: int, missing: Sequence[int] = ()
) -> CommunicationError:
    """Returns the error for a proof that did not come to its end."""
    return kind_of_deaths(deaths, RendezvousError)(
        f"rank {rank} of {world_size} finds out whether the hosts reach each other, but {problem}; look at the logs of "
        "these ranks",
        operation="rendezvous",
        rank=rank,
        suspect_ranks=[death.rank for death in deaths] or missing,
    )
