"""Finds processes, names in /dev/shm and listening sockets that tests leave. While a test runs, orphans become
children of this process. Names that an unrelated process has open are ignored."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_STEP_S = 0.05


@contextmanager
def nothing_left_after(limit_s: float) -> Iterator[None]:
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    processes, names, sockets = descendants(), segments(), listening()
    try:
        yield
        until = time.monotonic() + limit_s
        left = _new(processes), segments() - names, listening() - sockets
        while any(left) and time.monotonic() < until:
            time.sleep(_STEP_S)
            # Names that change at each poll are other jobs'.
            left = _new(processes), left[1] & segments(), left[2] & listening()
        if left[1]:
            left = left[0], left[1] - names_of_others(), left[2]
        assert not any(left), f"left after {limit_s} s: {_in_words(left)}"
    finally:
        for pid in _new(processes):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap(processes)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def descendants(of: int = 0) -> set[int]:
    children: dict[int, list[int]] = {}
    running = set()
    for pid, parent, state in _processes():
        children.setdefault(parent, []).append(pid)
        if state != "Z":
            running.add(pid)
    found, waiting = set(), [of or os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting += below
    return found & running


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("parallel_state-*")}


def names_of_others() -> set[str]:
    ours, found = {os.getpid(), *descendants()}, set()
    for pid, _, _ in _processes():
        if pid in ours:
            continue
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text("utf-8", "replace").splitlines()
            links = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
            found |= {line.rpartition("/dev/shm/")[2] for line in (*lines, *links) if "/dev/shm/" in line}
    return found


def listening() -> set[str]:
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text(encoding="utf-8").splitlines()
    ]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    own = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return own & inodes


def _new(before: set[int]) -> set[int]:
    """Returns descendants that aren't in `before`, except the fork server and resource tracker of all tests."""
    lasting = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    return descendants() - before - lasting


def _processes() -> Iterator[tuple[int, int, str]]:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (process / "stat").read_text("utf-8", "replace").rsplit(")", 1)[1].split()[:2]
            yield int(process.name), int(parent), state


def reap(before: set[int]) -> None:
    """Reaps ended children that aren't in `before`, except those that `multiprocessing` reaps."""
    known = {resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid}  # type: ignore[attr-defined]
    for pid, parent, state in list(_processes()):
        if parent == os.getpid() and state == "Z" and pid not in before | known:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _in_words(left: tuple[set[int], set[str], set[str]]) -> str:
    lines = []
    for pid in left[0]:
        with suppress(OSError):
            lines.append(
                f"{pid} ({Path(f'/proc/{pid}/cmdline').read_text('utf-8', 'replace').replace(chr(0), ' ')[:200]})"
            )
    return ", ".join([*lines, *left[1], *left[2]])
