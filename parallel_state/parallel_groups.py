"""The groups of one model as an explicit, frozen object: what the singletons of `state` are a view of.

Two models, a draft model or a test can each have theirs in one process. `use()` makes one the current groups of a
thread, so that model code with `get_tp_group()` runs on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from device_communicators import settings
from device_communicators.errors import (
    AlreadyInitializedError,
    ConfigMismatchError,
    GroupNotInitializedError,
    InvalidArgumentError,
    LayoutError,
    UsageError,
)
from parallel_state import startup
from parallel_state.coordinator import GroupCoordinator, create_group
from parallel_state.layout import Layout


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's group on every axis of a layout, and the world they divide."""

    layout: Layout
    world: GroupCoordinator
    groups: Mapping[str, GroupCoordinator]
    """By axis: `tp`, `dp`, `pp`."""

    def __post_init__(self) -> None:
        """The coordinating process is rank 0 everywhere: what it says on one group, it may say on the others."""
        for group in self.groups.values():
            if self.is_coordinator and not group.is_first_rank:
                raise LayoutError(f"rank 0 of the world must be rank 0 of every group, but is not in {group!r}")

    @property
    def tp(self) -> GroupCoordinator:
        return self.groups["tp"]

    @property
    def pp(self) -> GroupCoordinator:
        return self.groups["pp"]

    @property
    def dp(self) -> GroupCoordinator:
        return self.groups["dp"]

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
        """Destroys the groups of the axes, not the world. Every rank calls it; twice is fine."""
        for group in self.groups.values():
            group.destroy()


_CURRENT = threading.local()
# Read with getattr and a default: for a default in a subclass of threading.local, torch.compile guards on the class,
# and code compiled outside of `use()` would keep its groups inside.


@contextmanager
def patch_tensor_parallel_group(groups: ParallelGroups, tp_group: GroupCoordinator) -> Iterator[None]:
    """`groups` with another tp group are this thread's; doesn't nest."""
    if getattr(_CURRENT, "patched", False):
        raise AlreadyInitializedError("patch_tensor_parallel_group doesn't nest; leave the outer one first")
    _CURRENT.patched = True
    try:
        with replace(groups, groups={**groups.groups, "tp": tp_group}).use():
            yield
    finally:
        _CURRENT.patched = False


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
    timeout: timedelta | float | None = None,
    allow_pickle: bool = False,
    custom_all_reduce: bool = True,
) -> ParallelGroups:
    """The groups of a layout over `world`, without touching the singletons.

    `sizes` of the axes; one may be None: the rest. Every rank of the world calls it alike: ranks that differ
    get ConfigMismatchError, all of them, before any group is made. Raises LayoutError for sizes that don't fit and
    InvalidArgumentError for a backend or timeout that can't be.
    """
    if world.pool is None:
        raise GroupNotInitializedError("a simulated world has no process groups; use parallel_state.simulate")
    request = _agreed(world, partial(_resolve, world, sizes, order, backend, axis_backends, timeout, custom_all_reduce))
    made: dict[str, GroupCoordinator] = {}
    try:
        for axis in sizes:
            made[axis] = create_group(
                world.pool,
                request.layout.groups(axis),
                axis,
                device=world.device,
                local_rank=world.local_rank,
                backend=request.backends[axis],
                timeout_s=request.timeout_s,
                allow_pickle=allow_pickle,
                custom_all_reduce=custom_all_reduce and axis == "tp",
            )
        return ParallelGroups(request.layout, world, made)
    except BaseException:
        for group in made.values():
            group.destroy()
        raise


class _Request(NamedTuple):
    """What a rank asks for, resolved."""

    layout: Layout
    backends: dict[str, str]
    timeout_s: float
    custom_all_reduce: bool


def _resolve(
    world: GroupCoordinator,
    sizes: Mapping[str, int | None],
    order: str,
    backend: str | None,
    axis_backends: Mapping[str, str] | None,
    timeout: timedelta | float | None,
    custom_all_reduce: bool,
) -> _Request:
    axis_backends = axis_backends or {}
    if not isinstance(axis_backends, Mapping) or not axis_backends.keys() <= sizes.keys():
        raise InvalidArgumentError(
            f"axis_backends must map axes ({', '.join(sizes)}) to backends, but is {axis_backends!r}"
        )
    backend = backend or settings.BACKEND.get() or world.backend
    backends = {axis: axis_backends.get(axis, backend) for axis in sizes}
    for each in backends.values():
        if each != world.backend:
            startup.check_backend(each)
    timeout_s = world.context.timeout_s if timeout is None else startup.seconds(timeout)
    return _Request(Layout.resolve(world.world_size, sizes, order), backends, timeout_s, custom_all_reduce)


def _agreed(world: GroupCoordinator, resolve: Callable[[], _Request]) -> _Request:
    """The request, after every rank saw every rank's: where two differ, or one is wrong, all raise and none waits."""
    request: _Request | None = None
    wrong: UsageError | None = None
    try:
        request = resolve()
        mine = {name: str(value) for name, value in request._asdict().items()}
    except UsageError as error:
        wrong = error
        mine = dict.fromkeys(_Request._fields, f"wrong ({error})")
    asked = world.all_gather_object(mine)
    if all(each["layout"].startswith("wrong (") for each in asked) and wrong is not None:
        raise wrong  # all of them are, most likely alike
    for rank, each in enumerate(asked):
        for name in mine:
            if each[name] != asked[0][name]:
                raise ConfigMismatchError(
                    f"all ranks must ask for the same groups, but the {name} is {asked[0][name]} on rank 0 and "
                    f"{each[name]} on rank {rank} (this is rank {world.rank}); pass the same arguments on every rank"
                ) from wrong
    if request is None:
        raise wrong or InvalidArgumentError("the request could not be resolved")
    return request
