"""The Python part of one group of the backend. The compiled class calls this part to create errors and to use gloo."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from device_communicators.base.bounded_store import LAST_WORD_S, BoundedStore, StoreSilentError
from device_communicators.base.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    ForkedError,
    GroupFailedError,
    InvalidArgumentError,
    PeerDiedError,
    UsageError,
    plain,
    restore,
)
from device_communicators.base.helper_threads import Call, HelperThread
from device_communicators.base.member import LOST, Timeout
from device_communicators.base.torch_internals import backend_options, gloo_backend, set_backend_timeout, set_store
from device_communicators.c10d.extension import for_torch
from device_communicators.c10d.world import World
from device_communicators.calls.recorder import Operation
from device_communicators.calls.work import TransferError
from device_communicators.cpu import native
from device_communicators.cpu.connections import Connections
from device_communicators.cpu.host_memory import HostMemory
from device_communicators.cpu.native_group import Members, NativeGroup
from device_communicators.cpu.streams import connect_streams
from device_communicators.cpu.transfers import Failed, failure_of, failure_text_of
from device_communicators.cpu.window import TIMED_OUT, group_of_one, window_failure
from device_communicators.liveness.health import NOTICE_S, UnmetError
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import (
    ADVICE,
    all_died,
    attributed,
    died,
    failed_earlier,
    is_of_transport,
    kind_of_failure,
    note_error,
)
from device_communicators.routing.waiting import Watched, abandon

_COLLECTIVE_INTERRUPTED = 5
"""Value of `kInterrupted` in csrc/group.h."""
_TIMEOUT, _COMM_ERROR, _REMOTE_ERROR = 1, 2, 3
"""Values of torch's ErrorType."""
_NOBODYS_TAG = (1 << 31) - 1


def as_torch_error(error: BaseException) -> BaseException:
    """Converts a CommunicationError to a subclass that also derives from torch's DistBackendError, which programs
    catch. Returns other errors unchanged.
    """
    if not isinstance(error, CommunicationError):
        return error
    made = _as_torch_error(error)
    note_error(made)
    return made


def _as_torch_error(error: CommunicationError) -> CommunicationError:
    made: CommunicationError = restore(_torch_kind(type(error)), error.args, error.__dict__, None)  # type: ignore[arg-type,assignment]
    made.__cause__ = error.__cause__
    return made


@cache
def _torch_kind(kind: type[CommunicationError]) -> type[CommunicationError]:
    def reduced(self: CommunicationError) -> tuple[Any, ...]:
        """Pickles the error as its base class: pickle can't find the subclass by module and name."""
        _, arguments = kind.__reduce__(self)
        return _restore_torch_error, (kind, *arguments[1:])  # type: ignore[index]

    names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": reduced}
    return type(kind.__name__, (kind, dist.DistBackendError), names)


def _restore_torch_error(*reduced: Any) -> CommunicationError:
    return _as_torch_error(restore(*reduced))  # type: ignore[arg-type]


class Group:
    """The Python state of one group. If a signal handler raised an exception during a call, the methods that return
    errors raise this exception instead.
    """

    def __init__(
        self,
        store: BoundedStore,
        members: Members,
        memory: HostMemory,
        world: World,
        is_worlds: bool,
        create: Callable[..., Any],
    ) -> None:
        """Connects the group's ranks, which must all do this. `is_worlds`: True if closing this group also closes
        `world`. `create`: the function `create_group`.
        """
        self._store = store
        self._members = members
        self._memory = memory
        self._world = world
        self._is_worlds = is_worlds
        self._create = create
        self._pid = os.getpid()
        self.has_crashed = False
        """True if this process ends by an uncaught exception."""
        self.context = GroupContext(
            members.name, members.ranks, members.rank, torch.device("cpu"), members.timeout,
            host_memory=memory, watcher=world.watcher, domain=world.domain, given=members.name,
        )  # fmt: skip
        self.signal_pipe = 0
        with contextlib.suppress(native.NativeUnavailableError):
            self.signal_pipe = native.load().signal_pipe
        self._gloo: Any = None
        self._alone: NativeGroup | None = None
        self._connections: Connections | None = None
        self.transfers = 0
        """Address of the transfers' C++ object, which the compiled backend deletes; 0 if gloo runs the transfers."""
        if memory.channels is not None:
            self.transfers = memory.channels.open_transfers() or 0
        elif memory.is_meshed:
            self.transfers, self._connections = connect_streams(memory, self._gather, world.watcher, world.domain.ranks)
        elif len(members.ranks) > 1:
            self._gloo = self.make_gloo()
            self._connect_gloo()
        self._first_failure: CommunicationError | None = None
        self.note_failure: Callable[[int], None] = lambda error_type: None
        """Reports a failure to the compiled backend, which sets this attribute, `shut_down` and `logged_calls`."""
        self.shut_down: Callable[[], None] = lambda: None
        self.logged_calls: Callable[[], list[tuple[Any, ...]]] = list
        world.watcher.on_death.append(self._note_death)

    @property
    def collectives(self) -> NativeGroup | None:
        """The object that runs the group's collectives. None if gloo runs them, because the compiled library is
        missing or only one rank of each host is connected.
        """
        memory = self._memory
        return memory.collectives if memory.in_one_segment or memory.is_meshed else None

    def operations(self) -> list[Operation]:
        """Returns the group's last calls, except calls over gloo."""
        return sorted(
            (
                Operation(
                    number,
                    method,
                    str(dtype or "").removeprefix("torch."),
                    shape,
                    began_s,
                    ended_s or None,
                    peer=peer if peer < self.context.size else -1,  # a window's call may name a wrong rank
                )
                for number, method, dtype, shape, began_s, ended_s, peer in self.logged_calls()
            ),
            key=lambda each: each.started_s,
        )

    def operations_under_way(self) -> list[Operation]:
        return [each for each in self.operations() if each.ended_s is None]

    def _note_death(self) -> None:
        if self.context.deaths():
            self.note_failure(_REMOTE_ERROR)
            if self._gloo is not None:
                HelperThread("gloo", self._end_waits_in_gloo).start()

    def _end_waits_in_gloo(self) -> None:
        time.sleep(NOTICE_S)
        dead = {death.rank for death in self.context.deaths()}
        peers = [rank for rank in range(self.context.size) if rank != self.context.rank]
        if self._gloo is not None:  # living peers first: they accept connections
            abandon(self._gloo, sorted(peers, key=lambda peer: self.context.ranks[peer] in dead), _NOBODYS_TAG)

    def leave(self) -> None:
        if os.getpid() != self._pid:
            return
        if self._note_death in self._world.watcher.on_death:
            self._world.watcher.on_death.remove(self._note_death)
        self._gloo = None
        connections, self._connections = self._connections, None
        if connections is not None:  # the compiled backend has released it
            connections.close()
        if self._alone is not None:
            self._alone.close()
        if self._memory.collectives is not None and not self.has_crashed:
            self._memory.collectives.leave()
        if self._is_worlds:
            self._world.close()

    def _gather(self, record: bytes) -> list[bytes]:
        return self.context.gather(record, "connect")

    def set_timeout(self, timeout: timedelta) -> None:
        self._members.timeout.set(timeout.total_seconds())
        if self._gloo is not None:
            set_backend_timeout(self._gloo, timeout)

    def suspend(self, is_busy: bool) -> None:
        """Frees the group's buffers until `resume`. Every rank calls this. `is_busy`: True if this rank has a running
        call. If a rank is busy, raises UsageError on all ranks.
        """
        self.context.agree_on("suspend", "a call under way" if is_busy else self._memory.unread())
        self._memory.suspend()

    def resume(self) -> None:
        self.context.agree_on("resume", self._memory.resume())

    def memory_stats(self) -> dict[str, int]:
        return self._memory.backed_bytes()

    def collective_error(self, status: int, method: str, elapsed_s: float, timeout_s: float) -> BaseException:
        """Returns the error of a failed collective. `status`: value of `Status` in csrc/group.h."""
        if status == _COLLECTIVE_INTERRUPTED:
            native.load().raise_interruption()
        collectives = self.collectives
        if collectives is None:
            return self._members.destroyed()
        self._members.timeout.set(timeout_s - Timeout.extra_s)
        return self._failed(collectives.failure(status, method, elapsed_s), method, elapsed_s)

    def window_error(self, status: int, method: str, rank: int, elapsed_s: float, timeout_s: float) -> BaseException:
        collectives = self._alone or self.collectives
        if collectives is None:
            return self._members.destroyed()
        found = window_failure(collectives, status, method, rank, elapsed_s, timeout_s)
        if status == TIMED_OUT:  # the group stays usable
            return as_torch_error(found)
        return self._failed(found, method, elapsed_s)

    def group_of_one(self) -> tuple[str, int]:
        """Returns a group of this rank alone, for one-sided calls (`c10d::Window`): the path from which C++ loads the
        library, and the group's number in the library.
        """
        if self._alone is None:
            self._alone = group_of_one(self.context)
        return str(self._alone.library.path), self._alone.number

    def failed(self, operation: str) -> BaseException:
        """Returns the error for a new call, `operation`, on a group that has failed or in which a rank has died."""
        first = self._first_failure
        if first is not None:
            error: CommunicationError = failed_earlier(self.context, first)
            error.__cause__ = first
            return as_torch_error(error)
        self._world.watcher.await_death_of(self.context.failure_ranks, 0)  # others may have died with it
        return self._failed(died(self.context, operation, time.monotonic()), operation, 0.0)

    def _failed(self, error: BaseException, operation: str, elapsed_s: float) -> BaseException:
        if isinstance(error, TransferError):
            return self._transport_error(error, operation, error.peer, elapsed_s, "between hosts")
        if not isinstance(error, CommunicationError):
            return error
        first, collectives = self._first_failure, self._memory.collectives
        started = time.monotonic() - elapsed_s
        if isinstance(error, PeerDiedError):
            error = all_died(self.context, operation, started, error)
            if first is not None and not error.suspect_ranks:  # this rank's own failure ended the call
                error = failed_earlier(self.context, first)
        elif collectives is not None and first is None:
            collectives.give_up(error)
        if not isinstance(error, GroupFailedError):
            error.set_elapsed(time.monotonic() - started)
        if first is None:
            self._first_failure = error
        if collectives is not None:
            collectives.doom()
        first = self._first_failure
        is_timeout = isinstance(first, CollectiveTimeoutError)
        self.note_failure(
            _REMOTE_ERROR if isinstance(first, PeerDiedError) else _TIMEOUT if is_timeout else _COMM_ERROR
        )
        return as_torch_error(error)

    def transfer_error(self, words: Sequence[int]) -> BaseException:
        failed = Failed(*words)
        if failed.is_interruption:
            native.load().raise_interruption()
        operation, elapsed_s = failed.operation, failed.elapsed_us / 1e6
        found = failure_of(self._members, failed, failure_text_of(native.load(), self.transfers))
        return self._failed(found, operation, elapsed_s)

    def gloo_error(self, text: str, operation: str, peer: int, elapsed_s: float) -> BaseException | None:
        said = RuntimeError(text)
        if text.startswith("ProcessGroupGloo::") or not is_of_transport(said):
            return None
        return self._transport_error(said, operation, peer, elapsed_s, "over gloo")

    def _transport_error(
        self, said: RuntimeError, operation: str, peer: int, elapsed_s: float, where: str
    ) -> BaseException:
        started = time.monotonic() - elapsed_s
        if self.context.deaths():  # `_end_waits_in_gloo` caused gloo's error
            return self._failed(died(self.context, operation, started), operation, elapsed_s)
        kind = kind_of_failure(str(said))
        error: CommunicationError = self.context.failure(
            kind,
            f"{operation} of {self.context} failed after {elapsed_s:.3f} s {where}: {plain(said)}. {LOST}; "
            f"{ADVICE[kind]}",
            operation,
            suspect_ranks=(self.context.ranks[peer],) if peer >= 0 else (),
            elapsed_s=elapsed_s,
            timeout_s=self.context.timeout_s,
        )
        if kind is not CollectiveTimeoutError:
            error = attributed(self.context, operation, started, error)
        return self._failed(error, operation, elapsed_s)

    def usage_error(self, text: str, is_forked: bool) -> BaseException:
        return (ForkedError if is_forked else UsageError)(f"{self._members}: {text}")

    def make_gloo(self) -> Any:
        """Returns the group's gloo backend. All ranks must call this, because the first call connects the ranks."""
        if self._gloo is not None:
            return self._gloo
        store = self._store.prefixed("gloo")
        started, members = time.monotonic(), self._members
        rank, size = members.rank, len(members.ranks)
        call = Call(lambda: make_gloo(store, rank, size, timedelta(seconds=members.timeout_s), self._world.address))
        # gloo's own deadline is the same, but its store operations have none.
        deadline = started + members.timeout_s + LAST_WORD_S
        if call.wait(deadline, lambda: bool(self.context.deaths())) or call.wait(time.monotonic() + NOTICE_S):
            return call.result()
        if self.context.deaths():
            raise as_torch_error(died(self.context, "new_group", started))
        silent = StoreSilentError(f"{store} did not let the ranks connect over gloo")
        ranks = self.context.failure_ranks
        raise as_torch_error(lost_store(self._store, silent, self._world, members, ranks, "new_group", started))

    def _connect_gloo(self) -> None:
        """Connects all ranks over gloo by a barrier.

        Otherwise gloo connects two ranks in their first transfer, which blocks without running signal handlers.
        """
        context, started = replace(self.context, make_cpu_group=lambda: self._gloo), time.monotonic()
        try:
            Watched(self._gloo.barrier(), context, "new_group").wait()
        except RuntimeError as error:
            if isinstance(error, CommunicationError):
                raise
            text = f"the ranks of {context} can't be connected over gloo: {plain(error)}"
            failure: CommunicationError = context.failure(
                kind_of_failure(str(error)), text, "new_group", started=started
            )
            raise attributed(context, "new_group", started, failure) from error

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Waits for all ranks. After rank 0's `timeout`, raises CollectiveTimeoutError, which names the first missing
        rank, or all missing ranks if `wait_all_ranks`. The group stays usable.
        """
        members, method, watcher = self._members, "monitored_barrier", self._world.watcher
        limit_s = timeout.total_seconds() if members.rank == 0 else members.timeout_s
        what, watched = f"{method} of {members}", self.context.failure_ranks
        try:
            watcher.gather(
                method, members.ranks, b"", limit_s, watched=watched, what=what, group=members, operation=method
            )
        except CommunicationError as error:
            if not isinstance(error.__cause__, UnmetError) or watcher.deaths_of(watched):
                raise as_torch_error(error) from error.__cause__
            missing = [members.ranks.index(rank) for rank in error.__cause__.verdict.ranks]
            suspects = missing if wait_all_ranks else missing[:1]
            text = f"Rank 0 timed out in monitoredBarrier after {timeout.total_seconds()} s"
            if members.rank:
                text = (
                    f"Rank {members.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                    "send/recv from rank 0"
                )
            who = f"Rank{'s' * wait_all_ranks} {', '.join(map(str, suspects))} failed to pass monitoredBarrier"
            text = f"{method} of {members}: {text}: {who} ({error.args[0]}). The group can be used further"
            global_ranks = [members.ranks[rank] for rank in suspects]
            failure = members.failure(type(error), text, method, suspect_ranks=global_ranks, elapsed_s=error.elapsed_s)
            raise as_torch_error(failure) from error

    def split(self, store: Any, ranks: list[int], timeout: timedelta, name: str) -> Any:
        which = "_".join(map(str, ranks))
        options = backend_options(
            dist.PrefixStore(f"split/{which}", store), ranks.index(self._members.rank), len(ranks), timeout,
            name or f"{self._members.name}/{which}",
        )  # fmt: skip
        options.global_ranks_in_group = [self._members.ranks[rank] for rank in ranks]
        return self._create(options)

    def merge(self, store: Any, rank: int, size: int, timeout: timedelta, name: str) -> Any:
        """Creates a group of `size` ranks that find each other in `store`. Each of these ranks calls this, with its new
        `rank`.
        """
        world = World(BoundedStore(store), range(size), "merge_remote_group", may_borrow=False)
        return self._create(backend_options(store, rank, size, timeout, name), world)

    def shrink(self, excluded: Sequence[int], timeout: timedelta, renumber: bool) -> Any:
        """Creates a group without the ranks `excluded` (of this group). Each rank of the new group must call this. A
        death in the old group doesn't fail the new group.

        `timeout`: of the new group's calls. `renumber`: True if the new group's ranks get the global ranks 0, 1, ….
        """
        members, watcher, what = self._members, self._world.watcher, "shrink_group"
        places = [rank for rank in range(len(members.ranks)) if rank not in excluded]
        if members.rank not in places or not set(excluded).issubset(range(len(members.ranks))):
            raise InvalidArgumentError(
                f"{what} of {members} got the excluded ranks {sorted(excluded)}; they must be ranks of the group, and "
                f"must not include this rank, {members.rank}"
            )
        ranks = [members.ranks[rank] for rank in places]
        meeting = watcher.store_of(ranks)
        if meeting is None:
            raise members.destroyed()
        store = BoundedStore(dist.PrefixStore(f"{what}/{members.name}/{places}", for_torch(meeting.raw)))
        try:
            watcher.gather(
                what, ranks, b"", timeout.total_seconds(), what=f"{what} of {members}", group=members, operation=what
            )
            numbers = list(range(len(ranks))) if renumber else ranks
            world = World(store, numbers, what, may_borrow=False)
            world.outlives_store = True
            name = f"{members.name}:shrunk"
            options = backend_options(store.raw, places.index(members.rank), len(ranks), timeout, name)
            options.global_ranks_in_group = [] if renumber else ranks
            made = self._create(options, world)
        except CommunicationError as error:
            raise as_torch_error(error) from error.__cause__
        if self._is_worlds:
            self._world.hand_over(world)
        # torch connects to the old group's store again, whose server may be dead.
        lasting = world.lasting_store(store, numbers) if len(ranks) > 1 else BoundedStore(dist.HashStore())
        set_store(members.name, lasting.prefixed("torch").raw)
        return made

    def __del__(self) -> None:
        if os.getpid() == self._pid:
            self.leave()
            self._memory.close()


def lost_store(
    store: BoundedStore,
    error: RuntimeError,
    world: World,
    members: Members,
    ranks: Collection[int],
    what: str,
    started: float,
) -> CommunicationError:
    """Returns the error for a group that couldn't be created because its store failed with `error`.

    `what`: the step that failed, for the error's text. `ranks`: ranks whose death may be the cause. `started`: start of
    the creation, by time.monotonic().
    """
    kind, why, suspects = world.watcher.explain_lost_store(store, error, ranks)
    elapsed_s = time.monotonic() - started
    text = (
        f"{what} of {members} failed after {elapsed_s:.3f} s: {why}. See the log of the process that serves the store"
    )
    failure: CommunicationError = members.failure(kind, text, "new_group", suspect_ranks=suspects, elapsed_s=elapsed_s)
    failure.__cause__ = error
    return failure


def make_gloo(store: BoundedStore, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    return gloo_backend(store, rank, size, timeout, _gloo_device(address))


def _gloo_device(address: str) -> Any:
    make: Callable[..., Any] = dist.ProcessGroupGloo.create_device
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    where = {"interface": interface} if interface else {"hostname": address}
    if not interface and not address:
        make, where = dist.ProcessGroupGloo.create_default_device, {}
    try:
        return make(**where, lazy_init=True)
    except TypeError:
        return make(**where)
