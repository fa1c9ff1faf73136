"""The groups of one model as an explicit, frozen object: what the singletons of `state` are a view of.

Two models, a draft model or a test can each have theirs in one process. `use()` makes one the current groups,
so that model code with `get_tp_group()` runs on it (`current` has what that means for threads, tasks and backward).
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from device_communicators.errors import (
    AlreadyInitializedError,
    GroupNotInitializedError,
    LayoutError,
    UsageError,
)
from device_communicators.host_calls import OUTSIDE, host_call
from parallel_state.coordinator import GroupCoordinator, prove
from parallel_state.groups.current import try_get_current_groups, using
from parallel_state.layout.axes import AXES
from parallel_state.layout.ranks import Layout


@dataclass
class VirtualPipeline:
    """Several stages on each pipeline rank, in turn: rank 0 of 2 has stages 0 and 2, with `size` 2."""

    size: int
    """Stages on each rank."""
    rank: int = 0
    """Which of them is being run: Megatron's global; stages that are told theirs need it not."""


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's group of each kind that a layout has, and the world they divide."""

    layout: Layout
    """Of positions in `world`, whose global ranks are `world.ranks`."""
    world: GroupCoordinator
    groups: dict[str, GroupCoordinator]
    """Those that are made, by the name of their axis: `tp`, `dp`, `pp`, …"""
    make: Callable[[str, ParallelGroups], GroupCoordinator | None] | None = None
    """Makes one more, at its first use; None for a kind that this rank is in no group of."""
    virtual_pipeline: VirtualPipeline | None = None
    divide: Callable[[Mapping[str, int | None]], ParallelGroups] | None = field(default=None, repr=False, compare=False)
    """Makes groups of the same world as these were made, but for some sizes, by axis name."""
    ranks: dict[str, list[int]] = field(default_factory=dict, repr=False)
    """The global ranks of this rank's group of each kind, made or not; compiled code can't compute them."""
    meshes: dict[tuple[str, ...], Any] = field(default_factory=dict)
    """The DeviceMeshes that were asked for, by their dims."""
    is_view: bool = False
    """Whether the groups are another one's, who closes them."""
    held: list[Callable[[], None]] = field(default_factory=list)
    """What `close` gives back beside the groups."""
    lock: Any = field(default_factory=threading.RLock, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in self.layout.names:
            positions = self.layout.group_of(self.world.rank_in_group, name)
            self.ranks[name] = [self.world.context.ranks[position] for position in positions]
        for group in self.groups.values():
            self._check(group)

    def _check(self, group: GroupCoordinator) -> None:
        """The coordinating process is rank 0 everywhere: what it says on one group, it may say on the others."""
        if self.is_coordinator and not group.is_first_rank:
            raise LayoutError(f"rank 0 of the world must be rank 0 of every group, but is not in {group!r}")

    def get(self, name: str) -> GroupCoordinator:
        """This rank's group of a kind: `tp`, `ep`, `dp_cp`, …: any row of the axis table that the layout has.

        One that isn't made yet is made now: then every rank of the group calls it, and where they make several, in
        the same order. Raises LayoutError for a kind that there isn't, GroupNotInitializedError where this rank is in
        no such group (a middle stage in `embedding`), CommunicationError when the other ranks never come.
        """
        group = self.try_get(name)
        if group is None:
            raise self._in_none(name)
        return group

    def try_get(self, name: str) -> GroupCoordinator | None:
        """As `get`, but None where this rank is in no such group, or the layout has none."""
        group = self.groups.get(name)
        if group is not None:
            return group
        return None if name in self.layout.missing else self._made(name)

    def ranks_of(self, name: str) -> list[int]:
        """The global ranks of this rank's group of a kind, a new list. Makes no group: any rank may ask.

        Raises as `get`, but for what happens among ranks.
        """
        group = self.groups.get(name)
        if group is not None:
            return group.ranks
        if name not in self.ranks:
            self.layout.axes_of(name)  # raises, with the names that there are
        if not self.ranks[name]:
            raise self._in_none(name)
        return list(self.ranks[name])

    def _in_none(self, name: str) -> UsageError:
        if name in self.layout.missing:
            return LayoutError(f"the layout {self.layout} has no {name!r} group: {self.layout.missing[name]}")
        return GroupNotInitializedError(
            f"rank {self.world.rank} is in no {name!r} group of the layout {self.layout}; "
            f"try_get_{name}_group() is None there"
        )

    def _made(self, name: str) -> GroupCoordinator | None:
        if torch.compiler.is_compiling():
            raise GroupNotInitializedError(
                f"the {name!r} group is made at its first use, which can't be within torch.compile; ask for it once "
                "before, or initialise with eager=True"
            )
        with self.lock:  # of two threads one makes it
            group = self.groups.get(name)
            if group is None and self.make is not None:
                group = self.make(name, self)
                if group is not None:
                    self._check(group)
                    self.groups[name] = group
            return group

    def warm_up(self) -> None:
        """A first small all-reduce on each group that is made, which connects its ranks and shows that it works.

        Every rank of the world calls it. Raises CommunicationError with the group's name for one that doesn't.
        """
        for axis in AXES:
            if axis.name in self.groups:
                prove(self.groups[axis.name])

    @property
    def tp(self) -> GroupCoordinator:
        """The tensor-parallel group."""
        return self.get("tp")

    @property
    def pp(self) -> GroupCoordinator:
        """The pipeline-parallel group."""
        return self.get("pp")

    @property
    def dp(self) -> GroupCoordinator:
        """The data-parallel group."""
        return self.get("dp")

    @property
    def rdp(self) -> GroupCoordinator:
        """fairseq2's replicated data-parallel group: `dp_replicate`; `dp` if no size of it or dp_shard was given."""
        return self.get("dp_replicate" if self.layout.is_sharded else "dp")

    @property
    def sdp(self) -> GroupCoordinator:
        """fairseq2's sharded data-parallel group: `dp_shard`; this rank alone if no such size was given."""
        return self.get("dp_shard" if self.layout.is_sharded else "dp_replicate")

    @property
    def root(self) -> GroupCoordinator:
        """fairseq2's name of `world`."""
        return self.world

    @property
    def is_coordinator(self) -> bool:
        """Whether this is rank 0 of the world, and so of all its groups."""
        return self.world.rank_in_group == 0

    @contextmanager
    @host_call(OUTSIDE)
    def use(self) -> Iterator[ParallelGroups]:
        """Makes these the current groups: getters return them instead of the process-wide ones.

        Current in this context: the body, the asyncio tasks and the threads that are started in it, and the backward
        of what is computed in it, wherever that runs (of what an event loop's tasks compute: where it is inside).
        A worker of a thread pool that is started in it raises UsageError instead: submit
        `contextvars.copy_context().run, function`. Threads that ran before keep theirs, and one by
        `_thread.start_new_thread` has the process-wide groups. A backward is called in the
        thread of its forward.
        """
        with using(self):
            yield self

    @host_call(OUTSIDE)
    def close(self) -> None:
        """Destroys the groups, not the world. Every rank calls it; twice is fine."""
        if self.is_view:
            return
        self.meshes.clear()
        # Whatever one of them raises, the others are destroyed; the stack runs from its end.
        with contextlib.ExitStack() as stack:
            while self.held:
                stack.callback(self.held.pop(0))
            for group in self.groups.values():
                stack.callback(group.destroy)


_PATCHED: contextvars.ContextVar[bool] = contextvars.ContextVar("parallel_state_patched", default=False)


@contextmanager
@host_call(OUTSIDE)
def patch_tensor_parallel_group(groups: ParallelGroups, tp_group: GroupCoordinator) -> Iterator[None]:
    """Makes `groups` with another tp group current, as `use()`; doesn't nest."""
    if _PATCHED.get():
        raise AlreadyInitializedError("patch_tensor_parallel_group doesn't nest; leave the outer one first")
    _PATCHED.set(True)
    try:
        patched = {**groups.groups, "tp": tp_group}
        view = replace(groups, groups=patched, make=lambda name, _: groups.try_get(name), meshes={}, is_view=True)
        with view.use():
            yield
    finally:
        _PATCHED.set(False)


def current_groups() -> ParallelGroups:
    """As try_get_current_groups; raises GroupNotInitializedError outside of `use()`."""
    groups = try_get_current_groups()
    if groups is None:
        raise GroupNotInitializedError("no groups are in use here; enter `with groups.use():` first")
    return groups
