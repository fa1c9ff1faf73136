"""Resets a thread's floating-point state for arithmetic in torch, so that all ranks compute the same bits.

A program can change the state of its thread by torch.set_flush_denormal, fesetround, or a library linked with
-ffast-math. Ranks that reduce the same inputs under different states get different bits. The C++ kernels have their own
guard (cpu/csrc/floating_point.h).
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ONE_THREAD_ELEMENTS = 32_768
"""Up to this number of elements, torch runs an operator in the calling thread (at::internal::GRAIN_SIZE)."""
_STATE_BYTES = 64
"""Larger than `fenv_t`, which has 32 bytes on x86-64 and 8 on 64-bit ARM."""
_DEFAULT = ctypes.c_void_p(-1)
"""FE_DFL_ENV of glibc and musl: round to nearest, keep denormals, no traps."""


@contextmanager
def default_floating_point() -> Iterator[None]:
    """Sets the default floating-point state of this thread for a block.

    Other threads keep their state. torch's threads for larger operators have that of the thread that started them.
    """
    functions = _functions()
    if functions is None:
        yield
        return
    get, put = functions
    state = ctypes.create_string_buffer(_STATE_BYTES)
    get(state)
    put(_DEFAULT)
    try:
        yield
    finally:
        put(state)


@functools.cache
def _functions() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Returns `fegetenv` and `fesetenv`, or None if FE_DFL_ENV isn't known to be -1."""
    if sys.platform != "linux":
        return None
    try:
        library = ctypes.CDLL("libm.so.6")
    except OSError:  # musl has them in its libc
        library = ctypes.CDLL(None)
    try:
        return library.fegetenv, library.fesetenv
    except AttributeError:
        return None
