"""The control plane between simulated hosts with their own networks, PIDs and clocks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.failure.trials import assert_in_time
from tests.hosts import INTERFACE, Host, HostRanks, Hosts, _children, problem
from tests.internals import control_ranks as ranks_of
from tests.internals.control_ranks import Party, agree, leave

BEAT_S, LIMIT_S = 0.3, 1.0
AMPLE_S = 10.0
TWO, THREE = (0, 0, 0, 1, 1, 1), (0, 0, 1, 1, 2, 2)
ALL = list(range(6))


class HostParty(Party):
    def __init__(self, hosts: Hosts, placement: Sequence[int]) -> None:
        self.made = hosts
        super().__init__(HostRanks(hosts, placement, {}), placement, [hosts.addresses[host] for host in placement])

    def signal(self, number: int, *ranks: int) -> float:
        for rank in ranks:
            for pid in _children(self.pool._processes[rank].pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        return time.time()


@contextlib.contextmanager
def _party(placement: Sequence[int], *, agreed: bool = True, **options: float) -> Iterator[HostParty]:
    reason = problem()
    if reason is not None:
        pytest.skip(f"no hosts can be made here: {reason}")
    with Hosts([Host(own_pids=True)] * (max(placement) + 1)) as hosts:
        party = HostParty(hosts, placement)
        try:
            party.join(**{"limit_s": LIMIT_S, "beat_s": BEAT_S, **options})  # type: ignore[arg-type]
            if agreed:
                found = party.each(range(party.size), agree, "start", list(range(party.size)), b"", 30.0)
                assert {verdict.kind for verdict, _ in found.values()} == {"agreed"}
            yield party
        finally:
            party.signal(signal.SIGCONT, *range(party.size))
            party.pool.kill()


@pytest.mark.parametrize("victims", [[0], [1, 3]], ids=str)
@pytest.mark.parametrize("placement", [TWO, THREE], ids=["two hosts", "three hosts"])
def test_killed_ranks_are_named_on_all_hosts(tmp_path: Path, placement: Sequence[int], victims: list[int]) -> None:
    def trial(_: Path) -> float:
        with _party(placement, limit_s=20.0) as party:
            since_s = party.signal(signal.SIGKILL, *victims)
            return party.latest(party.others(*victims), "died", victims, since_s, 5.0)

    assert_in_time(trial, tmp_path)


def test_all_ranks_of_a_host_are_killed_at_once(tmp_path: Path) -> None:
    def trial(_: Path) -> float:
        with _party(THREE, limit_s=20.0) as party:
            since_s = party.signal(signal.SIGKILL, 0, 1)
            return party.latest([2, 3, 4, 5], "died", [0, 1], since_s, 5.0)

    assert_in_time(trial, tmp_path)


def test_a_cut_network_is_told_on_both_sides(tmp_path: Path) -> None:
    def trial(_: Path) -> float:
        with _party(TWO) as party:
            party.made.link(1, up=False)
            since_s, took_s = time.time(), list[float]()
            for here, there in (([0, 1, 2], [3, 4, 5]), ([3, 4, 5], [0, 1, 2])):
                took_s.append(party.latest(here, "unreachable", there, since_s, AMPLE_S))
                for rank in here:
                    assert sorted(party.changes(rank)) == [("unreachable", each) for each in there]
                    (seen,) = party.each([rank], ranks_of.wait_for, [("unreachable", there[0])], 0.0)[rank]
                    assert seen.change.by in here
            assert min(took_s) > LIMIT_S * 0.5
            return max(took_s)

    assert_in_time(trial, tmp_path, LIMIT_S + 1.5)


@pytest.mark.parametrize("deaf", [0, 1], ids=["to the lower host", "to the higher host"])
def test_a_dead_direction_is_unreachable_and_not_stopped(deaf: int) -> None:
    """The other direction still carries acknowledgments of bytes received before the cut."""
    with _party(TWO) as party:
        party.made.run_on(1 - deaf, f"tc qdisc add dev {INTERFACE} root tbf rate 8bit burst 1 latency 1ms")
        since_s = time.time()
        sides = [[0, 1, 2], [3, 4, 5]]
        found = []
        for here, there in (sides, sides[::-1]):
            # A host that still receives may learn, before or after, that the other one reports it as unreachable.
            until_s = since_s + AMPLE_S
            while any(len(party.changes(rank)) < len(there) for rank in here) and time.time() < until_s:
                time.sleep(0.05)
            for rank in here:
                changes = [seen.change for seen in party.each([rank], ranks_of.seen_so_far)[rank]]
                assert {each.kind for each in changes} == {"unreachable"}
                own, others = ({each.rank for each in changes if each.by in by} for by in (here, there))
                assert own <= set(there) and others <= set(here), changes
                assert own == set(there) or others == set(here), changes
                found.append(own == set(there))
        assert any(found), "one host at least has had no sign of the other"


def test_a_short_cut_is_no_end() -> None:
    with _party(TWO, limit_s=4.0) as party:
        party.made.link(1, up=False)
        time.sleep(1.5)
        party.made.link(1, up=True)
        verdicts = party.each(ALL, agree, "after", ALL, b"", 20.0)
        assert {verdict.kind for verdict, _ in verdicts.values()} == {"agreed"}
        assert [party.changes(rank) for rank in ALL] == [[]] * 6


def _hold_the_lock(seconds: int) -> None:
    ctypes.PyDLL(None).sleep(seconds)


@pytest.mark.parametrize("placement", [TWO, (0, 0, 1)], ids=["all ranks of a host", "the only rank of a host"])
def test_a_host_whose_ranks_hold_the_interpreter_lock_lives(placement: Sequence[int]) -> None:
    with _party(placement) as party:
        everyone = list(range(party.size))
        holders = [rank for rank in everyone if placement[rank] == 1]
        party.each(holders, _hold_the_lock, 3)
        verdicts = party.each(everyone, agree, "after", everyone, b"", 10.0)
        assert {verdict.kind for verdict, _ in verdicts.values()} == {"agreed"}
        assert [party.changes(rank) for rank in everyone] == [[]] * party.size


@pytest.mark.parametrize("placement", [TWO, (0, 0, 1)], ids=["three ranks", "one rank"])
def test_a_host_whose_ranks_are_stopped_is_told_as_stopped(tmp_path: Path, placement: Sequence[int]) -> None:
    limit_s = 2.0

    def trial(_: Path) -> float:
        with _party(placement, limit_s=limit_s) as party:
            stopped = [rank for rank in range(party.size) if placement[rank] == 1]
            running = party.others(*stopped)
            since_s = party.signal(signal.SIGSTOP, *stopped)
            took_s = party.latest(running, "stopped", stopped, since_s, AMPLE_S)
            for rank in running:
                assert sorted(party.changes(rank)) == [("stopped", each) for each in stopped]
        return took_s

    assert_in_time(trial, tmp_path, limit_s + 1.5)


def test_ranks_of_all_hosts_leave(tmp_path: Path) -> None:
    def trial(_: Path) -> float:
        with _party(THREE, limit_s=20.0) as party:
            took_s = party.each(ALL, leave)
            assert {kind for rank in ALL for kind, _ in party.changes(rank)} <= {"left"}
        return max(took_s.values())

    assert_in_time(trial, tmp_path)


def test_an_idle_world_and_its_end_take_few_packets() -> None:
    """Each lead sends a beat per second to each other lead, and TCP acknowledges it."""
    with _party(TWO, limit_s=20.0, beat_s=1.0) as party:
        time.sleep(0.5)
        since_s, before = time.monotonic(), party.made.sent(0)[1]
        time.sleep(5.0)
        at_end_s, at_end = time.monotonic(), party.made.sent(0)[1]
        assert at_end - before <= (at_end_s - since_s) * 3 + 5, f"{at_end - before} packets in {at_end_s - since_s} s"
        party.each(ALL, leave)
        ended = party.made.sent(0)[1] - at_end - 3 * (time.monotonic() - at_end_s)
        assert ended <= 8 * 9, f"{ended} packets at the end of 9 connections"


def test_threads_and_descriptors_are_gone_after_a_cut() -> None:
    with _party(TWO) as party:
        party.made.link(1, up=False)
        party.latest([0], "unreachable", [3, 4, 5], time.time(), LIMIT_S + 2.0)
        took_s = party.each(ALL, leave, 0.5)
        assert max(took_s.values()) < 1.5
        until_s = time.monotonic() + 2.0
        while time.monotonic() < until_s and "ps-control" in str(party.each(ALL, ranks_of.threads)):
            time.sleep(0.01)
        assert "ps-control" not in str(party.each(ALL, ranks_of.threads))


def _tcp_counts() -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in ("snmp", "netstat"):
        lines = [line.split() for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()]
        for names, values in zip(lines[::2], lines[1::2], strict=True):
            counts.update(zip(names[1:], map(int, values[1:]), strict=True))
    return counts


def test_the_end_of_a_job_takes_two_frames_a_rank_and_no_dials() -> None:
    """Segments with data count as frames; no beats are sent meanwhile."""
    everyone, leads = range(16), range(0, 16, 4)
    with _party([rank // 4 for rank in everyone], agreed=False, limit_s=60.0, beat_s=15.0) as party:
        time.sleep(1.0)
        before = party.each(leads, _tcp_counts)
        party.each(everyone, leave)
        after = party.each(leads, _tcp_counts)
    dials, segments = (
        sum(after[lead][name] - before[lead][name] for lead in leads) for name in ("ActiveOpens", "TCPOrigDataSent")
    )
    assert dials == 0
    assert 0 < segments <= 2 * len(everyone)
