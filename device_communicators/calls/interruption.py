"""Exceptions that a signal handler raised while an op was in C++."""

from collections.abc import Callable

ON_FAILED_OP: list[Callable[[], None]] = []
"""Functions that raise the exception of a signal handler, if there is one, for a failed op that calls its route.

Without them the route would raise another error: the handler may have destroyed the group, or another thread may have
reported a failure first.
"""


def raise_interruption() -> None:
    """Raises the exception that a signal handler raised while an op was in C++, if there is one."""
    for raise_it in ON_FAILED_OP:
        raise_it()
