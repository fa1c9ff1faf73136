"""Creates and opens files in shared memory, *segments*. Only this user can open a segment, and only until its name is
removed.

A segment's creator holds a file lock while the name exists. So `sweep`, which removes names without a lock, removes
only those of killed creators.
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
"""Folder of segments. Outside of Linux, segments only serve to find the ranks of a host."""
NAME_BYTES = 33
_PREFIX = "parallel_state-"
_LOCKED = "k"
_NAME = re.compile(rf"{_LOCKED}[0-9a-f]{{32}}")
_TRIES = 8


class SegmentError(Exception):
    pass


class Segment:
    """A file in shared memory. Call `unlink` when all ranks have opened the file, and `close` when it is mapped."""

    def __init__(self, name: str, descriptor: int) -> None:
        self.name = name
        self.descriptor = descriptor

    @classmethod
    def make(cls) -> Segment:
        for _ in range(_TRIES):
            name = _LOCKED + secrets.token_hex(NAME_BYTES // 2)
            try:
                descriptor = os.open(_path(name), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise SegmentError(f"no file for shared memory can be made in {DIRECTORY}: {error.strerror}") from error
            if _keep(descriptor):
                return cls(name, descriptor)
            os.close(descriptor)
        raise SegmentError(
            f"another process removes each new shared-memory file in {DIRECTORY} at once, perhaps to clean up; stop "
            "that process"
        )

    @classmethod
    def open(cls, name: str) -> Segment | None:
        """Opens the segment `name`. Returns None if this host has none. Raises SegmentError for another user's
        segment.
        """
        if not _NAME.fullmatch(name):
            return None
        try:
            descriptor = os.open(_path(name), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # it may exist
                raise SegmentError(
                    f"a shared-memory file of another rank in {DIRECTORY} can't be opened: {error.strerror}"
                ) from error
            return None
        if not _is_own(descriptor):
            os.close(descriptor)
            raise SegmentError(
                "the shared-memory file of another rank belongs to another user, or its permissions let others access "
                "it; run all ranks as one user"
            )
        return cls(name, descriptor)

    @property
    def size_bytes(self) -> int:
        return os.fstat(self.descriptor).st_size

    def resize(self, size_bytes: int) -> None:
        os.ftruncate(self.descriptor, size_bytes)

    def allocate(self, size_bytes: int, offset: int = 0, *, leave_some: bool = False) -> None:
        """Allocates the file's bytes from `offset` on. Raises SegmentError if the file system is full, or with
        `leave_some` nearly full. Without this call, a later write could kill the process.
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
                f"{DIRECTORY} has no room for {max(1, size_bytes >> 20)} MiB of shared memory ({error.strerror}); make "
                f"{DIRECTORY} larger"
            ) from error

    def unlink(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(_path(self.name))

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def sweep() -> int:
    swept = 0
    with contextlib.suppress(OSError):
        for file in os.listdir(DIRECTORY):
            if file.startswith(_PREFIX) and _NAME.fullmatch(file.removeprefix(_PREFIX)):
                swept += _sweep_one(os.path.join(DIRECTORY, file))
    return swept


def _sweep_one(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # another user's, or its maker removed it
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
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks, so no sweeps
        return True
    return os.fstat(descriptor).st_nlink == 1


def _is_own(descriptor: int) -> bool:
    info = os.fstat(descriptor)
    return stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and stat.S_IMODE(info.st_mode) == 0o600


def _path(name: str) -> str:
    return os.path.join(DIRECTORY, f"{_PREFIX}{name}")
