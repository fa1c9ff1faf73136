"""Agreements of ranks that are threads, each with its own control plane."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from device_communicators.base.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    ConfigMismatchError,
    PeerDiedError,
    UnsupportedError,
    UsageError,
)
from device_communicators.control.plane import Change, ControlError, Verdict
from device_communicators.cpu import native
from device_communicators.liveness.health import Place, Watcher
from parallel_state.process_groups.agreement import Agreement

TIMEOUT_S = 0.3
EVERYONE = (0, 1, 2, 3)


class World:
    def __init__(self, size: int = 4) -> None:
        self.watchers = [Watcher() for _ in range(size)]
        endpoints = [watcher.listen(native.load(), "127.0.0.1") for watcher in self.watchers]
        places = {rank: Place("host", "network", "", 0, "", endpoint) for rank, endpoint in enumerate(endpoints)}
        for rank, watcher in enumerate(self.watchers):
            watcher.follow(rank, places)
        self.ranks = [Agreement("world", rank, watcher) for rank, watcher in enumerate(self.watchers)]

    def close(self) -> None:
        for watcher in self.watchers:
            watcher.close()

    def each(self, call: Callable[[Agreement, int], object], ranks: Sequence[int] = EVERYONE) -> list[object]:
        def attempt(rank: int) -> object:
            try:
                return call(self.ranks[rank], rank)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(ranks)) as threads:
            return list(threads.map(attempt, ranks))


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def _kinds(outcomes: Sequence[object]) -> set[type]:
    return {type(outcome) for outcome in outcomes}


def test_disjoint_groups_ask_the_same_without_meeting(world: World) -> None:
    pairs = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    for step in range(3):
        names = {rank: {"name": f"{pairs[rank]} {step}"} for rank in EVERYONE}
        outcomes = world.each(
            lambda agreement, rank, names=names: agreement.agree("a group", pairs[rank], names[rank], 5.0)
        )
        assert outcomes == [None] * 4, outcomes


def test_a_group_that_disagrees_is_told_so_whatever_another_one_agreed_on(world: World) -> None:
    agreed = world.each(lambda agreement, rank: agreement.agree("a group", (2, 3), {"size": "2"}, 5.0), (2, 3))
    assert agreed == [None] * 2
    odd = world.each(lambda agreement, rank: agreement.agree("a group", (0, 1), {"size": str(rank)}, 5.0), (0, 1))
    assert _kinds(odd) == {ConfigMismatchError}


def test_the_first_verdict_counts(world: World) -> None:
    def ask(agreement: Agreement, rank: int) -> None:
        if rank == 3:
            time.sleep(2 * TIMEOUT_S)
        agreement.agree("a group", EVERYONE, {"name": "tp"}, TIMEOUT_S)

    outcomes = world.each(ask)
    assert _kinds(outcomes) == {CollectiveTimeoutError}
    assert [outcome.suspect_ranks for outcome in outcomes] == [(3,), (3,), (3,), ()]  # type: ignore[attr-defined]
    assert "rank 3 came too late" in str(outcomes[3])
    assert world.each(lambda agreement, rank: agreement.agree("a group", EVERYONE, {}, 5.0)) == [None] * 4


def test_a_meeting_that_some_gave_up_is_followed_by_the_next(world: World) -> None:
    def come(agreement: Agreement, rank: int) -> str:
        if rank == 3:
            time.sleep(2 * TIMEOUT_S)
            return agreement.meet("gloo", EVERYONE, 20.0)
        with pytest.raises(CollectiveTimeoutError, match=r"ranks \[3\] did not come"):
            agreement.meet("gloo", EVERYONE, TIMEOUT_S)
        return agreement.meet("gloo", EVERYONE, 20.0)

    names = world.each(come)
    assert len(set(names)) == 1 and str(names[0]).endswith("/2"), names


def test_a_rank_that_can_not_make_a_group_tells_its_members(world: World) -> None:
    world.ranks[2].fail("tp/1", (1, 2, 3), "no descriptors")
    assert [each.failure("tp/1") for each in world.ranks] == [None, (2, "no descriptors"), None, (2, "no descriptors")]
    assert world.ranks[1].failure("tp/2") is None
    for number in range(300):
        world.ranks[2].fail(f"other/{number}", (3,), "again")
    assert world.ranks[3].failure("tp/1") is None and world.ranks[3].failure("other/299") is not None


def test_records_of_any_size_come_whole(world: World) -> None:
    sizes, order = (0, 4092, 4093, 20_000), (2, 0, 3, 1)
    records = [bytes([rank]) * size for rank, size in enumerate(sizes)]
    for _ in range(2):
        found = world.each(lambda agreement, rank: agreement._watcher.gather("what", order, records[rank], 20.0))
        assert found == [[records[rank] for rank in order]] * 4


def test_a_rank_that_left_is_named(world: World) -> None:
    world.watchers[3].close()

    def gather(agreement: Agreement, rank: int) -> object:
        return agreement._watcher.gather("what", EVERYONE, b"", 20.0, what=f"rank {rank} counts")

    for rank, outcome in enumerate(world.each(gather, EVERYONE[:3])):
        assert isinstance(outcome, CollectiveTimeoutError) and outcome.suspect_ranks == (3,)
        assert f"rank {rank} counts, but ranks [3] left the world before they did so" in str(outcome)


def test_gathering_without_a_control_plane_and_gloo_says_why() -> None:
    watcher = Watcher()
    assert watcher.gather("what", (0,), b"mine", 1.0) == [b"mine"]
    watcher.listen("it was not compiled", "127.0.0.1")
    with pytest.raises(ControlError, match="but has none: it was not compiled"):
        watcher.gather("what", (0, 1), b"mine", 1.0)


def test_a_watch_whose_control_plane_ended_reports_this_rank(world: World) -> None:
    watcher = world.watchers[1]
    assert watcher.watches([0, 2])
    watcher._take_in(Change("over", 1, "epoll_wait: Bad file descriptor"))
    assert not watcher.watches([0, 2])
    (death,) = watcher.deaths_of([1])
    assert "epoll_wait" in death.reason and not death.certain
    assert "epoll_wait" in watcher.explain([0])


class Silent:
    def __init__(self, *peers: int) -> None:
        self.peers = list(peers)

    def silent_peers(self, limit_s: float) -> list[int]:
        return self.peers


class Told:
    def __init__(self) -> None:
        self.unreachable: list[int] = []

    def report_unreachable(self, ranks: Sequence[int], text: str) -> None:
        self.unreachable += ranks


def _watching(processes: Sequence[str]) -> tuple[Watcher, Told]:
    watcher, told = Watcher(), Told()
    watcher._rank, watcher._world = 0, told  # type: ignore[assignment]
    watcher._places = {rank: Place("", "", each, 0, "", None) for rank, each in enumerate(processes)}
    return watcher, told


@pytest.mark.parametrize(
    ("processes", "silent", "dead", "expected"),
    [
        ("abbb", [2], [], [1, 2, 3]),
        ("abbb", [2], [1], [2, 3]),
        (["a", "", "", ""], [2], [], [2]),
        (["", "", "", ""], [2], [3], [2]),
    ],
    ids=["a host", "a host with an earlier death", "of an unknown host", "of unknown hosts"],
)
def test_who_is_unreachable_over_a_silent_data_connection(
    processes: Sequence[str], silent: list[int], dead: list[int], expected: list[int]
) -> None:
    watcher, told = _watching(processes)
    for rank in dead:
        watcher.report(rank, "has ended")
    connections = Silent(*silent)
    watcher.connections[connections] = range(4)
    watcher._look()
    assert told.unreachable == expected


def test_a_look_that_fails_ends_no_other(caplog: pytest.LogCaptureFixture) -> None:
    watcher, _ = _watching("ab")
    looked: list[int] = []
    watcher.on_look = [lambda: looked[1], lambda: looked.append(1)]  # type: ignore[list-item, func-returns-value]
    watcher._look()
    assert looked == [1] and "IndexError" in caplog.text


def test_a_rank_that_others_report_as_ended_says_who_did() -> None:
    watcher, _ = _watching("ab")
    watcher._take_in(Change("died", 0, "its port is closed", 1))
    (death,) = watcher.deaths_of([0])
    assert "was reported as exited by global rank 1, but runs" in death.reason


def test_a_world_that_cannot_be_joined_watches_nobody() -> None:
    watcher = Watcher()
    own = watcher.listen(native.load(), "127.0.0.1")
    assert own is not None
    places = {rank: Place("", "", "", 0, "", own._replace(proc=own.proc ^ rank << 1)) for rank in range(2)}
    strange = places | {1: places[1]._replace(endpoint=own._replace(proc=own.proc ^ 2, host="no.invalid"))}
    try:
        with pytest.raises(ControlError, match=r"'no\.invalid' of rank 1"):
            watcher.follow(0, strange)
        assert not watcher.watches([0])
        watcher.follow(0, places)
        assert watcher.watches([0, 1])
    finally:
        watcher.close()


def test_a_world_on_more_hosts_than_leads_can_connect_is_refused() -> None:
    watcher = Watcher()
    own = watcher.listen(native.load(), "127.0.0.1")
    assert own is not None
    places = {rank: Place("", "", "", 0, "", own._replace(proc=own.proc ^ rank << 1)) for rank in range(513)}
    try:
        with pytest.raises(UnsupportedError, match="4096 ranks on 512 hosts, but this one has 513 ranks on 513 hosts"):
            watcher.follow(0, places)
    finally:
        watcher.close()


def test_a_rank_without_a_reachable_endpoint_leaves_all_unwatched(caplog: pytest.LogCaptureFixture) -> None:
    watcher = Watcher()
    own = watcher.listen(native.load(), "127.0.0.1")
    places = {rank: Place("", f"network {rank}", "", 0, "", own) for rank in range(2)}
    watcher.follow(0, places)
    assert not watcher.watches([0, 1])
    assert "rank 0 can be reached from its own host only, at 127.0.0.1" in caplog.text
    assert watcher.agree("what", 1, (0, 1), b"", 5.0, (0, 1)) is None
    with pytest.raises(ControlError, match="rank 0 can be reached from its own host only"):
        watcher.gather("what", (0, 1), b"", 5.0)
    watcher.close()


def test_long_requests_are_compared_whole(world: World) -> None:
    outcomes = world.each(
        lambda agreement, rank: agreement.agree("group", EVERYONE, {"ranks": "0, " * 5000 + str(rank == 2)}, 5.0)
    )
    assert _kinds(outcomes) == {ConfigMismatchError}
    alike = world.each(lambda agreement, rank: agreement.agree("group", EVERYONE, {"ranks": "0, " * 5000}, 5.0))
    assert alike == [None] * 4


@pytest.mark.parametrize("odd", EVERYONE)
def test_one_that_asks_for_something_else(world: World, odd: int) -> None:
    outcomes = world.each(
        lambda agreement, rank: agreement.agree("group", EVERYONE, {"size": "4" if rank == odd else "2"}, 5.0)
    )
    assert _kinds(outcomes) == {ConfigMismatchError}
    other = odd or 1
    sides = ("4", "2") if odd == 0 else ("2", "4")
    assert all(f"the size is {sides[0]} on rank 0 and {sides[1]} on rank {other}" in str(each) for each in outcomes)


def test_one_whose_request_can_not_be(world: World) -> None:

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


def test_a_death_ends_the_wait_of_those_that_ask(world: World) -> None:
    for watcher in world.watchers:
        watcher.report(3, "has ended")
    started = time.monotonic()
    outcomes = world.each(lambda agreement, rank: agreement.agree("group", EVERYONE, {}, 20.0), EVERYONE[:3])
    assert _kinds(outcomes) == {PeerDiedError}
    assert all(outcome.suspect_ranks == (3,) for outcome in outcomes)  # type: ignore[attr-defined]
    assert time.monotonic() - started < 1.0


def test_a_problem_of_one_ends_the_meeting_of_all(world: World) -> None:
    outcomes = world.each(
        lambda agreement, rank: agreement.meet("gloo", EVERYONE, 5.0, problem="no open files" * (rank == 2))
    )
    assert _kinds(outcomes) == {CommunicationError}
    assert all(outcome.suspect_ranks == (2,) for outcome in outcomes)  # type: ignore[attr-defined]


def test_ranks_without_an_answer_of_rank_0_agree_without_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an undecided agreement no rank reports another one, so `reinitialize` works."""
    survivors = EVERYONE[1:]
    for watcher in world.watchers[1:]:
        with monkeypatch.context() as patch:
            patch.setattr(watcher, "agree", lambda *_: Verdict("undecided", [], [0]))
            with pytest.raises(CollectiveTimeoutError, match=r"ranks \[0\] did not come or answer") as told:
                watcher.gather("settings", EVERYONE, b"", TIMEOUT_S)
        assert told.value.suspect_ranks == (0,)
    time.sleep(0.2)
    verdicts = world.each(
        lambda agreement, rank: world.watchers[rank].agree("reinitialize", 1, survivors, b"", 5.0, survivors), survivors
    )
    assert [verdict.kind for verdict in verdicts] == ["agreed"] * 3, verdicts  # type: ignore[attr-defined]
