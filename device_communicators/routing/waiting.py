"""Waits for torch.distributed until a deadline or the death of a rank that the group needs.

gloo reports an exit only to direct neighbours. Therefore waits are split into slices, and deaths are polled in between.
Waits for gloo transfers and reduce_scatter can't be split, so a thread runs them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch

from device_communicators.base.errors import CommunicationError
from device_communicators.base.helper_threads import run_in_thread
from device_communicators.calls.work import TransferError, Work
from device_communicators.liveness.health import NOTICE_S, wait_in_slices
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import died

_SLICE_S = 0.05
_AT_ONCE = timedelta(milliseconds=1)
_NO_LIMIT = timedelta(days=3650)


class Watched:
    def __init__(self, work: Work, context: GroupContext, operation: str, timeout_s: float | None = None) -> None:
        self._work = work
        self._context = context
        self._operation = operation
        self._timeout_s = context.timeout_s if timeout_s is None else timeout_s

    def wait(self) -> None:
        try:
            self._wait()
        except Exception:
            raise
        except BaseException:  # Ctrl-C, or a signal handler's
            self._finish_in_background()
            raise

    def _finish_in_background(self) -> None:
        """Waits for the work in a thread, which keeps the process group alive: freeing the process group now would
        block.
        """
        work, cpu_group = self._work, self._context.cpu_group

        def finish(_: object = cpu_group) -> None:
            with contextlib.suppress(RuntimeError):
                work.wait(_NO_LIMIT)  # type: ignore[call-arg]

        run_in_thread(finish)

    def _wait(self) -> None:
        watcher = self._context.watcher
        if watcher is None:
            self._work.wait()
            return
        started = time.monotonic()
        if not wait_in_slices(self._work, started + self._timeout_s, self._context.deaths):
            self._last_chance(started)

    def _last_chance(self, started: float) -> None:
        """Waits briefly for the work after a rank's death, because that rank perhaps sent its data before. If the work
        fails, raises an error that names the dead rank.
        """
        try:
            self._work.wait(timedelta(seconds=NOTICE_S))  # type: ignore[call-arg]
        except RuntimeError as error:
            raise died(self._context, self._operation, started) from error

    def is_completed(self) -> bool:
        return self._work.is_completed()


class WatchedByThread:
    """Waits for torch's `work` in a thread that the first `wait` starts. `peer`: the other rank of a transfer; None for
    a collective.
    """

    def __init__(self, work: Work, context: GroupContext, operation: str, peer: int | None = None) -> None:
        self._work = work
        self._peer = peer
        self._context = context
        self._operation = operation
        self._limit: timedelta | None = None
        self._lock = threading.Lock()
        self._begun = False
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run_in_this_thread(self) -> None:
        self._limit = _NO_LIMIT  # gloo closes the connection when a wait times out
        if self._take():
            self._run_to_end()
        self._done.wait()

    def _take(self) -> bool:
        with self._lock:
            begun, self._begun = self._begun, True
            return not begun

    def wait(self) -> None:
        if self._take():
            run_in_thread(self._run_to_end)
        try:
            until(self._done.wait, self._context, self._operation)
        except RuntimeError as late:
            if self._peer is None or isinstance(late, CommunicationError):
                raise
            raise TransferError(str(late), self._peer) from late
        error = self._error
        if error is None:
            return
        if self._peer is not None and isinstance(error, RuntimeError) and not isinstance(error, CommunicationError):
            raise TransferError(str(error), self._peer) from error
        raise error

    def is_completed(self) -> bool:
        return self._done.is_set()

    def _run_to_end(self) -> None:
        try:
            with torch.inference_mode():  # the caller's tensors may be inference tensors
                limit = self._limit
                if limit is None and self._peer is not None:  # else gloo uses the timeout of its connecting
                    limit = timedelta(seconds=self._context.timeout_s)
                self._work.wait(*(() if limit is None else (limit,)))
        except BaseException as error:  # for `wait`, in the caller's thread
            self._error = error
        finally:
            self._done.set()


def until(ended: Callable[[float], bool], context: GroupContext, operation: str) -> None:
    """Waits until `ended(seconds)` returns True; `ended` can block for `seconds`. Raises RuntimeError at the group's
    timeout. If a rank dies, raises an error that names the rank.
    """
    started = time.monotonic()
    while not ended(_SLICE_S):
        if time.monotonic() - started > context.timeout_s + NOTICE_S:  # several works may each take the timeout
            raise RuntimeError(f"{operation} timed out after {context.timeout_s:g} s")
        if context.deaths() and not ended(NOTICE_S):
            raise died(context, operation, started)


def abandon(process_group: Any, peers: Iterable[int], tag: int) -> None:
    """Closes this rank's gloo connections to the group's ranks `peers`: starts a receive from each peer and lets the
    receive time out.
    """
    for peer in peers:
        with contextlib.suppress(RuntimeError):
            process_group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, tag).wait(_AT_ONCE)
