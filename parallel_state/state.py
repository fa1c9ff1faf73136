"""The process-wide groups: `_WORLD`, `_TP`, `_PP`, `_DP` and all others, made by one init, cleared by one destroy.

    init_distributed_environment()                      the world
    initialize_model_parallel(tp, pp)                   its division into tp, pp and dp groups
    get_tp_group() …                                    what model layers call
    destroy_model_parallel(); destroy_distributed_environment()

The only file with `global`. The groups themselves are an explicit object, `ParallelGroups`, which can be made and
passed around without any of this. Getters of the other groups, and the longer names, are in `getters` and `aliases`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

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
from parallel_state.groups.coordinator import GroupCoordinator, Traits, create_group, follow, prove, watch
from parallel_state.groups.parallel_groups import ParallelGroups, create_parallel_groups, try_get_current_groups
from parallel_state.layout.axes import BY_NAME, BY_PARAMETER, RankPicker, by_axis, named_sizes, other_sizes_by_name
from parallel_state.layout.ranks import Layout, check_division, position_in
from parallel_state.layout.resolution import resolve_layout
from parallel_state.process_groups.agreement import Request, digest
from parallel_state.process_groups.joining import agree_on_settings, agree_on_token
from parallel_state.process_groups.options import GroupOptions, check_backend, seconds
from parallel_state.process_groups.pool import ProcessGroupPool
from parallel_state.startup import environment
from parallel_state.startup.binding import bind_as_set
from parallel_state.startup.environment import ProcessEnvironment
from parallel_state.startup.interfaces import Address

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from parallel_state.keywords import Sizes
    from parallel_state.startup.rendezvous import Start

logger = logging.getLogger("parallel_state")

c10d.register()

_WORLD: GroupCoordinator | None = None
_TP: GroupCoordinator | None = None
_PP: GroupCoordinator | None = None
_DP: GroupCoordinator | None = None
_GROUPS: ParallelGroups | None = None
_NODES: list[list[int]] | None = None
_CUSTOM_ALL_REDUCE = True
_PATCHED: contextvars.ContextVar[bool] = contextvars.ContextVar("parallel_state_patched", default=False)
_START: Start | None = None
"""The way in which this process joined a world that it made; for `reinitialize`."""
_UNDO: contextlib.ExitStack | None = contextlib.ExitStack()
"""Undoes what init did to this process beside the groups, at destroy: exports, default group, ports, cores.

None while an init is under way, which has a stack of its own; a destroy meanwhile leaves one here, and the rest to it.
"""


# The world.


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
    """Joins this process with the others of its world; every process calls it once.

    Sizes and ranks that are left out (-1) come from what started the process (torchrun, SLURM, Open MPI, PMI), else
    from an already initialised torch.distributed default group, else it is alone: rank 0 of 1, which needs no address.
    `backend` of device tensors: nccl with CUDA, else gloo (or PARALLEL_STATE_BACKEND). `timeout`, seconds or
    timedelta, is the deadline of each operation (PARALLEL_STATE_TIMEOUT_S); the search for the other ranks has
    PARALLEL_STATE_START_TIMEOUT_S. `allow_pickle` as in initialize_model_parallel, for the world group. With
    PARALLEL_STATE_CORES the process is bound to its cores until the world ends. `bind_device` makes NCCL's communicator
    now, for this rank's device; those of groups are then split from it. `high_priority_stream` gives the world's NCCL
    collectives a stream of high priority; other backends have none.

    Ranks, sizes and the address, a found one or that of tcp://, are exported for torch's env:// where nothing is set.
    A world of one leaves torch's default group to its owner: there is none until a process group is asked for.
    The soft limit of open files is raised to the hard one (at most 65,536): each group over gloo takes five or more.

    Raises AlreadyInitializedError, SettingError for a missing or wrong environment variable, InvalidArgumentError,
    ConfigMismatchError where ranks or an existing default group disagree, RendezvousError with the address tried.
    """
    global _NODES, _START, _UNDO
    forks.check("init_distributed_environment()")
    if _UNDO is None:
        raise AlreadyInitializedError("init_distributed_environment() is under way in this process; wait for its end")
    if _WORLD is not None:
        raise AlreadyInitializedError(
            f"the distributed environment is initialised already ({_WORLD.context}); "
            "call destroy_distributed_environment() first"
        )
    logs.configure(None)  # `place_of` checks the rank
    settings.warn_about_unknown_names()
    limits.raise_descriptor_limit()
    timeout_s = seconds(timeout)
    watcher: Watcher | None = None
    undo, _UNDO = contextlib.ExitStack(), None
    try:
        # Here, because whoever only imports the package meets nobody; and before the first deadline starts.
        from parallel_state.groups import world as startup
        from parallel_state.startup.rendezvous import Start

        if dist.is_initialized():
            joined = startup.join_default_group(world_size, rank, local_rank, backend)
        else:
            place = startup.place_of(world_size, rank, local_rank, distributed_init_method)
            logs.configure(place.rank)
            joined = startup.join_world(
                place, distributed_init_method, backend, timeout_s, bind_device, high_priority_stream, undo=undo
            )
        place, watcher, met = joined.place, joined.watcher, joined.met
        # Not before: in the meeting all ranks find out whether a host's share the same cores.
        cores_before = bind_as_set(place.local_rank, place.local_world_size)
        if cores_before is not None:
            undo.callback(cores.bind, cores_before)
        pool = ProcessGroupPool(
            timeout_s,
            token=joined.token,
            alone_over=joined.alone_over,
            watcher=watcher,
            joined=not joined.is_ours,
        )
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
        prove(world)
        _NODES = startup.hosts_of(world)
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
                "destroy_distributed_environment() was called while init_distributed_environment() was under way, by a "
                "handler of signals or another thread; what had begun is undone"
            )
        _UNDO = undo
    except BaseException as error:
        named = limits.name_shortage(error, "init_distributed_environment()")
        if watcher is not None:
            startup.give_up(watcher, named)
        _UNDO = undo
        destroy_distributed_environment()
        if watcher is not None:
            watcher.close()
        if named is not error:
            raise named from error
        raise
    ways = ", then ".join(each.name for each in world.route.communicators) or "one rank"
    logger.info("%s is ready on %s: %s", world.context, world.device, ways)


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
    """Makes `_WORLD` over an initialised torch.distributed default group, and returns it."""
    global _WORLD
    from parallel_state.groups import world as startup

    if _WORLD is not None:
        raise AlreadyInitializedError("the world group exists already; destroy it first")
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
        # Of our own communicators; torch's group is there already, and is found by its options.
        traits = traits._replace(high_priority_stream=True)
    domain = FailureDomain(ranks, is_root=True)
    _WORLD = create_group(pool, ranks, "world", traits, division=lambda: [ranks], domain=domain)
    watch(pool, _WORLD)
    startup.check_shared_gpus(_WORLD)
    return _WORLD


@host_call(OUTSIDE)
def destroy_distributed_environment() -> None:
    """Ends the world (and the parallel groups first). A default group that somebody else made stays. Twice is fine.

    While init_distributed_environment() is under way, as in a signal's handler, it has that raise GroupDestroyedError.
    """
    global _WORLD, _NODES, _START, _UNDO
    forks.check("destroy_distributed_environment()")
    undo, _UNDO = _UNDO, contextlib.ExitStack()
    if undo is None:
        return
    world, _WORLD, _NODES, _START = _WORLD, None, None, None
    with undo:  # whatever one of them raises, the others are done; it runs from its end
        if world is not None:
            if world.pool is not None:
                undo.callback(world.pool.close)
            undo.callback(world.destroy)
        destroy_model_parallel()


# Its division.


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
    """Divides the world into tensor-, pipeline-, data-parallel and all other groups; every rank calls it alike.

    `sizes` are those of the other axes in `layout.axes`, by argument or axis name: context_parallel_size (cp),
    expert_model_parallel_size (ep), expert_tensor_parallel_size (etp; left out: tp), data_parallel_shard_size
    (dp_shard), data_parallel_replicate_size (dp_replicate), prefill_ and decode_context_model_parallel_size (pcp, dcp),
    external_data_parallel_size (external_dp), num_distributed_optimizer_instances (inter_dist_opt). A size that is left
    out, or None, is 1, but dp, which is what remains unless another size is -1. Only tp and pp go by position: what
    comes third differs between Megatron and vLLM.

    `order` names the axes from fastest to slowest: with `tp-cp-ep-dp-pp` the ranks of a tensor-parallel group are
    neighbours. It is any permutation, or `megatron` (the default), `vllm`, `torchtitan`. `device_mesh` says sizes and
    order instead, and its process groups are used; dims have names of axes. A size given beside it must be the mesh's.

    Groups of equal ranks are made once. Those of tp, dp, pp, and of each axis that was given a size are made now, the
    others (model, dp_cp, embedding, …) at their first use by the group's ranks, or now with `eager`. `warm_up` sends a
    first small all-reduce over each. `backend` and `timeout` are those of all groups, unless `axis_options` has others
    for a group's name. `allow_pickle=True` lets objects of unregistered types travel by pickle, which runs what a peer
    sends: only among processes that you trust. `get_embedding_ranks` picks from a pipeline's ranks (first and last),
    `get_position_embedding_ranks` too (the first).

    The death of any rank fails all groups, on all ranks: nobody waits for a rank that has failed elsewhere. With
    `failure_domain="replica"` it fails those that touch the data-parallel replica of the dead rank (its tp, pp and cp
    groups, and the dp groups that join it to others) and the world; the tp, pp and cp groups of other replicas go on.

    After torch.distributed's own init_process_group it joins that world. Raises GroupNotInitializedError before both,
    AlreadyInitializedError, LayoutError for sizes that don't fit,
    ConfigMismatchError on every rank where ranks differ, CommunicationError when a rank never comes.
    """
    from parallel_state.groups import world as startup

    forks.check("initialize_model_parallel()")
    if _GROUPS is not None:
        raise AlreadyInitializedError(
            f"the model-parallel groups exist already ({_GROUPS.layout}); call destroy_model_parallel() first"
        )
    if _WORLD is None and dist.is_initialized():
        init_distributed_environment()  # joins the world that the program made by torch
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
        startup.closing_barrier(_WORLD)
    except BaseException:
        groups.close()
        raise
    _install(groups)
    logger.info("layout %s; rank %d is in %s", groups.layout, _WORLD.rank, ", ".join(map(repr, groups.groups.values())))


def _ranks_per_node() -> int | None:
    """Returns the number of ranks on each host; None unless all have as many and they are neighbours."""
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
    """Initialises the groups, or checks that those that exist have these sizes and, if one is given, this order.

    Compares what is given and nothing else: the sizes, the backend of tp's device group, and with an order the ranks of
    every kind of group. Raises ConfigMismatchError where they differ, InvalidArgumentError for no backend of torch's.
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
            f"the model-parallel groups exist with {groups.layout}, but {difference} was asked for; "
            "call destroy_model_parallel() first to have others"
        )


def _difference(layout: Layout, asked: Mapping[str, int | None], order: str | None) -> str:
    """Returns the first size, or kind of group, in which a layout isn't what is asked for; "" if it is."""
    for axis, size in asked.items():
        if axis in layout.missing or size not in (-1, layout.size(axis)):
            return f"{axis}={size}"
    if order is None:
        return ""
    # Sizes that nobody asked for are those of the layout; dp follows from them, as where it was made.
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
    """Returns this rank's group among lists of global ranks; each rank of the world is in one list, and calls it alike.

    `use_custom_allreduce`: whether communicators with kernels of our own may carry its tensors; None: as
    `set_custom_all_reduce` says; never with `use_device_communicator=False`. `use_message_queue_broadcaster` is taken
    for vLLM's callers: within a host objects go through a queue in any case.
    """
    world = get_world_group()
    pool = world.pool
    if pool is None:
        raise GroupNotInitializedError("the current world is simulated; it has no process groups to make more of")

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
    ranks = group_ranks[position_in(group_ranks, world.rank)]
    traits = Traits(world.device, local_rank, options, allow_pickle, custom)
    return create_group(pool, ranks, group_name, traits, division=lambda: group_ranks)


def model_parallel_is_initialized() -> bool:
    """Returns True if there are tp and pp groups here, process-wide ones or those of `use()`."""
    return try_get_current_groups() is not None or _GROUPS is not None


@host_call(OUTSIDE)
def destroy_model_parallel() -> None:
    """Ends the tp, pp and dp groups; the world stays. Every rank calls it; twice is fine."""
    forks.check("destroy_model_parallel()")
    groups = _GROUPS
    _install(None)
    if groups is not None:
        groups.close()


@contextmanager
@host_call(OUTSIDE)
def patch_tensor_parallel_group(tp_group: GroupCoordinator) -> Iterator[None]:
    """Makes `tp_group` what `get_tp_group()` returns in the body: a draft model of another size. Doesn't nest."""
    groups = get_parallel_groups()
    if _PATCHED.get():
        raise AlreadyInitializedError("patch_tensor_parallel_group doesn't nest; leave the outer one first")
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
    """Allows, or forbids, kernels of our own to tensor-parallel groups that are made from now on (default: allowed)."""
    global _CUSTOM_ALL_REDUCE
    _CUSTOM_ALL_REDUCE = enable


# Getters.


def get_world_group() -> GroupCoordinator:
    """Returns the group of all ranks; GroupNotInitializedError before init_distributed_environment."""
    return _or_raise(try_get_world_group(), "world", "init_distributed_environment")


def get_tp_group() -> GroupCoordinator:
    """Returns the tensor-parallel group; GroupNotInitializedError before initialize_model_parallel."""
    return _or_raise(try_get_tp_group(), "tp")


def get_pp_group() -> GroupCoordinator:
    """Returns the pipeline-parallel group; GroupNotInitializedError before initialize_model_parallel."""
    return _or_raise(try_get_pp_group(), "pp")


def get_dp_group() -> GroupCoordinator:
    """Returns the data-parallel group; GroupNotInitializedError before initialize_model_parallel."""
    return _or_raise(try_get_dp_group(), "dp")


def try_get_world_group() -> GroupCoordinator | None:
    """Returns the group of all ranks; None before init_distributed_environment."""
    current = try_get_current_groups()
    return _WORLD if current is None else current.world


def try_get_tp_group() -> GroupCoordinator | None:
    """Returns the tensor-parallel group; None before initialize_model_parallel."""
    current = try_get_current_groups()
    return _TP if current is None else current.tp


def try_get_pp_group() -> GroupCoordinator | None:
    """Returns the pipeline-parallel group; None before initialize_model_parallel."""
    current = try_get_current_groups()
    return _PP if current is None else current.pp


def try_get_dp_group() -> GroupCoordinator | None:
    """Returns the data-parallel group; None before initialize_model_parallel."""
    current = try_get_current_groups()
    return _DP if current is None else current.dp


def get_parallel_groups() -> ParallelGroups:
    """Returns all current groups as one object; GroupNotInitializedError before initialize_model_parallel."""
    groups = try_get_current_groups() or _GROUPS
    if groups is None:
        raise GroupNotInitializedError("there are no parallel groups; call initialize_model_parallel() first")
    return groups


@host_call(OUTSIDE)
def get_device_mesh(*names: str, experts: bool = False) -> DeviceMesh:
    """Returns torch's DeviceMesh over this rank's groups with these dims, slowest first: `("dp_shard", "tp")`.

    Every rank of the world calls it with the same names: of axes, or of groups made of axes (`dp`, `fsdp`). Without
    names all axes of more than one rank, and `dp_shard` where tp or ep has more. Slices and flattens as any mesh.
    Experts number the ranks in their own way, so `ep`, `etp` and `efsdp` are in no mesh with tp: `experts=True` gives
    theirs, without names. Raises LayoutError for names that overlap or number the ranks in different ways.
    """
    return mesh.device_mesh(get_parallel_groups(), names, experts=experts)


def get_group(name: str) -> GroupCoordinator:
    """Returns this rank's group of a kind, by the name in the axis table: `get_group("ep")` is `get_ep_group()`."""
    return get_parallel_groups().get(name)


def get_group_ranks(name: str) -> list[int]:
    """Returns the global ranks of this rank's group of a kind, a new list. Makes no group: any rank may ask.

    GroupNotInitializedError before initialize_model_parallel, or where this rank is in no such group.
    """
    return get_parallel_groups().ranks_of(name)


def get_group_rank(name: str) -> int:
    """Returns this rank's position in its group of a kind. Makes no group, as get_group_ranks."""
    groups = get_parallel_groups()
    return groups.ranks_of(name).index(groups.world.rank)


def try_get_group(name: str) -> GroupCoordinator | None:
    """Returns what get_group does; None before initialize_model_parallel, or where this rank is in no such group."""
    groups = try_get_current_groups() or _GROUPS
    return None if groups is None else groups.try_get(name)


def _or_raise(
    group: GroupCoordinator | None, name: str, made_by: str = "initialize_model_parallel"
) -> GroupCoordinator:
    if group is None:
        long_name = BY_NAME[name].long_name if name in BY_NAME else name
        raise GroupNotInitializedError(f"the {long_name} group is not there; call {made_by}() first")
    return group


def get_node_count() -> int:
    """Returns the number of hosts that the world spans, by evidence of shared memory."""
    return len(get_nodes())


def get_nodes() -> list[list[int]]:
    """Returns the world's global ranks by host, each list ascending, in the order of their first ranks: new lists."""
    if _NODES is None:
        raise GroupNotInitializedError("which ranks share a host is known after init_distributed_environment()")
    return [list(node) for node in _NODES]


def get_process_environment() -> ProcessEnvironment:
    """Returns this process's rank, local rank, world size and, if known, local world size; works before any init.

    After init_distributed_environment they are the world's, else those of torch's default group if there is one, else
    what the launcher left in the environment (RANK, …, SLURM_PROCID, …), else rank 0 of 1. No call to other ranks, no
    address is looked for. Raises SettingError for variables that contradict each other.
    """
    if _WORLD is not None:
        local = next((len(ranks) for ranks in _NODES or [] if _WORLD.rank in ranks), None)
        return ProcessEnvironment(_WORLD.rank, _WORLD.local_rank, _WORLD.world_size, local, None, None, "explicit")
    if dist.is_initialized():
        return environment.explicit(dist.get_rank(), dist.get_world_size(), rendezvous=False)
    return environment.detect(rendezvous=False)


def is_global_first_rank() -> bool:
    """Returns True on rank 0 of the world; before init, as get_process_environment says."""
    world = try_get_world_group()
    return get_process_environment().rank == 0 if world is None else world.is_first_rank


def is_local_first_rank() -> bool:
    """Returns True on the first rank of a host; before init, as get_process_environment says."""
    world = try_get_world_group()
    return (get_process_environment().local_rank if world is None else world.local_rank) == 0
