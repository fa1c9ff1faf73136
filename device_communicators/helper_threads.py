"""Runs calls that their callers may abandon. Threads are reused: starting one takes longer than many calls."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from device_communicators import forks

_END_S = 1.0
_SLICE_S = 0.05


class _Helpers:
    """Daemon threads: one per running job, and idle ones for the next jobs."""

    def __init__(self) -> None:
        self._idle: list[tuple[threading.Thread, queue.SimpleQueue[Callable[[], object] | None]]] = []
        self._ends = 0

    def run(self, job: Callable[[], object]) -> None:
        try:
            _, jobs = self._idle.pop()
        except IndexError:
            forks.call_in_children(self._idle.clear)
            jobs = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(jobs,), daemon=True, name="parallel_state-helper").start()
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
            with contextlib.suppress(IndexError):  # another thread was first
                thread, jobs = self._idle.pop()
                jobs.put(None)
                thread.join(_END_S)


_HELPERS = _Helpers()


def run_in_thread(job: Callable[[], object]) -> None:
    """Runs `job`, which raises nothing, in a thread that may be used again."""
    _HELPERS.run(job)


def end_idle_threads() -> None:
    """Ends the idle threads. Called when a group that used some is closed."""
    _HELPERS.end_idle()


class Call:
    """A call that a helper thread runs, for a caller that stops waiting for it at its own deadline."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function: Callable[[], Any] | None = function
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self.started_s = time.monotonic()
        run_in_thread(self._run)

    def _run(self) -> None:
        function, self._function = self._function, None
        try:
            self._result = function() if function is not None else None
        except BaseException as error:  # for `result`, in the caller's thread
            self._error = error
        finally:
            del function  # frees a store, so that its server can close
            self._done.set()

    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, deadline: float, ended: Callable[[], object]) -> bool:
        """Returns True once the call is done, False at the deadline or when `ended()` is true; polled every 50 ms."""
        while not self._done.wait(max(0.0, min(_SLICE_S, deadline - time.monotonic()))):
            if time.monotonic() >= deadline or ended():
                return self._done.is_set()
        return True

    def result(self) -> Any:
        """Returns the call's result, or raises its error. Use it only after the call is done."""
        if self._error is not None:
            raise self._error
        return self._result
