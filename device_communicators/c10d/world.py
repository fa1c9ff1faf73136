"""The failure domain of the backend's groups, the ranks that fail together: those of the default process group.

Until there is a group of all ranks, each group is a failure domain of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import torch.distributed as dist

from device_communicators.base.bounded_store import BoundedStore
from device_communicators.base.helper_threads import Call
from device_communicators.base.host import address_towards
from device_communicators.c10d.extension import for_torch
from device_communicators.cpu.host_memory import HostMemory
from device_communicators.cpu.native_group import Members
from device_communicators.cpu.watching import know_neighbours, meet
from device_communicators.liveness.health import FailureDomain, Watcher


class World:
    _current: ClassVar[World | None] = None
    """The world of all ranks; guarded by _LOCK."""

    def __init__(
        self,
        store: BoundedStore,
        ranks: Sequence[int],
        caller: str,
        *,
        may_borrow: bool = True,
        call: str = "",
        address: str | None = None,
    ) -> None:
        """`ranks`: the world's global ranks. `caller`: function that errors name. `may_borrow`: True to share an
        existing watcher of the same ranks. `call`: the caller's arguments as text, equal on all ranks. `address`: this
        host's address, as other ranks use it; default: the one from which this host reaches `store`.
        """
        shared = Watcher.shared_by(ranks) if may_borrow else None
        self._caller, self._call = caller, call
        self._is_borrowed = shared is not None
        self.watcher = shared or Watcher()
        """Shared with `ParallelGroups` if these already watch the ranks."""
        self.domain = FailureDomain(ranks)
        self.address = address_of(store.raw) if address is None else address
        self.neighbours: tuple[int, ...] = ()
        """CPU core mask of each rank on this host."""
        self.begun = False
        self.over_gloo = ""
        """Why all groups use gloo, or ""."""
        self.has_warned = False
        self.outlives_store = False
        """True if the creation's store can end before the groups."""
        self.owns_store = False
        """True if nothing else uses the timeout of this world's store."""
        self.leaves_in_background = False

    @classmethod
    def of(cls, store: BoundedStore, ranks: Sequence[int], is_default: bool) -> World:
        """Returns the current world if it contains `ranks` (global); else creates a world. The default group
        (`is_default`) always gets a new world.
        """
        with _LOCK:
            current = cls._current
            if not is_default and current is not None and current.domain.ranks.issuperset(ranks):
                return current
            made = cls(store, ranks, "init_process_group" if is_default else "new_group")
            if is_default or len(ranks) == dist.get_world_size():
                cls._current = made
            return made

    @classmethod
    def watcher_of(cls, ranks: Sequence[int]) -> Watcher | None:
        """Returns the object that detects deaths in the current world, or None if there is no world or it doesn't watch
        all `ranks`.
        """
        with _LOCK:
            current = cls._current
        return None if current is None or not current.watcher.watches(ranks) else current.watcher

    def set_current(self) -> None:
        with _LOCK:
            World._current = self

    def meet(self, store: BoundedStore, members: Members, problem: str) -> str:
        """Connects the ranks to the control plane. Each rank of the world's first group calls this. Returns why all
        groups must use gloo, or "". `problem`: this rank's reason, or "".
        """
        ranks = members.ranks
        rank, limit_s = ranks[members.rank], members.timeout_s
        if self._is_borrowed:
            purpose = f"c10d/{members.name}"
            texts = self.watcher.gather(
                purpose, ranks, problem.encode(), limit_s, group=members, operation=self._caller
            )
            notes = [text.decode() for text in texts]
        else:
            notes = meet(
                store, rank, ranks, self.watcher, self.address, self._caller, note=problem, limit_s=limit_s,
                call=self._call,
            )  # fmt: skip
        found = next((f"global rank {rank} {note}" for rank, note in zip(ranks, notes, strict=True) if note), "")
        return found or self.watcher.explain(ranks)

    def begin(self, memory: HostMemory) -> None:
        self.begun = True
        self.neighbours = memory.cores
        if not self.watcher.pids:
            know_neighbours(memory, self.watcher)

    def lasting_store(self, store: BoundedStore, ranks: Sequence[int]) -> BoundedStore:
        """Returns a store that lives as long as a group of `ranks`: `store`, or if the group can outlive `store`, one
        that the lowest rank of `ranks` serves.
        """
        found = self.watcher.store_of(ranks) if self.outlives_store else None
        return store if found is None else BoundedStore(for_torch(found.raw))

    def hand_over(self, world: World) -> None:
        """Makes `world` the current world. Call this before this world's group is destroyed."""
        with _LOCK:
            if World._current is self:
                World._current = world
        self.leaves_in_background = True

    def close(self) -> None:
        with _LOCK:
            if World._current is self:
                World._current = None
        if self.leaves_in_background:
            Call(self.end_watch)  # in a thread of the pool
        else:
            self.end_watch()

    def end_watch(self) -> None:
        if not self._is_borrowed:
            self.watcher.close()


def address_of(store: Any) -> str:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    known = (store.host, store.port) if isinstance(store, dist.TCPStore) else getattr(store, "address", None)
    return address_towards(known)


_LOCK = threading.Lock()
