"""The user's cache of compiled code: its folder, who may write there, one process at a time, and a seal on each file.

What is compiled, and how, is the business of `cpu.native` and `peer.kernels`.
"""

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
"""For a process that compiles what this one needs."""
_LOOK_S = 0.02
_SEAL = b"parallel_state\0\0"
_SEAL_BYTES = len(_SEAL) + hashlib.sha256().digest_size
_FOLDERS_FAULTS = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EEXIST
)  # fmt: skip


class CacheError(Exception):
    """A file of the cache can't be used; the text says why."""


def check_owner(path: Path) -> None:
    """Raises CacheError where others may write to what lies in the cache, which is loaded as code."""
    if path.exists():
        info = path.stat()
        if info.st_uid != os.geteuid() or info.st_mode & 0o022:
            raise CacheError(
                f"{path} must be this user's, and writable by nobody else; mend that (chmod go-w), or remove it"
            )


def about_cache(error: Exception) -> str:
    """Returns an error's text, and for one of the file system what to do about the cache."""
    text = limits.with_shortage(error, cache_folder().parent)
    if isinstance(error, OSError) and error.errno in _FOLDERS_FAULTS:
        text += f"; the cache is {cache_folder()}: let XDG_CACHE_HOME name a folder with room that you may write to"
    return text


def cache_folder() -> Path:
    """Returns where compiled code lies, by XDG_CACHE_HOME. All of it may be deleted: it is made again."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "parallel_state"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[IO[bytes]]:
    """Holds a lock among processes, and gives its file, whose content stays. Raises CacheError if another keeps it."""
    deadline = time.monotonic() + WAIT_S
    with open(path, "r+b", buffering=0, opener=lambda name, _: os.open(name, os.O_RDWR | os.O_CREAT, 0o600)) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CacheError(f"another process has held {path} for {WAIT_S} s; end it (fuser {path})") from None
                time.sleep(_LOOK_S)
        yield file


def seal(content: bytes) -> bytes:
    """Returns what is compiled, with the digest by which `read_sealed` finds out whether it is still whole."""
    return content + _SEAL + hashlib.sha256(content).digest()


def read_sealed(path: Path) -> bytes:
    """Returns what was sealed. Raises CacheError where it can't be loaded as it is; it may be made again then."""
    try:
        info = path.stat()
        content = path.read_bytes()
    except OSError as error:
        raise CacheError(str(error)) from error
    if info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise CacheError("others may have written to it")
    body = content[:-_SEAL_BYTES]
    if content != seal(body):
        raise CacheError("it is damaged")
    return body


def flaw_of(library: Path) -> str | None:
    """Returns why a sealed library can't be loaded as it is; None where it can."""
    try:
        read_sealed(library)
    except CacheError as error:
        return str(error)
    return None


def write_sealed(path: Path, content: bytes) -> None:
    """Writes `content` with its seal, whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(seal(content))
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
