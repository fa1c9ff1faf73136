"""Defines `Handle`: one ncclComm_t with its registered windows of memory.

Only *non-blocking* communicators allow a deadline and an abort during set-up. But on such a communicator, each later
call starts a thread, which a CUDA graph capture forbids (nccl's src/group.cc, ncclGroupEndInternal). Therefore ranks
create a non-blocking communicator and split a blocking communicator from it.
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
from device_communicators.nccl.deadlines import GOODBYE_S, not_done
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import attributed, died
from device_communicators.routing.waiting import WatchedByThread

_KINDS: dict[int, type[CommunicationError]] = {REMOTE_ERROR: PeerDiedError, TIMEOUT: CollectiveTimeoutError}
_ADVICE = {
    UNHANDLED_CUDA_ERROR: "an earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1",
    INVALID_USAGE: "do two ranks use one GPU? NCCL 2.30.3 and later supports it with NCCL_MULTI_RANK_GPU_ENABLE=1",
}
logger = logging.getLogger("parallel_state")

_STEP_S = 0.002
_END_S = 1.0


class Deadline:
    def __init__(self, context: GroupContext, operation: str) -> None:
        self.context = context
        self.operation = operation
        self.started = time.monotonic()

    def step(self) -> None:
        """Sleeps for at most 2 ms. Raises PeerDiedError if a rank of the group has died, and CollectiveTimeoutError
        after the deadline.
        """
        if self.context.deaths():
            raise died(self.context, self.operation, self.started)
        elapsed_s = time.monotonic() - self.started
        if elapsed_s > self.context.timeout_s:
            raise not_done(self.context, self.operation, self.started)
        time.sleep(min(_STEP_S, 0.1 * elapsed_s + 1e-5))


class Handle:
    def __init__(self, library: NcclLibrary, context: GroupContext) -> None:
        self.library = library
        self.context = context
        self.comm: int | None = None
        self.lock = threading.RLock()
        self.ended_in_order = False
        """True if the communicator was closed without an abort. The memory of its windows can then be freed."""
        self._windows: list[int] = []
        self._kept: list[object] = []  # NCCL may access these in the background

    @classmethod
    def meet(cls, library: NcclLibrary, context: GroupContext, unique_id: UniqueId, size: int, rank: int) -> Handle:
        """Creates a non-blocking NCCL communicator of `size` ranks on the current device. All ranks must call this with
        the same id. Raises CommunicationError.
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
        """Splits this communicator into one blocking communicator for each color, and returns this rank's. Every rank
        of this communicator calls `split` or `join_split`. `color` and `key` are as in MPI_Comm_split.

        `context`: describes the new group. If the split fails, aborts this communicator and raises CommunicationError.
        """
        made, name = Handle(self.library, context), context.name.encode()
        config = self.library.config(blocking=1, splitShare=0, commName=name, **context.nccl_config)
        self._divide(made, color, key, config)
        return made

    def join_split(self) -> None:
        """Takes part in the other ranks' `split` without getting a new communicator."""
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
                self.abort()  # also ends an unfinished split
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
            if parent is not None:  # the parent has the state of a split until the child exists
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
        while (state := self._state(comm)) == IN_PROGRESS:
            deadline.step()
        if state != SUCCESS:
            raise self.error(deadline.operation, state, deadline.started)

    def _state(self, comm: int) -> int:
        state = ctypes.c_int()
        result = self.library.ncclCommGetAsyncError(comm, ctypes.byref(state))
        return state.value if result == SUCCESS else result

    def state(self) -> int:
        """Returns the communicator's ncclResult_t, or IN_PROGRESS if another thread uses it. Never blocks."""
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
                f"the NCCL communicator of {self.context} was closed or aborted; see the log for the first failure",
                None,
            )
        return self.comm

    def check(self, operation: str, result: int) -> None:
        """Waits until an NCCL call that returned the ncclResult_t `result` is complete. Raises the call's error. The
        caller must hold the lock.
        """
        if result != SUCCESS:
            self.check_started(operation, result, self._usable())

    def check_started(self, operation: str, result: int, comm: int) -> None:
        """Waits until an NCCL call on `comm` that returned the ncclResult_t `result` is complete. Raises the call's
        error. With NCCL_COMM_BLOCKING=0, calls return before they are complete.
        """
        deadline = Deadline(self.context, operation)
        if result not in (SUCCESS, IN_PROGRESS):
            raise self.error(operation, result, deadline.started)
        self._wait(comm, deadline)

    def register(self, address: int, size_bytes: int) -> str | None:
        """Registers memory with NCCL. Every rank calls this with the same size. Returns None, or the reason if NCCL
        refuses.

        If NCCL refuses on one rank, other ranks can block until their deadline.
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
        """Returns a context that combines NCCL calls into one launch. The caller must hold the lock."""
        self.check(operation, self.library.ncclGroupStart())
        try:
            yield
        except BaseException:
            self.library.ncclGroupEnd()  # NCCL counts open groups per thread
            raise
        self.check(operation, self.library.ncclGroupEnd())

    def error(self, operation: str, result: int, started: float) -> CommunicationError:
        kind = _KINDS.get(result, CommunicationError)
        text = self.library.text_of(result)
        advice = _ADVICE.get(result, "find the first rank that failed, or run with NCCL_DEBUG=WARN")
        failure = self.context.failure(
            kind,
            f"{operation} of {self.context} failed in NCCL {self.library.version}: {text}. This group is unusable now; "
            f"{advice}",
            operation,
            started=started,
        )
        return attributed(self.context, operation, started, failure)

    def abort(self) -> None:
        """Aborts the communicator's kernels, whose results are then invalid, and frees the communicator. Idempotent."""
        end_all([self], in_order=False)

    def close(self) -> None:
        """Closes the communicator. The device must have finished its calls. Idempotent."""
        end_all([self], in_order=True)

    def begin_end(self, in_order: bool) -> threading.Thread | None:
        """Starts and returns a thread that closes the communicator; returns None if it is closed. The thread aborts the
        communicator instead if `in_order` is False, or if another thread holds the lock for 1 s.
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
    """Closes the communicators in parallel, because the end of one can depend on kernels of another. Aborts them
    instead if `in_order` is False.

    Waits at most 10 s, because NCCL doesn't release a communicator that a CUDA graph still uses.
    """
    threads = [(handle, thread) for handle in handles if (thread := handle.begin_end(in_order)) is not None]
    deadline = time.monotonic() + GOODBYE_S
    for handle, thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            logger.warning(
                "NCCL didn't %s its communicator of %s within %g s; it continues in the background. Delete CUDA graphs "
                "that use a group before destroying the group",
                "end" if in_order else "abort", handle.context, GOODBYE_S,
            )  # fmt: skip


class SetUpRecord(ctypes.Structure):
    version: int
    unique_id: UniqueId
    _fields_: ClassVar = [("version", ctypes.c_uint64), ("unique_id", UniqueId)]


def make_record(library: NcclLibrary, context: GroupContext, *, makes_id: bool) -> SetUpRecord:
    unique_id = UniqueId()
    if makes_id:
        result = library.ncclGetUniqueId(ctypes.byref(unique_id))
        if result != SUCCESS:
            raise context.failure(
                CommunicationError,
                f"NCCL can't listen for the other ranks of {context} (ncclGetUniqueId: {library.text_of(result)}). "
                "Check that NCCL_SOCKET_IFNAME names an interface that is up",
                "ncclGetUniqueId",
            )
    return SetUpRecord(library.version, unique_id)


def gather_records(context: GroupContext, mine: SetUpRecord) -> list[SetUpRecord]:
    """All-gathers the ranks' set-up records. Every rank calls this. Raises ConfigMismatchError if NCCL versions
    differ.
    """
    records = [SetUpRecord.from_buffer_copy(each) for each in context.gather(bytes(mine), "nccl set-up")]
    _compare(context, context.ranks, records)
    return records


def exchange_records(context: GroupContext, mine: SetUpRecord, peer: int, tag: int) -> SetUpRecord:
    """Exchanges set-up records with the group's rank `peer`, which must call this, too. Raises ConfigMismatchError if
    NCCL versions differ.
    """
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
                f"all ranks of {context} must have the same version of NCCL, but global rank {ranks[0]} has "
                f"{version_text(records[0].version)} and global rank {rank} has {version_text(each.version)}; install "
                "the same torch everywhere, or set PARALLEL_STATE_NCCL_LIBRARY to the same library"
            )


def expect_sum(context: GroupContext, total: float, started: float, advice: str) -> None:
    if total != context.size:
        raise context.failure(
            CommunicationError,
            f"the first all-reduce of {context} over NCCL returned {total:g} instead of {context.size}. This group is "
            f"unusable. NCCL_DEBUG=INFO logs the transports in use; {advice}",
            "all_reduce",
            elapsed_s=time.monotonic() - started,
        )
