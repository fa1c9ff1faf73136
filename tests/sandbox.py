"""Makes system calls of a process fail permanently, as in container runtimes (EPERM) and old kernels (ENOSYS)."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest

NUMBERS = {
    "clone3": 435, "close_range": 436, "eventfd2": 290, "execveat": 322, "fallocate": 285, "get_mempolicy": 239,
    "getrandom": 318, "inotify_init1": 294, "io_uring_setup": 425, "ioprio_set": 251, "kcmp": 312, "mbind": 237,
    "membarrier": 324, "memfd_create": 319, "mlock": 149, "move_pages": 279, "name_to_handle_at": 303, "openat2": 437,
    "perf_event_open": 298, "pidfd_getfd": 438, "pidfd_open": 434, "pidfd_send_signal": 424, "prctl": 157,
    "process_vm_readv": 310, "process_vm_writev": 311, "ptrace": 101, "rseq": 334, "sched_setaffinity": 203,
    "sched_setscheduler": 144, "set_mempolicy": 238, "setns": 308, "signalfd4": 289, "statx": 332,
    "timerfd_create": 283, "unshare": 272, "userfaultfd": 323, "vfork": 58, "waitid": 247,
}  # fmt: skip
"""System call numbers of x86-64."""

needs_filters = pytest.mark.skipif(platform.machine() != "x86_64", reason="its system call numbers are x86-64's")

_NO_NEW_PRIVS, _SECCOMP, _MODE_FILTER, _ALL_THREADS = 38, 317, 1, 1
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("count", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def refuse(names: Sequence[str], code: int) -> None:
    """Makes these system calls fail with error `code`, also in all threads and future children of this process."""
    steps = [(_LOAD, 0, 0, 0)]
    for place, name in enumerate(names):
        steps.append((_JUMP_IF_EQUAL, len(names) - place, 0, NUMBERS[name]))
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | code)]
    content = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program, libc = _Program(len(steps), ctypes.addressof(content)), ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(
        _SECCOMP, _MODE_FILTER, _ALL_THREADS, ctypes.byref(program)
    ):
        raise OSError(ctypes.get_errno(), f"can't refuse system calls: {os.strerror(ctypes.get_errno())}")


def refusing(names: Sequence[str], code: int, function: Callable[..., Any], *args: Any) -> Any:
    refuse(names, code)
    return function(*args)
