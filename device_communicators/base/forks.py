"""A process that was forked from a rank is no rank: it shares the rank's memory, connections and place in its groups.

What it may do there is ask for numbers (`rank`, `world_size`), as the workers of a data loader do. Whatever would reach
another rank, or end what is its parent's, raises `ForkedError` at once. The compiled part forgets its groups by itself
(csrc/forks.h).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from device_communicators.base.errors import ForkedError


class _Process:
    """Knows if this process is a rank or a forked child of one."""

    def __init__(self) -> None:
        self.leave: Callable[[], bool] | None = None
        self.is_child = False

    def forked(self) -> None:
        """Notes in a child, before anything else runs there, that it is one."""
        self.is_child |= self.leave is not None and self.leave()


_PROCESS = _Process()


def watch(leave: Callable[[], bool]) -> None:
    """Makes each forked child call `leave`, which says whether its parent had groups. Only the first one counts."""
    if _PROCESS.leave is None:
        _PROCESS.leave = leave
        os.register_at_fork(after_in_child=_PROCESS.forked)


@functools.cache
def call_in_children(function: Callable[[], object]) -> None:
    """Calls `function` in each child that is forked from now on. Repeated calls with the same function do nothing.

    Called at first use: an import registers no hook.
    """
    os.register_at_fork(after_in_child=function)


def check(call: str) -> None:
    """Raises ForkedError for `call`, such as "destroy_model_parallel()", in a child that a rank has forked."""
    if _PROCESS.is_child:
        raise error(call)


def error(what: str) -> ForkedError:
    """Returns the error for a call, or a group, in such a child."""
    return ForkedError(
        f"{what} can't be used in process {os.getpid()}, which was forked from a rank (now process {os.getppid()}) "
        "after its groups were made, and is no rank itself. Communicate in the rank, or start processes by spawn or "
        "forkserver"
    )
