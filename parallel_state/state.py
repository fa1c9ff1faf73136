"""The process-wide groups, and the functions that create, return and destroy them. Only this file uses `global`.

Getters raise GroupNotInitializedError before the init; those whose name begins with `try_` return None.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from device_communicators import c10d
from device_communicators.base import cores, forks, limits, logs, settings
from device_communicators.base.errors import (
    AlreadyInitializedError,
    ConfigMismatchError,
    GroupDestroyedError,
    GroupNotInitializedError,
    LayoutError,
    format_ranks,
)
from device_communicators.base.host_calls import OUTSIDE, host_call
from device_communicators.liveness.health import FailureDomain, Watcher
from device_communicators.routing.failures import counted_from_begin
from parallel_state.groups import mesh
from parallel_state.groups.coordinator import GroupCoordinator, verify_group
from parallel_state.groups.creation import Traits, create_group, follow, record_neighbours
from parallel_state.groups.parallel_groups import ParallelGroups, create_parallel_groups, try_get_current_groups
from parallel_state.keywords import Sizes
from parallel_state.layout.axes import BY_NAME, BY_PARAMETER, RankPicker, by_axis, named_sizes, other_sizes_by_name
from parallel_state.layout.ranks import Layout, check_division
from parallel_state.layout.resolution import resolve_layout
from parallel_state.process_groups.agreement import Request, digest
from parallel_state.process_groups.joining import agree_on_settings, agree_on_token
from parallel_state.process_groups.options import GroupOptions, check_backend, seconds
from parallel_state.process_groups.pool import ProcessGroupPool
from parallel_state.startup import environment
from parallel_state.startup.binding import bind_as_set
from parallel_state.startup.environment import ProcessEnvironment
from parallel_state.startup.interfaces import Address

logger = logging.getLogger("parallel_state")

c10d.register()


@dataclass(frozen=True)
class Start:
    """Arguments of this process's init_distributed_environment, which `reinitialize` uses to start a smaller world.

    `own_place`: this rank's Address. `is_served_by_rank_0`: True if rank 0, not a launcher, serves the store.
    """

    init_method: str
    options: Mapping[str, Any]
    own_place: Address
    is_served_by_rank_0: bool


_WORLD: GroupCoordinator | None = None
_TP: GroupCoordinator | None = None
_PP: GroupCoordinator | None = None
_DP: GroupCoordinator | None = None
_GROUPS: ParallelGroups | None = None
_NODES: list[list[int]] | None = None
_CUSTOM_ALL_REDUCE = True
_PATCHED: contextvars.ContextVar[bool] = contextvars.ContextVar("parallel_state_patched", default=False)
_START: Start | None = None
_UNDO: contextlib.ExitStack | None = contextlib.ExitStack()
"""Callbacks by which destroy undoes init's changes outside the groups: exported variables, default group, ports, cores.

None while an init runs. A destroy during an init assigns a new stack; the init then fails and cleans up.
"""


@host_call(OUTSIDE)
@counted_from_begin()
def init_distributed_environment(
    world_size: int = -1,
    rank: int = -1,
    distributed_init_method: str = "env://",
    local_rank: int = -1,
    backend: str | None = None,
    timeout: timedelta | float | None = None,
    *,
    allow_pickle: bool = False,
    bind_device: bool = False,
    high_priority_stream: bool = False,
) -> None:
    """Connects this process with the other ranks of its world. Every process must call this once.

    If torch.distributed is already initialised, joins that world. Otherwise a launcher's variables (torchrun, SLURM,
    Open MPI, PMI) supply the ranks and sizes that are -1. Without a launcher the process is rank 0 of 1.

    - `backend`: torch's backend for device tensors. Default: PARALLEL_STATE_BACKEND, else nccl with CUDA and gloo
      without.
    - `timeout`: of each operation, in seconds or as a timedelta. Default: PARALLEL_STATE_TIMEOUT_S. The start has
      another timeout, PARALLEL_STATE_START_TIMEOUT_S.
    - `allow_pickle`: as in initialize_model_parallel.
    - `bind_device`: creates NCCL's communicator for this rank's device now; groups are then split from it.
    - `high_priority_stream`: runs the world's NCCL collectives on a stream of high priority.

    Sets the variables of torch's `env://` that are unset, binds the process to the cores of PARALLEL_STATE_CORES if
    set, and raises the soft limit of open files. A world of one rank creates torch's default group only when a process
    group is requested.

    Raises AlreadyInitializedError, SettingError for a wrong environment variable, InvalidArgumentError,
    ConfigMismatchError if ranks disagree with each other or with an existing default group, RendezvousError if ranks
    don't find each other.
    """
    global _NODES, _START, _UNDO
    forks.check("init_distributed_environment()")
    if _UNDO is None:
        raise AlreadyInitializedError(
            "init_distributed_environment() is already running in this process; wait until it returns"
        )
    if _WORLD is not None:
        raise AlreadyInitializedError(
            f"the distributed environment is initialised already ({_WORLD.context}); "
            "call destroy_distributed_environment() first"
        )
    logs.configure(None)
    settings.warn_about_unknown_names()
    limits.raise_descriptor_limit()
    timeout_s = seconds(timeout)
    watcher: Watcher | None = None
    undo, _UNDO = contextlib.ExitStack(), None
    try:
        # The import must precede the first deadline.
        from parallel_state.groups import world as world_module

        if dist.is_initialized():
            joined = world_module.join_default_group(world_size, rank, local_rank, backend)
        else:
            place = world_module.place_of(world_size, rank, local_rank, distributed_init_method)
            logs.configure(place.rank)
            joined = world_module.join_world(
                place, distributed_init_method, backend, timeout_s, bind_device, high_priority_stream, undo=undo
            )
        place, watcher, met = joined.place, joined.watcher, joined.met
        # After the rendezvous, in which ranks compare the cores that they may use.
        cores_before = bind_as_set(place.local_rank, place.local_world_size)
        if cores_before is not None:
            undo.callback(cores.bind, cores_before)
        pool = ProcessGroupPool(
            timeout_s,
            token=joined.token,
            alone_backend=joined.alone_backend,
            watcher=watcher,
            joined=not joined.is_ours,
        )
        watcher = pool.watcher
        if not joined.is_ours:
            follow(pool, range(place.world_size), "init_distributed_environment")
        pool.address = joined.address
        if not joined.is_ours:
            ranks, limit_s = range(place.world_size), settings.START_TIMEOUT_S.get()
            agree_on_settings(pool.agreement, ranks, pool.default_backend, timeout_s, limit_s)
        if joined.has_made_default_group:
            undo.callback(pool.abandon, failed_only=True)
        world = init_world_group(
            list(range(place.world_size)),
            place.local_rank,
            pool.default_backend,
            pool=pool,
            device=joined.device,
            allow_pickle=allow_pickle,
            high_priority_stream=high_priority_stream,
        )
        if bind_device:
            world.route.set_up(divisible=True)
        verify_group(world)
        _NODES = world_module.hosts_of(world)
        if joined.is_ours:
            options = {
                "local_rank": place.local_rank,
                "backend": pool.default_backend,
                "timeout": timeout_s,
                "allow_pickle": allow_pickle,
                "bind_device": bind_device,
                "high_priority_stream": high_priority_stream,
            }
            own_place = Address() if met is None else met.places.get(place.rank, Address())
            is_served = environment.store_server(distributed_init_method, place) is not None
            _START = Start(distributed_init_method, options, own_place, is_served)
        if _UNDO is not None:
            raise GroupDestroyedError(
                "destroy_distributed_environment() was called while init_distributed_environment() ran, by a signal "
                "handler or another thread; the init was undone"
            )
        _UNDO = undo
    except BaseException as error:
        named = limits.name_shortage(error, "init_distributed_environment()")
        if watcher is not None:
            world_module.give_up(watcher, named)
        _UNDO = undo
        destroy_distributed_environment()
        _UNDO.callback(_end_linger)
        if watcher is not None:
            watcher.close()
        if named is not error:
            raise named from error
        raise
    ways = ", then ".join(each.name for each in world.route.communicators) or "one rank"
    logger.info("%s is ready on %s: %s", world.context, world.device, ways)


def _end_linger() -> None:
    from parallel_state.startup.rendezvous import end_linger

    end_linger()


@host_call(OUTSIDE)
@counted_from_begin()
def init_world_group(
    ranks: Sequence[int],
    local_rank: int,
    backend: str,
    *,
    pool: ProcessGroupPool | None = None,
    device: torch.device | None = None,
    allow_pickle: bool = False,
    high_priority_stream: bool = False,
) -> GroupCoordinator:
    """Creates and returns the group of all ranks over torch.distributed's default group. Every rank must call this.

    `ranks`: all global ranks: 0, 1, … `pool`: by default a new pool. `allow_pickle`, `high_priority_stream`: as in
    init_distributed_environment.
    """
    global _WORLD
    from parallel_state.groups import world as world_module

    if _WORLD is not None:
        raise AlreadyInitializedError("the world group exists already; call destroy_distributed_environment() first")
    if pool is None and not dist.is_initialized():
        raise GroupNotInitializedError("init_world_group needs an initialised torch.distributed default group")
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
    size = dist.get_world_size() if pool is None else pool.world_size
    if list(ranks) != list(range(size)):
        raise LayoutError(f"the ranks of the world must be 0 … {size - 1} in ascending order, but are {list(ranks)}")
    if pool is None:
        pool = ProcessGroupPool(seconds(None), token=agree_on_token(device), joined=True)
        follow(pool, ranks, "init_world_group")
    options = GroupOptions(backend).resolve(backend, pool.timeout_s, known=pool.default_backend)
    traits = Traits(device, local_rank, options, allow_pickle)
    if high_priority_stream and options.is_nccl:
        # Not in `options`: these identify torch's existing group in the pool.
        traits = traits._replace(high_priority_stream=True)
    domain = FailureDomain(ranks, is_root=True)
    _WORLD = create_group(GroupCoordinator, pool, ranks, "world", traits, division=lambda: [ranks], domain=domain)
    record_neighbours(pool, _WORLD.context.host_memory)
    world_module.check_shared_gpus(_WORLD)
    return _WORLD


@host_call(OUTSIDE)
def destroy_distributed_environment() -> None:
    """Destroys the parallel groups and the world. Keeps a default group that the program made. May be called twice.
    Every rank must call this.

    An init_distributed_environment() that runs in another thread raises GroupDestroyedError.
    """
    global _WORLD, _NODES, _START, _UNDO
    forks.check("destroy_distributed_environment()")
    undo, _UNDO = _UNDO, contextlib.ExitStack()
    if undo is None:
        return
    world, _WORLD, _NODES, _START = _WORLD, None, None, None
    with undo:
        if world is not None:
            if world.pool is not None:
                undo.callback(world.pool.close)
            undo.callback(world.destroy)
        destroy_model_parallel()


@host_call(OUTSIDE)
@other_sizes_by_name
@limits.naming_shortages("initialize_model_parallel()")
@counted_from_begin()
def initialize_model_parallel(
    tensor_model_parallel_size: int | None = None,
    pipeline_model_parallel_size: int | None = None,
    *,
    data_parallel_size: int | None = None,
    order: str | None = None,
    backend: str | None = None,
    axis_options: Mapping[str, GroupOptions] | None = None,
    timeout: timedelta | float | None = None,
    allow_pickle: bool = False,
    eager: bool = False,
    warm_up: bool = False,
    virtual_pipeline_model_parallel_size: int | None = None,
    get_embedding_ranks: RankPicker | None = None,
    get_position_embedding_ranks: RankPicker | None = None,
    device_mesh: DeviceMesh | None = None,
    failure_domain: str = "root",
    **sizes: Unpack[Sizes],
) -> None:
    """Divides the world into tensor-, pipeline-, data-parallel and all other groups.

    Every rank must call this with the same arguments. If only torch.distributed is initialised, joins its world first.
    Groups of tp, dp, pp and of each axis with a given size are created now; the others (model, dp_cp, embedding, …)
    when the group's ranks first use them. Groups with the same ranks share one process group.

    - `sizes`: of the other axes, by parameter or axis name (`context_parallel_size`, `ep`, …): see docs/layouts.md. A
      size that isn't passed is 1. The remaining ranks go to the size that is -1, by default dp.
    - `order`: axes from fastest to slowest: with `tp-cp-ep-dp-pp`, the ranks of a tensor-parallel group are
      consecutive. Any permutation, or `megatron` (default), `vllm`, `torchtitan`.
    - `backend`, `timeout`: for all groups. `axis_options` overrides both for single groups, by group name.
    - `allow_pickle`: sends objects of unregistered types by pickle, which runs code that a peer sends. Only for
      processes that you trust.
    - `eager`: creates all groups now. `warm_up`: runs a small all-reduce in each group.
    - `get_embedding_ranks`: a function that picks the ranks with the word embedding from a pipeline's ranks; default:
      the first and the last.
    - `get_position_embedding_ranks`: the same for the position embedding; default: the first.
    - `device_mesh`: a torch DeviceMesh whose dims are named after axes. It replaces sizes and order, and its process
      groups are used.
    - `failure_domain`: with `root` the death of any rank fails all groups on all ranks. With `replica` it fails the
      world and each group with ranks of the dead rank's data-parallel replica.

    Raises GroupNotInitializedError without a world, AlreadyInitializedError, LayoutError for sizes that don't fit,
    ConfigMismatchError if ranks differ, CommunicationError if a rank doesn't call this.
    """
    from parallel_state.groups import world as world_module

    forks.check("initialize_model_parallel()")
    if _GROUPS is not None:
        raise AlreadyInitializedError(
            f"the model-parallel groups exist already ({_GROUPS.layout}); call destroy_model_parallel() first"
        )
    if _WORLD is None and dist.is_initialized():
        init_distributed_environment()
    if _WORLD is None:
        raise GroupNotInitializedError("call init_distributed_environment() before initialize_model_parallel()")
    asked = named_sizes(tensor_model_parallel_size, pipeline_model_parallel_size, data_parallel_size, sizes)
    groups = create_parallel_groups(
        _WORLD,
        asked,
        order,
        backend=backend,
        axis_options=axis_options,
        timeout=timeout,
        allow_pickle=allow_pickle,
        custom_all_reduce=_CUSTOM_ALL_REDUCE,
        eager=eager,
        virtual_pipeline_size=virtual_pipeline_model_parallel_size,
        ranks_per_node=_ranks_per_node(),
        get_embedding_ranks=get_embedding_ranks,
        get_position_embedding_ranks=get_position_embedding_ranks,
        device_mesh=device_mesh,
        failure_domain=failure_domain,
    )
    try:
        if warm_up:
            groups.warm_up()
        world_module.closing_barrier(_WORLD)
    except BaseException:
        groups.close()
        raise
    _install(groups)
    logger.info("layout %s; rank %d is in %s", groups.layout, _WORLD.rank, ", ".join(map(repr, groups.groups.values())))


def _ranks_per_node() -> int | None:
    nodes = _NODES or []
    size = len(nodes[0]) if nodes else 0
    return (
        size if all(node == list(range(at * size, (at + 1) * size)) for at, node in enumerate(nodes)) and size else None
    )


def _install(groups: ParallelGroups | None) -> None:
    global _GROUPS, _TP, _PP, _DP
    _GROUPS = groups
    _TP = groups.groups["tp"] if groups else None
    _PP = groups.groups["pp"] if groups else None
    _DP = groups.groups["dp"] if groups else None


@host_call(OUTSIDE)
@other_sizes_by_name
def ensure_model_parallel_initialized(
    tensor_model_parallel_size: int | None = None,
    pipeline_model_parallel_size: int | None = None,
    *,
    data_parallel_size: int | None = None,
    order: str | None = None,
    backend: str | None = None,
    virtual_pipeline_model_parallel_size: int | None = None,
    **sizes: Unpack[Sizes],
) -> None:
    """Initialises the groups, or checks that the existing ones match these arguments. Every rank must call this.

    Compares only the arguments that are passed: the sizes, the order, and the backend of tp's device group. Raises
    ConfigMismatchError if one of them differs.
    """
    if backend is not None:
        check_backend(backend)
    groups = try_get_current_groups() or _GROUPS
    if groups is None:
        others: dict[str, Any] = {**sizes, "virtual_pipeline_model_parallel_size": virtual_pipeline_model_parallel_size}
        initialize_model_parallel(
            tensor_model_parallel_size,
            pipeline_model_parallel_size,
            data_parallel_size=data_parallel_size,
            order=order,
            backend=backend,
            **others,
        )
        return
    asked = by_axis(named_sizes(tensor_model_parallel_size, pipeline_model_parallel_size, data_parallel_size, sizes))
    found = groups.virtual_pipeline and groups.virtual_pipeline.size
    simulated = groups.tp.context.simulated
    if virtual_pipeline_model_parallel_size not in (None, found):
        difference = f"virtual_pipeline_model_parallel_size={virtual_pipeline_model_parallel_size} (now: {found})"
    elif backend is not None and not simulated and backend.lower() != groups.tp.backend.lower():
        difference = f"backend={backend!r} (now: {groups.tp.backend!r})"
    else:
        difference = _difference(groups.layout, asked, order)
    if difference:
        raise ConfigMismatchError(
            f"the model-parallel groups exist with {groups.layout}, but {difference} was requested; "
            "call destroy_model_parallel() first to replace them"
        )


def _difference(layout: Layout, asked: Mapping[str, int | None], order: str | None) -> str:
    for axis, size in asked.items():
        if axis in layout.missing or size not in (-1, layout.size(axis)):
            return f"{axis}={size}"
    if order is None:
        return ""
    # Unrequested sizes keep the layout's values; dp follows from them.
    others = {row.name: layout.size(row.name) for row in BY_PARAMETER.values() if row.name not in layout.missing}
    others = {name: size for name, size in others.items() if name not in ("dp", "dp_shard", "inter_dist_opt")}
    if "intra_dp_cp" in layout.parts:
        others["inter_dist_opt"] = layout.size("inter_dist_opt")
    try:
        wanted = resolve_layout(layout.world_size, {**others, **asked}, order)
    except LayoutError as error:
        return f"order={order!r} ({error})"
    for name in wanted.names:
        if name not in layout.names:
            return f"order={order!r} (which has {name} groups)"
        if name not in layout.ends and wanted.groups(name) != layout.groups(name):
            return f"order={order!r} (the first {name} group {format_ranks(wanted.groups(name)[0])})"
    return ""


@host_call(OUTSIDE)
@counted_from_begin()
def init_model_parallel_group(
    group_ranks: Sequence[Sequence[int]],
    local_rank: int,
    backend: str,
    *,
    group_name: str = "group",
    use_device_communicator: bool = True,
    use_message_queue_broadcaster: bool = False,
    use_custom_allreduce: bool | None = None,
    allow_pickle: bool = False,
) -> GroupCoordinator:
    """Creates a group for each list of global ranks, and returns this rank's group.

    Each rank of the world is in exactly one list, and must call this function with the same arguments.

    - `group_name`: the first part of the groups' `unique_name`. `allow_pickle`: as in initialize_model_parallel.
    - `use_device_communicator`: False forbids this library's kernels.
    - `use_custom_allreduce`: False also forbids them. Default: the value of `set_custom_all_reduce`.
    - `use_message_queue_broadcaster`: ignored.
    """
    world = get_world_group()
    pool = world.pool
    if pool is None:
        raise GroupNotInitializedError(
            "the current world is simulated and can't create process groups; call init_distributed_environment()"
        )

    custom = use_device_communicator and (_CUSTOM_ALL_REDUCE if use_custom_allreduce is None else use_custom_allreduce)

    def resolve() -> tuple[GroupOptions, Request]:
        check_backend(backend)
        check_division(group_ranks, pool.world_size)
        lists = ", ".join(format_ranks(each) for each in group_ranks[:4]) + (", …" if len(group_ranks) > 4 else "")
        options = GroupOptions(backend).resolve(backend, world.context.timeout_s)
        request = {"list of groups": lists, "digest": digest((group_ranks, options)), "options": repr(options)}
        return options, {**request, "custom_all_reduce": str(custom)}

    options = pool.agreement.resolve_and_agree(
        "groups by lists of ranks", world.ranks, resolve, world.context.timeout_s, world.context.failure_ranks
    )
    ranks = next(each for each in group_ranks if world.rank in each)
    traits = Traits(world.device, local_rank, options, allow_pickle, custom)
    return create_group(GroupCoordinator, pool, ranks, group_name, traits, division=lambda: group_ranks)


def model_parallel_is_initialized() -> bool:
    """Returns True if tp and pp groups exist, including groups that `ParallelGroups.use()` made current."""
    return try_get_current_groups() is not None or _GROUPS is not None


@host_call(OUTSIDE)
def destroy_model_parallel() -> None:
    """Destroys all parallel groups, but not the world group. Every rank must call this. May be called twice."""
    forks.check("destroy_model_parallel()")
    groups = _GROUPS
    _install(None)
    if groups is not None:
        groups.close()


@contextmanager
@host_call(OUTSIDE)
def patch_tensor_parallel_group(tp_group: GroupCoordinator) -> Iterator[None]:
    """Makes `get_tp_group()` return `tp_group`, such as a draft model's group, within the `with` block. Can't be
    nested.
    """
    groups = get_parallel_groups()
    if _PATCHED.get():
        raise AlreadyInitializedError("patch_tensor_parallel_group can't be nested; leave its outer `with` block first")
    _PATCHED.set(True)
    try:
        patched = {**groups.groups, "tp": tp_group}
        view = dataclasses.replace(
            groups, groups=patched, make=lambda name, _: groups.try_get(name), meshes={}, is_view=True
        )
        with view.use():
            yield
    finally:
        _PATCHED.set(False)


@host_call(OUTSIDE)
def set_custom_all_reduce(enable: bool) -> None:
    """Allows or forbids this library's kernels in tensor-parallel groups created later. Every rank must call this with
    the same value.
    """
    global _CUSTOM_ALL_REDUCE
    _CUSTOM_ALL_REDUCE = enable


def get_world_group() -> GroupCoordinator:
    """Returns the group of all ranks."""
    return _or_raise(try_get_world_group(), "world", "init_distributed_environment")


def get_tp_group() -> GroupCoordinator:
    """Returns the tensor-parallel group."""
    return _or_raise(try_get_tp_group(), "tp")


def get_pp_group() -> GroupCoordinator:
    """Returns the pipeline-parallel group."""
    return _or_raise(try_get_pp_group(), "pp")


def get_dp_group() -> GroupCoordinator:
    """Returns the data-parallel group."""
    return _or_raise(try_get_dp_group(), "dp")


def try_get_world_group() -> GroupCoordinator | None:
    """Returns the group of all ranks, or None before init."""
    current = try_get_current_groups()
    return _WORLD if current is None else current.world


def try_get_tp_group() -> GroupCoordinator | None:
    """Returns the tensor-parallel group, or None before init."""
    current = try_get_current_groups()
    return _TP if current is None else current.tp


def try_get_pp_group() -> GroupCoordinator | None:
    """Returns the pipeline-parallel group, or None before init."""
    current = try_get_current_groups()
    return _PP if current is None else current.pp


def try_get_dp_group() -> GroupCoordinator | None:
    """Returns the data-parallel group, or None before init."""
    current = try_get_current_groups()
    return _DP if current is None else current.dp


def get_parallel_groups() -> ParallelGroups:
    """Returns the set of groups that `ParallelGroups.use()` made current, else that of initialize_model_parallel."""
    groups = try_get_current_groups() or _GROUPS
    if groups is None:
        raise GroupNotInitializedError("there are no parallel groups; call initialize_model_parallel() first")
    return groups


@host_call(OUTSIDE)
def get_device_mesh(*names: str, experts: bool = False) -> DeviceMesh:
    """Returns a torch DeviceMesh over this rank's groups. `names` are its dims, slowest first, such as `("dp_shard",
    "tp")`.

    Every rank of the world must call this with the same names, of axes or of groups that span axes (`dp`, `fsdp`).
    Without names, the dims are all axes with more than one rank. If tp or ep has more than one rank, `dp_shard` is a
    dim even with one rank. `experts=True` returns another mesh, with `ep`, `etp` and `efsdp`, because these axes order
    the ranks differently.

    Raises LayoutError if two names share an axis, or if no order of the ranks fits all names, and
    GroupNotInitializedError in a simulated world.
    """
    return mesh.device_mesh(get_parallel_groups(), names, experts=experts)


def get_group(name: str) -> GroupCoordinator:
    """Returns this rank's group of the kind `name`, such as "tp": `get_group("ep")` is `get_ep_group()`."""
    return get_parallel_groups().get(name)


def get_group_ranks(name: str) -> list[int]:
    """Returns the global ranks of this rank's group `name` as a new list, without creating the group.

    Raises GroupNotInitializedError before the init, or if this rank is in no group `name`.
    """
    return get_parallel_groups().ranks_of(name)


def get_group_rank(name: str) -> int:
    """Returns this rank's number in its group `name`, such as "tp", without creating the group."""
    groups = get_parallel_groups()
    return groups.ranks_of(name).index(groups.world.rank)


def try_get_group(name: str) -> GroupCoordinator | None:
    """Returns this rank's group `name`, or None before the init or if this rank is in no such group."""
    groups = try_get_current_groups() or _GROUPS
    return None if groups is None else groups.try_get(name)


def _or_raise(
    group: GroupCoordinator | None, name: str, made_by: str = "initialize_model_parallel"
) -> GroupCoordinator:
    if group is None:
        long_name = BY_NAME[name].long_name if name in BY_NAME else name
        raise GroupNotInitializedError(f"the {long_name} group does not exist; call {made_by}() first")
    return group


def get_node_count() -> int:
    """Returns the number of hosts of the world. Ranks that share memory count as one host."""
    return len(get_nodes())


def get_nodes() -> list[list[int]]:
    """Returns the list of global ranks of each host, ascending, ordered by first rank."""
    if _NODES is None:
        raise GroupNotInitializedError("the ranks of each host are unknown; call init_distributed_environment() first")
    return [list(node) for node in _NODES]


def get_process_environment() -> ProcessEnvironment:
    """Returns this process's rank and local rank, and the sizes of the world and of this host.

    Uses the world group, else torch's default group, else the launcher's variables. Works before any init. Raises
    SettingError for contradictory variables.
    """
    if _WORLD is not None:
        local = next((len(ranks) for ranks in _NODES or [] if _WORLD.rank in ranks), None)
        return ProcessEnvironment(_WORLD.rank, _WORLD.local_rank, _WORLD.world_size, local, None, None, "explicit")
    if dist.is_initialized():
        return environment.explicit(dist.get_rank(), dist.get_world_size(), rendezvous=False)
    return environment.detect(rendezvous=False)


def is_global_first_rank() -> bool:
    """Returns True on global rank 0. Works before any init."""
    world = try_get_world_group()
    return get_process_environment().rank == 0 if world is None else world.is_first_rank


def is_local_first_rank() -> bool:
    """Returns True on local rank 0 of each host. Works before any init."""
    world = try_get_world_group()
    return (get_process_environment().local_rank if world is None else world.local_rank) == 0
