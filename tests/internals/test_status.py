from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from device_communicators.base.errors import CollectiveTimeoutError
from device_communicators.base.member import Timeout
from device_communicators.calls.recorder import Operation
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.reports import add_calls
from device_communicators.routing.states import SILENT, State
from device_communicators.routing.waits import group_key
from tests.internals.asked_peers import Peers

HOSTS = (0, 0, 1, 1)


def _peers() -> Peers:
    peers = Peers()
    for rank, host in enumerate(HOSTS):
        peers.join(rank, host)
    return peers


def _fail(peers: Peers, rank: int, call: str, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> str:
    watcher = peers.watchers[rank]
    context = GroupContext("test", ranks, ranks.index(rank), torch.device("cpu"), Timeout(1.0), watcher=watcher)
    failure = CollectiveTimeoutError("it took too long")
    add_calls(context, Operation(3, call, "", (), 0.0), failure)
    return str(failure)


def test_an_error_has_the_states_of_all_ranks() -> None:
    text = _fail(_peers(), 0, "barrier")
    assert "global ranks 1, 2, 3 are in no call of a group, at asked_peers.py" in text
    assert "global rank 0 is in barrier, at test_status.py" in text


def test_a_rank_that_failed_in_the_group_answers_with_that_call() -> None:
    peers = _peers()
    _fail(peers, 2, "gather")
    assert "global rank 2 is in gather, at test_status.py" in _fail(peers, 0, "barrier")
    states = peers.watchers[0].status.ask_states([2], "another group")
    assert states[2].call == "gather", "it has made no call since"


def test_the_failed_call_of_a_rank_that_left_is_known() -> None:
    peers = _peers()
    _fail(peers, 3, "gather")
    peers.leave(3)
    assert "global rank 3 is in gather, at test_status.py" in _fail(peers, 0, "barrier")


def test_a_rank_that_holds_the_interpreter_lock() -> None:
    peers = _peers()
    peers.holding = {1, 3}
    assert f"global ranks 1, 3 are {SILENT}" in _fail(peers, 0, "barrier")


def test_a_stopped_rank_is_described_by_its_neighbour() -> None:
    peers = _peers()
    peers.stopped = {1, 3}
    text = _fail(peers, 0, "barrier")
    assert "global rank 1 is stopped, as rank 0 sees" in text
    assert "global rank 3 is stopped, as rank 2 sees" in text


def test_a_neighbour_outside_of_the_group_describes_a_stopped_rank() -> None:
    peers = _peers()
    peers.stopped = {3}
    text = _fail(peers, 0, "barrier", (0, 3))
    assert "global rank 3 is stopped, as rank 2 sees" in text
    assert "global rank 2" not in text


def test_nothing_is_said_of_a_rank_that_does_not_answer() -> None:
    peers = _peers()
    peers.stopped = {2, 3}
    assert peers.watchers[0].status.ask_states([1, 2, 3]).keys() == {1}


@pytest.mark.parametrize(
    "reply", [b'[["', b"[1, 2, 3]", b'[["a", "b", "c", "d", "e", true, 1, 2, [], "more"], {}]', b"[null, []]"]
)
def test_a_reply_that_cannot_be_read_costs_no_other(reply: bytes) -> None:
    peers = _peers()
    peers.watchers[2].answers["state"] = peers.watchers[2].answers["report"] = lambda rank, question: reply
    text = _fail(peers, 0, "barrier")
    assert "global ranks 1, 3 are in no call of a group" in text and "global rank 2" not in text


def test_groups_of_the_same_ranks_are_told_apart() -> None:
    context = GroupContext("test", (0, 1), 0, torch.device("cpu"), Timeout(1.0), channel=1 << 20)
    others = [replace(context, given="a"), replace(context, given="b"), replace(context, channel=1 << 21)]
    assert len({group_key(each) for each in (context, *others)}) == 4


def test_states_of_many_failed_groups_are_dropped() -> None:
    peers = _peers()
    status = peers.watchers[0].status
    for number in range(1000):
        status.keep(State(key=str(number)), 1.0)
    assert len(status._failed_groups) <= 64
