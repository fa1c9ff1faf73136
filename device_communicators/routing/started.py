"""Defines handles of operations that returned before they completed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from device_communicators.base.errors import UsageError
from device_communicators.base.helper_threads import HelperThread
from device_communicators.base.host_calls import host_call
from device_communicators.calls.recorder import Operation
from device_communicators.calls.user_call import handler_error
from device_communicators.calls.work import Work
from device_communicators.routing import observers
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.waits import waiting_for

WAITED_FOR = "a started operation must be waited for on the host; start it and wait outside the compiled function"


class Starter(Protocol):
    context: GroupContext
    is_parents: bool

    def check_usable(self) -> None: ...

    def failure_of(self, error: Exception, operation: str, started: float, record: Operation) -> Exception: ...


class Handle:
    """Handle of a started operation. A repeated `wait()` returns at once, or raises the same error again."""

    def __init__(self, route: Starter, record: Operation, work: Work, tensor: Tensor) -> None:
        self._route = route
        self._record = record
        self._work: Work | None = work
        self._tensor: Tensor | None = tensor  # the transport uses it until the work is done
        self._on_cpu = tensor.device.type == "cpu"
        self._error: Exception | None = None
        self._lock = threading.RLock()
        self._waiter: threading.Thread | None = None

    @host_call(WAITED_FOR)
    def is_completed(self) -> bool:
        """Returns True if the operation has ended. A gloo transfer completes only while a thread waits, so the first
        call starts a thread.
        """
        work = self._work
        if work is None or self._error is not None:
            return True
        if self._waiter is None:
            if work.is_completed():
                return True
            if not self._on_cpu:
                return False
            self._waiter = HelperThread("wait", self._wait_quietly)
            self._waiter.start()
        return False

    @property
    @host_call(WAITED_FOR)
    def has_ended(self) -> bool:
        """Returns True if the operation has ended. Unlike `is_completed`, starts no thread."""
        work = self._work
        return work is None or self._error is not None or work.is_completed()

    @property
    @host_call(WAITED_FOR)
    def needs_a_thread(self) -> bool:
        """Returns True if the operation completes only while a thread runs `run_to_end`."""
        return not self.has_ended and hasattr(self._work, "run_in_this_thread")

    @host_call(WAITED_FOR)
    def run_to_end(self) -> None:
        """Waits in this thread for a gloo transfer, without a deadline. `wait()` then raises the transfer's error, if
        any.
        """
        run = getattr(self._work, "run_in_this_thread", None)
        if run is not None:
            run()
            self._wait_quietly()

    def _wait_quietly(self) -> None:
        with contextlib.suppress(Exception):  # kept for wait()
            self.wait()

    @host_call(WAITED_FOR)
    def wait(self) -> None:
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise handler_error("wait", str(self._route.context), self._record.name)
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._work is None:
                return
            if self._route.is_parents:
                self._route.check_usable()  # raises: the work is another process's
            started = time.monotonic()
            with waiting_for(self._route.context, self._record):
                try:
                    self._work.wait()
                    self._record.ended_s = time.monotonic()
                    if observers.ON_OPERATION or observers.PYTHON_ONLY:
                        observers.notify_operation(self._route.context, self._record, self._tensor)
                except Exception as error:
                    if type(error) is UsageError:  # in a signal handler; the transfer continues
                        raise
                    self._error = self._route.failure_of(error, self._record.name, started, self._record)
                    self._tensor = None
                    if self._error is error:
                        raise
                    raise self._error from error
            self._work = self._tensor = None


class TensorHandle:
    """Handle of a started operation that returns a tensor."""

    def __init__(
        self,
        handle: Handle | None,
        tensor: Tensor,
        finish: Callable[[], Tensor] | None = None,
        *,
        keep: Tensor | None = None,
    ) -> None:
        self._handle = handle  # None: complete already
        self._tensor = tensor
        self._finish = finish
        self._keep = keep  # the transport reads it

    @host_call(WAITED_FOR)
    def is_completed(self) -> bool:
        return self._handle is None or self._handle.is_completed()

    @host_call(WAITED_FOR)
    def wait(self) -> Tensor:
        """Waits for the operation. Returns its result, also if called again."""
        if self._handle is not None:
            self._handle.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            self._tensor = finish()
        self._keep = None
        return self._tensor
