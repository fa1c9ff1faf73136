"""Raises the exception of a signal handler that ran during a C++ op. Exceptions can't propagate through C++."""

from collections.abc import Callable

ON_FAILED_OP: list[Callable[[], None]] = []
"""Functions that a failed op calls before it raises its own error."""


def raise_interruption() -> None:
    for raise_it in ON_FAILED_OP:
        raise_it()
