"""`ParallelGroups`: the groups of one model. The module `state` stores one such object for the process."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from device_communicators.base import limits, settings
from device_communicators.base.errors import GroupNotInitializedError, InvalidArgumentError, LayoutError, UsageError
from device_communicators.base.host_calls import OUTSIDE, host_call
from device_communicators.liveness.health import FailureDomain
from device_communicators.routing.failures import counted_from_begin
from parallel_state.groups import given_mesh
from parallel_state.groups.coordinator import GroupCoordinator, verify_group
from parallel_state.groups.creation import Traits, create_group
from parallel_state.groups.current import CURRENT, POOLED, using
from parallel_state.layout.axes import (
    AXES,
    BY_NAME,
    DEFAULT_ORDER,
    RankPicker,
    by_axis,
    embedding_ranks,
    position_embedding_ranks,
)
from parallel_state.layout.ranks import Layout
from parallel_state.layout.resolution import made_at_start, resolve_layout
from parallel_state.process_groups.agreement import Request, digest
from parallel_state.process_groups.options import GroupOptions, seconds
from parallel_state.process_groups.pool import ProcessGroupPool


@dataclass
class VirtualPipeline:
    """Several stages per pipeline rank, assigned in turn: with `size` 2, pipeline rank 0 of 2 has stages 0 and 2."""

    size: int
    rank: int = 0
    """The virtual stage, below `size`, that runs now."""


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's groups for one model: one group of each kind in the layout, and the world that they divide.

    Properties: `tp`, `pp`, `dp`, and fairseq2's names: `root` (the world), `rdp` and `sdp` (replicated and sharded data
    parallel). `divide`, `meshes`, `held` and `lock` are internal.
    """

    layout: Layout
    world: GroupCoordinator
    groups: dict[str, GroupCoordinator]
    make: Callable[[str, ParallelGroups], GroupCoordinator | None] | None = None
    """A function that creates a group at its first use. It returns None if this rank is in no group of that kind."""
    virtual_pipeline: VirtualPipeline | None = None
    divide: Callable[[Mapping[str, int | None]], ParallelGroups] | None = field(default=None, repr=False, compare=False)
    ranks: dict[str, list[int]] = field(default_factory=dict, repr=False)
    """The global ranks of each group, created or not. Stored because compiled code can't compute them."""
    meshes: dict[tuple[str, ...], Any] = field(default_factory=dict)
    is_view: bool = False
    """True if another object owns the groups. `close` then does nothing."""
    held: list[Callable[[], None]] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in self.layout.names:
            positions = self.layout.group_of(self.world.rank_in_group, name)
            self.ranks[name] = [self.world.context.ranks[position] for position in positions]
        for group in self.groups.values():
            self._check(group)

    def _check(self, group: GroupCoordinator) -> None:
        if self.is_coordinator and not group.is_first_rank:
            raise LayoutError(
                f"rank 0 of the world must be the first rank of each of its groups, but isn't the first of {group!r}; "
                "list it first"
            )

    def get(self, name: str) -> GroupCoordinator:
        """Returns this rank's group of a kind, such as `tp`, `ep` or `dp_cp`.

        The first use creates the group, so every rank of the group must call this. All ranks must create their groups
        in the same order. Raises LayoutError for a kind that the layout lacks, GroupNotInitializedError if this rank is
        in no such group (`embedding` on a middle stage), CommunicationError if a rank of the group doesn't call this in
        time.
        """
        group = self.try_get(name)
        if group is None:
            raise self._no_group_error(name)
        return group

    def try_get(self, name: str) -> GroupCoordinator | None:
        """Works as `get`, but returns None if this rank is in no such group or the layout lacks the kind."""
        group = self.groups.get(name)
        if group is not None:
            return group
        return None if name in self.layout.missing else self._made(name)

    def ranks_of(self, name: str) -> list[int]:
        """Returns the global ranks of this rank's group of a kind, without creating the group. Raises LayoutError and
        GroupNotInitializedError as `get` does.
        """
        group = self.groups.get(name)
        if group is not None:
            return group.ranks
        if name not in self.ranks:
            self.layout.axes_of(name)  # raises
        if not self.ranks[name]:
            raise self._no_group_error(name)
        return list(self.ranks[name])

    def _no_group_error(self, name: str) -> UsageError:
        if name in self.layout.missing:
            return LayoutError(f"the layout {self.layout} has no {name!r} group: {self.layout.missing[name]}")
        return GroupNotInitializedError(
            f"rank {self.world.rank} is in no {name!r} group of the layout {self.layout}; "
            f"try_get_{name}_group() returns None on such ranks"
        )

    def _made(self, name: str) -> GroupCoordinator | None:
        if torch.compiler.is_compiling():
            raise GroupNotInitializedError(
                f"the {name!r} group doesn't exist yet and can't be created within torch.compile; call its getter "
                "before the compiled code runs, or initialize with eager=True"
            )
        with self.lock:
            group = self.groups.get(name)
            if group is None and self.make is not None:
                group = self.make(name, self)
                if group is not None:
                    self._check(group)
                    self.groups[name] = group
            return group

    def warm_up(self) -> None:
        """Runs a small all-reduce on each group created so far. Every rank of the world must call this."""
        for axis in AXES:
            if axis.name in self.groups:
                verify_group(self.groups[axis.name])

    @property
    def tp(self) -> GroupCoordinator:
        return self.get("tp")

    @property
    def pp(self) -> GroupCoordinator:
        return self.get("pp")

    @property
    def dp(self) -> GroupCoordinator:
        return self.get("dp")

    @property
    def rdp(self) -> GroupCoordinator:
        """fairseq2's replicated data-parallel group. It is `dp` if the layout isn't sharded."""
        return self.get("dp_replicate" if self.layout.is_sharded else "dp")

    @property
    def sdp(self) -> GroupCoordinator:
        """fairseq2's sharded data-parallel group. It has one rank if the layout isn't sharded."""
        return self.get("dp_shard" if self.layout.is_sharded else "dp_replicate")

    @property
    def root(self) -> GroupCoordinator:
        return self.world

    @property
    def is_coordinator(self) -> bool:
        """Returns True on rank 0 of the world."""
        return self.world.rank_in_group == 0

    @contextmanager
    @host_call(OUTSIDE)
    def use(self) -> Iterator[ParallelGroups]:
        """Makes these groups current: getters return them instead of the process-wide groups.

        The groups are current in the body, and in asyncio tasks and threads that the body starts. They are also current
        in the backward of tensors that the body computed; in an event loop, only if backward is called in the body.
        Call backward in the thread of the forward.

        In a thread-pool worker that was started in the body, getters raise UsageError unless the program calls
        `pool.submit(contextvars.copy_context().run, function)`. Threads that started before `use()` keep their groups.
        """
        with using(self):
            yield self

    @host_call(OUTSIDE)
    def close(self) -> None:
        """Destroys the groups, but not the world. Every rank must call this. Idempotent."""
        if self.is_view:
            return
        self.meshes.clear()
        with contextlib.ExitStack() as stack:
            while self.held:
                stack.callback(self.held.pop(0))
            for group in self.groups.values():
                stack.callback(group.destroy)


def try_get_current_groups() -> ParallelGroups | None:
    """Returns the groups that `use()` made current here, or None. Raises UsageError in a thread-pool worker that
    started inside `use()`.
    """
    groups = CURRENT.groups
    if groups is POOLED:
        raise UsageError(
            "the current groups are unknown in this thread-pool worker: the worker was started inside `with "
            "groups.use():`, but its tasks may come from other code. Call `submit(contextvars.copy_context().run, "
            "function)`, or enter `with groups.use():` in the function"
        )
    return groups


def current_groups() -> ParallelGroups:
    """Returns the groups that `use()` made current here; raises GroupNotInitializedError outside `use()`."""
    groups = try_get_current_groups()
    if groups is None:
        raise GroupNotInitializedError("this thread or task uses no parallel groups; enter `with groups.use():` first")
    return groups


logger = logging.getLogger("parallel_state")

_FAILURE_DOMAINS = ("root", "replica")


@host_call(OUTSIDE)
@limits.naming_shortages("create_parallel_groups()")
@counted_from_begin()
def create_parallel_groups(
    world: GroupCoordinator,
    sizes: Mapping[str, int | None],
    order: str | None = None,
    *,
    backend: str | None = None,
    axis_options: Mapping[str, GroupOptions] | None = None,
    timeout: timedelta | float | None = None,
    allow_pickle: bool = False,
    custom_all_reduce: bool = True,
    eager: bool = False,
    virtual_pipeline_size: int | None = None,
    ranks_per_node: int | None = None,
    get_embedding_ranks: RankPicker | None = None,
    get_position_embedding_ranks: RankPicker | None = None,
    device_mesh: DeviceMesh | None = None,
    failure_domain: str = "root",
) -> ParallelGroups:
    """Creates the groups of a layout over the ranks of `world`; leaves the process-wide groups unchanged.

    Every rank of `world` must call this with the same arguments. Most arguments are those of initialize_model_parallel.
    `custom_all_reduce=False` forbids this library's kernels in the tensor-parallel group. `ranks_per_node` determines
    which data-parallel ranks share a node. Only deaths in `world` fail these groups.

    Raises LayoutError for sizes that don't fit, InvalidArgumentError, and ConfigMismatchError on every rank if ranks
    differ, before any group is created.
    """
    arguments: dict[str, Any] = {**locals()}
    world.route.check_usable()
    pool = world.pool
    if pool is None:
        raise GroupNotInitializedError(
            "create_parallel_groups needs a world with processes, but got a group made by parallel_state.simulate(); "
            "pass the layout's sizes to simulate() instead"
        )

    def resolve() -> tuple[_Division, Request]:
        if not isinstance(eager, bool):
            raise InvalidArgumentError(f"eager must be a bool, but is {eager!r}")
        if failure_domain not in _FAILURE_DOMAINS:
            raise InvalidArgumentError(
                f"failure_domain must be one of {', '.join(map(repr, _FAILURE_DOMAINS))}, but is {failure_domain!r}"
            )
        given, wanted = sizes, DEFAULT_ORDER if order is None else order
        adopted: Mapping[str, Any] = {}
        if device_mesh is not None:
            if order is not None:
                raise InvalidArgumentError(f"device_mesh sets the order of the axes, so leave out order={order!r}")
            given, wanted, adopted = given_mesh.read(device_mesh, world, sizes)
        layout = resolve_layout(
            world.world_size,
            given,
            wanted,
            ranks_per_node=ranks_per_node,
            get_embedding_ranks=get_embedding_ranks,
            get_position_embedding_ranks=get_position_embedding_ranks,
        )
        if device_mesh is not None:
            given_mesh.check(device_mesh, layout, world)
        division = _Division(
            world=world,
            layout=layout,
            made=made_at_start(layout, given),
            options=_options_by_axis(world, layout, backend, axis_options, timeout, adopted),
            virtual_pipeline=virtual_pipeline(layout, virtual_pipeline_size),
            eager=eager,
            allow_pickle=allow_pickle,
            custom_all_reduce=custom_all_reduce,
            adopted=adopted,
            failure_domain=failure_domain,
        )
        return division, division.described()

    limit_s = min(world.context.timeout_s, settings.START_TIMEOUT_S.get())
    division = pool.agreement.resolve_and_agree(
        "parallel groups", world.ranks, resolve, limit_s, world.context.failure_ranks
    )

    def divide(changed: Mapping[str, int | None]) -> ParallelGroups:
        return create_parallel_groups(**{**arguments, "sizes": {**by_axis(sizes), **changed}})

    groups = ParallelGroups(division.layout, world, {}, division.make, division.virtual_pipeline, divide)
    try:
        kinds = [row.name for row in AXES if row.name in division.layout.names] if eager else division.made
        with pool.dividing(world.ranks):
            # Adopted groups first, so that other kinds with the same ranks share them.
            for name in sorted(kinds, key=lambda name: name not in division.adopted):
                division.make_at_start(name, groups)
    except BaseException:
        groups.close()
        raise
    return groups


@host_call(OUTSIDE)
@counted_from_begin()
def create_fsdp_groups(groups: ParallelGroups, intra_node_size: int | None = None) -> ParallelGroups:
    """Creates groups like `groups`, but data-parallel ranks shard the weights: fairseq2's create_fsdp_gangs.

    Without `intra_node_size`, `sdp` is `dp`. With `intra_node_size` (hybrid sharding), each `sdp` has that many
    neighbouring ranks of `dp`, and `rdp` has the ranks with equal shards. Every rank of the world must call this with
    the same arguments and close both objects. Raises LayoutError if `intra_node_size` is below 2 or doesn't divide dp.
    """
    if groups.divide is None:
        raise GroupNotInitializedError(
            f"{groups!r} can't be divided for sharding: use groups from initialize_model_parallel(), "
            "create_parallel_groups() or simulate()"
        )
    if intra_node_size is not None and intra_node_size < 2:
        raise LayoutError(
            f"intra_node_size must be at least 2, or None for all ranks of the dp group, but is {intra_node_size!r}"
        )
    size = groups.layout.size("dp") if intra_node_size is None else intra_node_size
    return groups.divide({"dp_shard": size, "dp_replicate": None})


@dataclass(frozen=True)
class _Division:
    world: GroupCoordinator
    layout: Layout
    made: tuple[str, ...]
    options: Mapping[str, GroupOptions]
    virtual_pipeline: VirtualPipeline | None
    eager: bool
    allow_pickle: bool
    custom_all_reduce: bool
    adopted: Mapping[str, Any]
    failure_domain: str

    @property
    def pool(self) -> ProcessGroupPool:
        if self.world.pool is None:
            raise GroupNotInitializedError(f"{self.world} was destroyed with its process groups; initialize again")
        return self.world.pool

    def described(self) -> dict[str, str]:
        layout = self.layout
        ends = [
            "as usual" if pick in (embedding_ranks, position_embedding_ranks) else layout.groups(name)
            for name, (_, pick) in layout.ends.items()
        ]
        return {
            "layout": str(layout),
            "backends": ", ".join(dict.fromkeys(str(options.backend) for options in self.options.values())),
            "timeout_s": ", ".join(dict.fromkeys(str(options.timeout) for options in self.options.values())),
            "custom_all_reduce": str(self.custom_all_reduce),
            "eager": str(self.eager),
            "virtual pipeline size": str(self.virtual_pipeline and self.virtual_pipeline.size),
            "backend of CPU groups": settings.CPU_BACKEND.get(),
            "adopted groups": ", ".join(self.adopted) or "none",
            "options of the groups": "; ".join(f"{name}: {options}" for name, options in self.non_default_options()),
            "embedding ranks": f"{str(ends)[:80]} ({digest(ends)})",
            "numberings of the ranks": f"{'; '.join(map(str, layout.grids))} ({digest(sorted(layout.spans.items()))})",
            "groups made at start": ", ".join(self.made),
            "failure domain": self.failure_domain,
        }

    def non_default_options(self) -> list[tuple[str, GroupOptions]]:
        kinds = list(self.options.values())
        usual = max(kinds, key=kinds.count)
        return sorted((name, options) for name, options in self.options.items() if options != usual)

    def make(self, name: str, groups: ParallelGroups) -> GroupCoordinator | None:
        """Creates this rank's group of kind `name`; returns None if there is none. All ranks of the group must call
        this.
        """
        ranks = self._ranks(name)
        if self.world.route.closed or self.failure_domain == "root":
            self.world.route.check_usable()
        if not ranks:
            return None
        if len(ranks) > 1:
            request = {"group": name, "options": repr(self.options[name])}
            domain = self._domain(ranks).ranks
            self.pool.agreement.agree("a group of one kind", ranks, request, self.options[name].timeout_s, domain)
        return self._create(name, groups, ranks, everyone=False)

    def make_at_start(self, name: str, groups: ParallelGroups) -> None:
        """Adds this rank's group of kind `name` to `groups`. All ranks of `world` must call this, even those in no such
        group.
        """
        ranks = self._ranks(name)
        everyone = self.world.world_size == self.pool.world_size and name not in self.adopted
        if ranks:
            groups.groups[name] = self._create(name, groups, ranks, everyone)
        elif everyone:  # a split of the world needs all ranks
            root = self._domain(self.layout.groups(name)[0]).root
            own = self.options[name]
            for options in dict.fromkeys((own, own.for_cpu, own.for_callers)):  # the same order as in `create_group`
                acquired = self.pool.acquire([], options, division=lambda: self.layout.groups(name), root=root)
                groups.held.append(functools.partial(self.pool.release, acquired))
        # After the process groups on every rank: all ranks create both together.
        if everyone and not self._is_lazy(name):
            self._divide(name, groups)

    def _is_lazy(self, name: str) -> bool:
        if BY_NAME[name].always_made:
            return False
        return self.world.device.type != "cuda" or not (self.eager or name in self.made)

    def _divide(self, name: str, groups: ParallelGroups) -> None:
        """Splits the world's communicator into those of the groups of kind `name`. Every rank of the world must call
        this.
        """
        own, rank = groups.groups.get(name), self.world.rank_in_group
        if self.pool.divides(self.options[name]):
            color = next((at for at, ranks in enumerate(self.layout.groups(name)) if rank in ranks), 0)
            self.world.route.divide(None if own is None else own.route, color)

    def _ranks(self, name: str) -> list[int]:
        positions = self.layout.group_of(self.world.rank_in_group, name)
        return [self.world.context.ranks[position] for position in positions]

    def _domain(self, ranks: Sequence[int]) -> FailureDomain:
        world = self.world.ranks
        touched = set(world)
        if self.failure_domain == "replica":
            replicas = [{world[position] for position in positions} for positions in replicas_of(self.layout)]
            touched = {rank for replica in replicas if replica & set(ranks) for rank in replica}
        whole = len(touched) == self.pool.world_size
        return FailureDomain(touched, "" if whole else digest((world, self.failure_domain)))

    def _create(self, name: str, groups: ParallelGroups, ranks: list[int], everyone: bool) -> GroupCoordinator:
        pool = self.pool
        traits = Traits(
            device=self.world.device,
            local_rank=self.world.local_rank,
            options=self.options[name],
            allow_pickle=self.allow_pickle,
            custom_all_reduce=self.custom_all_reduce and name == "tp",
            lazy_cpu_group=self._is_lazy(name),
        )
        domain = self._domain(ranks)
        borrowed = [pool.adopt(ranks, traits.options, self.adopted[name], domain.root)] if name in self.adopted else []
        try:
            group = create_group(
                GroupCoordinator,
                pool,
                ranks,
                name,
                traits,
                division=(lambda: self.layout.groups(name)) if everyone else None,
                near=[*borrowed, *(acquired for group in groups.groups.values() for acquired in group.acquired)],
                domain=domain,
            )
        except BaseException:
            for acquired in borrowed:
                pool.release(acquired)
            raise
        group.acquired.extend(borrowed)
        return group


def replicas_of(layout: Layout) -> list[list[int]]:
    sharded = layout.size("dp_shard") > 1 and layout.size("dp_replicate") > 1
    return layout.groups("tp", "cp", "pcp", "pp", *(["dp_shard"] if sharded else []))


def _options_by_axis(
    world: GroupCoordinator,
    layout: Layout,
    backend: str | None,
    axis_options: Mapping[str, GroupOptions] | None,
    timeout: timedelta | float | None,
    adopted: Mapping[str, Any],
) -> dict[str, GroupOptions]:
    by_name = {} if axis_options is None else axis_options
    if (
        not isinstance(by_name, Mapping)
        or not by_name.keys() <= BY_NAME.keys()
        or not all(isinstance(options, GroupOptions) for options in by_name.values())
    ):
        raise InvalidArgumentError(
            f"axis_options must map group names ({', '.join(BY_NAME)}) to GroupOptions, but is {axis_options!r}"
        )
    timeout_s = world.context.timeout_s if timeout is None else seconds(timeout)
    default = GroupOptions(backend or settings.BACKEND.get()).resolve(world.backend, timeout_s, known=world.backend)
    options = {}
    for name in layout.names:
        own = by_name.get(name, GroupOptions())
        if name in adopted:
            own = GroupOptions(str(dist.get_backend(adopted[name])), own.timeout)
        options[name] = own.resolve(str(default.backend), timeout_s, known=default.backend)
    return options


def virtual_pipeline(layout: Layout, size: int | None) -> VirtualPipeline | None:
    if size is None:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise LayoutError(f"the virtual pipeline size must be a positive integer or None, but is {size!r}")
    if layout.size("pp") == 1:
        raise LayoutError(f"virtual pipeline stages need a pipeline-parallel size above 1, but the layout is {layout}")
    return VirtualPipeline(size)
