from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from device_communicators.base.bounded_store import BoundedStore
from device_communicators.base.host import start_time
from device_communicators.cpu.watching import CallsDifferError, Neighbours, _Roll

DEADLINE_S = 20.0
Result = tuple[list[list[Any]], list[int]]


class CountedStore(dist.HashStore):
    calls: Counter[str]

    def __getattribute__(self, name: str) -> Any:
        if name in ("multi_get", "check", "add"):
            super().__getattribute__("calls")[name] += 1
        return super().__getattribute__(name)


@pytest.fixture
def store() -> CountedStore:
    made = CountedStore()
    made.calls = Counter()
    return made


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def start(
    threads: ThreadPoolExecutor, store: Any, ranks: Sequence[int], size: int, round_: str, timeout_s: float = DEADLINE_S
) -> list[Future[Result]]:
    def call(rank: int) -> Result:
        roll = _Roll(BoundedStore(store), rank, range(size), f'["{round_}", {rank}]', Neighbours(""))
        return roll.call(time.monotonic() + timeout_s)

    return [threads.submit(call, rank) for rank in ranks]


def roll_of(size: int, round_: str) -> Result:
    return [[round_, rank] for rank in range(size)], []


def test_all_get_the_entries_of_all_and_leave_no_keys(threads: ThreadPoolExecutor, store: CountedStore) -> None:
    for round_ in ("first", "again"):
        calls = start(threads, store, range(8), 8, round_)
        assert [each.result(DEADLINE_S) for each in calls] == [roll_of(8, round_)] * 8
        while store.num_keys() > 1:  # a helper thread deletes them
            time.sleep(0.01)
    assert store.calls["multi_get"] == 2, "one rank reads all entries"


def test_the_next_meeting_doesnt_wait_for_the_clean_up(
    threads: ThreadPoolExecutor, store: CountedStore, monkeypatch: Any
) -> None:
    monkeypatch.setattr(BoundedStore, "start", lambda self, job: None)
    for round_ in ("first", "again", "again"):
        calls = start(threads, store, range(3), 3, round_)
        assert [each.result(DEADLINE_S) for each in calls] == [roll_of(3, round_)] * 3


def test_a_retry_reads_no_entry_of_a_rank_that_gave_up(threads: ThreadPoolExecutor, store: CountedStore) -> None:
    given_up = start(threads, store, (0, 1), 3, "old", 0.3)
    assert [each.result(DEADLINE_S) for each in given_up] == [([], [2])] * 2
    late = start(threads, store, (2,), 3, "new")
    time.sleep(0.2)
    assert not late[0].done(), "it must not take the old entries"
    calls = [*late, *start(threads, store, (0, 1), 3, "new")]
    assert [each.result(DEADLINE_S) for each in calls] == [roll_of(3, "new")] * 3


def test_ranks_that_give_up_in_turn_name_only_the_missing(threads: ThreadPoolExecutor, store: CountedStore) -> None:
    calls = [start(threads, store, (rank,), 4, "one", 0.3 + 0.2 * rank)[0] for rank in (0, 1, 3)]
    assert [each.result(DEADLINE_S) for each in calls] == [([], [2])] * 3


def test_a_rank_still_waits_while_another_one_retries(threads: ThreadPoolExecutor, store: CountedStore) -> None:
    waits = start(threads, store, (0,), 3, "new")
    assert start(threads, store, (1,), 3, "old", 0.2)[0].result(DEADLINE_S) == ([], [2])
    calls = [*waits, *start(threads, store, (1, 2), 3, "new")]
    assert [each.result(DEADLINE_S) for each in calls] == [roll_of(3, "new")] * 3


def test_an_attempt_that_a_rank_could_not_close(threads: ThreadPoolExecutor, store: CountedStore) -> None:
    roll = _Roll(BoundedStore(store), 0, range(2), '["old", 0]', Neighbours(""))
    roll._store = BoundedStore(store).until(time.monotonic() + DEADLINE_S)
    roll._attempts.append(store.compare_set("process/attempt", "", "name").decode())
    roll._enter()
    calls = start(threads, store, (0,), 2, "new")
    while store.compare_set("process/attempt", "-", "-") == b"name":
        time.sleep(0.01)  # rank 1 would complete the old attempt
    calls += start(threads, store, (1,), 2, "new")
    assert [each.result(DEADLINE_S) for each in calls] == [roll_of(2, "new")] * 2


def test_a_rank_knows_which_neighbours_had_entered_and_exited(store: CountedStore, monkeypatch: Any) -> None:
    bounded = BoundedStore(store)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        for rank, processes, pid in ((0, "here", os.getpid()), (1, "here", other.pid), (2, "elsewhere", other.pid)):
            monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
            Neighbours(processes).enter(bounded, rank)
        monkeypatch.undo()
        near = Neighbours("here")
        assert near.ended() == set(), "nothing was read"
        near.read(bounded)
        assert near.found.keys() == {0, 1}
        assert near.ended() == set()
        assert near.found[1] == (other.pid, start_time(other.pid))
        other.kill()
    assert near.ended() == {1}


def test_a_rank_reads_its_neighbours_while_it_waits(threads: ThreadPoolExecutor, store: CountedStore) -> None:
    rolls = [_Roll(BoundedStore(store), rank, range(3), "[]", Neighbours("here")) for rank in (0, 1)]
    calls = [threads.submit(roll.call, time.monotonic() + 1.2) for roll in rolls]
    assert [each.result(DEADLINE_S) for each in calls] == [([], [2])] * 2
    assert all(roll._near.found.keys() == {0, 1} for roll in rolls)


def test_ranks_with_different_calls_all_raise(threads: ThreadPoolExecutor, store: CountedStore) -> None:
    def call(rank: int, arguments: str) -> Result:
        roll = _Roll(BoundedStore(store), rank, range(4), "[]", Neighbours(""), arguments)
        return roll.call(time.monotonic() + DEADLINE_S)

    calls = [threads.submit(call, 0, "one")]
    while not store.check(["process/call"]):
        time.sleep(0.01)
    calls += [threads.submit(call, 1, "other"), threads.submit(call, 2, "one")]
    errors = [each.exception(DEADLINE_S) for each in calls]
    errors.append(threads.submit(call, 3, "one").exception(DEADLINE_S))  # after the others gave up
    assert all(isinstance(error, CallsDifferError) for error in errors)
    assert [error.args for error in errors if error is not None] == [("one", "other")] * 4
