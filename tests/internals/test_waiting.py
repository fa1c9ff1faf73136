"""Waits for torch.distributed that a rank's death ends, unless the rank has already sent its data."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from device_communicators.base.errors import CollectiveTimeoutError, HostUnreachableError, PeerDiedError
from device_communicators.base.member import Timeout
from device_communicators.cpu import native
from device_communicators.liveness.health import LOOPBACK, NOTICE_S, Watcher
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import died
from device_communicators.routing.waiting import Watched, WatchedByThread


class Collective:
    def __init__(self, done_s: float | None, error: str = "") -> None:
        self._ends = time.monotonic() + done_s if done_s is not None else float("inf")
        self._error = error

    def wait(self, limit: timedelta | None = None) -> None:
        left_s = max(0.0, self._ends - time.monotonic())
        seconds = left_s if limit is None else min(left_s, limit.total_seconds())
        time.sleep(min(seconds, 10.0))
        if not self.is_completed():
            raise RuntimeError("timed out")
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return time.monotonic() >= self._ends


def _context(watcher: Watcher | None, timeout_s: float = 5.0) -> GroupContext:
    return GroupContext("tp:0", (0, 1, 2, 3), 0, torch.device("cpu"), Timeout(timeout_s), watcher=watcher)


def _seconds(call: Callable[[], object], error: type[Exception]) -> float:
    started = time.monotonic()
    with pytest.raises(error):
        call()
    return time.monotonic() - started


@pytest.mark.parametrize("kind", [Watched, WatchedByThread])
def test_what_a_dead_rank_had_sent_completes_the_call(kind: type[Watched]) -> None:
    watcher = Watcher()
    watcher.report(3, "has ended")
    kind(Collective(0.13), _context(watcher), "all_reduce").wait()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Watched, WatchedByThread])
def test_a_death_ends_a_wait_once_its_last_chance_is_over(kind: type[Watched]) -> None:
    watcher = Watcher()
    watcher.report(3, "has ended")
    waits = []
    for _ in range(3):
        work = kind(Collective(None), _context(watcher), "all_reduce")
        waits.append(_seconds(work.wait, PeerDiedError))
    assert min(waits) >= NOTICE_S
    assert statistics.median(waits) < NOTICE_S + 0.15


WITHOUT_ITS_FIRST_THREAD = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print(flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_rank_that_the_kernel_is_ending_is_named_with_one_that_has_ended() -> None:
    """A killed process counts at once. One that lost only its first thread doesn't."""
    commands = (["sleep", "60"], [sys.executable, "-c", WITHOUT_ITS_FIRST_THREAD])
    killed, other = (subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands)
    watcher = Watcher()
    try:
        assert other.stdout is not None and other.stdout.read(1)
        while Path(f"/proc/{other.pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0] != "Z":
            time.sleep(0.01)
        watcher.listen(native.load(), LOOPBACK)
        watcher.pids = {2: killed.pid, 3: other.pid}  # without pidfds, which would report the exit
        watcher.report(1, "has ended")
        assert [death.rank for death in watcher.await_death_of(range(4), 0)] == [1]
        killed.kill()
        assert [death.rank for death in watcher.await_death_of(range(4), 0)] == [1, 2]
    finally:
        for process in (killed, other):
            process.kill()
            process.communicate()
        watcher.close()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this Python or kernel has no pidfds")
def test_a_rank_that_has_ended_is_named_before_the_watching_thread_says_so() -> None:
    with subprocess.Popen(["sleep", "60"]) as ended:
        watcher = Watcher()
        watcher.listen(native.load(), LOOPBACK)
        watcher.pids = {2: ended.pid}
        watcher.report(1, "has ended")
        assert [death.rank for death in watcher.await_death_of(range(3), 0)] == [1]
        ended.kill()
    assert [death.rank for death in watcher.await_death_of(range(3), 0)] == [1, 2]
    watcher.close()


def test_a_death_in_another_domain_ends_no_wait() -> None:
    watcher = Watcher()
    watcher.report(7, "has ended")
    started = time.monotonic()
    Watched(Collective(0.4), _context(watcher), "all_reduce").wait()
    assert time.monotonic() - started >= 0.4


@pytest.mark.slow
def test_a_wait_ends_at_the_deadline() -> None:
    waits = [
        _seconds(Watched(Collective(None), _context(Watcher(), 0.2), "all_reduce").wait, RuntimeError) for _ in range(3)
    ]
    assert min(waits) >= 0.2
    assert statistics.median(waits) < 0.2 + 0.07
    own = Watched(Collective(None), _context(Watcher(), 60.0), "all_reduce", timeout_s=0.1)
    assert _seconds(own.wait, RuntimeError) < 0.5


def test_a_failure_of_the_work_itself_is_raised_as_it_is() -> None:
    work = Watched(Collective(0.06, "Connection closed by peer"), _context(Watcher()), "all_reduce")
    with pytest.raises(RuntimeError, match="closed by peer"):
        work.wait()


@pytest.mark.parametrize(
    ("certain", "unreachable", "kind"),
    [
        ((True,), (False,), PeerDiedError),
        ((False, True), (True, False), PeerDiedError),
        ((False,), (True,), HostUnreachableError),
        ((False,), (False,), CollectiveTimeoutError),
    ],
)
def test_the_kind_of_an_end(certain: tuple[bool, ...], unreachable: tuple[bool, ...], kind: type[Exception]) -> None:
    watcher = Watcher()
    for rank, (sure, far) in enumerate(zip(certain, unreachable, strict=True), 2):
        watcher.report(rank, "is gone", sure, unreachable=far)
    error = died(_context(watcher), "all_reduce", time.monotonic())
    assert type(error) is kind
    assert error.suspect_ranks == tuple(range(2, 2 + len(certain)))
