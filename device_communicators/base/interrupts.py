"""Ends commands on Ctrl-C or SIGTERM with one line on stderr and an exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Terminated(KeyboardInterrupt):
    """Raised when the process receives SIGTERM, so that code that handles Ctrl-C (KeyboardInterrupt) also handles
    SIGTERM.
    """


def report_end(program: str, error: KeyboardInterrupt) -> int:
    """Prints to stderr that `error` ended `program`, a command's name. Returns the exit code, 128 + the signal's
    number.
    """
    is_terminated = isinstance(error, Terminated)
    print(f"{program}: {'terminated' if is_terminated else 'interrupted'}", file=sys.stderr)
    return 128 + (signal.SIGTERM if is_terminated else signal.SIGINT)


def run_interruptible(program: str, command: Callable[[], int]) -> int:
    """Runs `command` and returns its exit code, or 128 + the signal's number if Ctrl-C or SIGTERM ends `command`.
    `program`: name to print on stderr.
    """
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        return command()
    except KeyboardInterrupt as error:
        return report_end(program, error)
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(*_: object) -> None:
    raise Terminated


@contextmanager
def signals_wait() -> Iterator[None]:
    """Delays Ctrl-C and SIGTERM until the end of the block.

    Used while torch is imported and while fork handlers run: both can drop an exception that a signal raises.
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
