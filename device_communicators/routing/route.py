"""The route of one group: an ordered list of communicators, which carry its operations eagerly, compiled and captured.

`Route.run` is the one place through which an operation goes on its way: it picks, counts, and turns what a
communicator raises into this library's errors. It holds no membership logic and moves no byte itself.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from device_communicators.base import forks
from device_communicators.base.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    GroupDestroyedError,
    GroupFailedError,
    ParallelStateError,
    PeerDiedError,
    UnsupportedError,
    UsageError,
    plain,
)
from device_communicators.base.member import LOST
from device_communicators.calls.recorder import PAIRS, RECORDS, Operation
from device_communicators.calls.user_call import (
    METHODS,
    UserCall,
    began_s,
    begin_locally,
    begin_sending,
    call_of_arguments,
    called_as,
    has_sent,
    overlap_error,
    set_current_call,
    transfer_method,
)
from device_communicators.calls.work import TransferError
from device_communicators.liveness.stacks import call_site
from device_communicators.routing import observers
from device_communicators.routing.communicator import Communicator, GroupContext, Request, method_of
from device_communicators.routing.comparison import check_alike
from device_communicators.routing.failures import (
    ADVICE,
    all_died,
    attributed,
    died,
    failed_earlier,
    is_communication_error,
    is_of_transport,
    kind_of_failure,
)
from device_communicators.routing.reports import add_calls, explained, publish
from device_communicators.routing.started import Handle
from device_communicators.routing.states import waiting_for

if TYPE_CHECKING:
    from device_communicators.cpu.native_group import NativeGroup

_RECENT = 8
_MOST_CHOSEN = 4096

_Kind = tuple[str, torch.dtype | None, str, str | None]
"""A request without its size."""


@dataclass
class Traffic:
    """The traffic of one operation of a route: `bytes` are those of the calling rank's tensors."""

    calls: int = 0
    bytes: int = 0


class _Turn:
    """Makes a call this thread's, and the group's only one: ranks can't agree in which order threads come.

    A class, as generators take 3 µs more.
    """

    __slots__ = ("_before", "_call", "_entered", "_has_steps", "_holder", "_is_outermost", "_route")

    def __init__(self, route: Route, call: UserCall, has_steps: bool = False) -> None:
        """`has_steps`: whether collectives of this thread may begin within the call, as steps of it."""
        self._route = route
        self._call = call
        self._has_steps = has_steps
        self._entered: NativeGroup | None = None

    def __enter__(self) -> None:
        route, call, thread = self._route, self._call, threading.get_ident()
        self._is_outermost = route._turn.acquire(blocking=False)
        self._holder = route._holder
        if not self._is_outermost and self._holder != thread:
            raise overlap_error(call.method, str(route.context))
        self._before = set_current_call(call)
        if not self._has_steps:
            return
        route._holder = thread
        collectives = route.context.collectives
        if collectives is not None and not self._holder:
            try:
                collectives.enter(call.method)
            except BaseException:
                self.__exit__()
                raise
            self._entered = collectives

    def __exit__(self, *_: object) -> None:
        if self._entered is not None:
            self._entered.exit()
        self._route._holder = self._holder
        set_current_call(self._before)
        if self._is_outermost:
            self._route._turn.release()


class Route:
    """The communicators of one group in order of preference, and the table of those that were turned down."""

    def __init__(
        self,
        context: GroupContext,
        communicators: Sequence[Communicator],
        refusals: Mapping[str, str],
        paths: Sequence[str] = (),
    ) -> None:
        self.context = context
        self.refusals = refusals
        """Name of each communicator that the group doesn't have -> the reason."""
        self.paths = paths
        """Lines: the way to each communicator that it has, eagerly, compiled and captured."""
        self._on_cuda = context.device.type == "cuda"
        self._traffic: dict[str, Traffic] = {}
        self._chosen: dict[_Kind | tuple[_Kind, int], Communicator] = {}
        self._picks_by_size = False
        self._communicators: tuple[Communicator, ...] = ()
        self._serves_ops = False
        self._server: NativeGroup | None = None
        self._turn = threading.Lock()  # of the collective that is under way; never waited for
        self._holder = 0
        self.communicators = communicators
        self.sequence = 0
        """The number of the last operation that came through here; what went past it counts as well."""
        self._recorded: deque[Operation] = deque(maxlen=RECORDS)
        self._kept: list[Operation] = []  # of those that went past this route, when it was served last
        self.first_failure: CommunicationError | None = None
        self._messenger: Callable[[], Any] = lambda: None
        self.closed = False
        self._was_captured = False
        self.is_parents = False
        """True in a process that was forked from the one that made it; then it is `closed` too."""

    def attach_messenger(self, messenger: object) -> None:
        """Sets what carries the group's messages; it is not kept alive."""
        self._messenger = weakref.ref(messenger)

    @property
    def try_messenger(self) -> Any:
        """Returns the messenger, or None."""
        return self._messenger()

    @property
    def messenger(self) -> Any:
        """Returns what carries the group's messages, for the ops on lists of tensors."""
        messenger = self.try_messenger
        if messenger is None:
            raise GroupDestroyedError(f"{self.context} was destroyed; take the group anew from its getter")
        return messenger

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """Returns the communicators in order of preference. Assigned anew, they carry what comes from then on."""
        return self._communicators

    @communicators.setter
    def communicators(self, communicators: Sequence[Communicator]) -> None:
        served = self._serves_ops
        self.serve_ops(False)
        self._communicators = tuple(communicators)
        self._chosen = {}
        self._picks_by_size = any(each.picks_by_size for each in self._communicators)
        self.serve_ops(served)

    def serve_ops(self, on: bool) -> None:
        """Lets the registered ops go straight to the first communicator, past this route, or no longer."""
        # In debug mode each call is compared, and its caller noted; observers are told of each.
        on = on and not self.in_debug_mode and not observers.ON_OPERATION
        key, first = self.context.key, next(iter(self._communicators), None)
        if on and not self._serves_ops:
            self._server = None if first is None else first.op_server
            if self._server is not None:
                self._server.serve(key, self.sequence)
        elif self._server is not None and not on:
            server, self._server = self._server, None
            self._kept = server.operations(key)
            self.sequence = max([self.sequence, *(each.sequence for each in self._kept)])
            for name, counts in server.stop_serving(key).items():
                self.count(name, *counts)
        self._serves_ops = on

    @property
    def in_debug_mode(self) -> bool:
        """Returns True if all ranks compare their calls: PARALLEL_STATE_DEBUG on one of them."""
        memory = self.context.host_memory
        return memory is not None and memory.debug

    def run(
        self,
        operation: str,
        tensor: Tensor | None,
        *args: Any,
        reduce_op: str | None = None,
        part_of: str | None = None,
        method: str = "",
        as_list: bool = False,
    ) -> Any:
        """Calls `operation` of the first communicator that carries it; `args` are that method's.

        `method`: what the caller called, where that isn't `operation`. `as_list`: the first argument is a list of
        tensors, for the communicator's `run_list`.
        Raises GroupDestroyedError, GroupFailedError, UnsupportedError, UsageError while another collective of the group
        is under way, or the CommunicationError that happened.
        """
        call = None if operation in PAIRS else call_of_arguments(operation, tensor, args, reduce_op, method, -1)
        with nullcontext() if call is None else _Turn(self, call):
            started = time.monotonic()
            begin_sending()
            try:
                # A communicator may need its peers to tell whether it can: that, too, fails as the operation would.
                communicator, record = self._begin(operation, tensor, reduce_op, part_of, call, started)
                if call is None:
                    record.peer = args[-1]
                with waiting_for(self.context, record):
                    carry = partial(communicator.run_list, operation) if as_list else method_of(communicator, operation)
                    if observers.IN_PROFILER:
                        carry = observers.profiled(carry, self.context, operation, tensor)
                    with nullcontext() if call is None else communicator.turn(call.method):
                        result = carry(*args)
                    record.ended_s = time.monotonic()
                if observers.ON_OPERATION or observers.OF_PYTHON:
                    observers.notify_operation(self.context, record, tensor)
                return result
            except Exception as error:
                self._raise_failure(error, operation if call is None else call.method, started)

    @property
    def has_memory(self) -> bool:
        """Returns True if `allocate` may give memory."""
        return any(each.has_memory for each in self.communicators)

    def allocate(self, size: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Returns an uninitialised tensor in memory that a communicator has registered; None if none has any.

        Every rank of the group calls it, with as many bytes. Raises as `run`.
        """
        size_bytes = math.prod(size) * dtype.itemsize
        maker = next((each for each in self.communicators if each.has_memory), None)
        if maker is None or size_bytes == 0:
            return None
        call = call_of_arguments("empty", None, (), None, "", -1)
        with _Turn(self, call):
            started = time.monotonic()
            begin_sending()
            try:
                self.check_usable("empty")
                record = self.note("empty", None, call)
                if record.site:
                    check_alike(self.context, self.sequence, call, record.site)
                self.count("empty")
                with waiting_for(self.context, record):
                    made = maker.allocate(size_bytes)
                record.ended_s = time.monotonic()
            except Exception as error:
                self._raise_failure(error, "empty", started)
        if made is None:
            return None
        out, storage = torch.empty(0, dtype=dtype, device=made.device), made.untyped_storage()
        return out.set_(storage, 0, tuple(size))  # type: ignore[call-overload]  # strides may be left out

    def run_list(self, operation: str, tensors: Sequence[Tensor], *args: Any, part_of: str, method: str = "") -> None:
        """Runs `operation` (send, recv or broadcast_) of tensors: in one launch if one communicator carries them all.

        Every rank that is in it has tensors of the same dtypes and sizes, and so the same communicators.
        """
        if len(tensors) > 1 and len({id(self._carrier(operation, x, None)) for x in tensors}) == 1:
            self.run(operation, tensors[0], tensors, *args, part_of=part_of, method=method, as_list=True)
            self.count(part_of, 0, sum(x.nbytes for x in tensors[1:]))
            return
        for x in tensors:
            self.run(operation, x, x, *args, part_of=part_of, method=method)

    def start(
        self,
        operation: str,
        tensor: Tensor,
        *args: Any,
        reduce_op: str | None = None,
        part_of: str | None = None,
        method: str = "",
        dim: int = -1,
    ) -> Handle:
        """Starts an operation with an `i` (isend, iall_reduce_, …) of a contiguous `tensor`, and doesn't wait.

        Its bytes are counted as those of `part_of`, whose calls the caller counts. `dim`: along which ranks' tensors
        meet, where the arguments don't tell it.
        """
        call = None if operation in PAIRS else call_of_arguments(operation, tensor, args, reduce_op, method, dim)
        with nullcontext() if call is None else _Turn(self, call):
            started = time.monotonic()
            begin_sending()
            try:
                communicator, record = self._begin(operation, tensor, reduce_op, part_of, call, started)
                if call is None:
                    record.peer = args[-2]
                work = method_of(communicator, operation)(tensor, *args)
            except Exception as error:
                self._raise_failure(error, operation if call is None else call.method, started)
        return Handle(self, record, work, tensor)

    def operations_under_way(self) -> list[Operation]:
        """Returns those that came past this route and have not ended: a collective, transfers."""
        server, collectives = self._server, self.context.collectives
        if server is None or collectives is None:
            return []
        is_busy, has_transfers = collectives.is_busy, server.has_transfers(self.context.key)
        if not is_busy and not has_transfers:
            return []
        under_way = [each for each in server.operations(self.context.key) if each.ended_s is None]
        own = [each for each in under_way if each.name not in PAIRS][-1:] if is_busy else []
        return own + [each for each in under_way if has_transfers and each.name in PAIRS]

    def alone(self, call: UserCall) -> _Turn:
        """Keeps other threads from beginning a collective of the group: `with` it around one of several steps."""
        return _Turn(self, call, has_steps=True)

    @contextmanager
    def called_as(self, method: str) -> Iterator[None]:
        """Errors of this and other ranks name this thread's calls `method`, where that is of their class."""
        collectives = self.context.collectives
        with called_as(method):
            if collectives is not None:
                collectives.library.ps_call_as(METHODS[method])
            try:
                yield
            finally:
                if collectives is not None:
                    collectives.library.ps_call_as(0)

    def _begin(
        self,
        operation: str,
        tensor: Tensor | None,
        reduce_op: str | None,
        part_of: str | None,
        call: UserCall | None,
        started: float,
    ) -> tuple[Communicator, Operation]:
        self.check_usable(operation, started)
        if self._on_cuda and (tensor is None or tensor.is_cpu):
            self.check_recordable(operation)
        communicator = self._carrier(operation, tensor, reduce_op)
        if call is not None and self._serves_ops and communicator is not self._communicators[0]:
            collectives = self.context.collectives  # in which another thread may be by a call that came past this route
            if collectives is not None and collectives.is_busy and self._holder != threading.get_ident():
                raise overlap_error(call.method, str(self.context))
        record = self.note(operation, tensor, call)
        if record.site and call is not None and part_of is None:
            check_alike(self.context, self.sequence, call, record.site)
        self.count(part_of or operation, 0 if part_of else 1, 0 if tensor is None else tensor.nbytes)
        if communicator.tells_sending:
            begin_locally()
        return communicator, record

    def _carrier(self, operation: str, tensor: Tensor | None, reduce_op: str | None) -> Communicator:
        """Returns the communicator for an operation of a tensor."""
        kind: _Kind = (operation, None, "cpu", None)
        numel = 0
        if tensor is not None:
            kind, numel = (operation, tensor.dtype, tensor.device.type, reduce_op), tensor.numel()
        key = (kind, numel) if self._picks_by_size else kind
        communicator = self._chosen.get(key)
        if communicator is None:
            communicator = self.pick(Request(*kind[:3], numel, kind[3]))
            if len(self._chosen) >= _MOST_CHOSEN:  # sizes may come and go
                self._chosen.clear()
            self._chosen[key] = communicator
        return communicator

    def check_recordable(self, operation: str) -> None:
        """Raises UnsupportedError while this thread records a CUDA graph: the host does `operation`, and no replay."""
        if self._on_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"{operation} on {self.context} is done by the host and can't be recorded in a CUDA graph: a replay "
                "would not do it. Call it before or after the capture"
            )

    def note(
        self,
        operation: str,
        tensor: Tensor | None,
        call: UserCall | None = None,
        *,
        peer: int = -1,
        started_s: float | None = None,
    ) -> Operation:
        """Numbers and records an operation that begins, or has begun at `started_s`; `peer`: of a transfer."""
        if operation not in PAIRS:
            served = 0 if self._server is None else self._server.next_operation(self.context.key)
            self.sequence = served or self.sequence + 1
        record = Operation(
            self.sequence,
            operation,
            "" if tensor is None else str(tensor.dtype).removeprefix("torch."),
            () if tensor is None else tuple(tensor.shape),
            time.monotonic() if started_s is None else started_s,
            None,
            call_site() if self.in_debug_mode else "",
            transfer_method() if call is None else str(call),
            peer,
        )
        self._recorded.append(record)
        return record

    def operations(self) -> list[Operation]:
        """Returns the last operations, in order; one without an end is under way, or has failed."""
        others = self._kept if self._server is None else self._server.operations(self.context.key)
        return sorted([*self._recorded, *others], key=lambda each: each.sequence)[-RECORDS:]

    def count(self, name: str, calls: int = 1, size_bytes: int = 0) -> None:
        """Adds to the traffic of `name`."""
        traffic = self._traffic.get(name)
        if traffic is None:
            traffic = self._traffic[name] = Traffic()
        traffic.calls += calls
        traffic.bytes += size_bytes

    def traffic(self) -> dict[str, Traffic]:
        """Returns calls and bytes so far, by operation."""
        found = {name: Traffic(traffic.calls, traffic.bytes) for name, traffic in self._traffic.items()}
        if self._server is not None:
            for name, (calls, size_bytes) in self._server.traffic(self.context.key).items():
                total = found.setdefault(name, Traffic())
                total.calls += calls
                total.bytes += size_bytes
        return found

    def pick(self, request: Request) -> Communicator:
        """Returns the first communicator that carries `request`; UnsupportedError with every reason if none does."""
        for communicator in self.communicators:
            if communicator.refusal(request) is None:
                return communicator
        reasons = "; ".join(f"{c.name}: {c.refusal(request)}" for c in self.communicators)
        raise UnsupportedError(f"no communicator of {self.context} carries {request}: {reasons}")

    def check_usable(self, operation: str = "a call", started: float | None = None) -> None:
        """Raises GroupDestroyedError, ForkedError, GroupFailedError, or the PeerDiedError that nobody has met yet.

        `started`: when `operation` began, where that isn't now.
        """
        if self.closed:
            if self.is_parents:
                raise forks.error(str(self.context))
            raise GroupDestroyedError(
                f"{self.context} was destroyed; take the group anew from its getter, or initialise again"
            )
        if self.first_failure is not None:
            raise failed_earlier(self.context, self.first_failure) from self.first_failure
        if self.context.deaths():  # of whom no operation has met yet: none begins that may wait in vain
            if self.context.watcher is not None:
                self.context.watcher.await_death_of(self.context.failure_ranks, 0)  # others may be ending with it
            began = self._began(time.monotonic() if started is None else started)
            self._poison(died(self.context, operation, began))
            if self.first_failure is not None:
                raise self.first_failure

    def _raise_failure(self, error: Exception, operation: str, started: float) -> NoReturn:
        failure = self.failure_of(error, operation, started, sent=has_sent())
        if failure is error:
            raise error
        raise failure from error

    def _began(self, started: float) -> float:
        """Returns when this thread's call began: before `started` where it has waited past this route first."""
        collectives = self.context.collectives
        repeated_s = 0.0 if collectives is None else collectives.library.ps_repeated_since_s()
        return min(started, repeated_s or started, began_s() or started)

    def failure_of(
        self, error: Exception, operation: str, started: float, record: Operation | None = None, *, sent: bool = True
    ) -> Exception:
        """Returns the error to raise for `error`; a communication error poisons the group.

        `record`: of the operation that failed, where it isn't the last that began. `sent`: whether others may know of
        it; else it is this rank's affair, and the group goes on.
        """
        if error is self.first_failure:
            return error
        started = self._began(started)
        record = record or (self._recorded[-1] if self._recorded else None)
        sequence = self.sequence if record is None else record.sequence
        if isinstance(error, ParallelStateError) or not is_communication_error(error):
            if isinstance(error, PeerDiedError):
                error = all_died(self.context, operation, started, error)
            elif isinstance(error, CollectiveTimeoutError) and self._spans_hosts:
                error = self._explained(error, record)
            elif isinstance(error, CollectiveMismatchError) and self._spans_hosts and record is not None:
                publish(self.context, record)  # ranks that wait for this one in another call fail later
            if isinstance(error, CommunicationError):
                self._add_calls(error, record)
                if error is not self.first_failure and not isinstance(error, GroupFailedError):
                    error.set_elapsed(time.monotonic() - started)
                self._poison(error)
            return error
        text = str(error)
        if not sent:
            return UsageError(
                f"{operation} of {self.context} failed on this rank before anything was sent, by "
                f"{type(error).__name__}: {text.splitlines()[0] if text else ''}. The group can be used further; mend "
                "the cause, and make the call again where the other ranks wait for it"
            )
        kind = kind_of_failure(text)
        failure: CommunicationError = self.context.failure(
            kind,
            f"{operation} number {sequence} of {self.context} failed after {time.monotonic() - started:.3f} s "
            f"(timeout {self.context.timeout_s:g} s): {plain(error)}. {LOST}; {ADVICE[kind]}",
            operation,
            started=started,
            sequence=sequence,
            suspect_ranks=(self.context.ranks[error.peer],) if isinstance(error, TransferError) else (),
        )
        if not is_of_transport(error):  # nobody else is to blame
            failure.set_elapsed(time.monotonic() - started)
            self._poison(failure)
            return failure
        if kind is not CollectiveTimeoutError:
            failure = attributed(self.context, operation, started, failure)
        if not failure.suspect_ranks:
            failure = self._explained(failure, record)
        self._add_calls(failure, record)
        failure.set_elapsed(time.monotonic() - started)
        self._poison(failure)
        return failure

    def _add_calls(self, failure: CommunicationError, record: Operation | None) -> None:
        """Adds what ranks are at to an error of a wait that no end of a rank explains, or of calls that differ."""
        if not isinstance(failure, PeerDiedError) and self.first_failure is None and not self.context.deaths():
            add_calls(self.context, record, failure)

    @property
    def has_failed(self) -> bool:
        """Returns True if the group is beyond use: an operation failed, or a rank of its failure domain has ended."""
        return bool(self.context.deaths()) or self.first_failure is not None

    @property
    def _spans_hosts(self) -> bool:
        memory = self.context.host_memory
        return memory is not None and len(memory.domains) > 1

    def _explained(self, failure: CommunicationError, last: Operation | None) -> CommunicationError:
        """Returns `failure` of an operation, with what the other ranks say of where they are."""
        if last is None or last.name in PAIRS or self.first_failure is not None:
            return failure
        if self.context.deaths():
            return failure
        passed = {each.sequence: each.call for each in self.operations() if each.name not in PAIRS}
        return explained(self.context, last, failure, passed.get(last.sequence - 1, ""))

    def _poison(self, failure: CommunicationError) -> None:
        if self.first_failure is None and not self.closed:
            self.first_failure = failure
            self.serve_ops(False)
            if failure.sequence is None:
                failure.sequence = self.sequence
            failure.recent = tuple(map(str, self.operations()[-_RECENT:]))
            if self.context.collectives is not None and not isinstance(failure, PeerDiedError):
                self.context.collectives.give_up(failure)
            for communicator in self.communicators:
                communicator.abandon()
            observers.notify_failure(self.context, failure)

    def set_up(self, *, divisible: bool = False) -> None:
        """Makes now what the communicators' first calls would make. Every rank of the group calls it."""
        self.check_usable()
        for communicator in self._carriers_of_the_device():
            communicator.set_up(divisible=divisible)

    def divide(self, part: Route | None, color: int) -> None:
        """Divides each communicator of this route, with the one of its kind in the part's: see Communicator.divide."""
        parts = {} if part is None else {communicator.name: communicator for communicator in part.communicators}
        for communicator in self.communicators:
            communicator.divide(parts.get(communicator.name), color)

    def capture(self, peers: Sequence[int] = ()) -> ExitStack:
        """Prepares a context in which a CUDA graph may record the group's operations, and transfers with `peers`.

        Every rank of the group calls it; a rank's peers are ranks in the group, each of which names it as well.
        """
        self.check_usable()
        self._was_captured = True
        # In one order of all pairs, so that no rank waits for one that waits for another.
        prepared = self._carriers_of_the_device()
        for peer in sorted(set(peers) - {self.context.rank}, key=lambda peer: sorted((peer, self.context.rank))):
            for communicator in prepared:
                communicator.connect(peer)
        stack = ExitStack()
        for communicator in prepared:
            stack.enter_context(communicator.capture())
        return stack

    def _carriers_of_the_device(self) -> Sequence[Communicator]:
        """Returns the communicators up to the first one that lets nothing of the device past."""
        last = next((at for at, each in enumerate(self.communicators) if each.carries_the_device), None)
        return self.communicators if last is None else self.communicators[: last + 1]

    def explain(self) -> str:
        """Returns which communicators carry the group's operations, in order, and why the others don't."""
        lines = [str(self.context)]
        lines += [f"  {i}. {c.name}: {c}" for i, c in enumerate(self.communicators, 1)]
        if not self.communicators:
            lines.append("  (one rank: nothing to carry)")
        lines += [f"  -  {name}: not used, {reason}" for name, reason in self.refusals.items()]
        lines += [f"     {line}" for line in self.paths]
        return "\n".join(lines)

    def close(self) -> None:
        """Closes the communicators and lets go of the process groups, which are the coordinator's. Twice is fine."""
        if not self.closed:
            self.closed = True
            with ExitStack() as stack:  # whatever one of them raises, the others are done; it runs from its end
                stack.callback(self._let_go)
                for communicator in reversed(self.communicators):
                    stack.callback(communicator.close)
                if self._was_captured:  # NCCL waits for graphs, and an exception within a capture leaves one in a cycle
                    stack.callback(gc.collect)
                stack.callback(setattr, self, "communicators", ())
                self.serve_ops(False)

    def _let_go(self) -> None:
        self.context = dataclasses.replace(self.context, device_group=None, make_cpu_group=None, host_memory=None)
        # Nor does who keeps a destroyed group keep its failure: a thread that is still on its way out of a call with it
        # has frames that can't be cleared yet.
        failure, self.first_failure = self.first_failure, None
        _let_go(failure)


def _let_go(failure: BaseException | None) -> None:
    """Clears an error's frames, which keep the variables of all its calls: process groups, and the store."""
    seen: set[int] = set()  # an error that is raised from itself is its own cause
    while failure is not None and id(failure) not in seen:
        seen.add(id(failure))
        traceback.clear_frames(failure.__traceback__)
        failure = failure.__cause__ or failure.__context__
