"""Raises exceptions of signal handlers that ran while an op was in C++, where they can't propagate."""

from collections.abc import Callable

ON_FAILED_OP: list[Callable[[], None]] = []
"""Functions that raise a handler's pending exception. A failed op's route calls them before it raises its own error."""


def raise_interruption() -> None:
    for raise_it in ON_FAILED_OP:
        raise_it()
