"""Megatron's `initialize_model_parallel` and `destroy_model_parallel`, and the groups that only Megatron has."""

from __future__ import annotations

import importlib
import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from device_communicators.base.torch_internals import set_timeout
from parallel_state import state
from parallel_state.compat.errors import InitializedError, NotInitializedError, RefusedError, as_megatrons
from parallel_state.compat.megatron import lookup, process_groups
from parallel_state.compat.megatron.buffers import set_global_memory_buffer
from parallel_state.compat.megatron.ranks import hierarchical_ranks
from parallel_state.process_groups.options import GroupOptions

logger = logging.getLogger("parallel_state")

_LOGGED: set[str] = set()
_JOINED: list[weakref.ref[Any]] = []
_GLOO_KINDS = ("dp", "dp_cp", "intra_dp_cp", "edp", "intra_edp")


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: list[int] | None = None,
    hybrid_context_parallel: bool = False,
    expert_model_parallel_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: int = 30,
    order: str = "tp-cp-ep-dp-pp",
    get_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    get_position_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: list[str] | None = None,
    sharp_enabled_group: str | None = None,
    create_all_gather_group: bool | None = False,
    *,
    gtp_remat_size: int = 1,
    expert_gtp_remat_size: int = 1,
    rank_offset: int = 0,
    local_world_size: int | None = None,
) -> None:
    """Creates all of Megatron's groups. Every rank of torch's default group must call this.

    `create_gloo_process_groups` adds a gloo group to each data-parallel group. Options without effect are logged once:
    SHARP, and on the CPU all options of NCCL. For keyword-only parameters only the defaults are supported.

    Raises NotInitializedError before init_process_group, InitializedError if the groups exist, and RefusedError if
    sizes don't fit.
    """
    _check_sharp(use_sharp, sharp_enabled_group, num_distributed_optimizer_instances)
    if gtp_remat_size * expert_gtp_remat_size != 1 or rank_offset or local_world_size is not None:
        raise RefusedError(
            "gtp_remat_size, expert_gtp_remat_size, rank_offset and local_world_size must keep their defaults; for "
            "groups in a part of the world, use parallel_state.create_parallel_groups over a sub-group"
        )
    if pipeline_model_parallel_comm_backend not in (None, "nccl", "ucc"):
        raise RefusedError(
            "pipeline_model_parallel_comm_backend must be 'nccl', 'ucc' or None, "
            f"but is {pipeline_model_parallel_comm_backend!r}"
        )
    if hierarchical_context_parallel_sizes:
        hierarchical_ranks(range(context_parallel_size), hierarchical_context_parallel_sizes)
    _join_world()
    if lookup.has_group("dp"):
        raise InitializedError("the model-parallel groups already exist; call destroy_model_parallel() first")
    on_gpu = process_groups.backend_of_groups() is None and torch.cuda.is_available()
    nccl = _nccl_options(nccl_communicator_config_path, high_priority_stream_groups)
    if on_gpu and pipeline_model_parallel_comm_backend is not None:
        nccl["pp"] = GroupOptions(pipeline_model_parallel_comm_backend)
    _log_unused(
        use_sharp=use_sharp,
        sharp_enabled_group=sharp_enabled_group,
        nccl_communicator_config_path=not on_gpu and nccl_communicator_config_path,
        high_priority_stream_groups=not on_gpu and high_priority_stream_groups,
        pipeline_model_parallel_comm_backend=not on_gpu and pipeline_model_parallel_comm_backend,
    )
    timeout = timedelta(minutes=distributed_timeout_minutes)
    try:
        with as_megatrons():
            state.initialize_model_parallel(
                tensor_model_parallel_size,
                pipeline_model_parallel_size,
                cp=context_parallel_size,
                ep=expert_model_parallel_size,
                etp=expert_tensor_parallel_size,
                inter_dist_opt=num_distributed_optimizer_instances,
                virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
                order=order,
                backend=process_groups.backend_of_groups(),
                axis_options=nccl if on_gpu else None,
                timeout=timeout,
                eager=True,
                get_embedding_ranks=get_embedding_ranks,
                get_position_embedding_ranks=get_position_embedding_ranks,
            )
        lookup.OPTIONS["gloo"] = create_gloo_process_groups
        if create_gloo_process_groups:
            for kind in _GLOO_KINDS:  # made now: later perhaps not all ranks of a group call the getter
                lookup.gloo_group_of(kind)
        if create_all_gather_group:
            lookup.OPTIONS["dp_cp_ag"] = _create_second_group("dp_cp", timeout)
        _make_context_parallel(hierarchical_context_parallel_sizes, hybrid_context_parallel, timeout)
        if virtual_pipeline_model_parallel_size is not None:
            lookup.CHOSEN["get_virtual_pipeline_model_parallel_rank"] = 0
            lookup.CHOSEN["get_virtual_pipeline_model_parallel_world_size"] = virtual_pipeline_model_parallel_size
        set_global_memory_buffer()
    except BaseException:
        destroy_model_parallel()
        raise


def _make_context_parallel(levels: list[int] | None, hybrid: bool, timeout: timedelta) -> None:
    me = dist.get_rank()
    for ranks in _lists("cp") if levels else ():
        made, _ = process_groups.create_hierarchical_groups(
            me, ranks, levels or (), timeout=timeout, group_desc="CONTEXT_PARALLEL"
        )
        lookup.HIERARCHICAL.extend(made)
    for ranks in _lists("dp_cp") if hybrid else ():
        if len(ranks) % 2:
            raise RefusedError(
                f"hybrid context parallelism needs an even product of the data- and context-parallel sizes, but their "
                f"product is {len(ranks)}"
            )
        lookup.HYBRID.update(process_groups.create_hybrid_dp_cp_groups(me, ranks, None))


def destroy_model_parallel() -> None:
    """Destroys the parallel groups, but not the world group. Every rank must call this. Idempotent."""
    symmetric = sys.modules.get("megatron.core.inference.symmetric_memory")
    lookup.forget()
    if symmetric is not None and hasattr(symmetric, "SymmetricMemoryManager"):
        symmetric.SymmetricMemoryManager.destroy()
    try:
        state.destroy_model_parallel()
    finally:
        process_groups.forget_groups()


def _join_world() -> None:
    """Creates the world group over torch's default group, in place of one over an earlier default group."""
    world = state.try_get_world_group()
    if world is not None and _JOINED and _JOINED[0]() is not dist.group.WORLD:
        destroy_model_parallel()
        state.destroy_distributed_environment()
        _JOINED.clear()
        world = None
    if world is None:
        if not dist.is_initialized():
            raise NotInitializedError(
                "torch.distributed is not initialized; call torch.distributed.init_process_group() first"
            )
        state.init_distributed_environment()
        _JOINED[:] = [weakref.ref(dist.group.WORLD)]


def _check_sharp(use_sharp: bool, sharp_enabled_group: str | None, instances: int) -> None:
    if sharp_enabled_group is not None and not use_sharp:
        raise RefusedError(f"sharp_enabled_group={sharp_enabled_group!r} needs use_sharp=True; pass both, or neither")
    if sharp_enabled_group not in (None, "dp", "dp_replica"):
        raise RefusedError(f"sharp_enabled_group must be 'dp' or 'dp_replica', but is {sharp_enabled_group!r}")
    if sharp_enabled_group == "dp_replica" and instances == 1:
        raise RefusedError("sharp_enabled_group='dp_replica' needs num_distributed_optimizer_instances above 1")


def _log_unused(**options: Any) -> None:
    for name in (name for name, value in options.items() if value and name not in _LOGGED):
        _LOGGED.add(name)
        logger.info("initialize_model_parallel: %s has no effect here", name)


def _nccl_options(path: str | None, high_priority: list[str] | None) -> dict[str, GroupOptions]:
    found: dict[str, dict[str, Any]] = {}
    if path is not None:
        try:
            yaml: Any = importlib.import_module("yaml")
        except ImportError as error:
            raise RuntimeError("nccl_communicator_config_path needs PyYAML; run: pip install pyyaml") from error
        with open(path, encoding="utf-8") as file:
            found = yaml.safe_load(file) or {}
    for name in high_priority or ():
        process_groups.overwrite_nccl_comm_cfgs(found, name, ("is_high_priority_stream", True))
    kinds = process_groups.KINDS
    return {kinds[name]: process_groups.options_of(chosen) for name, chosen in found.items() if name in kinds}


def _lists(kind: str) -> list[list[int]]:
    return state.get_parallel_groups().layout.groups(kind)


def _create_second_group(kind: str, timeout: timedelta | None) -> Any:
    made = {
        tuple(ranks): process_groups.create_group(ranks, timeout, group_desc=f"{kind}_ag") for ranks in _lists(kind)
    }
    return next((group for ranks, group in made.items() if dist.get_rank() in ranks), None)


def create_all_gather_groups(
    for_expert_parallelism: bool = False,
    timeout: timedelta | None = None,
    nccl_comm_cfgs: Mapping[str, Any] | None = None,
) -> tuple[Any, Any]:
    """Creates a second group for each `dp_cp` group (data and context parallel) and, with `for_expert_parallelism`, for
    each `edp` group (expert data parallel).

    Returns this rank's second groups, the latter None if not created. Their calls can overlap calls of the first
    groups. Every rank must call this. `nccl_comm_cfgs` has no effect.
    """
    if not lookup.has_group("dp"):
        raise NotInitializedError("call initialize_model_parallel() before create_all_gather_groups()")
    dense = _create_second_group("dp_cp", timeout)
    if not for_expert_parallelism or lookup.size_of("ep") == 1:
        return dense, None
    return dense, _create_second_group("edp", timeout)


def update_pg_timeout(timeout: timedelta, pg: Any = None) -> None:
    """Sets the timeout of `pg`, or of all groups, and runs a barrier.

    All ranks of `pg`, or of the world, must call this.
    """
    groups = [pg]
    if pg is None:
        kinds = [lookup.group_of(kind) for kind in dict.fromkeys(lookup.VARIABLES.values())]
        groups = list(dict.fromkeys([dist.group.WORLD, *filter(None, kinds), *process_groups.CREATED]))
    dist.barrier(pg)  # no timeout may become shorter during a call
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for group in groups:
        set_timeout(group, timeout.total_seconds())
