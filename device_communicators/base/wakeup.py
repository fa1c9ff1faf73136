"""Lets waits in C++ detect signals without Python's interpreter lock, by polling the pipe of `signal.set_wakeup_fd`.

If the program sets its own descriptor, as asyncio does, the main thread's waits instead take the lock periodically.
This module replaces `signal.set_wakeup_fd` to detect such programs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from ctypes import Structure, c_int, c_uint64
from typing import Any, ClassVar

from device_communicators.base import forks

_set = signal.set_wakeup_fd


class SignalPipe(Structure):
    """The pipe that C++ waits poll: its read end and its inode. Mirrors the struct in cpu/csrc/signals.h."""

    _fields_: ClassVar = [("reader", c_int), ("inode", c_uint64)]
    reader: int
    """Descriptor that is readable after a signal; -1 if there is none."""
    inode: int
    """Inode of the pipe. If `reader` has another inode, the program closed the pipe. 0 skips this check."""


class _Wakeup:
    def __init__(self) -> None:
        self.reader, self.writer = _pipe()
        self._inode = os.fstat(self.reader).st_ino
        self.pipes: list[SignalPipe] = []
        self.is_set = self.is_foreign = False
        """True if this module (`is_set`) or the program (`is_foreign`) set the wakeup descriptor."""
        forks.call_in_children(self.renew)
        signal.set_wakeup_fd = self.set

    def set(self, fd: int, /, **options: Any) -> int:
        """Replaces `signal.set_wakeup_fd`: the value -1 sets the library's own descriptor. Returns the previous
        descriptor, but -1 for the library's own.
        """
        before = _set(self.writer, warn_on_full_buffer=False) if fd == -1 else _set(fd, **options)
        self.is_set, self.is_foreign = fd == -1, fd != -1
        self.publish()
        return -1 if before == self.writer else before

    def publish(self) -> None:
        for pipe in self.pipes:
            pipe.inode = self._inode
            pipe.reader = self.reader if self.is_set else -1

    def is_open(self) -> bool:
        """Returns False if the program closed the pipe, as daemons do."""
        try:
            return os.fstat(self.reader).st_ino == os.fstat(self.writer).st_ino == self._inode
        except OSError:
            return False

    def renew(self) -> None:
        """Opens a new pipe, because the program closed the old one, or in a forked child, whose signals would otherwise
        wake its parent.
        """
        made, inode = _pipe(), self._inode
        self._inode = os.fstat(made[0]).st_ino
        self.reader, self.writer = (
            _take_over(*each, inode) for each in zip(made, (self.reader, self.writer), strict=True)
        )
        if self.is_set:
            self.set(-1)


def _take_over(new: int, old: int, inode: int) -> int:
    with contextlib.suppress(OSError):
        if os.fstat(old).st_ino == inode:
            os.dup2(new, old, inheritable=False)
            os.close(new)
            return old
    return new


def _pipe() -> tuple[int, int]:
    return os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)


@functools.cache
def _wakeup() -> _Wakeup:
    return _Wakeup()


def tell(pipe: SignalPipe) -> None:
    _wakeup().pipes.append(pipe)
    begin()


def begin() -> None:
    """Makes signals wake calls that wait in C++: passes the library's pipe to `signal.set_wakeup_fd`. Does nothing
    outside the main thread, or if the program has set its own descriptor.
    """
    wakeup = _wakeup()
    if threading.current_thread() is threading.main_thread() and not wakeup.is_open():
        with contextlib.suppress(OSError):
            wakeup.renew()
    if not wakeup.is_set and not wakeup.is_foreign:
        with contextlib.suppress(ValueError):
            before = wakeup.set(-1)
            if before != -1:
                wakeup.set(before)
    wakeup.publish()
