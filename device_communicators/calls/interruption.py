"""Raises exceptions of signal handlers that ran while an op was in C++, where an exception can't propagate."""

from collections.abc import Callable

ON_FAILED_OP: list[Callable[[], None]] = []
"""Functions that raise the exception of a signal handler, if there is one, for a failed op that calls its route.

Without them the route would raise another error: the handler may have destroyed the group, or another thread may have
reported a failure first.
"""


def raise_interruption() -> None:
    """Raises the exception of a signal handler that ran while this thread's op was in C++, if there was one."""
    for raise_it in ON_FAILED_OP:
        raise_it()
