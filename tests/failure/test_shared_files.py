"""Rows 28, 29, 38 of docs/failures.md: names that killed starts leave in /dev/shm, a full /dev/shm, other
users. Row 28 kills 6 starts, 50 with FAILURE_TESTS=long."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel_state as ps
from device_communicators.cpu import segment
from device_communicators.cpu.segment import Segment, SegmentError, sweep
from tests import hosts
from tests.contract.attempts import Outcome, attempt, environment, world
from tests.extent import LONG
from tests.failure.launchers import program
from tests.failure.leftovers import names_of_others, segments
from tests.failure.ranks import KILLED, Ranks
from tests.failure.trials import assert_in_time

pytestmark = pytest.mark.over("shared memory")
DEADLINE_S = 60.0
ROUNDS = 50 if LONG else 6
START_S = 0.7
NOBODY = 65_534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def _start(tp: int, pp: int) -> float:
    with world(tp, pp):
        return ps.get_world_group().all_reduce(torch.ones(1)).item()


def test_row_28_starts_that_are_killed_leave_no_names(ranks: Ranks) -> None:
    before, left = segments(), set()
    for number in range(ROUNDS):
        ranks.begin(_start, 2, 2)
        time.sleep(random.Random(number).uniform(0, START_S))
        pids = ranks.pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        ranks.kill()
        left |= segments() - before
    assert ranks.run(_start, 2, 2, timeout_s=DEADLINE_S) == [4.0] * 4
    assert (left & segments()) - names_of_others() == set()


def _die_while_named(at: int) -> None:
    given: list[Segment] = []
    make = Segment.make

    def made() -> Segment:
        given.append(make())
        if len(given) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return given[-1]

    Segment.make = staticmethod(made)  # type: ignore[method-assign,assignment]
    try:
        # A rank that is connecting when another one dies gets the error at its deadline.
        with environment(PARALLEL_STATE_TIMEOUT_S="15", PARALLEL_STATE_START_TIMEOUT_S="15"):
            _start(2, 2)
    except ps.CommunicationError:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("at", [1, 2])
def test_row_28_ranks_that_die_with_a_name_in_place(ranks: Ranks, at: int) -> None:
    before = segments()
    assert ranks.survivors(_die_while_named, at, timeout_s=DEADLINE_S) == {}
    assert [ranks.exit_code(rank) for rank in range(4)] == [KILLED] * 4
    left = segments() - before
    assert left, "this test can't fail"
    ranks.kill()
    assert ranks.run(_start, 2, 2, timeout_s=DEADLINE_S) == [4.0] * 4
    assert (left & segments()) - names_of_others() == set()


def _launch() -> None:
    ps.launch(_start, 4, args=(2, 2), timeout=DEADLINE_S)
    print("done", flush=True)


def test_row_28_the_whole_tree_of_a_launch() -> None:
    before, others = _names(), set()
    begin = time.monotonic()
    with program(_launch) as launcher:
        assert launcher.wait(DEADLINE_S) == 0 and launcher.printed == "done\n"
    took_s = time.monotonic() - begin
    for number in range(ROUNDS // 2):
        with program(_launch):
            time.sleep(random.Random(number).uniform(0.3, 1) * took_s)
        others |= _names() - before
    with program(_launch) as launcher:
        assert launcher.wait(DEADLINE_S) == 0 and launcher.printed == "done\n"
    assert (others & _names()) - names_of_others() == set()


def _names() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("parallel_state-", "sem.mp-"))}


@contextmanager
def _child(act: Any) -> Iterator[int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            os.write(writing, json.dumps(act()).encode())
            signal.pause()
        os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 4096), "the child failed"
        yield pid
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_sweep_takes_only_what_nobody_keeps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(segment, "DIRECTORY", str(tmp_path))
    mine = Segment.make()
    held: list[Segment] = []
    with _child(lambda: held.append(Segment.make())):
        assert sweep() == 0
        assert len(list(tmp_path.iterdir())) == 2
    assert sweep() == 1, "its maker was killed"
    assert [path.name for path in tmp_path.iterdir()] == [f"parallel_state-{mine.name}"]

    dead = Segment.make()
    os.close(dead.descriptor)
    others = ["parallel_state-" + "0" * 32, "parallel_state-k", "torch_1_2", f"parallel_state-{dead.name}x"]
    for name in others:
        (tmp_path / name).touch(0o600)
    os.mkfifo(tmp_path / f"parallel_state-k{'0' * 32}")
    os.symlink(tmp_path / others[0], tmp_path / f"parallel_state-k{'1' * 32}")
    os.mkdir(tmp_path / f"parallel_state-k{'2' * 32}")
    (tmp_path / f"parallel_state-k{'3' * 32}").touch(0o644)
    there = {path.name for path in tmp_path.iterdir()}
    assert sweep() == 1
    assert there - {path.name for path in tmp_path.iterdir()} == {f"parallel_state-{dead.name}"}
    mine.unlink()
    mine.close()


def test_a_sweep_in_the_middle_of_making_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A sweep may remove a name whose maker hasn't locked it yet. The maker then makes another."""
    monkeypatch.setattr(segment, "DIRECTORY", str(tmp_path))
    lock, swept = segment.fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not swept:
            swept.append(0)
            swept[0] = sweep()
        lock(descriptor, operation)

    monkeypatch.setattr(segment.fcntl, "flock", late)
    made = Segment.make()
    assert swept == [1]
    assert [path.name for path in tmp_path.iterdir()] == [f"parallel_state-{made.name}"]
    assert sweep() == 0
    made.unlink()
    made.close()


SMALL, WANTED_BYTES = "64m", 72 << 20
TINY, WANTED_OF_TINY_BYTES = "64k", 4 << 20


def _want_much(size_bytes: int) -> dict[str, Any]:
    with world(4):
        group = ps.get_tp_group()
        x = group.empty((size_bytes,), dtype=torch.uint8)
        x.fill_(1)  # SIGBUS if it were only mapped
        group.all_reduce_(x)
        told = group.broadcast_tensor_dict({"x": torch.full((1 << 20,), 7)} if group.rank == 0 else None)
        sending = group.isend(torch.full((1 << 20,), group.rank), (group.rank + 1) % 4)
        got = group.recv((1 << 20,), torch.int64, (group.rank - 1) % 4)
        sending.wait()
        return {
            "free": _free_bytes(),
            "right": bool((x == 4).all())
            and bool((told["x"] == 7).all())
            and bool((got == (group.rank - 1) % 4).all()),
            "carried by": group.route.communicators[0].name,
            "explained": group.explain(),
        }


def _free_bytes() -> int:
    found = os.statvfs("/dev/shm")
    return found.f_bavail * found.f_frsize


def _fill() -> int:
    """Allocates all but a page or two of /dev/shm. Returns the descriptor that holds it."""
    descriptor = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    offset, step = 0, 1 << 20
    while step >= 4096:
        try:
            os.posix_fallocate(descriptor, offset, step)
            offset += step
        except OSError:
            step //= 2
    return descriptor


def _queue_without_memory() -> tuple[Outcome, Outcome, str]:
    with world(4, timeout=3.0):
        group = ps.get_tp_group()
        large = group.all_reduce(torch.ones(1 << 18))
        group.barrier()
        descriptor = _fill() if group.rank == 0 else -1
        group.barrier()
        more = [group.all_reduce(torch.ones(1 << (18 + i % 4))) for i in range(8)]
        kept = group.empty((8 << 20,))
        kept.fill_(1.0)
        right = all(bool((each == 4).all()) for each in [large, *more]) and bool((kept == 1).all())
        sent = attempt(group.send, torch.ones(10), (group.rank + 1) % 4)
        after = attempt(group.all_reduce, torch.ones(3))
        ps.get_world_group().barrier()  # all have tried before memory is freed
        if descriptor >= 0:
            os.close(descriptor)
        return sent, after, f"{right} {large.numel()}"


@pytest.fixture
def small_host() -> Iterator[hosts.Hosts]:
    problem = hosts.problem()
    if problem is not None:
        pytest.skip(f"a host with a /dev/shm of its own can't be made: {problem}")
    with hosts.Hosts([hosts.Host(shared_memory=SMALL)]) as made:
        yield made


def test_row_29_more_is_wanted_than_there_is(small_host: hosts.Hosts) -> None:
    with small_host.ranks([0, 0, 0, 0]) as ranks:
        for facts in ranks.run(_want_much, WANTED_BYTES, timeout_s=DEADLINE_S):
            assert facts["right"]
            assert facts["free"] < 64 << 20
            assert facts["carried by"] == "shared_memory"


def test_row_29_no_room_for_anything() -> None:
    problem = hosts.problem()
    if problem is not None:
        pytest.skip(f"a host with a /dev/shm of its own can't be made: {problem}")
    with hosts.Hosts([hosts.Host(shared_memory=TINY)]) as made, made.ranks([0, 0, 0, 0]) as ranks:
        for facts in ranks.run(_want_much, WANTED_OF_TINY_BYTES, timeout_s=DEADLINE_S):
            assert facts["right"]
            assert facts["carried by"] == "hierarchical"
            assert "/dev/shm has no room" in facts["explained"], facts["explained"]


def test_row_29_memory_ends_in_the_middle(small_host: hosts.Hosts, tmp_path: Path) -> None:
    def trial(_: Path) -> float:
        with small_host.ranks([0, 0, 0, 0]) as ranks:
            found = ranks.run(_queue_without_memory, timeout_s=DEADLINE_S)
        for sent, after, right in found:
            assert right == f"True {1 << 18}"
            assert sent.kind == "CommunicationError", sent
            assert "group 'tp:0'" in sent.text
            assert "shared memory for a message queue: No space left on device; make /dev/shm larger" in sent.text
            assert after.kind == "GroupFailedError"
        return max(sent.seconds for sent, _, _ in found)

    assert_in_time(trial, tmp_path)


def _as_nobody(name: str) -> list[Any]:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    path = segment._path(name)
    outcomes = [attempt(os.open, path, flags).kind for flags in (os.O_RDONLY, os.O_RDWR)]
    outcomes += [attempt(os.unlink, path).kind, Segment.open(name) is None, sweep()]
    return outcomes


@needs_root
def test_row_38_another_user_opens_the_segment() -> None:
    made = Segment.make()
    try:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                os.write(writing, json.dumps(_as_nobody(made.name)).encode())
            os._exit(0)
        os.close(writing)
        told = json.loads(os.read(reading, 4096))
        os.close(reading)
        os.waitpid(pid, 0)
        assert told == ["PermissionError", "PermissionError", "PermissionError", True, 0]
        assert stat.S_IMODE(os.fstat(made.descriptor).st_mode) == 0o600
        assert os.path.exists(segment._path(made.name))
    finally:
        made.unlink()
        made.close()


@needs_root
def test_row_38_a_segment_of_another_user() -> None:
    made = Segment.make()
    try:
        for change in (lambda: os.fchown(made.descriptor, NOBODY, NOBODY), lambda: os.fchmod(made.descriptor, 0o666)):
            change()
            with pytest.raises(SegmentError, match="belongs to another user, or its permissions let others") as caught:
                Segment.open(made.name)
            assert made.name not in str(caught.value), "an error text never names a segment"
            os.fchown(made.descriptor, 0, 0)
    finally:
        made.unlink()
        made.close()


def test_row_38_a_name_that_is_there_already(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(segment, "DIRECTORY", str(tmp_path))
    bait = tmp_path / "bait"
    bait.write_text("unchanged")
    drawn = iter(["0" * 32, "1" * 32, "2" * 32])
    monkeypatch.setattr(segment.secrets, "token_hex", lambda size: next(drawn))
    (tmp_path / f"parallel_state-k{'0' * 32}").touch(0o600)
    os.symlink(bait, tmp_path / f"parallel_state-k{'1' * 32}")
    os.symlink(tmp_path / "nothing", tmp_path / f"parallel_state-k{'2' * 32}")
    for number in range(3):
        with pytest.raises(SegmentError, match=r"no file for shared memory can be made in .*: File exists") as caught:
            Segment.make()
        assert str(number) * 32 not in str(caught.value)
    assert Segment.open(f"k{'1' * 32}") is None, "a symlink is not followed"
    assert Segment.open(f"k{'2' * 32}") is None
    assert Segment.open("../" + "k" * 30) is None
    assert bait.read_text() == "unchanged"
    assert not (tmp_path / "nothing").exists()
