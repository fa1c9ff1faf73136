"""Creates torch process groups from rank lists. Equal requests share a group, which its last user destroys.

Only the group's members call torch to create a group. Exception: in a world that is bound to a device, all ranks
together split the world's NCCL communicator into, say, all tensor-parallel groups.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from device_communicators.base import limits, settings, torch_internals
from device_communicators.base.bounded_store import BoundedStore
from device_communicators.base.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    GroupDestroyedError,
    format_ranks,
    plain,
)
from device_communicators.base.helper_threads import Call
from device_communicators.liveness.health import NOTICE_S, Watcher, kind_of_deaths
from device_communicators.routing.waiting import abandon
from parallel_state.process_groups.agreement import Agreement, digest
from parallel_state.process_groups.options import GroupOptions

_NOBODYS_TAG = (1 << 31) - 1
_DESCRIPTORS = 32
_POLL_S = 0.2

RankLists = Sequence[Sequence[int]]
T = TypeVar("T")


_Key = tuple[tuple[int, ...], GroupOptions, int, str]
"""Identifies a group: ranks, options, number, and name of the failure domain.

The number is 0 if the members created the group, 1 if all ranks did, and 2 or more for unshared groups.
"""


@dataclass(frozen=True)
class Acquired:
    """A process group that the pool lent, with its keys in the pool. The borrower passes this to `release` once."""

    process_group: Any
    keys: tuple[_Key, ...]


class AbandonedError(RuntimeError): ...


def run_watched(
    call: Callable[[Callable[[], bool]], T],
    watcher: Watcher,
    ranks: Sequence[int],
    deadline: float,
    has_failed: Callable[[], bool] = lambda: False,
) -> T:
    """Runs `call(is_abandoned)` in a thread, because torch can't be interrupted, and returns its result.

    Raises AbandonedError if one of `ranks` exits, `has_failed()` returns True, or the deadline passes. `call` then
    continues in its thread, and must undo its work once `is_abandoned()` returns True.
    """
    abandoned, polled_at = threading.Event(), time.monotonic()

    def must_end() -> bool:
        nonlocal polled_at
        failure = False
        if time.monotonic() - polled_at > _POLL_S:
            polled_at, failure = time.monotonic(), has_failed()
        return failure or bool(watcher.deaths_of(ranks))

    running = Call(lambda: call(abandoned.is_set))
    if not running.wait(deadline, must_end) and not running.wait(time.monotonic() + NOTICE_S):
        abandoned.set()
        late = time.monotonic() >= deadline + NOTICE_S
        raise AbandonedError("the start's deadline passed" if late else "a rank exited or failed during the start")
    return running.result()


class LazyProcessGroup:
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._value: Any = None
        self._lock = threading.RLock()
        self.made = False

    def __call__(self) -> Any:
        with self._lock:
            if not self.made:
                self._value = self._make()
                self.made = True
            return self._value


class ProcessGroupPool:
    def __init__(
        self,
        timeout_s: float,
        *,
        token: str = "",
        alone_backend: str | None = None,
        watcher: Watcher | None = None,
        joined: bool = False,
    ) -> None:
        """`timeout_s`: the world's timeout. `token`: part of the groups' names, to separate worlds on one store.
        `alone_backend`: the backend of a world of one rank without torch's default group. `joined`: True if the
        program, not this library, created torch's default group.
        """
        self.world_size = 1 if alone_backend else dist.get_world_size()
        self.rank = 0 if alone_backend else dist.get_rank()
        self.timeout_s = timeout_s
        self.default_backend = alone_backend or str(dist.get_backend())
        self._default_made: Any = None
        self.prefix = f"parallel_state{token}"
        self.default_options = GroupOptions(self.default_backend, timeout_s)
        default: _Key = (tuple(range(self.world_size)), self.default_options, False, "")
        self.watcher = watcher or Watcher()
        self.agreement = Agreement(self.prefix, self.rank, self.watcher, alone=torch_internals.is_fake())
        self.address = ""
        self.neighbours: tuple[int, ...] = ()
        """Masks of the CPU cores of each rank on this host."""
        self._groups: dict[_Key, Any] = {} if alone_backend else {default: dist.group.WORLD}
        self._users: Counter[_Key] = Counter({default: 1})  # the pool must not destroy the default group
        self._channels: Counter[tuple[int, ...]] = Counter()
        self._unshared: Counter[_Key] = Counter()
        self._borrowed: set[_Key] = {default} if joined else set()
        self._failed: set[_Key] = set()
        self._alone: dict[GroupOptions, Any] = {}
        self._division: tuple[int, ...] = ()
        self._closed = False
        self._lock = threading.RLock()
        """Never held while waiting for other ranks."""
        self._creation_locks: dict[_Key | None, threading.Lock] = {}
        """One lock for each group; under the key None, one for all groups that must be created one by one."""

    @contextlib.contextmanager
    def dividing(self, ranks: Sequence[int]) -> Iterator[None]:
        """In the block, makes creating a group fail if one of `ranks` dies, even a rank outside of the group.

        Otherwise rank A could wait for a live rank B, which has given up because rank C died.
        """
        before, self._division = self._division, tuple(ranks)
        try:
            yield
        finally:
            self._division = before

    def watched_with(self, ranks: Sequence[int]) -> Sequence[int]:
        return self._division or ranks

    def acquire(
        self,
        ranks: Sequence[int],
        options: GroupOptions,
        *,
        division: Callable[[], RankLists] | None = None,
        near: Sequence[Acquired] = (),
        root: str = "",
        unshared: bool = False,
    ) -> Acquired:
        """Creates the process group of `ranks` (global, ascending, including this one), or returns an existing one.
        Every member must call this. All ranks must acquire their groups in the same order.

        - `division`: a function that returns the rank lists of this group and its siblings, which divide the world. If
          given, every rank of the world must call `acquire`.
        - `near`: groups that the caller already holds. If one of them has the same ranks, options and `root`, returns
          that group.
        - `root`: name of the group's failure domain, the ranks that fail together. Domains don't share groups.
        - `unshared`: creates a group that no other caller shares, so that another thread can use it.
        """
        if self._closed:
            raise GroupDestroyedError("the world of this group was destroyed; initialise again to create groups")
        wanted = (tuple(ranks), options)
        same = (key for acquired in near for key in acquired.keys if key[:2] == wanted and key[3] == root)
        own: _Key = next(same, (*wanted, False, root))
        if unshared:
            with self._lock:
                self._unshared[own] += 1
                own = (*wanted, 1 + self._unshared[own], root)
        keys, splits = [own], False
        if division is not None and self.divides(options):
            keys, splits = [(tuple(each), options, len(each) < self.world_size, root) for each in division()], True
        keys = [key for key in keys if len(key[0]) > 1]
        mine = next((key for key in keys if self.rank in key[0]), None)
        # `new_group_of_members` temporarily unbinds a bound device: threads then take turns.
        alone = not splits and torch_internals.bound_device() is None
        with self._lock:
            creating = self._creation_locks.setdefault(own if alone else None, threading.Lock())
        with creating:
            with self._lock:
                missing = [key for key in keys if key not in self._groups]
                if not missing:
                    return self._acquired(keys, mine)
            if splits:
                self._split_world(missing)
            else:
                self._groups[own] = self._new_group_of_members(own)
            with self._lock:
                return self._acquired(keys, mine)

    def _acquired(self, keys: Sequence[_Key], mine: _Key | None) -> Acquired:
        self._users.update(keys)
        return Acquired(None if mine is None else self._groups[mine], tuple(keys))

    def next_channel(self, ranks: Sequence[int]) -> int:
        """Returns a number from which message tags are made, unique among groups of these ranks. The members must call
        this in the same order.
        """
        with self._lock:
            self._channels[tuple(ranks)] += 1
            return self._channels[tuple(ranks)] - 1

    def divides(self, options: GroupOptions) -> bool:
        """True if groups with `options` are created by splitting the world's communicator."""
        return options.is_nccl and torch_internals.bound_device() is not None

    def _split_world(self, keys: Sequence[_Key]) -> None:
        torch_internals.name_ranks(dist.group.WORLD)
        made = dist.split_group(
            parent_pg=dist.group.WORLD,
            split_ranks=[list(key[0]) for key in keys],
            timeout=timedelta(seconds=keys[0][1].timeout_s),
            pg_options=keys[0][1].for_backend(),
        )
        self._groups.update((key, made if self.rank in key[0] else None) for key in keys)

    def _new_group_of_members(self, key: _Key) -> Any:
        """Creates the process group. Each attempt uses a new name, because the store keeps a failed attempt's
        addresses.
        """
        ranks, options, *_ = key
        what = f"the {options.backend} group"
        started = time.monotonic()
        start_timeout_s = settings.START_TIMEOUT_S.get()
        timeout_s = min(options.timeout_s, start_timeout_s)
        connecting = options.connecting(start_timeout_s)
        connects = "gloo" in str(options.backend)
        if options.backend == "fake":
            name = f"{self.prefix}/{digest((key, secrets.token_hex(8)))}"
        else:
            # gloo aborts the process if it has no descriptor to accept a connection.
            lacking = limits.descriptor_shortage(_DESCRIPTORS + 3 * len(ranks)) if connects else ""
            name = self.agreement.meet(f"{what} ({digest(key)})", ranks, timeout_s, self.watched_with(ranks), lacking)
            if connects:
                self.agreement.forget_addresses(name, ranks)

        def make(is_abandoned: Callable[[], bool]) -> Any:
            from device_communicators.c10d.extension import for_torch

            served = self.watcher.store_of(ranks)
            store = None if served is None else BoundedStore(for_torch(served.raw))
            group = torch_internals.new_group_of_members(
                name, ranks, str(options.backend), connecting.timeout_s, connecting.for_backend(), store
            )
            if connecting != options:
                torch_internals.set_timeout(group, options.timeout_s)
            if is_abandoned():
                _destroy(group)
            return group

        def has_failed() -> bool:
            is_late = time.monotonic() > started + timeout_s
            return self.agreement.failure(name) is not None or (is_late and self.watcher.is_silent(min(ranks)))

        try:
            if options.meets:
                deadline, watched = time.monotonic() + start_timeout_s, self.watched_with(ranks)
                return run_watched(make, self.watcher, watched, deadline, has_failed)
            return make(lambda: False)
        except BaseException as error:
            if not isinstance(error, AbandonedError):
                self.agreement.fail(name, ranks, f"{type(error).__name__}: {plain(error)}")
            if not isinstance(error, RuntimeError) or isinstance(error, CommunicationError):
                raise
            raise self._not_made(error, what, name, ranks, started) from error

    def _not_made(
        self, error: RuntimeError, what: str, name: str, ranks: Sequence[int], started: float
    ) -> CommunicationError:
        limit_s = settings.START_TIMEOUT_S.get()
        elapsed_s = time.monotonic() - started
        deaths = self.watcher.await_death_of(self.watched_with(ranks))
        kind, reasons = kind_of_deaths(deaths, CommunicationError), {death.rank: death.reason for death in deaths}
        failure, server = self.agreement.failure(name), min(ranks)
        if not reasons and failure is not None and failure[0] != self.rank:
            reasons = {failure[0]: f"could not ({failure[1]})"}
        if reasons:
            why = "; ".join(f"global rank {rank} {reason}" for rank, reason in reasons.items())
        elif self.watcher.is_silent(server):
            held = self.watcher.conditions([server]).get(server, "")
            why = f"global rank {server}, which serves the group's store, does not answer{held and f'; it is {held}'}"
            kind, reasons = CollectiveTimeoutError, {server: why}
        elif isinstance(error, AbandonedError):
            why = f"they did not connect within {limit_s:g} s"
        else:
            why = plain(error)
            if any(os.strerror(number) in why for number in (errno.EAGAIN, errno.ENOMEM)):
                why += f"; {limits.describe_address_space()}"  # a new thread needs address space
        return kind(
            f"rank {self.rank} could not create {what} of global ranks {format_ranks(ranks)}: {why}. See that rank's "
            "log, and check the network between the hosts; all of the group's ranks may try again. For a slow network, "
            f"raise {settings.START_TIMEOUT_S.name}",
            operation="new_group",
            rank=self.rank,
            suspect_ranks=list(reasons),
            elapsed_s=elapsed_s,
            timeout_s=limit_s,
        )

    def adopt(self, ranks: Sequence[int], options: GroupOptions, process_group: Any, root: str = "") -> Acquired:
        """Registers the caller's process group for `ranks` (global). The caller still owns it. Every member must call
        this. `root`: name of the failure domain.
        """
        key: _Key = (tuple(ranks), options, False, root)
        if len(ranks) == 1:
            return Acquired(None, ())
        with self._lock:
            if key not in self._groups:
                self._groups[key] = process_group
                self._borrowed.add(key)
            self._users[key] += 1
            return Acquired(self._groups[key], (key,))

    def is_programs(self, acquired: Acquired, *, with_default: bool) -> bool:
        """Returns True if the program, not this library, created the process group.

        `with_default`: False excludes torch's default group.
        """
        own = self._borrowed.intersection(acquired.keys)
        return any(with_default or self._groups[key] is not dist.group.WORLD for key in own)

    def release(self, acquired: Acquired, *, failed: bool = False) -> None:
        """Gives back a group; the last user's call destroys it. Ranks that acquired a group together must also release
        it together.

        `failed`: True if calls of the group may never complete.
        """
        with self._lock:
            if failed:
                self._failed.update(acquired.keys)
            with contextlib.ExitStack() as stack:
                for key in reversed(acquired.keys):
                    stack.callback(self._release, key)

    def _release(self, key: _Key) -> None:
        self._users[key] -= 1
        if self._users[key] > 0:
            return
        del self._users[key]
        group, failed, borrowed = self._groups.pop(key), key in self._failed, key in self._borrowed
        self._failed.discard(key)
        self._borrowed.discard(key)
        if borrowed:
            return
        try:
            if failed:
                self._abandon(key, group)
        finally:
            _destroy(group)

    def abandon(self, *, failed_only: bool = False) -> None:
        """Ends all blocked calls in this rank's process groups; with `failed_only`, only in groups that failed.

        Otherwise, destroying a gloo group would block, and other ranks would wait until their deadlines.
        """
        for key in list(self._failed if failed_only else self._groups):
            self._abandon(key, self._groups.get(key))

    def _abandon(self, key: _Key, group: Any) -> None:
        ranks, options, *_ = key
        if group is None:
            return
        if options.is_nccl:  # destroying it would wait for kernels that wait for a dead rank; not tested on a GPU
            with contextlib.suppress(RuntimeError):
                group.abort()
        elif "gloo" in str(options.backend):
            abandon(group, [peer for peer, rank in enumerate(ranks) if rank != self.rank], _NOBODYS_TAG)

    def close(self) -> None:
        self._closed = True
        alone, self._alone = self._alone, {}
        with contextlib.ExitStack() as stack:
            for group in [self._default_made, *alone.values()]:
                stack.callback(_destroy, group)
            self.watcher.close()

    def alone(self, options: GroupOptions) -> Any:
        if self._closed:
            raise GroupDestroyedError("the world of this group was destroyed; initialise again to create groups")
        with self._lock:
            if not dist.is_initialized():
                store, timeout = dist.HashStore(), timedelta(seconds=self.timeout_s)
                dist.init_process_group(self.default_backend, store=store, rank=0, world_size=1, timeout=timeout)
                self._default_made = dist.group.WORLD
            if dist.get_world_size() == 1 and options.backend == str(dist.get_backend()):
                return dist.group.WORLD
            # Also if the program destroyed its default group.
            if not torch_internals.is_registered(self._alone.get(options)):
                rank = dist.get_rank()
                name = f"{self.prefix}/alone/{rank}/{len(self._alone)}"
                self._alone[options] = torch_internals.new_group_of_members(
                    name, [rank], str(options.backend), options.timeout_s, options.for_backend()
                )
            return self._alone[options]


def _destroy(group: Any) -> None:
    if group is not None and dist.is_initialized() and torch_internals.is_registered(group):
        torch_internals.end_process_groups(group)
