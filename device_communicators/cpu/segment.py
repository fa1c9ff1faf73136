"""A file in shared memory that only this user can open, and nobody once its name was taken away.

A name is there for the moment in which the ranks open it. Who is killed in that moment leaves it behind; so its maker
holds a lock on the file as long as it has that name, which the kernel lets go of whatever becomes of the maker, and
`sweep` takes away the names whose lock is free. Unlike a pid in the name that holds across PID namespaces. A name says
that its file is kept so: those of other versions stay.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import sys
import tempfile

_SPARE_BYTES = 64 << 20
DIRECTORY = "/dev/shm" if sys.platform == "linux" else tempfile.gettempdir()
"""Elsewhere no memory is shared: a segment tells which ranks are on one host, no more."""
NAME_BYTES = 33
_PREFIX = "parallel_state-"
_LOCKED = "k"
_NAME = re.compile(rf"{_LOCKED}[0-9a-f]{{32}}")
_TRIES = 8


class SegmentError(Exception):
    """A segment can't be made or opened; the text says why, without naming it. Never leaves this package."""


class Segment:
    """An open segment; `close` it when it is mapped, `unlink` it, before, when all have opened it."""

    def __init__(self, name: str, descriptor: int) -> None:
        self.name = name
        self.descriptor = descriptor

    @classmethod
    def make(cls) -> Segment:
        """Makes an empty segment under a random name. Raises SegmentError."""
        for _ in range(_TRIES):
            name = _LOCKED + secrets.token_hex(NAME_BYTES // 2)
            try:
                descriptor = os.open(_path(name), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise SegmentError(f"no segment can be made in {DIRECTORY}: {error.strerror}") from error
            if _keep(descriptor):
                return cls(name, descriptor)
            os.close(descriptor)
        raise SegmentError(f"each segment made in {DIRECTORY} was taken away at once")

    @classmethod
    def open(cls, name: str) -> Segment | None:
        """Opens a segment by name; None if this host's memory has none. Raises SegmentError for a stranger's."""
        if not _NAME.fullmatch(name):
            return None
        try:
            descriptor = os.open(_path(name), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # it may well be there
                raise SegmentError(f"a segment in {DIRECTORY} can't be opened: {error.strerror}") from error
            return None
        if not _is_own(descriptor):
            os.close(descriptor)
            raise SegmentError("the segment isn't this user's alone")
        return cls(name, descriptor)

    @property
    def size_bytes(self) -> int:
        return os.fstat(self.descriptor).st_size

    def resize(self, size_bytes: int) -> None:
        """Gives it that length; memory comes with `allocate` only."""
        os.ftruncate(self.descriptor, size_bytes)

    def allocate(self, size_bytes: int, offset: int = 0, *, leave_some: bool = False) -> None:
        """Backs bytes of it with memory. A full file system is a SegmentError here, and no SIGBUS later.

        With `leave_some` a file system that would be nearly full counts as full: what comes after needs room as well.
        """
        try:
            if leave_some:
                state = os.fstatvfs(self.descriptor)
                spare_bytes = min(state.f_blocks * state.f_frsize // 4, _SPARE_BYTES)
                if state.f_bavail * state.f_frsize < size_bytes + spare_bytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self.descriptor, offset, size_bytes)
        except OSError as error:
            raise SegmentError(
                f"{DIRECTORY} has no room for {max(1, size_bytes >> 20)} MiB: {error.strerror}"
            ) from error

    def unlink(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(_path(self.name))

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def sweep() -> int:
    """Takes away the names of this user's segments whose makers have ended; how many."""
    swept = 0
    with contextlib.suppress(OSError):
        for file in os.listdir(DIRECTORY):
            if file.startswith(_PREFIX) and _NAME.fullmatch(file.removeprefix(_PREFIX)):
                swept += _sweep_one(os.path.join(DIRECTORY, file))
    return swept


def _sweep_one(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # another user's, or its maker took it away meanwhile
        return False
    try:
        if not _is_own(descriptor):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return True
    except OSError:  # its maker lives
        return False
    finally:
        os.close(descriptor)


def _keep(descriptor: int) -> bool:
    """Locks a new file against `sweep`; False where a sweep came first.

    A sweep takes names away with the lock in its hand: a file that has its name when this process holds the lock keeps
    it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks in this file system: then nobody sweeps either
        return True
    return os.fstat(descriptor).st_nlink == 1


def _is_own(descriptor: int) -> bool:
    info = os.fstat(descriptor)
    return stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and stat.S_IMODE(info.st_mode) == 0o600


def _path(name: str) -> str:
    return os.path.join(DIRECTORY, f"{_PREFIX}{name}")
