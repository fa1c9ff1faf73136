"""Who carries what for one group: an ordered list of communicators, and the register of such routes by group name.

`Route.run` is the one place through which an operation goes on its way: it picks, counts, and turns what a
communicator raises into this library's errors. It holds no membership logic and moves no byte itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from device_communicators.base import Communicator, GroupContext, Request, Work
from device_communicators.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    GroupDestroyedError,
    GroupFailedError,
    GroupNotInitializedError,
    ParallelStateError,
    PeerDiedError,
    UnsupportedError,
)

_Kind = tuple[str, torch.dtype | None, str, str | None]
"""A request without its size."""


@dataclass
class Traffic:
    """What went through one operation of a route: `bytes` are those of the calling rank's tensors."""

    calls: int = 0
    bytes: int = 0


class Handle:
    """A started transfer. `wait()` returns when it is done and raises what went wrong; both calls may be repeated."""

    def __init__(self, route: Route, operation: str, work: Work, tensor: Tensor) -> None:
        self._route = route
        self._operation = operation
        self._work: Work | None = work
        self._tensor = tensor  # the transport reads or writes it until the work is done
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._waiter: threading.Thread | None = None

    def is_completed(self) -> bool:
        """Whether `wait()` would return at once.

        gloo's point-to-point works can't be polled (they stay "not completed" until waited for, and a wait with a
        short timeout closes the connection), so the first call that finds one unfinished leaves a thread waiting.
        A device's works can be polled, and must be waited for by the caller: it is his stream that has to wait.
        """
        work = self._work
        if work is None or self._error is not None:
            return True
        if self._waiter is None:
            if work.is_completed():
                return True
            if self._tensor.device.type != "cpu":
                return False
            self._waiter = threading.Thread(target=self._wait_quietly, daemon=True, name="parallel_state-wait")
            self._waiter.start()
        return False

    def _wait_quietly(self) -> None:
        with contextlib.suppress(Exception):  # kept in self._error for wait()
            self.wait()

    def wait(self) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._work is None:
                return
            started = time.monotonic()
            try:
                self._work.wait()
            except Exception as error:
                self._error = self._route.failure_of(error, self._operation, started)
                raise self._error from error
            self._work = None


class Route:
    """The communicators of one group in order of preference, and the table of those that were turned down."""

    def __init__(self, context: GroupContext, communicators: Sequence[Communicator], refusals: dict[str, str]) -> None:
        self.context = context
        self.communicators = tuple(communicators)
        self.refusals = refusals
        """Name of each communicator that the group doesn't have -> the reason."""
        self.traffic: dict[str, Traffic] = {}
        self._chosen: dict[_Kind, Communicator] = {}
        self._chosen_of = self.communicators
        self.sequence = 0
        self.first_failure: CommunicationError | None = None
        self.closed = False

    def run(
        self,
        operation: str,
        tensor: Tensor | None,
        *args: Any,
        reduce_op: str | None = None,
        part_of: str | None = None,
    ) -> Any:
        """Calls `operation` of the first communicator that carries it; `args` are that method's.

        Raises GroupDestroyedError, GroupFailedError, UnsupportedError, or the CommunicationError that happened.
        """
        started = time.monotonic()
        try:
            # A communicator may need its peers to tell whether it can: that, too, fails as the operation would.
            communicator = self._begin(operation, tensor, reduce_op, part_of)
            return getattr(communicator, operation)(*args)
        except Exception as error:
            failure = self.failure_of(error, operation, started)
            if failure is error:
                raise
            raise failure from error

    def start(
        self,
        operation: str,
        tensor: Tensor,
        *args: Any,
        reduce_op: str | None = None,
        part_of: str | None = None,
    ) -> Handle:
        """As `run` for the operations with an `i` (isend, iall_reduce_, …) of a contiguous `tensor`: doesn't wait.

        Its bytes are counted as those of `part_of`, whose calls the caller counts.
        """
        started = time.monotonic()
        try:
            communicator = self._begin(operation, tensor, reduce_op, part_of)
            work = getattr(communicator, operation)(tensor, *args)
        except Exception as error:
            failure = self.failure_of(error, operation, started)
            if failure is error:
                raise
            raise failure from error
        return Handle(self, operation, work, tensor)

    def _begin(
        self, operation: str, tensor: Tensor | None, reduce_op: str | None, part_of: str | None = None
    ) -> Communicator:
        self.check_usable()
        kind: _Kind = (operation, None, "cpu", None)
        numel = 0
        if tensor is not None:
            kind, numel = (operation, tensor.dtype, tensor.device.type, reduce_op), tensor.numel()
        if self._chosen_of is not self.communicators:
            self._chosen, self._chosen_of = {}, self.communicators
        communicator = self._chosen.get(kind)
        if communicator is None:
            communicator = self.pick(Request(*kind[:3], numel, kind[3]))
            if not any(each.picks_by_size for each in self.communicators):
                self._chosen[kind] = communicator
        self.sequence += 1
        self.count(part_of or operation, 0 if part_of else 1, 0 if tensor is None else tensor.nbytes)
        return communicator

    def count(self, name: str, calls: int = 1, size_bytes: int = 0) -> None:
        """Adds to the traffic of `name`."""
        traffic = self.traffic.get(name)
        if traffic is None:
            traffic = self.traffic[name] = Traffic()
        traffic.calls += calls
        traffic.bytes += size_bytes

    def pick(self, request: Request) -> Communicator:
        """The first communicator that carries `request`; UnsupportedError with every reason if none does."""
        for communicator in self.communicators:
            if communicator.refusal(request) is None:
                return communicator
        reasons = "; ".join(f"{c.name}: {c.refusal(request)}" for c in self.communicators)
        raise UnsupportedError(f"no communicator of {self.context} carries {request}: {reasons}")

    def check_usable(self) -> None:
        if self.closed:
            raise GroupDestroyedError(
                f"{self.context} was destroyed; take the group anew from its getter, or initialise again"
            )
        if self.first_failure is not None:
            raise GroupFailedError(
                f"{self.context} failed earlier ({self.first_failure}); destroy it and initialise again",
                group=self.context.name,
                rank=self.context.rank,
            ) from self.first_failure

    def failure_of(self, error: Exception, operation: str, started: float) -> Exception:
        """The error to raise for `error`; a communication error poisons the group.

        c10d raises RuntimeError for whatever happens on the wire; what it says tells a timeout from a lost peer.
        """
        if isinstance(error, ParallelStateError) or not _is_communication_error(error):
            if isinstance(error, CommunicationError) and self.first_failure is None:
                self.first_failure = error
            return error
        text = str(error)
        lowered = text.lower()
        if "timed out" in lowered or "timeout" in lowered:
            kind: type[CommunicationError] = CollectiveTimeoutError
            advice = "look at the ranks that are not in this call (their logs, `py-spy dump`), or raise the timeout"
        elif "closed by peer" in lowered or "reset by peer" in lowered or "broken pipe" in lowered:
            kind = PeerDiedError
            advice = "look for the first rank that ended"
        else:
            kind = CommunicationError
            advice = "look for the first rank that failed"
        elapsed = time.monotonic() - started
        failure = kind(
            f"{operation} number {self.sequence} of {self.context} failed after {elapsed:.3f} s "
            f"(timeout {self.context.timeout_s:g} s): {text.splitlines()[0] if text else type(error).__name__}. "
            f"The group can't be used further; {advice}",
            group=self.context.name,
            operation=operation,
            sequence=self.sequence,
            rank=self.context.rank,
            elapsed_s=elapsed,
            timeout_s=self.context.timeout_s,
        )
        if self.first_failure is None:
            self.first_failure = failure
        return failure

    def capture(self) -> ExitStack:
        """A context in which a CUDA graph may record the group's operations."""
        stack = ExitStack()
        for communicator in self.communicators:
            stack.enter_context(communicator.capture())
        return stack

    def explain(self) -> str:
        """Which communicators carry the group's operations, in order, and why the others don't."""
        lines = [str(self.context)]
        lines += [f"  {i}. {c.name}: {c}" for i, c in enumerate(self.communicators, 1)]
        if not self.communicators:
            lines.append("  (one rank: nothing to carry)")
        lines += [f"  -  {name}: not used, {reason}" for name, reason in self.refusals.items()]
        return "\n".join(lines)

    def close(self) -> None:
        """Closes the communicators and lets go of the process groups, whose threads end with them. Twice is fine."""
        if not self.closed:
            self.closed = True
            for communicator in self.communicators:
                communicator.close()
            self.communicators = self._chosen_of = ()
            self._chosen = {}
            self.context = dataclasses.replace(self.context, device_group=None, make_cpu_group=None)


def _is_communication_error(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and not isinstance(error, (NotImplementedError, torch.OutOfMemoryError))


_ROUTES: weakref.WeakValueDictionary[str, Route] = weakref.WeakValueDictionary()
_KNOWN_NAMES: set[str] = set()
_NEXT_INDEX: dict[str, int] = {}


def register_route(route: Route) -> None:
    """Makes `route` known by its group's name and by its key; the caller keeps it alive."""
    _ROUTES[route.context.name] = _ROUTES[route.context.key] = route
    _KNOWN_NAMES.add(route.context.name)


def unique_name(stem: str) -> str:
    """`tp:0`, then `tp:1`, …: a name that no group of this process had, so that a stale one is told from a new one."""
    index = _NEXT_INDEX.get(stem, 0)
    _NEXT_INDEX[stem] = index + 1
    return f"{stem}:{index}"


def find_route(key: str) -> Route:
    """The route of a group by name or key; GroupDestroyedError or GroupNotInitializedError if there is none."""
    route = _ROUTES.get(key)
    if route is not None:
        return route
    name = key.partition("@")[0]
    if name in _KNOWN_NAMES:
        raise GroupDestroyedError(f"group {name!r} was destroyed; take the group anew from its getter")
    known = sorted({route.context.name for route in _ROUTES.values()})
    raise GroupNotInitializedError(
        f"there is no group {name!r}; this process has {known}. Call initialize_model_parallel first"
    )
