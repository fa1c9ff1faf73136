"""Meetings of ranks that are threads of one process, over a store in its memory."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from device_communicators.base.errors import RendezvousError
from parallel_state.startup import rendezvous
from parallel_state.startup.binding import different_cores
from parallel_state.startup.environment import ProcessEnvironment
from parallel_state.startup.interfaces import Address
from parallel_state.startup.rendezvous import _Meeting


@pytest.mark.slow
def test_a_rank_that_gave_up_is_not_the_one_that_is_missing() -> None:
    """Rank 2 never comes; rank 1, which started first, gives up and ends before rank 0's time is over."""
    store = dist.HashStore()

    def meeting(rank: int, timeout_s: float) -> _Meeting:
        place = ProcessEnvironment(rank, rank, 3, 3, "localhost", 1, "explicit")
        deadline = time.monotonic() + timeout_s
        return _Meeting(place, Address(), "here", timeout_s, deadline, lambda: store, "start")

    with ThreadPoolExecutor(1) as threads:
        opened = threads.submit(meeting(0, 30.0).open_world)
        with pytest.raises(RendezvousError, match=r"ranks \[2\] did not come") as own:
            meeting(1, 0.5).enter_world()
        world = dist.PrefixStore("start", store).get("world").decode()
        dist.PrefixStore(f"start/{world}", store).set("ended", "1")  # as a neighbour of rank 1 would tell
        with pytest.raises(RendezvousError, match=r"ranks \[2\] did not come") as told:
            opened.result(10.0)
    assert own.value.suspect_ranks == told.value.suspect_ranks == (2,)


@pytest.mark.parametrize("decided", [True, False])
def test_a_rank_stays_in_the_world_that_was_decided(decided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 opens another world between two looks: as its start failed, or as it was killed and is back."""
    top = dist.PrefixStore("start", dist.HashStore())

    def decide(world: str) -> None:
        dist.PrefixStore(world, top).set("roster", zlib.compress(json.dumps({}).encode()).hex())
        dist.PrefixStore(world, top).set("verdict", "complete 2")

    def looks(*_: object) -> Iterator[None]:
        top.set("world", "first")
        yield
        if decided:
            decide("first")
        top.set("world", "second")
        yield
        decide("second")
        yield

    monkeypatch.setattr(rendezvous, "looks", looks)
    place = ProcessEnvironment(1, 1, 2, 2, "localhost", 1, "explicit")
    meeting = _Meeting(place, Address(), "here", 1.0, time.monotonic() + 1.0, lambda: top.underlying_store, "start")
    assert meeting.enter_world().get("rank/1").decode().startswith("2 ")
    assert dist.PrefixStore("second", top).check(["rank/1"]) != decided


def test_ranks_of_each_host_must_begin_with_the_same_cores() -> None:
    def place(host: str, cores: str, network: str = "one") -> Address:
        return Address(network, name=host, cores=cores)

    assert different_cores({0: place("a", "0-3"), 1: place("a", "0-3"), 2: place("b", "4-7")}) == []
    assert different_cores({0: place("a", "0-3"), 1: place("a", ""), 2: Address(cores="0")}) == []
    found = different_cores({0: place("a", "0"), 1: place("b", "0-3"), 3: place("b", "4-7"), 2: place("b", "0-3")})
    assert found == ["b", "0-3", "1,2", "4-7", "3"]
