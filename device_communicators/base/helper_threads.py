"""The library's threads, and a pool of threads for calls whose callers can stop waiting."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from device_communicators.base import forks

THREADS = "parallel_state-"
_END_S = 1.0
_SLICE_S = 0.05
_PR_SET_NAME = 15


@functools.cache
def _prctl() -> Any:
    return ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: -1


def name_this_thread(name: str) -> None:
    _prctl()(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


@functools.cache
def prepare_exit() -> None:
    """Prevents an abort when Python exits while threads run native calls: the threads then block, as in Python 3.14.

    Older versions of Python unwind the stack of a thread that returns from a native call during the exit. Unwinding
    noexcept C++ code, such as torch's bindings, calls `std::terminate`.
    """
    if sys.version_info < (3, 14):
        atexit.register(_let_threads_wait)


def _let_threads_wait() -> None:
    if not any(thread.name.startswith(THREADS) for thread in threading.enumerate()):
        return
    try:
        library = ctypes.CDLL("libstdc++.so.6", mode=os.RTLD_NOLOAD)
        library._ZSt13set_terminatePFvvE(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))
    except (OSError, AttributeError):  # another C++ runtime
        return


class HelperThread(threading.Thread):
    def __init__(self, name: str, target: Callable[..., object], *args: Any) -> None:
        super().__init__(target=target, args=args, daemon=True, name=f"{THREADS}{name}")
        self._kernel_name = f"ps-{name}"

    def run(self) -> None:
        name_this_thread(self._kernel_name)
        super().run()


class _Helpers:
    def __init__(self) -> None:
        self._idle: list[tuple[threading.Thread, queue.SimpleQueue[Callable[[], object] | None]]] = []
        self._ends = 0

    def run(self, job: Callable[[], object]) -> None:
        try:
            _, jobs = self._idle.pop()
        except IndexError:
            forks.call_in_children(self._idle.clear)
            jobs = queue.SimpleQueue()
            HelperThread("helper", self._serve, jobs).start()
        jobs.put(job)

    def _serve(self, jobs: queue.SimpleQueue[Callable[[], object] | None]) -> None:
        while (job := jobs.get()) is not None:
            ends = self._ends
            job()
            del job  # frees the caller's tensors
            if ends != self._ends:
                return
            self._idle.append((threading.current_thread(), jobs))

    def end_idle(self) -> None:
        self._ends += 1
        while self._idle:
            with contextlib.suppress(IndexError):
                thread, jobs = self._idle.pop()
                jobs.put(None)
                thread.join(_END_S)


_HELPERS = _Helpers()
run_in_thread, end_idle_threads = _HELPERS.run, _HELPERS.end_idle


class Call:
    def __init__(self, function: Callable[[], Any]) -> None:
        self._function: Callable[[], Any] | None = function
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self.started_s = time.monotonic()
        prepare_exit()
        run_in_thread(self._run)

    def _run(self) -> None:
        function, self._function = self._function, None
        try:
            self._result = function() if function is not None else None
        except BaseException as error:  # for `result`
            self._error = error
        finally:
            del function  # frees a store, so that its server can close
            self._done.set()

    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, deadline: float, ended: Callable[[], object] = lambda: False) -> bool:
        while not self._done.wait(max(0.0, min(_SLICE_S, deadline - time.monotonic()))):
            if time.monotonic() >= deadline or ended():
                return self._done.is_set()
        return True

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result
