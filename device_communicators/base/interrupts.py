"""Ends commands by Ctrl-C or SIGTERM: with what they have measured, one line and an exit code.

Imports nothing large, because a signal can arrive while torch is imported.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Terminated(KeyboardInterrupt):
    """SIGTERM, as an exception that code for Ctrl-C handles."""


def exit_code_of(error: KeyboardInterrupt) -> int:
    return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)


def run_interruptible(program: str, command: Callable[[], int]) -> int:
    """Returns the exit code of `command`. In it SIGTERM raises Terminated.

    If Ctrl-C or SIGTERM ends the command, prints one line to stderr and returns 128 + the signal's number.
    """
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        return command()
    except KeyboardInterrupt as error:
        print(f"{program}: {'terminated' if isinstance(error, Terminated) else 'interrupted'}", file=sys.stderr)
        return exit_code_of(error)
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(*_: object) -> None:
    raise Terminated


@contextmanager
def signals_wait() -> Iterator[None]:
    """Delays Ctrl-C and SIGTERM until the end of the block.

    Imports of torch and fork handlers need this: both can drop an exception that a signal raises.
    """
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
