"""State of a process that its children inherit: a fork server's may be other than the launcher's, or as old as it is.

Belongs here: what a worker takes over from the launcher whoever has forked it, so that both start methods give it the
same. Variables are `worker`'s; multiprocessing itself hands over the working directory and sys.path.
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
"""A rank is stopped by the first, and learns of its own children by the second."""


@dataclass(frozen=True)
class Inheritance:
    """The launcher's, when it starts a rank."""

    umask: int | None
    """None if the system doesn't tell it without changing it."""
    cores: frozenset[int]
    """Empty where the system has no such thing."""
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
        """Gives it to this process, but for what would keep a rank from being stopped or from having children.

        What isn't permitted is left as it is.
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
    """Returns the signals that a process has blocked, a bit each from SIGHUP (1) on; 0 where that isn't known."""
    return int(_status(pid, "SigBlk") or "0", 16)


def _status(pid: int, field: str) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        found = re.search(rf"^{field}:\s*(\S+)", file.read(), re.MULTILINE)
        return found[1] if found else ""
    return ""
