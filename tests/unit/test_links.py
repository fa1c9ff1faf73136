"""Connections that tell of a process' end: who has ended, who has left, and whose connection only broke."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from device_communicators.liveness.health import Watcher
from device_communicators.liveness.links import MOST_PEERS, Links, peers_of

_PATIENCE_S = 10.0


@contextmanager
def _pair() -> Iterator[tuple[list[Links], list[Watcher]]]:
    """Ranks 0 and 1, each alone on its host."""
    store, watchers = dist.HashStore(), [Watcher(), Watcher()]
    links = [Links(store, [[0], [1]], rank, "127.0.0.1", watchers[rank]) for rank in range(2)]
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


def test_the_end_of_a_process_is_a_death() -> None:
    with _pair() as (links, watchers):
        links[1]._closing.set()  # what is left of a process that was killed: descriptors that the kernel closes
        for end in (links[1]._listener, *links[1]._links):
            assert end is not None
            end.close()
        assert _soon(lambda: bool(watchers[0].deaths_of([1])))
        assert watchers[0].deaths()[0].certain


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
        assert links[0]._listener is not None
        with socket.create_connection(links[0]._listener.getsockname(), _PATIENCE_S) as stranger:
            stranger.sendall(os.urandom(20))
            assert stranger.recv(1) == b""
        assert watchers[0].watches([1]) and watchers[0].deaths_of([0, 1]) == []


def test_peers_are_all_ranks_of_other_hosts_or_one_of_each() -> None:
    assert peers_of([[0, 1], [2, 3]], 1) == [2, 3]
    large = [list(range(first, first + 8)) for first in range(0, 8 * MOST_PEERS, 8)]
    assert peers_of(large, 9) == [host[1] for host in large if 9 not in host]
