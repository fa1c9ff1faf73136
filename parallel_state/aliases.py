"""The long names that users of Megatron and vLLM type, for what `state` and the coordinators already say.

Where Megatron's `get_…_group` returns a torch ProcessGroup, these return the GroupCoordinator, as vLLM's do;
`.device_group` is the ProcessGroup.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
from torch import Tensor

from parallel_state.coordinator import GroupCoordinator
from parallel_state.state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    get_dp_group,
    get_pp_group,
    get_tp_group,
    get_world_group,
    model_parallel_is_initialized,
)


def get_tensor_model_parallel_group() -> GroupCoordinator:
    """`get_tp_group()`."""
    return get_tp_group()


def get_tensor_model_parallel_world_size() -> int:
    """`get_tp_group().world_size`."""
    return get_tp_group().world_size


def get_tensor_model_parallel_rank() -> int:
    """This process' rank in its tensor-parallel group."""
    return get_tp_group().rank_in_group


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the tensor-parallel group's first rank."""
    return get_tp_group().first_rank


def get_tensor_model_parallel_global_ranks() -> list[int]:
    """`get_tp_group().ranks` as a new list."""
    return list(get_tp_group().ranks)


def get_pipeline_model_parallel_group() -> GroupCoordinator:
    """`get_pp_group()`."""
    return get_pp_group()


def get_pipeline_model_parallel_world_size() -> int:
    """`get_pp_group().world_size`."""
    return get_pp_group().world_size


def get_pipeline_model_parallel_rank() -> int:
    """This process' stage: its rank in its pipeline group."""
    return get_pp_group().rank_in_group


def get_pipeline_model_parallel_global_ranks() -> list[int]:
    """`get_pp_group().ranks` as a new list."""
    return list(get_pp_group().ranks)


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of this pipeline's first stage."""
    return get_pp_group().first_rank


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of this pipeline's last stage."""
    return get_pp_group().last_rank


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage, round the end."""
    return get_pp_group().next_rank


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the previous stage, round the end."""
    return get_pp_group().prev_rank


def is_pipeline_first_stage() -> bool:
    """`get_pp_group().is_first_rank`."""
    return get_pp_group().is_first_rank


def is_pipeline_last_stage() -> bool:
    """`get_pp_group().is_last_rank`."""
    return get_pp_group().is_last_rank


def get_data_parallel_group() -> GroupCoordinator:
    """`get_dp_group()`."""
    return get_dp_group()


def get_data_parallel_world_size() -> int:
    """`get_dp_group().world_size`."""
    return get_dp_group().world_size


def get_data_parallel_rank() -> int:
    """This process' rank in its data-parallel group."""
    return get_dp_group().rank_in_group


def get_data_parallel_src_rank() -> int:
    """Global rank of the data-parallel group's first rank."""
    return get_dp_group().first_rank


def get_data_parallel_global_ranks() -> list[int]:
    """`get_dp_group().ranks` as a new list."""
    return list(get_dp_group().ranks)


def get_world_size() -> int:
    """`get_world_group().world_size`."""
    return get_world_group().world_size


def get_rank() -> int:
    """This process' rank in the world."""
    return get_world_group().rank


def is_unitialized() -> bool:
    """Megatron's name, in its spelling, for "the groups are not there"."""
    return not model_parallel_is_initialized()


def is_initialized() -> bool:
    """Megatron's name for model_parallel_is_initialized."""
    return model_parallel_is_initialized()


def tensor_model_parallel_all_reduce(input_: Tensor) -> Tensor:
    """`get_tp_group().all_reduce(input_)`."""
    return get_tp_group().all_reduce(input_)


def tensor_model_parallel_all_gather(input_: Tensor, dim: int = -1) -> Tensor:
    """`get_tp_group().all_gather(input_, dim)`."""
    return get_tp_group().all_gather(input_, dim)


def tensor_model_parallel_reduce_scatter(input_: Tensor, dim: int = -1) -> Tensor:
    """`get_tp_group().reduce_scatter(input_, dim)`."""
    return get_tp_group().reduce_scatter(input_, dim)


def tensor_model_parallel_gather(input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
    """`get_tp_group().gather(input_, dst, dim)`."""
    return get_tp_group().gather(input_, dst, dim)


def broadcast_tensor_dict(tensor_dict: dict[Any, Any] | None = None, src: int = 0) -> dict[Any, Any] | None:
    """`get_tp_group().broadcast_tensor_dict(tensor_dict, src)`; the dict itself before any init, as in vLLM."""
    return get_tp_group().broadcast_tensor_dict(tensor_dict, src) if model_parallel_is_initialized() else tensor_dict


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Both destroys, then frees what memory nobody holds, as vLLM's tests call it. Ray, if it is loaded, on demand."""
    destroy_model_parallel()
    destroy_distributed_environment()
    ray = sys.modules.get("ray")
    if shutdown_ray and ray is not None:
        ray.shutdown()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
