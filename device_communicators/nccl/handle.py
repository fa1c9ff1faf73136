"""One ncclComm_t: agreed on, made with a deadline, proven, split, used by one thread at a time, ended or aborted; and
the windows that are registered with it.

Ranks first gather a record of each: its version, and where NCCL meets.

NCCL makes a communicator in the background where it is *non-blocking*, which is the only way to have a deadline, to
hear of a rank's end and to give up. But a non-blocking communicator starts a thread for every later call, too, and a
capture doesn't like what another thread launches (nccl's src/group.cc, ncclGroupEndInternal). So ranks meet in a
non-blocking one, and work in a blocking one that is split from it: a split goes by its parent's mode until it is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from device_communicators.base.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    ConfigMismatchError,
    PeerDiedError,
)
from device_communicators.base.helper_threads import HelperThread
from device_communicators.cuda.nccl_library import (
    COLL_SYMMETRIC,
    IN_PROGRESS,
    INVALID_USAGE,
    NO_COLOR,
    REMOTE_ERROR,
    SUCCESS,
    TIMEOUT,
    UNHANDLED_CUDA_ERROR,
    NcclLibrary,
    UniqueId,
    version_text,
)
from device_communicators.cuda.streams import enter
from device_communicators.nccl.deadlines import GOODBYE_S
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import attributed, died
from device_communicators.routing.waiting import WatchedByThread

_KINDS: dict[int, type[CommunicationError]] = {REMOTE_ERROR: PeerDiedError, TIMEOUT: CollectiveTimeoutError}
_ADVICE = {
    UNHANDLED_CUDA_ERROR: "a kernel before it may have failed: run with CUDA_LAUNCH_BLOCKING=1",
    INVALID_USAGE: "do two ranks use one GPU? NCCL from 2.30.3 on takes them with NCCL_MULTI_RANK_GPU_ENABLE=1",
}
logger = logging.getLogger("parallel_state")

_STEP_S = 0.002
_END_S = 1.0


class Deadline:
    """Bounds a wait by a timeout, and ends it early when a rank of the group dies."""

    def __init__(self, context: GroupContext, operation: str) -> None:
        self.context = context
        self.operation = operation
        self.started = time.monotonic()

    def step(self) -> None:
        """Sleeps a little. Raises PeerDiedError or CollectiveTimeoutError where waiting on is no use."""
        if self.context.deaths():
            raise died(self.context, self.operation, self.started)
        elapsed_s = time.monotonic() - self.started
        if elapsed_s > self.context.timeout_s:
            raise self.context.failure(
                CollectiveTimeoutError,
                f"{self.operation} of {self.context} was not done within {self.context.timeout_s:g} s. The group can't "
                "be used further; look at the ranks that are not in this call (their logs, NCCL_DEBUG=INFO), or raise "
                "the timeout",
                self.operation,
                elapsed_s=elapsed_s,
                timeout_s=self.context.timeout_s,
            )
        time.sleep(min(_STEP_S, 0.1 * elapsed_s + 1e-5))


class Handle:
    """Holds one communicator of NCCL, of all ranks of the group or of some."""

    def __init__(self, library: NcclLibrary, context: GroupContext) -> None:
        self.library = library
        self.context = context
        self.comm: int | None = None
        """ncclComm_t; None once it is no more."""
        self.lock = threading.RLock()
        self.ended_in_order = False
        """True once NCCL has ended it, with its windows, in order: the memory of the windows may be freed."""
        self._windows: list[int] = []
        self._kept: list[object] = []  # what NCCL may read or write while it works in the background

    @classmethod
    def meet(cls, library: NcclLibrary, context: GroupContext, unique_id: UniqueId, size: int, rank: int) -> Handle:
        """Makes a non-blocking communicator of the `size` ranks that call it with one id, for the current device.

        Raises PeerDiedError, CollectiveTimeoutError or CommunicationError; then nothing of it is left.
        """
        made = cls(library, context)
        config = library.config(blocking=0, commName=context.name.encode(), **context.nccl_config)
        made._make(
            Deadline(context, "ncclCommInitRankConfig"),
            lambda place: library.ncclCommInitRankConfig(place, size, unique_id, rank, ctypes.byref(config)),
            config,
        )
        return made

    def split(self, context: GroupContext, color: int, key: int) -> Handle:
        """Makes a blocking communicator of the ranks of one color, ordered by key; every rank of this one calls it.

        It shares nothing with this one. What it is made for goes by `context`. Raises as `meet`.
        """
        made = Handle(self.library, context)
        name = context.name.encode()
        self._divide(
            made, color, key, self.library.config(blocking=1, splitShare=0, commName=name, **context.nccl_config)
        )
        return made

    def join_split(self) -> None:
        """Takes part in a `split` without being in any part."""
        self._divide(Handle(self.library, self.context), NO_COLOR, 0, self.library.config())

    def _divide(self, made: Handle, color: int, key: int, config: ctypes.Structure) -> None:
        with self.lock:
            parent = self._usable()
            try:
                made._make(
                    Deadline(made.context, "ncclCommSplit"),
                    lambda place: self.library.ncclCommSplit(parent, color, key, place, ctypes.byref(config)),
                    config,
                    parent,
                    stands_aside=color == NO_COLOR,
                )
            except BaseException:
                self.abort()  # which also ends what is left of the split
                raise

    def _make(
        self,
        deadline: Deadline,
        begin: Callable[[Any], int],
        config: ctypes.Structure,
        parent: int | None = None,
        *,
        stands_aside: bool = False,
    ) -> None:
        place = ctypes.c_void_p()
        self._kept += [place, config]
        result = begin(ctypes.byref(place))
        try:
            if result not in (SUCCESS, IN_PROGRESS):
                raise self.error(deadline.operation, result, deadline.started)
            if parent is not None:  # a split's state is its parent's until the child is there
                self._wait(parent, deadline)
                if stands_aside:
                    return
            while place.value is None:
                deadline.step()
            self.comm = place.value
            self._wait(self.comm, deadline)
        except BaseException:
            if place.value is not None and parent is None:
                self.comm = place.value
                self.abort()
            raise

    def _wait(self, comm: int, deadline: Deadline) -> None:
        """Waits while NCCL works in the background."""
        while (state := self._state(comm)) == IN_PROGRESS:
            deadline.step()
        if state != SUCCESS:
            raise self.error(deadline.operation, state, deadline.started)

    def _state(self, comm: int) -> int:
        state = ctypes.c_int()
        result = self.library.ncclCommGetAsyncError(comm, ctypes.byref(state))
        return state.value if result == SUCCESS else result

    def state(self) -> int:
        """Returns SUCCESS, IN_PROGRESS, or what failed in the background. From any thread, never waits."""
        if not self.lock.acquire(blocking=False):
            return IN_PROGRESS
        try:
            return SUCCESS if self.comm is None else self._state(self.comm)
        finally:
            self.lock.release()

    def _usable(self) -> int:
        if self.comm is None:
            raise self.context.failure(
                CommunicationError,
                f"NCCL's communicator of {self.context} was closed or aborted; look for the first failure",
                None,
            )
        return self.comm

    def check(self, operation: str, result: int) -> None:
        """Raises the error of a call's result, once NCCL has done with it. The caller has the lock."""
        if result == SUCCESS:
            return
        self.check_started(operation, result, self._usable())

    def check_started(self, operation: str, result: int, comm: int) -> None:
        """Does what `check` does, for calls that go on in the background: all of them under NCCL_COMM_BLOCKING=0."""
        deadline = Deadline(self.context, operation)
        if result not in (SUCCESS, IN_PROGRESS):
            raise self.error(operation, result, deadline.started)
        self._wait(comm, deadline)

    def register(self, address: int, size_bytes: int) -> str | None:
        """Registers memory for symmetric kernels. Every rank of the communicator calls it with as many bytes.

        Returns the reason if NCCL refuses; other ranks then may wait in their call until its deadline. The windows are
        deregistered at the communicator's end.
        """
        window = ctypes.c_void_p()
        self._kept.append(window)
        with self.lock:
            result = self.library.ncclCommWindowRegister(
                self._usable(), address, size_bytes, ctypes.byref(window), COLL_SYMMETRIC
            )
            if result == IN_PROGRESS:
                self.check("ncclCommWindowRegister", result)
            elif result != SUCCESS:
                return f"ncclCommWindowRegister failed: {self.library.text_of(result)}"
        if window.value is None:
            return "ncclCommWindowRegister gave no window: is NCCL_CUMEM_ENABLE or NCCL_LOCAL_REGISTER 0?"
        self._windows.append(window.value)
        return None

    @contextlib.contextmanager
    def group(self, operation: str) -> Iterator[None]:
        """Makes the calls within it one launch. The caller has the lock."""
        self.check(operation, self.library.ncclGroupStart())
        try:
            yield
        except BaseException:
            self.library.ncclGroupEnd()  # NCCL counts them per thread
            raise
        self.check(operation, self.library.ncclGroupEnd())

    def error(self, operation: str, result: int, started: float) -> CommunicationError:
        kind = _KINDS.get(result, CommunicationError)
        text = self.library.text_of(result)
        advice = _ADVICE.get(result, "look for the first rank that failed, and at what NCCL_DEBUG=WARN prints")
        failure = self.context.failure(
            kind,
            f"{operation} of {self.context} failed in NCCL {self.library.version}: {text}. The group can't be used "
            f"further; {advice}",
            operation,
            started=started,
        )
        return attributed(self.context, operation, started, failure)

    def abort(self) -> None:
        """Ends it and whatever runs in it, on the device too, whose results are then worthless. Twice is fine."""
        end_all([self], in_order=False)

    def close(self) -> None:
        """Ends it in order, once the device has done with it. Twice is fine."""
        end_all([self], in_order=True)

    def begin_end(self, in_order: bool) -> threading.Thread | None:
        """Starts a thread that ends it; None where there is nothing to end. From any thread.

        A thread that is inside of a call after `_END_S` is aborted there: NCCL's calls then return.
        """
        if self.comm is None:
            return None

        def run() -> None:
            has_lock = self.lock.acquire(timeout=_END_S)
            comm, self.comm = self.comm, None
            if has_lock:
                self.lock.release()
            if comm is None:
                return
            enter(self.context.device)
            if in_order and has_lock:
                self._finish(comm)
            else:
                self.library.ncclCommAbort(comm)

        thread = HelperThread("nccl-end", run)
        thread.start()
        return thread

    def _finish(self, comm: int) -> None:
        try:
            for window in self._windows:
                result = self.library.ncclCommWindowDeregister(comm, window)
                self.check_started("ncclCommWindowDeregister", result, comm)
            self.check_started("ncclCommFinalize", self.library.ncclCommFinalize(comm), comm)
        except CommunicationError:
            self.library.ncclCommAbort(comm)
        else:
            self.library.ncclCommDestroy(comm)
            self.ended_in_order = True


def end_all(handles: Sequence[Handle], *, in_order: bool) -> None:
    """Ends communicators, all at once, with an end to the wait for them: NCCL doesn't let go of one that a CUDA graph
    still uses, and the kernels of another one may be what everyone waits for."""
    threads = [(handle, thread) for handle in handles if (thread := handle.begin_end(in_order)) is not None]
    deadline = time.monotonic() + GOODBYE_S
    for handle, thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            logger.warning(
                "NCCL didn't %s its communicator of %s within %g s and is left to it; CUDA graphs that use a group "
                "must be gone before it is destroyed", "end" if in_order else "abort", handle.context, GOODBYE_S,
            )  # fmt: skip


class SetUpRecord(ctypes.Structure):
    """Holds what a rank tells the others before NCCL meets."""

    version: int
    unique_id: UniqueId
    _fields_: ClassVar = [("version", ctypes.c_uint64), ("unique_id", UniqueId)]


def make_record(library: NcclLibrary, context: GroupContext, *, makes_id: bool) -> SetUpRecord:
    """Returns this rank's record; `makes_id` on the rank that opens the place where NCCL meets."""
    unique_id = UniqueId()
    if makes_id:
        result = library.ncclGetUniqueId(ctypes.byref(unique_id))
        if result != SUCCESS:
            raise context.failure(
                CommunicationError,
                f"NCCL can't open a place for the ranks of {context} to meet: {library.text_of(result)}. Is the "
                "interface right (NCCL_SOCKET_IFNAME)?",
                "ncclGetUniqueId",
            )
    return SetUpRecord(library.version, unique_id)


def gather_records(context: GroupContext, mine: SetUpRecord) -> list[SetUpRecord]:
    """Returns every rank's record; every rank calls it. Raises ConfigMismatchError where versions differ."""
    everyones = context.gather(bytes(mine), "nccl set-up")
    records = [SetUpRecord.from_buffer_copy(each) for each in everyones]
    _compare(context, context.ranks, records)
    return records


def exchange_records(context: GroupContext, mine: SetUpRecord, peer: int, tag: int) -> SetUpRecord:
    """Returns the peer's record, which calls it as well. Raises ConfigMismatchError where versions differ."""
    record = SetUpRecord()
    x, out = (torch.frombuffer(each, dtype=torch.uint8) for each in (mine, record))
    sending = WatchedByThread(context.cpu_group.send([x], peer, tag), context, "nccl set-up")
    WatchedByThread(context.cpu_group.recv([out], peer, tag), context, "nccl set-up").wait()
    sending.wait()
    _compare(context, (context.global_rank, context.ranks[peer]), (mine, record))
    return record


def _compare(context: GroupContext, ranks: Sequence[int], records: Sequence[SetUpRecord]) -> None:
    for rank, each in zip(ranks, records, strict=True):
        if each.version != records[0].version:
            raise ConfigMismatchError(
                f"all ranks of {context} must have one version of NCCL, but global rank {ranks[0]} has "
                f"{version_text(records[0].version)} and global rank {rank} {version_text(each.version)}; give all "
                "of them the same torch, or one library by PARALLEL_STATE_NCCL_LIBRARY"
            )


def expect_sum(context: GroupContext, total: float, started: float, advice: str) -> None:
    """Raises CommunicationError unless the first all-reduce, of a one from each rank, gave the group's size."""
    if total != context.size:
        raise context.failure(
            CommunicationError,
            f"the first all-reduce of {context} over NCCL gave {total:g}, not {context.size}. The group can't be used; "
            f"NCCL_DEBUG=INFO tells which way the bytes went: {advice}",
            "all_reduce",
            elapsed_s=time.monotonic() - started,
        )
