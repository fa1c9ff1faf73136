"""Makes calls that communicate raise `ForkedError` in processes that were forked from a rank."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from device_communicators.base.errors import ForkedError


class _Process:
    def __init__(self) -> None:
        self.leave: Callable[[], bool] | None = None
        self.is_child = False

    def forked(self) -> None:
        self.is_child |= self.leave is not None and self.leave()


_PROCESS = _Process()


def watch(leave: Callable[[], bool]) -> None:
    """Registers `leave`, which each forked child calls at its start. `leave` returns True if the child has inherited
    groups; calls that communicate then raise ForkedError in the child.
    """
    if _PROCESS.leave is None:
        _PROCESS.leave = leave
        os.register_at_fork(after_in_child=_PROCESS.forked)


@functools.cache
def call_in_children(function: Callable[[], object]) -> None:
    """Registers `function`, which each forked child calls at its start. Idempotent."""
    os.register_at_fork(after_in_child=function)


def check(call: str) -> None:
    if _PROCESS.is_child:
        raise error(call)


def error(what: str) -> ForkedError:
    return ForkedError(
        f"{what} can't be used in process {os.getpid()}, which was forked from a rank (now process {os.getppid()}) "
        "after its groups were created, and is no rank itself. Make the call in the rank's process, or start processes "
        "with the method spawn or forkserver"
    )
