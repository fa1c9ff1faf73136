"""Finds which resource limit caused an error, and describes how to raise the limit."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import resource
import sys
from collections.abc import Iterator

from device_communicators.base.errors import ParallelStateError, ResourceLimitError

logger = logging.getLogger("parallel_state")

_MOST_DESCRIPTORS = 65_536
"""Highest limit that is set, enough for 13,000 groups. Containers allow 10⁹, but then programs that close every
possible descriptor would take minutes.
"""
_TEXTS = {
    "Too many open files": errno.EMFILE,
    "can't start new thread": errno.EAGAIN,
    "Resource temporarily unavailable": errno.EAGAIN,
    "Cannot allocate memory": errno.ENOMEM,
    "std::bad_alloc": errno.ENOMEM,
    "No space left on device": errno.ENOSPC,
    "Disk quota exceeded": errno.EDQUOT,
    "File too large": errno.EFBIG,
}
_CLONE3 = 435
_FOLDERS = "/dev/shm", "/tmp"


def shortage(error: BaseException, folder: str | os.PathLike[str] | None = None) -> str | None:
    """Describes the resource (such as memory) whose shortage caused `error`; None if no shortage did. If a disk is full
    and `error` names no file, the text has the free space of `folder`.
    """
    for each in _chain(error):
        number = _number(each)
        if number is not None:
            path = getattr(each, "filename", None) or folder
            return _describe(number, path if isinstance(path, str | os.PathLike) else None)
    return None


def name_shortage(error: BaseException, doing: str) -> BaseException:
    """Converts `error` to a ResourceLimitError if a resource ran out; returns other errors unchanged. An error of this
    library keeps its class, and its text names the resource. `doing`: what failed, for the text.
    """
    found = shortage(error)
    if found is None or isinstance(error, ResourceLimitError):
        return error
    if isinstance(error, ParallelStateError):
        if found.partition(":")[0] in str(error):
            return error
        error.args = (f"{error.args[0]}. {found}",)
        return error
    if not isinstance(error, Exception):
        return error
    made = ResourceLimitError(f"{doing} failed ({_first_line(error)}): {found}")
    made.__cause__ = error
    return made


def with_shortage(error: BaseException, folder: str | os.PathLike[str] | None = None) -> str:
    found = shortage(error, folder)
    return str(error) if found is None else f"{error}; {found}"


@contextlib.contextmanager
def naming_shortages(doing: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        named = name_shortage(error, doing)
        if named is error:
            raise
        raise named from error


def need_descriptors(count: int, doing: str) -> None:
    """Raises ResourceLimitError if this process can't open `count` more descriptors, which `doing` needs. Call this
    before gloo connects: gloo ends the process if it can't accept a connection.
    """
    with naming_shortages(f"{doing}, which needs {count} descriptors,"), contextlib.ExitStack() as spare:
        first = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        spare.callback(os.close, first)
        for _ in range(count - 1):
            spare.callback(os.close, os.dup(first))


def in_force() -> str:
    return (
        f"here a process may have {_limit(resource.RLIMIT_NOFILE)} descriptors (`ulimit -n`) and map "
        f"{_limit(resource.RLIMIT_AS)} bytes (`ulimit -v`), and the user {_limit(resource.RLIMIT_NPROC)} processes "
        "and threads (`ulimit -u`)"
    )


_FEW_DESCRIPTORS = 8


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _first_line(error: BaseException) -> str:
    text = str(error).partition("\n")[0].encode("ascii", "ignore").decode().strip()
    return f"{type(error).__name__}: {text}"


def _number(error: BaseException) -> int | None:
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, ParallelStateError) or not isinstance(error, (OSError, RuntimeError)):
        return None  # these have a cause, or come from another rank
    if isinstance(error, FileNotFoundError) and "No usable temporary directory" in str(error):
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        is_short = soft != resource.RLIM_INFINITY and _open() >= soft - _FEW_DESCRIPTORS
        return errno.EMFILE if is_short else None  # tempfile hides the original error
    known = {*_TEXTS.values(), errno.ENFILE}
    if isinstance(error, OSError) and error.errno is not None:
        if error.errno == errno.EPERM and _clone3_is_forbidden():  # a thread in C++
            return errno.EAGAIN
        return error.errno if error.errno in known else None
    text = str(error)
    return next((number for words, number in _TEXTS.items() if words in text), None)


def _describe(number: int, path: str | os.PathLike[str] | None) -> str:
    if number == errno.EMFILE:
        return (
            f"files ran out: this process may have {_limit(resource.RLIMIT_NOFILE)} descriptors, and has {_open()} "
            "open; raise the limit (`ulimit -n 4096`)"
        )
    if number == errno.ENFILE:
        return "files ran out: the machine's limit is reached; raise fs.file-max (sysctl), or find what holds them open"
    if number == errno.EAGAIN and _clone3_is_forbidden():
        return (
            "the sandbox forbids the system call clone3, which creates threads, with EPERM: use a container "
            "runtime whose filter answers ENOSYS (Docker 20.10.10 or later), or run without it "
            "(`--security-opt seccomp=unconfined`)"
        )
    if number == errno.EAGAIN:
        return (
            f"processes and threads ran out: this user may have {_limit(resource.RLIMIT_NPROC)} in all, and this "
            f"process may map {_limit(resource.RLIMIT_AS)} bytes, their stacks included; raise the limit (`ulimit -u`, "
            "`ulimit -v`), or a container's (`--pids-limit`)"
        )
    if number == errno.ENOMEM:
        available_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return (
            f"memory ran out: this process may map {_limit(resource.RLIMIT_AS)} bytes, and the machine has "
            f"{available_bytes >> 20} MiB available; raise the limit (`ulimit -v`) or free some"
        )
    if number == errno.EFBIG:
        return (
            f"a file grew too large: this process may write files of {_limit(resource.RLIMIT_FSIZE)} bytes; raise the "
            "limit (`ulimit -f`)"
        )
    return f"space ran out: {_space(path)}; free some, choose another TMPDIR, or give a container more (`--shm-size`)"


def _clone3_is_forbidden() -> bool:
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(_CLONE3, None, ctypes.c_size_t(0)) < 0 and ctypes.get_errno() == errno.EPERM


def _limit(which: int) -> str:
    soft, _ = resource.getrlimit(which)
    return "any number of" if soft == resource.RLIM_INFINITY else str(soft)


def _open() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sum(_is_open(descriptor) for descriptor in range(min(soft, 65_536)))


def _is_open(descriptor: int) -> bool:  # listing /proc/self/fd would need a free descriptor
    try:
        os.fstat(descriptor)
        return True
    except OSError:
        return False


def _space(path: str | os.PathLike[str] | None) -> str:
    found = []
    for folder in _FOLDERS if path is None else (os.fspath(path),):
        try:
            state = os.statvfs(folder)
        except OSError:
            continue
        free, size = state.f_bavail * state.f_frsize >> 10, state.f_blocks * state.f_frsize >> 10
        found.append(f"{folder} has {free} of {size} KiB free")
    return ", ".join(found) or str(path)


def raise_descriptor_limit() -> None:
    """Raises the soft limit of open files, because a group over gloo needs at least five descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError) as error:  # macOS has a smaller limit that it does not report
        logger.debug("the limit of open files (ulimit -n) stays at %d: %s", soft, error)
        return
    logger.info("raised the soft limit of open files (ulimit -n) from %d to %d, for connections", soft, wanted)


def descriptor_shortage(needed: int) -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return ""
    try:
        count = len(os.listdir("/proc/self/fd"))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            return ""
        count = soft
    if count + needed <= soft:
        return ""
    return (
        f"it has {count} files open and needs up to {needed} more, but its limit is {soft} (ulimit -n; the hard one is "
        f"{_bound(hard)}). Destroy unused groups, or start the ranks with a higher limit"
    )


def describe_address_space() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            taken_mib = int(file.read().split()[0]) * resource.getpagesize() >> 20
    except OSError:
        return f"the limit of address space is {_bound(soft)} bytes (ulimit -v)"
    allowed = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 20} MiB"
    return f"{taken_mib} MiB of address space are in use; the limit (ulimit -v) is {allowed}"


def _bound(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
