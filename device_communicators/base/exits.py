"""Prevents an abort when Python exits while threads run native calls: such threads then block, as in Python 3.14.

Older versions of Python unwind the stack of a thread that returns from a native call during the exit. Unwinding
noexcept C++ code, such as torch's bindings, calls `std::terminate`.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
import threading

THREADS = "parallel_state-"


@functools.cache
def prepare() -> None:
    if sys.version_info < (3, 14):
        atexit.register(_let_them_wait)


def _let_them_wait() -> None:
    if not any(thread.name.startswith(THREADS) for thread in threading.enumerate()):
        return
    try:
        library = ctypes.CDLL("libstdc++.so.6", mode=os.RTLD_NOLOAD)
        library._ZSt13set_terminatePFvvE(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))
    except (OSError, AttributeError):  # another C++ runtime
        return
