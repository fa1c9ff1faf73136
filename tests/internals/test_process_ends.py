"""Ends of processes that only /proc tells, where the kernel has no pidfd_open."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from device_communicators.liveness import process_ends
from device_communicators.liveness.process_ends import ProcessEnds
from tests.failure.conftest import nothing_left  # noqa: F401 - for each test

WITHOUT_ITS_FIRST_THREAD = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print(flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.fixture
def polled(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessEnds]:
    """Knows processes by /proc alone."""
    monkeypatch.setattr(process_ends, "_open_pidfd", lambda pid: -1)
    ends = ProcessEnds()
    yield ends
    ends.close()


def test_a_process_has_ended_once_it_is_a_zombie_and_once_it_is_gone(polled: ProcessEnds) -> None:
    """One of which the first thread alone has exited is a zombie, too, and runs."""
    commands = (["sleep", "60"], ["sleep", "60"], [sys.executable, "-c", WITHOUT_ITS_FIRST_THREAD])
    zombie, gone, alive = processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    try:
        assert alive.stdout is not None and alive.stdout.read(1)
        while Path(f"/proc/{alive.pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0] != "Z":
            time.sleep(0.01)
        for rank, process in enumerate(processes):
            polled.add(rank, process.pid)
        assert polled.wait(0.25) == [] and polled.ranks == {0, 1, 2}
        gone.kill()
        gone.wait()
        assert polled.wait(10.0) == [1]
        zombie.kill()
        assert polled.wait(10.0) == [0]
        assert polled.wait(0.25) == [] and polled.ended() == {0, 1}
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_pid_that_another_process_has_by_now_is_an_end(polled: ProcessEnds) -> None:
    polled.add(0, os.getpid(), process_ends.start_time(os.getpid()))
    with pytest.raises(ProcessLookupError, match="another one has its pid"):
        polled.add(1, os.getpid(), "1")
    with pytest.raises(ProcessLookupError):
        polled.add(1, 1 << 30)
    assert polled.ranks == {0}
