"""Runs each call of a group on its first communicator that supports the call."""

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
from typing import Any, NoReturn

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
from device_communicators.calls.reductions import TREE_SUM
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
from device_communicators.cpu.types import NativeGroup
from device_communicators.liveness.stacks import call_site
from device_communicators.routing import observers
from device_communicators.routing.communicator import Communicator, GroupContext, Request, method_of
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
from device_communicators.routing.reports import add_calls, check_alike, explained, publish
from device_communicators.routing.started import Handle
from device_communicators.routing.waits import STARTED, waiting_for

_RECENT = 8
_MOST_CHOSEN = 4096

_Kind = tuple[str, torch.dtype | None, str, str | None]


@dataclass
class Traffic:
    calls: int = 0
    bytes: int = 0


class _CallScope:
    """Makes the group's collectives in other threads raise UsageError during a collective: ranks can't agree on an
    order of threads. `has_steps`: the collective makes other collectives.
    """

    __slots__ = ("_before", "_call", "_entered", "_has_steps", "_is_outermost", "_outer_owner", "_route")

    def __init__(self, route: Route, call: UserCall, has_steps: bool = False) -> None:
        self._route = route
        self._call = call
        self._has_steps = has_steps
        self._entered: NativeGroup | None = None

    def __enter__(self) -> None:
        route, call, thread = self._route, self._call, threading.get_ident()
        self._is_outermost = route._turn.acquire(blocking=False)
        self._outer_owner = route._owner_thread
        if not self._is_outermost and self._outer_owner != thread:
            raise overlap_error(call.method, str(route.context))
        self._before = set_current_call(call)
        if not self._has_steps:
            return
        route._owner_thread = thread
        collectives = route.context.collectives
        if collectives is not None and not self._outer_owner:
            try:
                collectives.enter(call.method)
            except BaseException:
                self.__exit__()
                raise
            self._entered = collectives

    def __exit__(self, *_: object) -> None:
        if self._entered is not None:
            self._entered.exit()
        self._route._owner_thread = self._outer_owner
        set_current_call(self._before)
        if self._is_outermost:
            self._route._turn.release()


class Route:
    def __init__(
        self,
        context: GroupContext,
        communicators: Sequence[Communicator],
        refusals: Mapping[str, str],
        paths: Sequence[str] = (),
    ) -> None:
        self.context = context
        self.key, self.ranked_key = context.key, context.ranked_key
        self.refusals = refusals
        """Maps the name of each unused communicator to the reason."""
        self.paths = paths
        self._on_cuda = context.device.type == "cuda"
        self._traffic: dict[str, Traffic] = {}
        self._chosen: dict[_Kind | tuple[_Kind, int], Communicator] = {}
        self._picks_by_size = False
        self._communicators: tuple[Communicator, ...] = ()
        self._serves_ops = False
        self._server: NativeGroup | None = None
        self._turn = threading.Lock()  # held during a collective; never waited for
        self._owner_thread = 0
        self.communicators = communicators
        self.sequence = 0
        """Number of the last operation that ran in Python. Operations in C++ take numbers from the same sequence."""
        self._recorded: deque[Operation] = deque(maxlen=RECORDS)
        self._native_records: list[Operation] = []  # from before native ops were disabled
        self.first_failure: CommunicationError | None = None
        self._messenger: Callable[[], Any] = lambda: None
        self.closed = self.suspended = False
        self._was_captured = False
        self.is_parents = False
        """True in a forked child if the parent created the route."""

    def attach_messenger(self, messenger: object) -> None:
        self._messenger = weakref.ref(messenger)

    @property
    def try_messenger(self) -> Any:
        return self._messenger()

    @property
    def messenger(self) -> Any:
        messenger = self.try_messenger
        if messenger is None:
            raise GroupDestroyedError(f"{self.context} was destroyed; get or create the group again")
        return messenger

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """The group's communicators, in order of preference. A new list affects the calls that begin afterwards."""
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
        """If `on`, makes compiled torch ops call the first communicator's C++ code directly; else, this route."""
        # Debug mode and hooks need each call to run in this class.
        on = on and not self.in_debug_mode and not observers.ON_OPERATION
        key, first = self.context.key, next(iter(self._communicators), None)
        if on and not self._serves_ops:
            self._server = None if first is None else first.op_server
            if self._server is not None:
                self._server.serve(key, self.sequence)
        elif self._server is not None and not on:
            server, self._server = self._server, None
            self._native_records = server.operations(key)
            self.sequence = max([self.sequence, *(each.sequence for each in self._native_records)])
            for name, counts in server.stop_serving(key).items():
                self.count(name, *counts)
        self._serves_ops = on

    @property
    def in_debug_mode(self) -> bool:
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
        """Calls the method `operation` with `args` on the first communicator that supports it for `tensor`. Returns the
        method's result.

        `method`: the name that the user called, if different. `part_of`: the operation under which the bytes are
        counted. `as_list`: the first argument is a list of tensors, which the communicator's `run_list` gets.
        """
        call = None if operation in PAIRS else call_of_arguments(operation, tensor, args, reduce_op, method, -1)
        with nullcontext() if call is None else _CallScope(self, call):
            started = time.monotonic()
            begin_sending()
            try:
                # `refusal` may communicate, and fail.
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
                if observers.ON_OPERATION or observers.PYTHON_ONLY:
                    observers.notify_operation(self.context, record, tensor)
                return result
            except Exception as error:
                self._raise_failure(error, operation if call is None else call.method, started)

    @property
    def has_memory(self) -> bool:
        return any(each.has_memory for each in self.communicators)

    def allocate(self, size: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Returns a tensor of shape `size` in memory that peers can access, or None if there is no such memory. Every
        rank calls this.
        """
        size_bytes = math.prod(size) * dtype.itemsize
        maker = next((each for each in self.communicators if each.has_memory), None)
        if maker is None or size_bytes == 0:
            return None
        call = call_of_arguments("empty", None, (), None, "", -1)
        with _CallScope(self, call):
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
        return out.set_(storage, 0, tuple(size))  # type: ignore[call-overload]  # strides are optional

    def run_list(self, operation: str, tensors: Sequence[Tensor], *args: Any, part_of: str, method: str = "") -> None:
        """Runs `operation` for each tensor, in one kernel launch if one communicator supports all of them. All ranks
        must pass the same dtypes and sizes. `part_of`, `method`: as in `run`.
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
        """Starts an operation. Returns its handle. `method`: as in `run`. If `part_of`, another operation under which
        the bytes are counted, is given, the caller must call `count(part_of)`. `dim`: the call's dim, if `args` contain
        none.
        """
        call = None if operation in PAIRS else call_of_arguments(operation, tensor, args, reduce_op, method, dim)
        with nullcontext() if call is None else _CallScope(self, call):
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
        server, collectives = self._server, self.context.collectives
        if server is None or collectives is None:
            return []
        is_busy, has_transfers = collectives.is_busy, server.has_transfers(self.context.key)
        if not is_busy and not has_transfers:
            return []
        under_way = [each for each in server.operations(self.context.key) if each.ended_s is None]
        own = [each for each in under_way if each.name not in PAIRS][-1:] if is_busy else []
        return own + [each for each in under_way if has_transfers and each.name in PAIRS]

    def alone(self, call: UserCall) -> _CallScope:
        return _CallScope(self, call, has_steps=True)

    @contextmanager
    def called_as(self, method: str) -> Iterator[None]:
        """In the with-block, errors name `method` as the user's call. All ranks must use this."""
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
            collectives = self.context.collectives  # another thread may be running a native op
            if collectives is not None and collectives.is_busy and self._owner_thread != threading.get_ident():
                raise overlap_error(call.method, str(self.context))
        record = self.note(operation, tensor, call, started_s=self._began(started))
        if record.site and call is not None and part_of is None:
            check_alike(self.context, self.sequence, call, record.site)
        self.count(part_of or operation, 0 if part_of else 1, 0 if tensor is None else tensor.nbytes)
        if communicator.tells_sending:
            begin_locally()
        return communicator, record

    def _carrier(self, operation: str, tensor: Tensor | None, reduce_op: str | None) -> Communicator:
        kind: _Kind = (operation, None, "cpu", None)
        numel = 0
        if tensor is not None:
            kind, numel = (operation, tensor.dtype, tensor.device.type, reduce_op), tensor.numel()
        key = (kind, numel) if self._picks_by_size else kind
        communicator = self._chosen.get(key)
        if communicator is None:
            communicator = self.pick(Request(*kind[:3], numel, kind[3]))
            if len(self._chosen) >= _MOST_CHOSEN:  # a program may use ever new sizes
                self._chosen.clear()
            self._chosen[key] = communicator
        return communicator

    def check_recordable(self, operation: str) -> None:
        if self._on_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"{operation} on {self.context} can't be captured in a CUDA graph, because it runs on the CPU and a "
                "replay would not repeat it. Call it before or after the capture"
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
            0 if call is None else call.key,
        )
        self._recorded.append(record)
        return record

    def operations(self) -> list[Operation]:
        """Returns records of the group's last operations. An operation without an end is running or has failed."""
        others = self._native_records if self._server is None else self._server.operations(self.context.key)
        return sorted([*self._recorded, *others], key=lambda each: each.sequence)[-RECORDS:]

    def count(self, name: str, calls: int = 1, size_bytes: int = 0) -> None:
        traffic = self._traffic.get(name)
        if traffic is None:
            traffic = self._traffic[name] = Traffic()
        traffic.calls += calls
        traffic.bytes += size_bytes

    def traffic(self) -> dict[str, Traffic]:
        found = {name: Traffic(traffic.calls, traffic.bytes) for name, traffic in self._traffic.items()}
        if self._server is not None:
            for name, (calls, size_bytes) in self._server.traffic(self.context.key).items():
                total = found.setdefault(name, Traffic())
                total.calls += calls
                total.bytes += size_bytes
        return found

    def pick(self, request: Request) -> Communicator:
        for communicator in self.communicators:
            if _refusal(communicator, request) is None:
                return communicator
        reasons = "; ".join(f"{c.name}: {_refusal(c, request)}" for c in self.communicators)
        raise UnsupportedError(f"no communicator of {self.context} supports {request}: {reasons}")

    def check_usable(self, operation: str = "a call", started: float | None = None) -> None:
        """Raises if the group was destroyed, has failed, or belongs to the parent process, or if one of its ranks has
        died.
        """
        if self.closed:
            if self.is_parents:
                raise forks.error(str(self.context))
            raise GroupDestroyedError(
                f"{self.context} was destroyed; get or create the group again, or initialise again"
            )
        if self.first_failure is not None:
            raise failed_earlier(self.context, self.first_failure) from self.first_failure
        if self.suspended and operation not in ("suspend", "resume"):
            raise UsageError(
                f"{operation} on {self.context} failed: the group is suspended; call resume() on every rank first"
            )
        if self.context.deaths():  # an operation that began now could wait until its deadline
            if self.context.watcher is not None:
                self.context.watcher.await_death_of(self.context.failure_ranks, 0)  # and ranks that die with it
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
        collectives = self.context.collectives
        repeated_s = 0.0 if collectives is None else collectives.library.ps_repeated_since_s()
        return min(started, repeated_s or started, began_s() or started)

    def failure_of(
        self, error: Exception, operation: str, started: float, record: Operation | None = None, *, sent: bool = True
    ) -> Exception:
        """Returns the error to raise instead of `error`, with the cause if known. A communication error makes the group
        unusable, unless nothing was sent (`sent` is False).

        `operation`, `started`: the user's call and its monotonic start time. `record` describes the failed operation,
        by default the last.
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
                publish(self.context, record)  # for peers that wait for this rank in another call and fail later
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
                f"{type(error).__name__}: {text.splitlines()[0] if text else ''}. The group stays usable; remove the "
                "cause, and repeat the call if other ranks wait for it"
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
        if not is_of_transport(error):  # no other rank caused it
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
        if not isinstance(failure, PeerDiedError) and self.first_failure is None and not self.context.deaths():
            add_calls(self.context, record, failure)

    @property
    def has_failed(self) -> bool:
        return bool(self.context.deaths()) or self.first_failure is not None

    @property
    def _spans_hosts(self) -> bool:
        memory = self.context.host_memory
        return memory is not None and len(memory.domains) > 1

    def _explained(self, failure: CommunicationError, last: Operation | None) -> CommunicationError:
        if last is None or last.name in PAIRS or self.first_failure is not None or self.context.deaths():
            return failure
        passed = {each.sequence: each for each in self.operations() if each.name not in PAIRS}
        return explained(self.context, last, failure, passed.get(last.sequence - 1))

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
        """Creates the connections that calls and, if `divisible`, `divide` need. Every rank calls this."""
        self.check_usable()
        for communicator in self._carriers_of_the_device():
            communicator.set_up(divisible=divisible)

    def suspend(self) -> None:
        """Frees the group's memory until `resume`. Every rank calls this. If any rank is in a call, all ranks raise
        UsageError, and the group remains usable.
        """
        self.check_usable("suspend")
        if self.suspended or self.context.size == 1 or self.context.simulated:
            return
        self._set_suspended(True)
        memory, carriers = self.context.host_memory, self._carriers_of_the_device()
        try:
            self.context.agree_on("suspend", self._under_way())
            for each in carriers:
                each.suspend()
        except Exception:
            for each in carriers:
                each.resume()
            self._set_suspended(False)
            raise
        if memory is not None:
            memory.suspend()

    def resume(self) -> None:
        """Reverses `suspend`. Every rank calls this. Does nothing if the group isn't suspended."""
        self.check_usable("resume")
        if self.suspended:
            memory = self.context.host_memory
            self.context.agree_on("resume", "" if memory is None else memory.resume())
            for each in self._carriers_of_the_device():
                each.resume()
            self._set_suspended(False)

    def _set_suspended(self, suspended: bool) -> None:
        self.suspended = suspended
        self.serve_ops(not suspended)

    def _under_way(self) -> str:
        collectives, memory = self.context.collectives, self.context.host_memory
        if self._turn.locked() or (collectives is not None and collectives.is_busy):
            return "a collective of another thread"
        begun = [each.call for each in self.operations() if each.ended_s is None and each.name in STARTED]
        return f"{begun[-1]}, for whose handle nobody has waited" if begun else memory.unread() if memory else ""

    def divide(self, part: Route | None, color: int) -> None:
        parts = {} if part is None else {communicator.name: communicator for communicator in part.communicators}
        for communicator in self.communicators:
            communicator.divide(parts.get(communicator.name), color)

    def capture(self, peers: Sequence[int] = ()) -> ExitStack:
        """Returns a context in which a CUDA graph can capture calls, including transfers with the group's ranks
        `peers`. Every rank calls this; each peer must pass this rank.
        """
        self.check_usable()
        self._was_captured = True
        # All ranks connect their pairs in the same order, which avoids a deadlock.
        prepared = self._carriers_of_the_device()
        for peer in sorted(set(peers) - {self.context.rank}, key=lambda peer: sorted((peer, self.context.rank))):
            for communicator in prepared:
                communicator.connect(peer)
        stack = ExitStack()
        for communicator in prepared:
            stack.enter_context(communicator.capture())
        return stack

    def _carriers_of_the_device(self) -> Sequence[Communicator]:
        last = next((at for at, each in enumerate(self.communicators) if each.carries_the_device), None)
        return self.communicators if last is None else self.communicators[: last + 1]

    def explain(self) -> str:
        lines = [str(self.context)]
        lines += [f"  {i}. {c.name}: {c}" for i, c in enumerate(self.communicators, 1)]
        if not self.communicators:
            lines.append("  (one rank: no communication)")
        lines += [f"  -  {name}: not used, {reason}" for name, reason in self.refusals.items()]
        lines += [f"     {line}" for line in self.paths]
        return "\n".join(lines)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            with ExitStack() as stack:
                stack.callback(self._drop_references)
                for communicator in reversed(self.communicators):
                    stack.callback(communicator.close)
                if self._was_captured:  # NCCL waits for graphs; one of a failed capture is in a cycle
                    stack.callback(gc.collect)
                stack.callback(setattr, self, "communicators", ())
                self.serve_ops(False)

    def _drop_references(self) -> None:
        self.context = dataclasses.replace(self.context, device_group=None, make_cpu_group=None, host_memory=None)
        # Tracebacks keep process groups and the store alive.
        failure: BaseException | None = self.first_failure
        self.first_failure = None
        seen: set[int] = set()  # an error can be its own cause
        while failure is not None and id(failure) not in seen:
            seen.add(id(failure))
            traceback.clear_frames(failure.__traceback__)
            failure = failure.__cause__ or failure.__context__


def _refusal(communicator: Communicator, request: Request) -> str | None:
    if request.reduce_op == TREE_SUM and not communicator.adds_in_tree_order:
        return "it adds in another order; order='tree' needs CPU tensors over shared memory or this library's TCP"
    return communicator.refusal(request)
