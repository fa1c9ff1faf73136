"""What ranks agree on through a store: threads stand for them, and the store is one of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from device_communicators.base.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    ConfigMismatchError,
    PeerDiedError,
    UsageError,
)
from device_communicators.liveness.health import Watcher
from parallel_state.process_groups.agreement import Agreement

TIMEOUT_S = 0.3
EVERYONE = (0, 1, 2, 3)


class World:
    """The ranks of one world, with an `Agreement` each."""

    def __init__(self, size: int = 4) -> None:
        self.store = dist.HashStore()
        self.watchers = [Watcher() for _ in range(size)]
        self.ranks = [Agreement(self.store, "world", rank, watcher) for rank, watcher in enumerate(self.watchers)]

    def each(self, call: Callable[[Agreement, int], object], ranks: Sequence[int] = EVERYONE) -> list[object]:
        """Returns what `call` gives or raises on each of `ranks`, at once."""

        def attempt(rank: int) -> object:
            try:
                return call(self.ranks[rank], rank)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(ranks)) as threads:
            return list(threads.map(attempt, ranks))


def _kinds(outcomes: Sequence[object]) -> set[type]:
    return {type(outcome) for outcome in outcomes}


def test_disjoint_groups_ask_the_same_without_meeting() -> None:
    """Each of them has its own answers, in whatever order they ask."""
    world = World()
    pairs = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    for step in range(3):
        names = {rank: {"name": f"{pairs[rank]} {step}"} for rank in EVERYONE}
        outcomes = world.each(
            lambda agreement, rank, names=names: agreement.agree("a group", pairs[rank], names[rank], 5.0)
        )
        assert outcomes == [None] * 4, outcomes


def test_a_group_that_disagrees_is_told_so_whatever_another_one_agreed_on() -> None:
    world = World()
    agreed = world.each(lambda agreement, rank: agreement.agree("a group", (2, 3), {"size": "2"}, 5.0), (2, 3))
    assert agreed == [None] * 2
    odd = world.each(lambda agreement, rank: agreement.agree("a group", (0, 1), {"size": str(rank)}, 5.0), (0, 1))
    assert _kinds(odd) == {ConfigMismatchError}


def test_the_first_verdict_counts() -> None:
    """A rank that comes after the others gave up hears what they heard, though by then everybody is there."""
    world = World()

    def ask(agreement: Agreement, rank: int) -> None:
        if rank == 3:
            time.sleep(2 * TIMEOUT_S)
        agreement.agree("a group", EVERYONE, {"name": "tp"}, TIMEOUT_S)

    outcomes = world.each(ask)
    assert _kinds(outcomes) == {CollectiveTimeoutError}
    assert [outcome.suspect_ranks for outcome in outcomes] == [(3,), (3,), (3,), ()]  # type: ignore[attr-defined]
    assert "rank 3 came too late" in str(outcomes[3])
    assert world.each(lambda agreement, rank: agreement.agree("a group", EVERYONE, {}, 5.0)) == [None] * 4


def test_a_verdict_is_not_replaced() -> None:
    world = World()
    first, second = {"kind": "missing", "ranks": [3]}, {"kind": "same"}
    assert world.ranks[0]._decide(world.ranks[0].store, "world/agree/x/1", first) == first
    assert world.ranks[1]._decide(world.ranks[0].store, "world/agree/x/1", second) == first
    assert world.ranks[0]._read(world.ranks[0].store, "world/agree/x/1/verdict", (), time.monotonic()) == first


def test_questions_leave_no_more_than_the_last_one_s_keys() -> None:
    world = World()
    counts = []
    for number in range(6):
        request = {"name": f"group {number}"}
        assert world.each(lambda agreement, rank, r=request: agreement.agree("a group", EVERYONE, r, 5.0)) == [None] * 4
        counts.append(world.store.num_keys())
    assert counts == [counts[0]] * 6
    for number in range(3):
        world.each(lambda agreement, rank, n=number: agreement.agree("b", EVERYONE, {"n": str(rank + n)}, 5.0))
    assert world.store.num_keys() <= 2 * counts[0] + 1, "with `differs` of the last one"


def test_meetings_leave_their_name_alone() -> None:
    world = World()
    counts = []
    for _ in range(4):
        names = world.each(lambda agreement, rank: agreement.meet("gloo", EVERYONE, 5.0))
        assert len(set(names)) == 1
        world.each(lambda agreement, rank, name=names[0]: agreement.forget(name, EVERYONE))
        counts.append(world.store.num_keys())
    assert counts == [counts[0]] * 4


@pytest.mark.parametrize("odd", EVERYONE)
def test_one_that_asks_for_something_else(odd: int) -> None:
    world = World()
    outcomes = world.each(
        lambda agreement, rank: agreement.agree("group", EVERYONE, {"size": "4" if rank == odd else "2"}, 5.0)
    )
    assert _kinds(outcomes) == {ConfigMismatchError}
    other = odd or 1
    sides = ("4", "2") if odd == 0 else ("2", "4")
    assert all(f"the size is {sides[0]} on rank 0 and {sides[1]} on rank {other}" in str(each) for each in outcomes)


def test_one_whose_request_can_not_be() -> None:
    world = World()

    def ask(agreement: Agreement, rank: int) -> object:
        def resolve() -> tuple[str, dict[str, str]]:
            if rank == 2:
                raise UsageError("no such group")
            return "made", {"size": "2"}

        return agreement.resolve_and_agree("group", EVERYONE, resolve, 5.0)

    outcomes = world.each(ask)
    assert [type(outcome) for outcome in outcomes] == [ConfigMismatchError] * 4
    assert "no such group" in str(outcomes[0])
    assert isinstance(outcomes[2].__cause__, UsageError)  # type: ignore[attr-defined]


def test_a_death_ends_the_wait_of_those_that_ask() -> None:
    world = World()
    for watcher in world.watchers:
        watcher.report(3, "has ended")
    started = time.monotonic()
    outcomes = world.each(lambda agreement, rank: agreement.agree("group", EVERYONE, {}, 20.0), EVERYONE[:3])
    assert _kinds(outcomes) == {PeerDiedError}
    assert all(outcome.suspect_ranks == (3,) for outcome in outcomes)  # type: ignore[attr-defined]
    assert time.monotonic() - started < 1.0


class GoneStore:
    """A store whose server has ended: each call says that its connection broke."""

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*args: object) -> object:
            raise dist.DistNetworkError("Connection reset by peer")

        return call


@pytest.mark.parametrize("asks", ["agree", "meet"])
def test_a_store_that_is_gone_names_the_rank_that_served_it(asks: str) -> None:
    """Its connections break a moment before its process is known to have ended."""
    watcher = Watcher()
    agreement = Agreement(GoneStore(), "world", 1, watcher)
    news = threading.Timer(0.05, watcher.report, (0, "has ended"))
    news.start()
    with pytest.raises(PeerDiedError, match="global rank 0 has ended") as caught:
        if asks == "agree":
            agreement.agree("a group", EVERYONE, {}, 5.0)
        else:
            agreement.meet("a group", EVERYONE, 5.0)
    news.join()
    assert caught.value.suspect_ranks == (0,)


class SlowStore:
    """A store in memory whose answers take as long as those of another host."""

    def __init__(self) -> None:
        self._store = dist.HashStore()

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name == "underlying_store":
            raise AttributeError(name)

        def call(*args: object) -> object:
            time.sleep(0.003)
            return getattr(self._store, name)(*args)

        return call


@pytest.mark.parametrize("asks", ["agree", "meet"])
def test_a_store_that_takes_its_time_is_not_blamed_for_ranks_that_do_not_come(asks: str) -> None:
    """The last look at the store comes after the deadline of the question."""
    agreement = Agreement(SlowStore(), "world", 0, Watcher())
    with pytest.raises(CommunicationError) as caught:
        if asks == "agree":
            agreement.agree("a group", EVERYONE, {}, 0.3)
        else:
            agreement.meet("a group", EVERYONE, 0.3)
    assert set(caught.value.suspect_ranks) == set(EVERYONE) - {0}


def test_a_problem_of_one_ends_the_meeting_of_all() -> None:
    world = World()
    outcomes = world.each(
        lambda agreement, rank: agreement.meet("gloo", EVERYONE, 5.0, problem="no open files" * (rank == 2))
    )
    assert _kinds(outcomes) == {CommunicationError}
    assert all(outcome.suspect_ranks == (2,) for outcome in outcomes)  # type: ignore[attr-defined]
