"""The control plane on real processes. Ranks of different "hosts" only have different watch domains and
connect over loopback."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import queue
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from device_communicators.base.errors import InvalidArgumentError, ResourceLimitError, UnsupportedError, UsageError
from device_communicators.base.host import start_time
from device_communicators.control.client import ask
from device_communicators.control.plane import (
    Change,
    ControlError,
    Endpoint,
    Member,
    World,
    find_endpoints,
)
from device_communicators.cpu import native
from tests.extent import LONG
from tests.failure.leftovers import nothing_left_after
from tests.failure.ranks import Ranks
from tests.failure.trials import assert_in_time
from tests.internals import control_ranks as ranks_of
from tests.internals.control_ranks import DEADLINE_S, LIMIT_S, THREAD, Party, agree, leave, world
from tests.sandbox import needs_filters, refuse

WITHIN_S = 1.0
ONE, TWO, THREE = [0] * 6, [0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2]
LAYOUTS = pytest.mark.parametrize("hosts", [ONE, TWO, THREE], ids=["one host", "two hosts", "three hosts"])
ALL = list(range(6))


@pytest.fixture(scope="module")
def kept_pool() -> Iterator[Ranks]:
    native.load()
    with nothing_left_after(2.0):
        pool = Ranks(6)
        yield pool
        pool.kill()


@pytest.fixture
def pool(kept_pool: Ranks, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    failed = request.session.testsfailed
    yield kept_pool
    if request.session.testsfailed > failed:
        Party(kept_pool, ALL).restart()


def _joined(pool: Ranks, hosts: list[int], **options: Any) -> Party:
    party = Party(pool, hosts)
    party.join(**options)
    found = party.each(range(len(hosts)), agree, "start", list(range(len(hosts))), b"", 30.0)
    assert {verdict.kind for verdict, _ in found.values()} == {"agreed"}
    return party


def _within(trial: Callable[[], float], folder: Path) -> None:
    assert_in_time(lambda _: trial(), folder, WITHIN_S)


@LAYOUTS
@pytest.mark.parametrize("victims", [[0], [4], [5, 0]], ids=["the lead", "another", "two"])
def test_a_killed_rank_is_named_on_all(pool: Ranks, tmp_path: Path, hosts: list[int], victims: list[int]) -> None:
    def trial() -> float:
        party = _joined(pool, hosts)
        since_s = party.signal(signal.SIGKILL, *victims)
        try:
            latest_s = party.latest(party.others(*victims), "died", victims, since_s, 5.0)
            for rank in party.others(*victims):
                assert sorted(party.changes(rank)) == sorted(("died", victim) for victim in victims)
            return latest_s
        finally:
            party.restart()

    _within(trial, tmp_path)


def test_all_ranks_of_a_host_are_killed_at_once(pool: Ranks, tmp_path: Path) -> None:
    def trial() -> float:
        party = _joined(pool, TWO)
        since_s = party.signal(signal.SIGKILL, 0, 1, 2)
        try:
            return party.latest([3, 4, 5], "died", [0, 1, 2], since_s, 5.0)
        finally:
            party.restart()

    _within(trial, tmp_path)


@pytest.mark.parametrize("hosts", [ONE, TWO, [0, 0, 0, 1, 1, 2]], ids=["one host", "two hosts", "three hosts"])
def test_the_lead_is_stopped_and_its_neighbour_killed(pool: Ranks, tmp_path: Path, hosts: list[int]) -> None:
    def trial() -> float:
        party = _joined(pool, hosts, limit_s=20.0)
        party.signal(signal.SIGSTOP, 0)
        since_s = party.signal(signal.SIGKILL, 1)
        try:
            return party.latest(party.others(0, 1), "died", [1], since_s, 5.0)
        finally:
            party.restart()

    _within(trial, tmp_path)


def _fill(size_bytes: int) -> int:
    """The kernel frees resident memory before it closes a killed process's sockets."""
    _fill.kept = bytearray(os.urandom(4096)) * (size_bytes // 4096)  # type: ignore[attr-defined]
    return len(_fill.kept)  # type: ignore[attr-defined]


@pytest.mark.slow
@LAYOUTS
def test_a_large_rank_is_killed(pool: Ranks, tmp_path: Path, hosts: list[int]) -> None:
    size_bytes = 2 << 30
    available = int(Path("/proc/meminfo").read_text(encoding="utf-8").split("MemAvailable:")[1].split()[0]) << 10
    if available < 2 * size_bytes:
        pytest.skip(f"2 GiB of memory are needed twice, and {available >> 20} MiB are available")

    def trial() -> float:
        party = _joined(pool, hosts)
        party.each([4], _fill, size_bytes)
        since_s = party.signal(signal.SIGKILL, 4)
        try:
            return party.latest(party.others(4), "died", [4], since_s, 5.0)
        finally:
            party.restart()

    _within(trial, tmp_path)


def _hold_the_lock(seconds: int) -> None:
    ctypes.PyDLL(None).sleep(seconds)


@LAYOUTS
def test_ranks_that_hold_the_interpreter_lock_live(pool: Ranks, hosts: list[int]) -> None:
    party = _joined(pool, hosts, limit_s=1.0)
    holders = [rank for rank in ALL if hosts[rank] == hosts[-1]]
    party.each(holders, _hold_the_lock, 3)
    assert [party.changes(rank) for rank in ALL] == [[]] * 6
    verdicts = party.each(ALL, agree, "after", ALL, b"", 10.0)
    assert {verdict.kind for verdict, _ in verdicts.values()} == {"agreed"}
    party.each(ALL, leave)


def test_a_host_whose_ranks_are_all_stopped_is_no_network_failure(pool: Ranks) -> None:
    party = _joined(pool, TWO, limit_s=1.0)
    since_s = party.signal(signal.SIGSTOP, 3, 4, 5)
    try:
        party.latest([0], "stopped", [3], since_s, 10.0)
        assert all(kind == "stopped" for rank in (0, 1, 2) for kind, _ in party.changes(rank))
    finally:
        party.restart()


def test_a_rank_that_pauses_judges_nobody(pool: Ranks) -> None:
    party = _joined(pool, TWO, limit_s=2.0)
    party.signal(signal.SIGSTOP, *ALL)
    time.sleep(3.0)
    party.signal(signal.SIGCONT, *ALL)
    time.sleep(0.5)
    assert [party.changes(rank) for rank in ALL] == [[]] * 6
    party.each(ALL, leave)


@LAYOUTS
def test_a_rank_reports_its_own_failure(pool: Ranks, tmp_path: Path, hosts: list[int]) -> None:
    def trial() -> float:
        party = _joined(pool, hosts)
        since_s = time.time()
        party.each([2], _report_failed, "out of memory in step 7 " + "x" * 400)
        try:
            latest_s = party.latest(ALL, "failed", [2], since_s, 5.0)
            (seen,) = party.each([5], ranks_of.wait_for, [("failed", 2)], 1.0)[5]
            assert seen.change.text.startswith("out of memory in step 7")
            return latest_s
        finally:
            party.restart()

    _within(trial, tmp_path)


def _report_failed(text: str) -> None:
    world().report_failed(text)


def _leave_and_exit() -> None:
    leave()
    os._exit(0)


@pytest.mark.parametrize("hosts", [ONE, TWO], ids=["one host", "two hosts"])
def test_a_rank_that_leaves_is_never_taken_for_dead(pool: Ranks, hosts: list[int]) -> None:
    generator = random.Random(1)
    for _ in range(25):
        party = _joined(pool, hosts)
        order = generator.sample(ALL, 6)
        for place, rank in enumerate(order):
            party.begin(rank, leave, 0.2)
            if generator.random() < 0.5:
                party.end(rank)
                order[place] = -1
        for rank in order:
            if rank >= 0:
                party.end(rank)
        told = [kind for rank in ALL for kind, _ in party.changes(rank)]
        assert set(told) <= {"left"}


@pytest.mark.parametrize("hosts", [ONE, TWO, THREE], ids=["one host", "two hosts", "three hosts"])
def test_a_rank_that_leaves_and_exits_is_told_as_left(pool: Ranks, hosts: list[int]) -> None:
    generator = random.Random(2)
    for _ in range(10 if LONG else 3):
        party = _joined(pool, hosts)
        try:
            leavers = generator.sample(ALL, 4)
            for rank in leavers:
                party.begin(rank, _leave_and_exit)
            stayers = party.others(*leavers)
            party.latest(stayers, "left", leavers, time.time(), 5.0)
            for rank in stayers:
                assert sorted(party.changes(rank)) == sorted(("left", leaver) for leaver in leavers)
        finally:
            party.restart()


def test_a_rank_may_leave_before_others_have_joined(pool: Ranks) -> None:
    """The rank notes in its shared memory that it left. It remains until all ranks of the host have opened it."""
    party = Party(pool, ONE)
    party.join(only=[0])
    party.begin(0, _leave_and_exit)
    time.sleep(0.1)
    party.meet(party.others(0))
    party.latest(party.others(0), "left", [0], time.time(), 5.0)
    for rank in party.others(0):
        assert party.changes(rank) == [("left", 0)]
    party.restart()


def test_a_second_leave_and_calls_after_it(pool: Ranks) -> None:
    party = _joined(pool, TWO)
    assert max(party.each(ALL, leave).values()) < 1.0
    assert max(party.each(ALL, leave).values()) < 0.1
    assert "left the world" in party.each([0], _error_of_agree)[0]


def _error_of_agree() -> str:
    try:
        return str(agree("late", ALL, b"", 1.0))
    except ControlError as error:
        return str(error)


@LAYOUTS
def test_values_of_all_ranks(pool: Ranks, hosts: list[int]) -> None:
    party = _joined(pool, hosts)
    for chosen in (ALL, [5, 1, 3], [2], [0, 5]):
        values = {rank: bytes([rank]) * rank * 800 for rank in chosen}
        for rank in chosen:
            party.begin(rank, agree, "values", chosen, values[rank], 10.0)
        for rank in chosen:
            verdict, _ = party.end(rank)
            assert verdict == ("agreed", [values[each] for each in chosen], [])
    party.each(ALL, leave)


def test_a_member_that_ends_ends_the_agreement(pool: Ranks, tmp_path: Path) -> None:
    def trial() -> float:
        party = _joined(pool, TWO)
        for rank in party.others(4):
            party.begin(rank, agree, "dies", ALL, b"", 30.0)
        time.sleep(0.1)
        since_s = party.signal(signal.SIGKILL, 4)
        try:
            for rank in party.others(4):
                verdict, _ = party.end(rank)
                assert verdict == ("ended", [], [4])
            return time.time() - since_s
        finally:
            party.restart()

    _within(trial, tmp_path)


def test_a_member_that_is_missing_at_the_deadline(pool: Ranks) -> None:
    party = _joined(pool, TWO)
    found = party.each(party.others(1, 4), agree, "late", ALL, b"", 1.0)
    for verdict, took_s in found.values():
        assert verdict == ("missing", [], [1, 4])
        assert took_s <= 1.1
    verdict, took_s = party.each([4], agree, "late", ALL, b"", 5.0)[4]
    assert verdict.kind == "missing" and 4 in verdict.ranks and took_s < 1.0
    party.each(ALL, leave)


def test_the_decider_is_killed_at_any_moment(pool: Ranks) -> None:
    generator = random.Random(3)
    for _ in range(40 if LONG else 8):
        party = _joined(pool, TWO)
        try:
            for rank in ALL:
                party.begin(rank, agree, "decide", ALL, b"%d" % rank, 20.0)
            time.sleep(generator.random() * 0.004)
            party.signal(signal.SIGKILL, 0)
            verdicts = [party.end(rank)[0] for rank in party.others(0)]
            assert verdicts[0] in (("agreed", [b"%d" % rank for rank in ALL], []), ("ended", [], [0]))
            assert verdicts == verdicts[:1] * 5
        finally:
            party.restart()


def test_an_agreement_takes_no_wrong_arguments(pool: Ranks) -> None:
    party = _joined(pool, ONE)
    assert party.each([1], _wrong_agreements) == {1: [True] * 4}
    party.each(ALL, leave)


def _wrong_agreements() -> list[bool]:
    wrong: list[tuple[str, list[int], bytes]] = [
        ("x", [0, 2], b""), ("x", [1, 7], b""), ("x", [0, 1], b"x" * 4097), ("x" * 257, [0, 1], b""),
    ]  # fmt: skip
    found = []
    for purpose, chosen, value in wrong:
        try:
            agree(purpose, chosen, value, 0.1)
        except InvalidArgumentError:
            found.append(True)
    return found


@pytest.fixture
def alone() -> Iterator[World]:
    world = World(native.load(), "127.0.0.1", limit_s=LIMIT_S, beat_s=0.3)
    world.meet([Member(0, "alone", os.getpid(), start_time(os.getpid()), world.endpoint)], lambda change: None)
    yield world
    world.leave()


def test_a_call_that_the_core_refuses_ends_alone(alone: World) -> None:
    alone._procs[1] = 12345
    with pytest.raises(InvalidArgumentError, match="not all members are of this world"):
        alone.agree("refused", 0, [0, 1], b"", 5.0)
    assert alone.agree("fine", 0, [0], b"value", 5.0) == ("agreed", [b"value"], [])


def test_waits_that_cannot_be_ended_are_an_error(alone: World) -> None:
    with pytest.raises(ControlError, match=r"ending waits of ranks \[0\] failed in the control plane"):
        alone.end_waits_of(1 << 40, [0], [0])


def _has_met(world: World) -> bool:
    return int.from_bytes(os.pread(world.endpoint.board, 8, 32), "little") == 1


def test_a_board_says_that_others_are_open_once_they_are() -> None:
    worlds = [World(native.load(), "127.0.0.1", limit_s=LIMIT_S, beat_s=0.3) for _ in range(2)]
    members = [Member(rank, "one", os.getpid(), "", each.endpoint) for rank, each in enumerate(worlds)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        worlds[0].meet(members, lambda change: None)
        time.sleep(0.5)
        assert not _has_met(worlds[0])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    worlds[1].meet(members, lambda change: None)
    until_s = time.monotonic() + 5.0
    while time.monotonic() < until_s and not (_has_met(worlds[0]) and _has_met(worlds[1])):
        time.sleep(0.02)
    assert _has_met(worlds[0]) and _has_met(worlds[1])
    for each in worlds:
        each.leave()


def test_a_second_meet_and_a_strange_member(alone: World) -> None:
    with pytest.raises(UsageError, match="twice"):
        alone.meet([], lambda change: None)
    other = World(native.load(), "127.0.0.1", limit_s=LIMIT_S, beat_s=0.3)
    with pytest.raises(
        InvalidArgumentError, match="each rank and process once, and this process among them, but got ranks"
    ):
        other.meet([Member(0, "", 1, "", alone.endpoint)], lambda change: None)
    for ranks, hosts in ((4097, 1), (513, 513)):
        places = [other.endpoint._replace(proc=other.endpoint.proc + rank) for rank in range(ranks)]
        members = [Member(rank, str(rank % hosts), 1, "", place) for rank, place in enumerate(places)]
        with pytest.raises(UnsupportedError, match=f"this one has {ranks} ranks on {hosts} hosts"):
            other.meet(members, lambda change: None)
    other.leave()


def test_an_address_of_nobody(alone: World) -> None:
    other = World(native.load(), "127.0.0.1", limit_s=LIMIT_S, beat_s=0.3)
    members = [Member(0, "", 1, "", other.endpoint), Member(1, "", 1, "", alone.endpoint._replace(host="no.invalid"))]
    with pytest.raises(ControlError, match=r"'no\.invalid' of rank 1"):
        other.meet(members, lambda change: None)
    other.leave()
    with pytest.raises(ControlError, match=r"listening on 192\.0\.2\.1 for other ranks failed"):
        World(native.load(), "192.0.2.1", limit_s=LIMIT_S, beat_s=0.3)


def test_without_descriptors_the_limit_is_named() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(_descriptors())
    for spare in range(6):
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, hard))
        try:
            with pytest.raises(ResourceLimitError, match="files ran out"):
                World(native.load(), "127.0.0.1", limit_s=LIMIT_S, beat_s=0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    until_s = time.monotonic() + 2.0
    while time.monotonic() < until_s and len(_descriptors()) > before:
        time.sleep(0.01)
    assert len(_descriptors()) <= before


def test_a_callback_that_takes_long_delays_no_verdict() -> None:
    worlds = [World(native.load(), "127.0.0.1", limit_s=LIMIT_S, beat_s=0.3) for _ in range(2)]
    members = [Member(rank, str(rank), os.getpid(), "", each.endpoint) for rank, each in enumerate(worlds)]
    runs, may_end = threading.Event(), threading.Event()

    def take_long(change: Change) -> None:
        runs.set()
        may_end.wait(DEADLINE_S)

    worlds[0].meet(members, take_long)
    worlds[1].meet(members, lambda change: None)
    worlds[1].leave()
    try:
        assert runs.wait(5.0)
        assert worlds[0].agree("beside it", 0, [0], b"value", 5.0) == ("agreed", [b"value"], [])
    finally:
        may_end.set()
        worlds[0].leave()


def test_a_shortage_of_descriptors_is_logged_once(alone: World, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(3)]
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for client in clients:
            client.connect(("127.0.0.1", alone.endpoint.port))
        time.sleep(0.6)
    assert caplog.text.count("can't accept connections: no free descriptors or memory") == 1


def test_callbacks_that_raise_end_nothing() -> None:
    def fail(*_: object) -> bytes:
        raise ValueError("mine")

    worlds = [World(native.load(), "127.0.0.1", limit_s=LIMIT_S, beat_s=0.3) for _ in range(2)]
    members = [Member(rank, "", os.getpid(), "", each.endpoint) for rank, each in enumerate(worlds)]
    for each in worlds:
        each.meet(members, fail, fail, fail)
    assert worlds[0].ask([1], b"?", 5.0) == worlds[0].ask([1], b"again", 5.0) == {1: b""}
    for each in worlds:
        each.leave()


@pytest.mark.parametrize("question", [b"", b"?"])
def test_a_question_leaves_no_connection(question: bytes) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    worlds = [World(native.load(), "127.0.0.1", limit_s=LIMIT_S, beat_s=0.3) for _ in range(2)]
    members = [Member(rank, "", os.getpid(), "", each.endpoint) for rank, each in enumerate(worlds)]
    for each in worlds:
        each.meet(members, lambda change: None, lambda rank, asked: asked)
    before = count()
    assert worlds[0].ask([1], question, 5.0).keys() == {1}
    ended_by = time.monotonic() + LIMIT_S
    while count() > before and time.monotonic() < ended_by:
        time.sleep(0.01)
    assert count() <= before
    for each in worlds:
        each.leave()


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_addresses(address: str) -> None:
    if address == "::1" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        worlds = [World(native.load(), address, limit_s=LIMIT_S, beat_s=0.3) for _ in range(2)]
    except ControlError as error:
        if address != "::1":
            raise
        pytest.skip(f"no IPv6: {error}")
    members = [Member(rank, "", os.getpid(), "", each.endpoint) for rank, each in enumerate(worlds)]
    for each in worlds:
        each.meet(members, lambda change: None)
    assert worlds[0].ask([1], b"?", 5.0) == {1: b""}
    for each in worlds:
        each.leave()


def _ask(ranks: list[int], question: bytes, timeout_s: float) -> dict[int, bytes | None]:
    return world().ask(ranks, question, timeout_s)


def test_questions(pool: Ranks) -> None:
    party = _joined(pool, TWO)
    others = [1, 2, 3, 4]
    assert party.each([0, 5], _ask, others, b"where?", 5.0) == {
        rank: dict.fromkeys(others, f"{rank}: where?".encode()) for rank in (0, 5)
    }
    assert party.each([0], _ask, [1, 4], b"never", 0.3) == {0: {1: None, 4: None}}
    party.signal(signal.SIGSTOP, 4)
    began_s = time.monotonic()
    assert party.each([0], _ask, others, b"where?", 0.3) == {0: dict.fromkeys([1, 2, 3], b"0: where?")}
    assert party.each([0], _ask, others, b"", 0.3)[0].keys() == {1, 2, 3}
    assert time.monotonic() - began_s < 2.0
    party.signal(signal.SIGCONT, 4)
    party.each(ALL, leave)


def test_long_replies(pool: Ranks) -> None:
    party = _joined(pool, TWO)
    question = b"x" * ((64 << 10) - len("0 "))
    assert party.each([0], _ask, [1, 4], question, 5.0) == {0: dict.fromkeys([1, 4], b"0: " + question)}
    assert party.each([0], _ask, [1], question + b"x", 5.0) == {0: {}}
    party.each(ALL, leave)


def test_a_reply_that_comes_later(pool: Ranks) -> None:
    party = _joined(pool, TWO)
    assert party.each([0], _ask, [1, 4], b"later", 5.0) == {0: {1: b"0: now", 4: b"0: now"}}
    party.each(ALL, leave)


def test_a_process_of_this_user_finds_and_asks_ranks(pool: Ranks) -> None:
    party = _joined(pool, TWO)
    found = find_endpoints()
    for member in party.members:
        assert found[member.pid] == [member.endpoint]
        _, host, port, token, _ = member.endpoint
        for question, reply in ((b"who?", b"-1: who?"), (b"later", b"-1: now")):
            assert ask(native.load(), {"it": (host, port, token)}, -1, question, 5.0) == {"it": (0, reply)}
    party.each(ALL, leave)
    assert not {member.pid for member in party.members} & find_endpoints().keys()


def _ask_in_the_callback_thread() -> str:
    errors: queue.SimpleQueue[str] = queue.SimpleQueue()

    def look() -> None:
        with pytest.raises(UsageError) as error:
            world().ask([1], b"?", 5.0)
        errors.put(str(error.value))

    world().start_thread(look=look)
    return errors.get(timeout=6.0)


def test_the_callback_thread_does_not_wait_for_replies(pool: Ranks) -> None:
    party = _joined(pool, TWO)
    assert "ask in another thread" in party.each([0], _ask_in_the_callback_thread)[0]
    party.each(ALL, leave)


def _fork(seconds: float) -> tuple[int, list[str], list[str]]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        found = _descriptors()
        names = list(ranks_of.threads().values())
        os.write(writer, repr((found, names)).encode())
        try:
            world().agree("in a child", 0, ALL, b"", 0.1)
        except RuntimeError as error:
            os.write(writer, type(error).__name__.encode().join([b"|", b""]))
        time.sleep(seconds)
        os._exit(0)
    os.close(writer)
    text = b""
    while b"|" not in text:
        text += os.read(reader, 1 << 16)
    facts, _, error_name = text.decode().partition("|")
    found, names = eval(facts)
    return child, [*found, f"error {error_name}"], names


def _descriptors() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except OSError:  # the descriptor of this listing
            continue
    return found


@pytest.mark.parametrize("hosts", [ONE, TWO], ids=["one host", "two hosts"])
def test_a_forked_child_holds_nothing_and_hides_no_death(pool: Ranks, tmp_path: Path, hosts: list[int]) -> None:
    def trial() -> float:
        before = Party(pool, hosts)
        party = _joined(pool, hosts)
        plane = party.each([4], _descriptors)[4]
        child, found, names = party.each([4], _fork, 5.0)[4]
        since_s = party.signal(signal.SIGKILL, 4)
        try:
            assert any("memfd:ps-control" in each for each in plane)
            assert not any(word in each for each in found for word in ("ps-control", "eventpoll", "pidfd"))
            assert "error ForkedError" in found
            assert THREAD not in names
            return party.latest(party.others(4), "died", [4], since_s, 5.0)
        finally:
            os.kill(child, signal.SIGKILL)
            before.restart()

    _within(trial, tmp_path)


def _world_of_a_child() -> tuple[str, list[str]]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        own = World(native.load(), "127.0.0.1", limit_s=LIMIT_S, beat_s=0.3)
        own.meet([Member(0, "alone", os.getpid(), start_time(os.getpid()), own.endpoint)], lambda change: None)
        verdict = own.agree("alone", 0, [0], b"value", 5.0)
        own.leave()
        os.write(writer, repr((verdict.kind, [str(each) for each in verdict.values])).encode())
        os._exit(0)
    os.close(writer)
    text = os.read(reader, 1 << 16).decode()
    os.close(reader)
    assert os.waitpid(child, 0)[1] == 0
    kind, values = eval(text)
    return kind, values


def test_a_forked_child_may_have_a_world_of_its_own(pool: Ranks) -> None:
    party = _joined(pool, ONE)
    assert party.each([2], _world_of_a_child) == {2: ("agreed", ["b'value'"])}
    assert [party.changes(rank) for rank in ALL] == [[]] * 6
    party.each(ALL, leave)


_DESCRIPTORS: set[str] = set()


def _numbers() -> set[str]:
    """Returns the open descriptors without their targets: a child has its own signal pipe at the same numbers."""
    return {each.partition(":")[0] for each in _descriptors()}


def _note_descriptors() -> None:
    native.load()  # opens a pipe for signals
    _DESCRIPTORS.clear()
    _DESCRIPTORS.update(_numbers())


def _fork_while_joining(count: int, members: list[Member]) -> None:
    ranks_of.meet(members)
    for attempt in range(count):
        child = os.fork()
        if child == 0:
            os._exit(len(_numbers() - _DESCRIPTORS))
        assert agree("forks", ALL, b"", 20.0, attempt)[0].kind == "agreed"
        _, status = os.waitpid(child, 0)
        assert status == 0, f"the child holds {os.waitstatus_to_exitcode(status)} descriptors"


def test_forks_at_any_moment(pool: Ranks) -> None:
    party = Party(pool, TWO)
    if not pool._processes:
        pool._start()
    for _ in range(3):
        party.each(ALL, _note_descriptors)
        party.join(only=[])
        party.each(ALL, _fork_while_joining, 20, party.members)
        assert [party.changes(rank) for rank in ALL] == [[]] * 6
        party.each(ALL, leave)


@needs_filters
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_without_what_a_sandbox_refuses(pool: Ranks, tmp_path: Path, code: int) -> None:
    """Without pidfds, /proc is read every 0.2 s."""

    def trial() -> float:
        party = Party(pool, TWO)
        if not pool._processes:
            pool._start()
        party.each(ALL, refuse, ["pidfd_open", "eventfd2", "memfd_create", "prctl", "getrandom"], code)
        party = _joined(pool, TWO)
        since_s = party.signal(signal.SIGKILL, 1)
        try:
            latest_s = party.latest(party.others(1), "died", [1], since_s, 5.0)
            party.each(party.others(1), leave)
            assert all(
                ("died", each) not in party.changes(rank) for rank in party.others(1) for each in (0, 2, 3, 4, 5)
            )
            return latest_s
        finally:
            party.restart()

    _within(trial, tmp_path)


def test_a_pid_that_another_process_has_now_is_no_rank(pool: Ranks) -> None:
    party = Party(pool, ONE)
    party.join(only=[])
    party.members[3] = party.members[3]._replace(began="12345")
    party.meet(ALL)
    party.latest(party.others(3), "died", [3], time.time(), 5.0)
    party.restart()


GARBAGE = (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0PSCTRL1" + b"\0" * 40, b"\0PSCTRL1\1\0\1\0" + b"\xff" * 100)


def test_strangers(pool: Ranks) -> None:
    party = _joined(pool, TWO)
    address = ("127.0.0.1", party.endpoints[3].port)
    generator = random.Random(4)
    strangers = []
    for _ in range(50):
        stranger = socket.create_connection(address)
        stranger.sendall(
            generator.choice([b"GET / HTTP/1.1\r\n\r\n", generator.randbytes(3000), b"\0PSCTRL1" + b"\0" * 40])
        )
        strangers.append(stranger)
    for _ in range(1000):
        stranger = socket.socket()
        stranger.setblocking(False)
        stranger.connect_ex(address)
        strangers.append(stranger)
    began_s = time.monotonic()
    verdicts = party.each(ALL, agree, "among strangers", ALL, b"", 10.0)
    assert {verdict.kind for verdict, _ in verdicts.values()} == {"agreed"}
    assert time.monotonic() - began_s < 2.0
    assert [party.changes(rank) for rank in ALL] == [[]] * 6
    assert max(party.each(ALL, leave).values()) < 2.0
    for stranger in strangers:
        stranger.close()


def _without_descriptors(address: tuple[str, int]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        time.sleep(1.0)
    for each in taken:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_descriptors_left(pool: Ranks) -> None:
    party = _joined(pool, TWO)
    address = ("127.0.0.1", party.endpoints[3].port)
    party.begin(3, _without_descriptors, address)
    time.sleep(0.3)
    before_s = _cpu_s(pool.pids[3])
    strangers = [socket.create_connection(address) for _ in range(20)]
    party.end(3)
    assert _cpu_s(pool.pids[3]) - before_s < 0.1, "the thread spins"
    for stranger in strangers:
        stranger.close()
    verdicts = party.each(ALL, agree, "again", ALL, b"", 10.0)
    assert {verdict.kind for verdict, _ in verdicts.values()} == {"agreed"}
    party.each(ALL, leave)


def test_ports(pool: Ranks) -> None:
    party = Party(pool, ONE)
    party.join(port_range="23450-23455")
    assert sorted(endpoint.port for endpoint in party.endpoints) == list(range(23450, 23456))
    with pytest.raises(ControlError, match=r"ports 23450-23455 \(PARALLEL_STATE_PORTS\).*in use\. Give a larger range"):
        os.environ["PARALLEL_STATE_PORTS"] = "23450-23455"
        try:
            World(native.load(), "127.0.0.1", limit_s=1.0, beat_s=0.1)
        finally:
            del os.environ["PARALLEL_STATE_PORTS"]
    party.each(ALL, leave)


def test_an_endpoint_travels_as_text() -> None:
    endpoint = Endpoint(2**64 - 1, "10.0.0.1", 65535, "token", 7)
    assert Endpoint.parse(str(endpoint)) == endpoint
    with pytest.raises(ValueError):
        Endpoint.parse("[1]")


def _cpu_s(pid: int) -> float:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        if (thread / "comm").read_text().strip() == THREAD:
            return int((thread / "schedstat").read_text().split()[0]) / 1e9
    raise AssertionError(f"process {pid} has no thread {THREAD}")


def test_an_idle_world_costs_little(pool: Ranks) -> None:
    party = _joined(pool, TWO, limit_s=20.0, beat_s=1.0)
    time.sleep(0.5)
    before = [_cpu_s(pid) for pid in pool.pids]
    time.sleep(5.0)
    shares = [(_cpu_s(pid) - earlier) / 5.0 for pid, earlier in zip(pool.pids, before, strict=True)]
    assert max(shares) <= 0.005, shares
    party.each(ALL, leave)


def test_nothing_is_left(pool: Ranks) -> None:
    party = Party(pool, TWO)
    if not pool._processes:
        pool._start()
    _joined(pool, TWO)
    party.each(ALL, leave)  # what a first world loads stays open
    before = party.each(ALL, _descriptors)
    for _ in range(3):
        _joined(pool, TWO)
        party.each(ALL, leave)
    until_s = time.monotonic() + 2.0
    while time.monotonic() < until_s and THREAD in str(party.each(ALL, ranks_of.threads)):
        time.sleep(0.01)
    assert "ps-control" not in str(party.each(ALL, ranks_of.threads))
    after = party.each(ALL, _descriptors)
    assert {rank: len(each) for rank, each in after.items()} == {rank: len(each) for rank, each in before.items()}


PROGRAM = """
import os, sys
from device_communicators.base.host import start_time
from device_communicators.control.plane import Member, World
from device_communicators.cpu import native
world = World(native.load(), "127.0.0.1", limit_s=1.0, beat_s=0.1)
me = Member(0, "alone", os.getpid(), start_time(os.getpid()), world.endpoint)
world.meet([me], lambda change: None)
print(world.agree("x", 0, [0], b"v", 5.0).kind)
if sys.argv[1] == "leave": world.leave()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["leave", "exit"])
def test_a_process_exits_with_and_without_leaving(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "agreed\n"), done.stderr
