"""Copies process state that children inherit from the launcher to its ranks.

A rank that a fork server forks inherits the server's state, which may be older than the launcher's or differ from it. A
worker takes over the launcher's state instead, so that both start methods give the same. `worker` handles environment
variables. multiprocessing itself passes the working directory and sys.path.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
from dataclasses import dataclass

_LIMITS = tuple(sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}))
_NEEDED = (signal.SIGTERM, signal.SIGCHLD)
"""The first signal stops a rank. The second reports exits of the rank's own children."""


@dataclass(frozen=True)
class Inheritance:
    """The launcher's state when it starts a rank."""

    umask: int | None
    """None if the system can't report it without changing it."""
    cores: frozenset[int]
    """Empty if the system doesn't support affinity."""
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
        """Applies the state to this process, unless it would keep a rank from being stopped or from having children.

        Settings that aren't permitted are left unchanged.
        """
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
    """Returns the signals that a process has blocked, one bit each from SIGHUP (1) on; 0 if unknown."""
    return int(_status(pid, "SigBlk") or "0", 16)


def _status(pid: int, field: str) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        found = re.search(rf"^{field}:\s*(\S+)", file.read(), re.MULTILINE)
        return found[1] if found else ""
    return ""
