from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from device_communicators.base.errors import CollectiveMismatchError, CollectiveTimeoutError, CommunicationError
from device_communicators.base.member import Timeout
from device_communicators.calls.recorder import Operation
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.reports import _MOST_REPORTS, Report, _peers_to_ask, _verdict, explained
from tests.internals.asked_peers import Peers

_KEYS = {"all_reduce": 8, "all_reduce_": 8}
"""The second call is the first by another method, or as C++ describes it."""


def _report(words: list[str]) -> Report:
    before = Operation(0, words[2], "", (), 0.0, key=_KEYS.get(words[2], 0)) if words[2:] else None
    return Report.of(Operation(int(words[0]), words[1], "", (), 0.0, key=_KEYS.get(words[1], 0)), before=before)


def _conclude(rank: int, **calls: str) -> CommunicationError:
    """`r0="3 barrier gather"`: rank 0 was in the group's third call, a barrier, after a gather."""
    reports = {int(name[1:]): _report(words.split()) for name, words in calls.items()}
    context = GroupContext("test", (0, 1, 2, 3), rank, torch.device("cpu"), Timeout(1.0))
    missing = [each for each in range(4) if each not in reports]
    return _verdict(context, reports[rank], reports, CommunicationError("it broke."), missing)


def test_who_reports_nothing_is_missing() -> None:
    found = _conclude(0, r0="3 barrier", r1="3 barrier", r3="4 barrier")
    assert isinstance(found, CollectiveTimeoutError)
    assert found.suspect_ranks == (2,)


def test_another_call_of_the_same_number_is_a_mismatch() -> None:
    found = _conclude(0, r0="3 barrier", r1="3 barrier", r2="3 gather", r3="3 barrier")
    assert isinstance(found, CollectiveMismatchError)
    assert found.suspect_ranks == (2,)


def test_one_that_is_ahead_is_a_mismatch_to_the_others() -> None:
    found = _conclude(0, r0="3 barrier", r1="3 barrier", r2="4 barrier", r3="3 barrier")
    assert isinstance(found, CollectiveMismatchError)
    assert found.suspect_ranks == (2,)


def test_one_that_was_late_is_told_so() -> None:
    found = _conclude(2, r0="4 gather", r1="4 gather", r2="3 barrier", r3="4 gather")
    assert type(found) is CommunicationError
    assert "already in gather number 4: this rank, in barrier number 3, was late" in str(found)


@pytest.mark.parametrize("rank", range(4))
def test_a_call_that_ended_on_some_ranks_only_is_no_mismatch(rank: int) -> None:
    there, ahead = "3 gather barrier", "4 barrier gather"
    found = _conclude(rank, r0=ahead, r1=ahead, r2=there, r3=there)
    assert type(found) is CommunicationError
    assert "gather number 3 had completed on global rank 0, global rank 1, but not on other ranks" in str(found)


@pytest.mark.parametrize("rank", range(4))
def test_calls_that_match_may_have_other_words(rank: int) -> None:
    found = _conclude(rank, r0="4 barrier all_reduce_", r1="3 all_reduce", r2="3 all_reduce_", r3="3 all_reduce")
    assert type(found) is CommunicationError
    assert "all_reduce number 3 had completed on global rank 0, but not on other ranks" in str(found)
    alike = _conclude(rank, r0="3 all_reduce_", r1="3 all_reduce", r2="3 all_reduce_", r3="3 all_reduce")
    assert str(alike) == "it broke."


def test_ranks_hear_of_each_others_call_and_of_the_one_before() -> None:
    peers = Peers()
    watchers = [peers.join(rank) for rank in range(4)]

    def fail(rank: int) -> CommunicationError:
        name, before = ("gather", "barrier") if rank > 1 else ("barrier", "gather")
        operation, passed = (Operation(3 if rank > 1 else 4, each, "", (), 0.0) for each in (name, before))
        context = GroupContext("test", (0, 1, 2, 3), rank, torch.device("cpu"), Timeout(1.0), watcher=watchers[rank])
        return explained(context, operation, CommunicationError("it broke."), passed)

    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(fail, range(4)):
            assert "gather number 3 had completed on global rank 0, global rank 1" in str(found)


@pytest.mark.parametrize("ahead", ["4 barrier broadcast", "4 barrier", "5 barrier gather"])
def test_ranks_that_are_ahead_by_another_call_are_a_mismatch(ahead: str) -> None:
    found = _conclude(2, r0=ahead, r1=ahead, r2="3 gather barrier", r3="3 gather barrier")
    assert isinstance(found, CollectiveMismatchError)
    assert found.suspect_ranks == (0, 1)


def test_the_report_of_a_rank_that_left_is_known() -> None:
    peers = Peers()
    watchers = [peers.join(rank) for rank in range(4)]

    def fail(rank: int, call: str) -> CommunicationError:
        context = GroupContext("test", (0, 1, 2, 3), rank, torch.device("cpu"), Timeout(1.0), watcher=watchers[rank])
        return explained(context, Operation(3, call, "", (), 0.0), CommunicationError("it broke."))

    fail(3, "gather")
    peers.leave(3)
    with ThreadPoolExecutor(3) as threads:
        for found in threads.map(fail, range(3), ["barrier"] * 3):
            assert isinstance(found, CollectiveMismatchError)
            assert found.suspect_ranks == (3,)
            assert "global rank 3 in gather number 3" in str(found)


@pytest.mark.parametrize("size", [2, 65, 66, 1000])
def test_ranks_of_large_groups_exchange_reports_with_some_others(size: int) -> None:
    def asked(rank: int) -> list[int]:
        return _peers_to_ask(GroupContext("test", tuple(range(size)), rank, torch.device("cpu"), Timeout(1.0)))

    assert len(set(asked(0))) == len(asked(0)) == min(size - 1, _MOST_REPORTS)
    for rank in asked(0):
        assert 0 in asked(rank)
