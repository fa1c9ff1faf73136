"""The watch over a start: how soon this process knows which rank has ended, where a connection to it broke."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from device_communicators.base.bounded_store import BoundedStore
from device_communicators.base.errors import CommunicationError, PeerDiedError
from device_communicators.base.host import start_time
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import attributed
from parallel_state.startup import interfaces, reachability
from parallel_state.startup.interfaces import Address
from parallel_state.startup.watch import Processes, StartWatch

NEIGHBOUR, REMOTE = 0, 2
DEADLINE_S = 30.0
SOON_S = 0.3
"""Less than a connection that broke is waited for news."""


class LostStore:
    """A store whose server is gone; `asked` once somebody has found that out."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def clone(self) -> LostStore:
        return self

    def check(self, keys: list[str]) -> bool:
        self.asked.set()
        raise dist.DistNetworkError("Connection reset by peer")

    def set(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("Broken pipe")

    def add(self, key: str, amount: int) -> int:
        raise dist.DistNetworkError("Broken pipe")

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        raise dist.DistNetworkError("Broken pipe")


@pytest.fixture
def neighbour() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def _watch(store: Any, served_by: int, neighbour: subprocess.Popen[bytes]) -> StartWatch:
    """Returns rank 1's watch over a world of three, whose rank 0 is the neighbour's process."""
    own = interfaces.process()
    processes = Processes(own)
    processes.see({NEIGHBOUR: own._replace(pid=str(neighbour.pid), born=start_time(neighbour.pid))})
    return StartWatch(store, 1, 3, processes, time.monotonic() + DEADLINE_S, served_by)


def _error(watch: StartWatch) -> CommunicationError:
    """Returns the error for a connection that has just broken."""
    context = GroupContext("world", (0, 1, 2), 1, torch.device("cpu"), 5.0, watcher=watch.watcher)
    failure = context.failure(CommunicationError, "connect failed: Connection reset by peer", "connect")
    return attributed(context, "connect", time.monotonic(), failure)


def test_a_neighbour_that_takes_the_store_along_is_noticed_as_it_ends(neighbour: subprocess.Popen[bytes]) -> None:
    """The kernel closes its connections first, and on a busy machine ends it some time later."""
    store = LostStore()
    watch = _watch(store, NEIGHBOUR, neighbour)
    try:
        assert store.asked.wait(DEADLINE_S)
        neighbour.kill()
        (death,) = watch.watcher.await_death_of([NEIGHBOUR], SOON_S)
        assert death.reason == "has ended during the start"
    finally:
        watch.close()


@pytest.mark.slow
def test_a_remote_rank_that_takes_the_store_along_is_named(neighbour: subprocess.Popen[bytes]) -> None:
    watch = _watch(LostStore(), REMOTE, neighbour)
    try:
        error = _error(watch)
        assert isinstance(error, PeerDiedError) and error.suspect_ranks == (REMOTE,)
    finally:
        watch.close()


@pytest.mark.slow
def test_the_news_of_a_remote_rank_may_take_longer_than_that_of_a_neighbour(
    neighbour: subprocess.Popen[bytes],
) -> None:
    """Its own neighbours tell of its end through the store, and have not come to it yet."""
    store = dist.HashStore()
    watch = _watch(store, NEIGHBOUR, neighbour)
    told = '{"rank": 2, "reason": "has ended during the start", "ended": true}'
    late = threading.Timer(0.6, store.set, ("failed", told))
    late.start()
    try:
        error = _error(watch)
        assert isinstance(error, PeerDiedError) and error.suspect_ranks == (REMOTE,)
    finally:
        late.join()
        watch.close()


@pytest.mark.slow
def test_a_store_that_is_lost_while_hosts_are_proven_is_named(neighbour: subprocess.Popen[bytes]) -> None:
    store: Any = LostStore()
    watch = _watch(store, REMOTE, neighbour)
    places = {rank: Address(f"network {rank}", "127.0.0.1") for rank in range(3)}
    try:
        with pytest.raises(PeerDiedError, match="finds out whether the hosts reach each other") as told:
            reachability.prove(store, 1, places, watch)
        assert told.value.suspect_ranks == (REMOTE,)
    finally:
        watch.close()


def _seconds(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def test_no_second_connection_to_a_store_that_has_ended() -> None:
    """torch would try for as long as the store waits for anything, or longer."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.PrefixStore("start", dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=DEADLINE_S)))
    again = BoundedStore(store).connect_anew()
    assert again is not None
    again.set("key", "value")
    assert again.raw.timeout == store.timeout == timedelta(seconds=DEADLINE_S)
    del server
    assert _seconds(lambda: BoundedStore(store).connect_anew()) < SOON_S
    assert BoundedStore(store).connect_anew() is None
