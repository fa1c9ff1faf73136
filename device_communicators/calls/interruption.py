"""Exceptions that a signal's handler raised while an op was in C++."""

from collections.abc import Callable

ON_FAILED_OP: list[Callable[[], None]] = []
"""Raise what a signal's handler raised in an op that comes to its route because it failed, if anything.

The handler may have destroyed the group, or another thread have told of a failure first.
"""


def raise_interruption() -> None:
    """Raises what a signal's handler raised in an op that was left to Python, if anything."""
    for raise_it in ON_FAILED_OP:
        raise_it()
