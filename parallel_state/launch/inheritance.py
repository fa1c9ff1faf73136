"""Copies the launcher's umask, cores, limits and signal mask to the ranks, which otherwise have the fork server's."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
from dataclasses import dataclass

_LIMITS = tuple(sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}))
_NEEDED = (signal.SIGTERM, signal.SIGCHLD)
"""Signals that no rank blocks: SIGTERM stops ranks, and SIGCHLD reports exits of a rank's children."""


@dataclass(frozen=True)
class Inheritance:
    umask: int | None
    cores: frozenset[int]
    limits: tuple[tuple[int, tuple[int, int]], ...]
    blocked: frozenset[int]

    @classmethod
    def of_this_process(cls) -> Inheritance:
        found = _status(os.getpid(), "Umask")
        return cls(
            umask=int(found, 8) if found else None,
            cores=frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset(),
            limits=tuple((number, resource.getrlimit(number)) for number in _LIMITS),
            blocked=frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        )

    def take_over(self) -> None:
        """Applies the launcher's umask, cores, limits and signal mask to this process, as far as permitted."""
        if self.umask is not None:
            os.umask(self.umask)
        if self.cores and self.cores != os.sched_getaffinity(0):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self.cores)
        for number, limit in self.limits:
            if resource.getrlimit(number) != limit:
                with contextlib.suppress(OSError, ValueError):
                    resource.setrlimit(number, limit)
        for needed in _NEEDED:
            if signal.getsignal(needed) == signal.SIG_IGN:
                signal.signal(needed, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked - {*map(int, _NEEDED)})


def blocked_signals(pid: int) -> int:
    """Returns the signals that process `pid` blocks, as a bit mask whose bit 0 is SIGHUP; 0 if unknown."""
    return int(_status(pid, "SigBlk") or "0", 16)


def _status(pid: int, field: str) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        found = re.search(rf"^{field}:\s*(\S+)", file.read(), re.MULTILINE)
        return found[1] if found else ""
    return ""
