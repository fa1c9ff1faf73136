"""The groups of one model as an explicit, frozen object: what the singletons of `state` are a view of.

Two models, a draft model or a test can each have theirs in one process. `use()` makes one the current groups of a
thread, so that model code with `get_tp_group()` runs on it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from device_communicators import settings
from device_communicators.errors import ConfigMismatchError, GroupNotInitializedError, LayoutError
from parallel_state.coordinator import GroupCoordinator, create_group
from parallel_state.layout import Layout


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's group on every axis of a layout, and the world they divide."""

    layout: Layout
    world: GroupCoordinator
    tp: GroupCoordinator
    pp: GroupCoordinator
    dp: GroupCoordinator

    def __post_init__(self) -> None:
        """The coordinating process is rank 0 everywhere: what it says on one group, it may say on the others."""
        if self.world.rank_in_group == 0:
            for group in (self.tp, self.pp, self.dp):
                if group.rank_in_group != 0:
                    raise LayoutError(f"rank 0 of the world must be rank 0 of every group, but is not in {group!r}")

    @property
    def root(self) -> GroupCoordinator:
        return self.world

    @property
    def is_coordinator(self) -> bool:
        """Whether this is rank 0 of the world, and so of all its groups."""
        return self.world.rank_in_group == 0

    @contextmanager
    def use(self) -> Iterator[ParallelGroups]:
        """Makes these the current groups of this thread: getters return them instead of the process-wide ones."""
        before = try_get_current_groups()
        _CURRENT.groups = self
        try:
            yield self
        finally:
            _CURRENT.groups = before

    def close(self) -> None:
        """Destroys tp, pp and dp, not the world. Every rank calls it; twice is fine."""
        for group in (self.tp, self.pp, self.dp):
            group.destroy()


_CURRENT = threading.local()
# Read with getattr and a default: for a default in a subclass of threading.local, torch.compile guards on the class,
# and code compiled outside of `use()` would keep its groups inside.


def try_get_current_groups() -> ParallelGroups | None:
    """The groups that `use()` made this thread's; None outside of it."""
    return getattr(_CURRENT, "groups", None)


def current_groups() -> ParallelGroups:
    """As try_get_current_groups; raises GroupNotInitializedError outside of `use()`."""
    groups = try_get_current_groups()
    if groups is None:
        raise GroupNotInitializedError("no groups are in use in this thread; enter `with groups.use():` first")
    return groups


def create_parallel_groups(
    world: GroupCoordinator,
    sizes: Mapping[str, int | None],
    order: str,
    *,
    backend: str | None = None,
    axis_backends: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    allow_pickle: bool = False,
    custom_all_reduce: bool = True,
) -> ParallelGroups:
    """The groups of a layout over `world`, without touching the singletons.

    `sizes` of `tp`, `pp`, `dp`; one may be None: the rest. Every rank of the world calls it alike: ranks that differ
    get ConfigMismatchError, all of them, before any group is made. Raises LayoutError for sizes that don't fit.
    """
    if world.pool is None:
        raise GroupNotInitializedError("a simulated world has no process groups; use parallel_state.simulate")
    backend = backend or settings.BACKEND.get() or world.backend
    backends = {**dict.fromkeys(sizes, backend), **(axis_backends or {})}
    timeout_s = world.context.timeout_s if timeout_s is None else timeout_s
    alike = {"backends": backends, "timeout_s": timeout_s, "custom_all_reduce": custom_all_reduce}
    layout = _agreed_layout(world, sizes, order, alike)
    made: dict[str, GroupCoordinator] = {}
    try:
        for axis in ("tp", "pp", "dp"):
            made[axis] = create_group(
                world.pool,
                layout.groups(axis),
                axis,
                device=world.device,
                local_rank=world.local_rank,
                backend=backends[axis],
                timeout_s=timeout_s,
                allow_pickle=allow_pickle,
                custom_all_reduce=custom_all_reduce and axis == "tp",
            )
        return ParallelGroups(layout=layout, world=world, **made)
    except BaseException:
        for group in made.values():
            group.destroy()
        raise


def _agreed_layout(
    world: GroupCoordinator, sizes: Mapping[str, int | None], order: str, rest: dict[str, Any]
) -> Layout:
    """The layout, after every rank saw every rank's request: where two differ, or one is wrong, all raise."""
    wrong: LayoutError | None = None
    layout: Layout | None = None
    try:
        unknown = sorted(set(rest["backends"]) - set(sizes))
        if unknown:
            raise LayoutError(f"axis_backends must name axes ({', '.join(sizes)}), but names {unknown[0]!r}")
        layout = Layout.resolve(world.world_size, sizes, order)
    except LayoutError as error:
        wrong = error
    asked = " × ".join(f"{axis}={'the rest' if size in (None, -1) else size}" for axis, size in sizes.items())
    mine = {"layout": str(layout or f"{asked} in the order {order!r}"), **rest}
    requests = world.all_gather_object(mine)
    for rank, request in enumerate(requests):
        for key in mine:
            if request[key] != requests[0][key]:
                raise ConfigMismatchError(
                    f"all ranks must ask for the same groups, but the {key} is {requests[0][key]} on rank 0 and "
                    f"{request[key]} on rank {rank} (this is rank {world.rank}); pass the same sizes on every rank"
                )
    if layout is None:
        raise wrong or LayoutError(f"the sizes {asked} give no layout")
    return layout
