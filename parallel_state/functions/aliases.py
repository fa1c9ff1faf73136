"""Megatron's and vLLM's names for this library's functions. Groups are GroupCoordinators, as in vLLM."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from device_communicators.base.errors import InvalidArgumentError
from device_communicators.base.host_calls import OUTSIDE, host_call
from parallel_state import state
from parallel_state.collectives.capture_stream import GraphCaptureContext, side_stream
from parallel_state.groups.coordinator import GroupCoordinator


def get_data_parallel_group(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> GroupCoordinator:
    """Returns the `dp` group, or `dp_cp` if `with_context_parallel`.

    If `partial_data_parallel` is set as well, returns `intra_dp_cp`, the part within one instance of the distributed
    optimizer.
    """
    return state.get_group(_data_parallel(with_context_parallel, partial_data_parallel))


def get_data_parallel_group_gloo(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> Any:
    """Returns the gloo ProcessGroup of `get_data_parallel_group(…)`."""
    return get_data_parallel_group(with_context_parallel, partial_data_parallel).cpu_group


def get_data_parallel_world_size(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """Returns the size of `get_data_parallel_group(…)`."""
    return len(state.get_group_ranks(_data_parallel(with_context_parallel, partial_data_parallel)))


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """Returns this rank's position in `get_data_parallel_group(…)`."""
    return state.get_group_rank(_data_parallel(with_context_parallel, partial_data_parallel))


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Returns the first global rank of `get_data_parallel_group(with_context_parallel)`."""
    return state.get_group_ranks(_data_parallel(with_context_parallel, False))[0]


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> GroupCoordinator | None:
    """Returns the `tp_dp` group, or `tp_dp_cp` if `with_context_parallel`.

    Before the init, raises GroupNotInitializedError, or returns None if `check_initialized` is False.
    """
    name = "tp_dp_cp" if with_context_parallel else "tp_dp"
    return state.get_group(name) if check_initialized else state.try_get_group(name)


def get_expert_data_parallel_group(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> GroupCoordinator | None:
    """Returns the `edp` group. If `check_initialized` is False, returns None before the init instead of raising.

    With `partial_expert_data_parallel` returns `intra_edp`, the part within one instance of the distributed optimizer.
    """
    name = "intra_edp" if partial_expert_data_parallel else "edp"
    return state.get_group(name) if check_initialized else state.try_get_group(name)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> Any:
    """Returns the gloo ProcessGroup of `get_expert_data_parallel_group(…)`."""
    return state.get_group("intra_edp" if partial_expert_data_parallel else "edp").cpu_group


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Returns the size of `get_expert_data_parallel_group(…)`."""
    return len(state.get_group_ranks("intra_edp" if partial_expert_data_parallel else "edp"))


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """Returns this rank's position in `get_expert_data_parallel_group(…)`."""
    return state.get_group_rank("intra_edp" if partial_expert_data_parallel else "edp")


def get_amax_reduction_group(with_context_parallel: bool = False, tp_only_amax_red: bool = False) -> GroupCoordinator:
    """Returns the group that reduces FP8 scales: `tp_dp`, or `tp` if `tp_only_amax_red` is set.

    `with_context_parallel` adds the ranks of cp: `tp_dp_cp`, or `tp_cp`.
    """
    if tp_only_amax_red:
        return state.get_group("tp_cp" if with_context_parallel else "tp")
    return state.get_group("tp_dp_cp" if with_context_parallel else "tp_dp")


def _data_parallel(context: bool, partial: bool) -> str:
    if partial and not context:
        raise InvalidArgumentError("partial_data_parallel needs with_context_parallel=True, as in Megatron")
    return "intra_dp_cp" if partial else "dp_cp" if context else "dp"


def get_pipeline_model_parallel_first_rank() -> int:
    """Returns the global rank of this pipeline's first stage."""
    return state.get_pp_group().first_global_rank


def get_pipeline_model_parallel_last_rank() -> int:
    """Returns the global rank of this pipeline's last stage."""
    return state.get_pp_group().last_global_rank


def get_pipeline_model_parallel_next_rank() -> int:
    """Returns the global rank of the next stage; wraps around."""
    return state.get_pp_group().next_global_rank


def get_pipeline_model_parallel_prev_rank() -> int:
    """Returns the global rank of the previous stage; wraps around."""
    return state.get_pp_group().prev_global_rank


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Returns the number of virtual stages on each pipeline rank; None without virtual stages."""
    virtual = state.get_parallel_groups().virtual_pipeline
    return None if virtual is None else virtual.size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Returns this rank's current virtual stage; None without virtual stages."""
    virtual = state.get_parallel_groups().virtual_pipeline
    return None if virtual is None else virtual.rank


def set_virtual_pipeline_model_parallel_rank(rank: int) -> None:
    """Sets the virtual stage that this pipeline rank runs now."""
    virtual = state.get_parallel_groups().virtual_pipeline
    if virtual is None or not 0 <= rank < virtual.size:
        found = "there are no virtual stages" if virtual is None else f"there are {virtual.size} virtual stages"
        raise InvalidArgumentError(
            f"the virtual pipeline rank must be the index of one of this rank's virtual stages, but is {rank}, "
            f"and {found}"
        )
    virtual.rank = rank


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Returns True on the first pipeline rank.

    With `ignore_virtual=False`, `vp_stage` (default: the current virtual stage) must also be the first virtual stage.
    """
    return state.get_pp_group().is_first_rank and (ignore_virtual or _stage(vp_stage) in (None, 0))


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Returns True on the last pipeline rank.

    With `ignore_virtual=False`, `vp_stage` (default: the current virtual stage) must also be the last virtual stage.
    """
    virtual = state.get_parallel_groups().virtual_pipeline if not ignore_virtual else None
    return state.get_pp_group().is_last_rank and (virtual is None or _stage(vp_stage) == virtual.size - 1)


def _stage(vp_stage: int | None) -> int | None:
    virtual = state.get_parallel_groups().virtual_pipeline
    if virtual is None:
        return None
    if vp_stage is not None and not 0 <= vp_stage < virtual.size:
        raise InvalidArgumentError(f"vp_stage must be in 0 … {virtual.size - 1}, but is {vp_stage}")
    return virtual.rank if vp_stage is None else vp_stage


@host_call(OUTSIDE)
def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Returns True if this rank shares the word embedding.

    With `ignore_virtual=False`, `vp_stage` (default: the current virtual stage) must also share the word embedding.
    """
    groups = state.get_parallel_groups()
    ranks = groups.layout.group_of(groups.world.rank_in_group, "embedding")
    if ignore_virtual or not ranks:
        return bool(ranks)
    if groups.world.rank_in_group == ranks[0]:
        return is_pipeline_first_stage(False, vp_stage)
    if groups.world.rank_in_group == ranks[-1]:
        return is_pipeline_last_stage(False, vp_stage)
    return True


@host_call(OUTSIDE)
def is_rank_in_position_embedding_group() -> bool:
    """Returns True if this rank has the position embedding."""
    groups = state.get_parallel_groups()
    return bool(groups.layout.group_of(groups.world.rank_in_group, "position_embedding"))


def get_all_ranks() -> str:
    """Returns this rank's positions in its tp, dp, cp, pp and ep groups, such as `0_1_0_3_0`."""
    return "_".join(str(state.get_group_rank(name)) for name in ("tp", "dp", "cp", "pp", "ep"))


def get_world_size() -> int:
    """Returns the size of the world."""
    return state.get_world_group().world_size


def get_rank() -> int:
    """Returns this process's rank in the world."""
    return state.get_world_group().rank


def is_unitialized() -> bool:
    """Returns True before initialize_model_parallel; the spelling is Megatron's."""
    return not state.model_parallel_is_initialized()


def is_initialized() -> bool:
    """Returns True after initialize_model_parallel."""
    return state.model_parallel_is_initialized()


def tensor_model_parallel_all_reduce(input_: Tensor) -> Tensor:
    """Calls `get_tp_group().all_reduce(input_)`."""
    return state.get_tp_group().all_reduce(input_)


def tensor_model_parallel_all_gather(input_: Tensor, dim: int = -1) -> Tensor:
    """Calls `get_tp_group().all_gather(input_, dim)`."""
    return state.get_tp_group().all_gather(input_, dim)


def tensor_model_parallel_reduce_scatter(input_: Tensor, dim: int = -1) -> Tensor:
    """Calls `get_tp_group().reduce_scatter(input_, dim)`."""
    return state.get_tp_group().reduce_scatter(input_, dim)


def tensor_model_parallel_gather(input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
    """Calls `get_tp_group().gather(input_, dst, dim)`."""
    return state.get_tp_group().gather(input_, dst, dim)


def broadcast_tensor_dict(tensor_dict: dict[Any, Any] | None = None, src: int = 0) -> dict[Any, Any] | None:
    """Calls `get_tp_group().broadcast_tensor_dict`; before init returns `tensor_dict`, as vLLM does."""
    if not state.model_parallel_is_initialized():
        return tensor_dict
    return state.get_tp_group().broadcast_tensor_dict(tensor_dict, src)


@contextmanager
@host_call(OUTSIDE)
def graph_capture(device: torch.device | str | None = None) -> Iterator[GraphCaptureContext]:
    """Prepares the tp and pp groups for CUDA graphs that the body captures.

    The body runs on a new stream of `device` (default: the tp group's). This stream first waits for the current one. On
    the CPU the context has no effect. Every rank of both groups must enter this context.
    """
    tp, pp = state.get_tp_group(), state.get_pp_group()
    where = tp.device if device is None else torch.device(device)
    neighbours = sorted({(pp.rank_in_group + step) % pp.world_size for step in (-1, 1)} - {pp.rank_in_group})
    with side_stream(where) as context, tp.graph_capture(context), pp.graph_capture(context, peers=neighbours):
        yield context


@host_call(OUTSIDE)
def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Destroys all groups and frees unused memory. Every rank must call this. `shutdown_ray` also shuts down Ray if
    loaded.
    """
    state.destroy_model_parallel()
    state.destroy_distributed_environment()
    ray = sys.modules.get("ray")
    if shutdown_ray and ray is not None:
        ray.shutdown()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
