"""What ranks conclude from each other's reports after a failure, without a store."""

from __future__ import annotations

import torch

from device_communicators.errors import CollectiveMismatchError, CollectiveTimeoutError, CommunicationError
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.reports import Report, _verdict


def _conclude(rank: int, **calls: str) -> CommunicationError:
    """`r0="3 barrier"`: rank 0 was in the group's third operation, a barrier."""
    reports = {int(name[1:]): Report(int(told.split()[0]), told.split()[1]) for name, told in calls.items()}
    context = GroupContext("test", (0, 1, 2, 3), rank, torch.device("cpu"), 1.0)
    return _verdict(context, reports[rank], reports, CommunicationError("it broke."))


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
    assert "in gather number 4 already: this rank, in barrier number 3, was late" in str(found)
