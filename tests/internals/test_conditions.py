from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from device_communicators.liveness import stacks
from device_communicators.liveness.condition import condition_of

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")


def _process(folder: Path, state: str, swap_kib: int = 0, memory_kib: int = 1000) -> str:
    own = folder / "7"
    own.mkdir()
    (own / "stat").write_text(f"7 (a name) with ) {state} 1 7 7 0 -1")
    (own / "status").write_text(f"Name:\tx\nTracerPid:\t9\nVmRSS:\t{memory_kib} kB\nVmSwap:\t{swap_kib} kB\nNgid:\n")
    return condition_of(7, folder)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("T", "kill -CONT 7"),
        ("t", r"debugger \(pid 9\)"),
        ("D", "no signal ends"),
        ("Z", "exited"),
        ("R", ""),
        ("S", ""),
    ],
)
def test_states_of_processes(tmp_path: Path, state: str, words: str) -> None:
    found = _process(tmp_path, state)
    assert words in found.replace("(pid 9)", r"\(pid 9\)") if words else not found


def test_a_process_in_swap(tmp_path: Path) -> None:
    assert "swapped out (2048 MiB" in _process(tmp_path, "S", swap_kib=2 << 20)


def test_little_swap_is_nothing(tmp_path: Path) -> None:
    assert _process(tmp_path, "S", swap_kib=100 << 10) == ""


def test_no_process(tmp_path: Path) -> None:
    assert condition_of(7, tmp_path) == ""


@LINUX
def test_a_real_process_that_is_stopped() -> None:
    process = subprocess.Popen(["sleep", "60"])

    def is_soon(words: str) -> bool:
        """Polls for `words` up to 5 s: a new process may first wait for a disk."""
        until = time.monotonic() + 5
        while time.monotonic() < until:
            found = condition_of(process.pid)
            if words in found if words else not found:
                return True
            time.sleep(0.01)
        return False

    try:
        assert is_soon("")
        os.kill(process.pid, signal.SIGSTOP)
        assert is_soon("stopped by a signal")
    finally:
        process.kill()
        process.wait()


def test_places_name_the_callers_lines() -> None:
    def load() -> list[stacks.Frame]:
        return stacks.own_frames()

    frames = load()
    assert "test_conditions.py:" in stacks.in_words(frames)
    assert " in load, called by test_conditions.py:" in stacks.in_words(frames)
    assert not stacks.is_compiling(frames)
    assert stacks.is_compiling([*frames, ("/x/torch/_inductor/codecache.py", 1, "load")])
    assert stacks.in_words([]) == "its end"


def test_a_wait_in_the_standard_library_has_its_line_before_the_callers() -> None:
    frames = [(threading.__file__, 3, "wait"), (threading.__file__, 2, "join"), ("/home/me/train.py", 7, "main")]
    assert stacks.in_words(frames) == "threading.py:3 in wait, called by train.py:7 in main"


def test_a_decorator_of_the_library_is_no_place_of_the_caller() -> None:
    frames = [(contextlib.__file__, 81, "inner"), ("/home/me/train.py", 7, "main")]
    assert stacks.in_words(frames) == "train.py:7 in main"
