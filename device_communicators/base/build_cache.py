"""The user's cache of compiled code: folder, access rights, lock, and checksums."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from device_communicators.base import limits

WAIT_S = 600
_POLL_S = 0.02
_SEAL = b"parallel_state\0\0"
_SEAL_BYTES = len(_SEAL) + hashlib.sha256().digest_size
_FOLDERS_FAULTS = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EEXIST
)  # fmt: skip


class CacheError(Exception):
    pass


def check_owner(path: Path) -> None:
    """Raises CacheError if another user can write to `path`, because the library executes the code in it."""
    if path.exists():
        info = path.stat()
        if info.st_uid != os.geteuid() or info.st_mode & 0o022:
            raise CacheError(
                f"{path} contains code that this process would execute, but another user owns {path} or can write to "
                "it; run `chmod go-w` on this path, or remove it"
            )


def about_cache(error: Exception) -> str:
    text = limits.with_shortage(error, cache_folder().parent)
    if isinstance(error, OSError) and error.errno in _FOLDERS_FAULTS:
        text += f"; the cache is {cache_folder()}: set XDG_CACHE_HOME to a writable folder with free space"
    return text


def cache_folder() -> Path:
    """Returns the folder of compiled code, which the user can delete at any time; the code is then compiled again."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "parallel_state"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[IO[bytes]]:
    deadline = time.monotonic() + WAIT_S
    with open(path, "r+b", buffering=0, opener=lambda name, _: os.open(name, os.O_RDWR | os.O_CREAT, 0o600)) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CacheError(
                        f"another process has held the lock file {path} for {WAIT_S} s; find that process by "
                        f"`fuser {path}`, and end it"
                    ) from None
                time.sleep(_POLL_S)
        yield file


def seal(content: bytes) -> bytes:
    return content + _SEAL + hashlib.sha256(content).digest()


def read_sealed(path: Path) -> bytes:
    """Returns the content of a file that `write_sealed` wrote. Raises CacheError if the file's checksum is wrong or
    another user can write to the file.
    """
    try:
        info = path.stat()
        content = path.read_bytes()
    except OSError as error:
        raise CacheError(str(error)) from error
    if info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise CacheError(f"another user owns the cached file {path}, or can write to it")
    body = content[:-_SEAL_BYTES]
    if content != seal(body):
        raise CacheError(f"the cached file {path} is damaged: its checksum is wrong")
    return body


def flaw_of(library: Path) -> str | None:
    try:
        read_sealed(library)
    except CacheError as error:
        return str(error)
    return None


def write_sealed(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(seal(content))
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
