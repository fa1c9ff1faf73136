"""Connections that tell of a process' end: who has ended, who has left, and whose connection only broke."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from device_communicators.liveness.health import Watcher
from device_communicators.liveness.links import MOST_PEERS, LinkPlace, LinkPort, Links, peers_of

_PATIENCE_S = 10.0


@contextmanager
def _pair(known: bool = False) -> Iterator[tuple[list[Links], list[Watcher]]]:
    """Ranks 0 and 1, each alone on its host; `known`: where they listen is, before they connect."""
    store, watchers = dist.HashStore(), [Watcher(), Watcher()]
    ports = [LinkPort("127.0.0.1") for _ in range(2)]
    places = {rank: port.place for rank, port in enumerate(ports)} if known else None
    links = [
        Links([[0], [1]], rank, ports[rank], watchers[rank], store=None if known else store, places=places)
        for rank in range(2)
    ]
    for each in links:
        each._complete.set()  # both are in this thread: none can wait for the other
        each.start()
    try:
        assert _soon(lambda: watchers[0].watches([1]) and watchers[1].watches([0]))
        yield links, watchers
    finally:
        for each in links:
            each.close()


def _soon(true: Callable[[], bool]) -> bool:
    until = time.monotonic() + _PATIENCE_S
    while not true() and time.monotonic() < until:
        time.sleep(0.005)
    return true()


@pytest.mark.parametrize("known", [False, True])
def test_the_end_of_a_process_is_a_death(known: bool) -> None:
    with _pair(known) as (links, watchers):
        links[1]._closing.set()  # what is left of a process that was killed: descriptors that the kernel closes
        for end in (links[1]._port.listener, *links[1]._links):
            end.close()
        assert _soon(lambda: bool(watchers[0].deaths_of([1])))
        assert watchers[0].deaths()[0].certain


def test_who_ends_before_it_connects_is_asked_after() -> None:
    """The higher ranks connect to the lower ones, which would wait for ever."""
    ports, watcher = [LinkPort("127.0.0.1") for _ in range(2)], Watcher()
    links = Links([[0], [1]], 0, ports[0], watcher, places={rank: port.place for rank, port in enumerate(ports)})
    ports[1].listener.close()
    try:
        links.start()
        assert [death.rank for death in watcher.deaths()] == [1]
    finally:
        links.close()


@pytest.mark.slow
def test_who_is_late_to_connect_is_no_death() -> None:
    ports, watchers = [LinkPort("127.0.0.1") for _ in range(2)], [Watcher(), Watcher()]
    places = {rank: port.place for rank, port in enumerate(ports)}
    early, late = (Links([[0], [1]], rank, ports[rank], watchers[rank], places=places) for rank in range(2))
    try:
        early.start()
        late.start()
        assert _soon(lambda: watchers[0].watches([1]) and watchers[1].watches([0]))
        assert watchers[0].deaths_of([1]) == watchers[1].deaths_of([0]) == []
    finally:
        early.close()
        late.close()


def test_a_farewell_is_none() -> None:
    with _pair() as (links, watchers):
        links[1].close()
        assert _soon(lambda: not watchers[0].watches([1]))
        time.sleep(0.1)
        assert watchers[0].deaths_of([1]) == []


def test_a_connection_that_was_reset_is_made_again() -> None:
    with _pair() as (links, watchers):
        (before,) = links[0]._links
        before.shutdown(socket.SHUT_RDWR)
        assert _soon(lambda: before not in links[0]._links and watchers[0].watches([1]) and watchers[1].watches([0]))
        assert watchers[0].deaths_of([0, 1]) == watchers[1].deaths_of([0, 1]) == []


def test_a_stranger_is_sent_away() -> None:
    with _pair() as (links, watchers):
        with socket.create_connection(links[0]._port.listener.getsockname(), _PATIENCE_S) as stranger:
            stranger.sendall(os.urandom(20))
            assert stranger.recv(1) == b""
        assert watchers[0].watches([1]) and watchers[0].deaths_of([0, 1]) == []


def test_peers_are_all_ranks_of_other_hosts_or_one_of_each() -> None:
    assert peers_of([[0, 1], [2, 3]], 1) == [2, 3]
    large = [list(range(first, first + 8)) for first in range(0, 8 * MOST_PEERS, 8)]
    assert peers_of(large, 9) == [host[1] for host in large if 9 not in host]


def test_a_place_goes_through_a_line_of_words() -> None:
    place = LinkPlace("fe80::1%eth0", 4711, os.urandom(16))
    assert LinkPlace.parse(str(place)) == place
    assert " " not in str(place)
