"""The exit of a process that has threads in native calls which can't be broken off: it must not be an abort.

Before Python 3.14 a thread that returns from a native call while the interpreter exits is ended by unwinding its stack;
C++ code that may not throw, as torch's bindings, then calls `std::terminate`, and the process ends by SIGABRT instead
of with its exit code. (Python 3.14 lets such a thread wait for the end.) So that thread waits here, too.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
import threading

THREADS = "parallel_state-"
"""With this the names of all threads of this library begin."""


@functools.cache
def prepare() -> None:
    """Has the exit of this process let threads of this library wait that return too late. Twice is fine."""
    if sys.version_info < (3, 14):
        atexit.register(_let_them_wait)


def _let_them_wait() -> None:
    """From here on `std::terminate` is the end of its thread's work, not of the process."""
    if not any(thread.name.startswith(THREADS) for thread in threading.enumerate()):
        return
    try:
        library = ctypes.CDLL("libstdc++.so.6", mode=os.RTLD_NOLOAD)
        library._ZSt13set_terminatePFvvE(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))
    except (OSError, AttributeError):  # another C++ runtime
        return
