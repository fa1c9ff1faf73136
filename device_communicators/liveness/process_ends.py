"""Detects exits of processes in this PID namespace: by pidfd, or through /proc if pidfds are unavailable.

Kernels before 5.3 have no `pidfd_open` (ENOSYS), sandboxes refuse it (EPERM). An open /proc/PID/stat belongs to one
process, as a pidfd does. Once that process has exited, reads fail even if its PID is used again. The file can't be
polled, so the waiting thread reads it every `READ_S`.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterable

from device_communicators.base.host import start_time

READ_S = 0.1
"""The time between two reads of /proc. Detection by /proc is at most this much later than by pidfd."""
CAN_WATCH_PROCESSES = sys.platform == "linux"
"""False on other systems: there, ranks of one host detect each other's exits as ranks of several hosts do."""
_ENDED = ("Z", "X", "x")
_STATE, _THREADS = 0, 17
"""Fields of proc(5) from the third on."""


class ProcessEnds:
    """The processes that one thread waits for, by rank. Other threads may call `ended`."""

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}
        """Descriptor -> rank."""
        self._stats: dict[int, int] = {}
        """Descriptor of /proc/PID/stat -> rank."""
        self._reported: set[int] = set()

    @property
    def ranks(self) -> set[int]:
        """Returns the ranks whose processes are watched, including exited ones."""
        return {*self._pidfds.values(), *self._stats.values()}

    def add(self, rank: int, pid: int, began: str = "") -> None:
        """Watches a process; `began` is its start time, if known, as `host.start_time` returns it.

        Raises ProcessLookupError if it has ended, another OSError if it can't be watched.
        """
        descriptor, kept = _open_pidfd(pid), self._pidfds
        if descriptor < 0:
            descriptor, kept = _open_stat(pid), self._stats
        if began and start_time(pid) != began:
            os.close(descriptor)
            raise ProcessLookupError(f"process {pid} has ended; another one has its pid")
        kept[descriptor] = rank

    def wait(self, timeout_s: float | None, wake: Iterable[int] = ()) -> list[int]:
        """Waits for exits, and returns the ranks that have exited since the last call.

        Returns at the first exit, at the timeout, or when a descriptor of `wake` is readable.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        poll = select.poll()
        for descriptor in (*wake, *(each for each, rank in self._pidfds.items() if rank not in self._reported)):
            poll.register(descriptor, select.POLLIN)
        while True:
            left_s = None if until is None else max(0.0, until - time.monotonic())
            if any(rank not in self._reported for rank in self._stats.values()):
                left_s = READ_S if left_s is None else min(left_s, READ_S)
            ready = [descriptor for descriptor, _ in poll.poll(None if left_s is None else left_s * 1000)]
            ended = [self._pidfds[descriptor] for descriptor in ready if descriptor in self._pidfds]
            ended += [rank for rank in self._ended_by_stat() if rank not in self._reported]
            if ready or ended or (until is not None and time.monotonic() >= until):
                self._reported.update(ended)
                return ended

    def ended(self) -> set[int]:
        """Returns all ranks that have exited by now."""
        poll, pidfds = select.poll(), dict(self._pidfds)
        for descriptor in pidfds:
            poll.register(descriptor, select.POLLIN)
        return {pidfds[each] for each, event in poll.poll(0) if event & select.POLLIN} | set(self._ended_by_stat())

    def _ended_by_stat(self) -> list[int]:
        return [rank for descriptor, rank in list(self._stats.items()) if _has_ended(descriptor)]

    def close(self) -> None:
        """Closes the descriptors. Twice is fine."""
        pidfds, self._pidfds = self._pidfds, {}
        stats, self._stats = self._stats, {}
        for descriptor in (*pidfds, *stats):
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _open_pidfd(pid: int) -> int:
    """Returns a pidfd; -1 if the system gives none."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):  # the Python may be built for kernels that have none
        return -1


def _open_stat(pid: int) -> int:
    try:
        return os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        if not CAN_WATCH_PROCESSES or not os.path.exists("/proc/self/stat"):
            raise OSError(f"neither a pidfd nor /proc: {error}") from error
        raise ProcessLookupError(f"process {pid} has ended") from error


def _has_ended(stat: int) -> bool:
    try:
        fields = os.pread(stat, 4096, 0).rpartition(b") ")[2].decode().split()
    except ProcessLookupError:
        return True
    except OSError:
        return False
    # A process whose first thread has exited is also a zombie while other threads run.
    return bool(fields) and fields[_STATE] in _ENDED and int(fields[_THREADS]) <= 1
