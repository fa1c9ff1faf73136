"""The shape of `megatron.core.parallel_state`, of 0.16 and of main: its names and signatures, over the one state.

    from parallel_state.compat import megatron as mpu

    torch.distributed.init_process_group("gloo")
    mpu.initialize_model_parallel(tensor_model_parallel_size=2)
    mpu.get_tensor_model_parallel_group()                  # a torch ProcessGroup

`install()` puts this module in the place of Megatron's own, for programs that import that. Getters return real process
groups: on the CPU of the backend "parallel_state", on GPUs NCCL's. They are those of the groups that `get_tp_group()`
and the others of `parallel_state` return, which exist as well. What differs from Megatron is in `NOTES` and `MISSING`.
"""

from __future__ import annotations

from typing import Any

from parallel_state.compat.megatron import (
    buffers,
    division,
    getters,
    installation,
    lookup,
    notes,
    process_group_collections,
    process_groups,
    ranks,
)
from parallel_state.compat.tables import absent, collect

_NAMES = {
    division: "create_all_gather_groups destroy_model_parallel initialize_model_parallel update_pg_timeout",
    getters: (
        "get_all_ranks get_amax_reduction_group get_data_modulo_expert_parallel_group get_data_parallel_group "
        "get_data_parallel_group_gloo get_data_parallel_rank get_data_parallel_src_rank get_data_parallel_world_size "
        "get_expert_data_parallel_group get_expert_data_parallel_group_gloo get_expert_data_parallel_rank "
        "get_expert_data_parallel_world_size get_expert_tensor_model_pipeline_parallel_group "
        "get_hierarchical_context_parallel_groups get_hybrid_data_context_parallel_groups "
        "get_pipeline_model_parallel_first_rank get_pipeline_model_parallel_last_rank "
        "get_pipeline_model_parallel_next_rank get_pipeline_model_parallel_prev_rank "
        "get_tensor_and_data_parallel_group get_virtual_pipeline_model_parallel_rank "
        "get_virtual_pipeline_model_parallel_world_size has_separate_all_gather_group is_initialized "
        "is_pipeline_first_stage is_pipeline_last_stage is_rank_in_embedding_group is_rank_in_position_embedding_group "
        "is_unitialized model_parallel_is_initialized set_virtual_pipeline_model_parallel_rank"
    ),
    buffers: (
        "GlobalMemoryBuffer destroy_global_memory_buffer destroy_global_symmetric_memory_buffer "
        "get_global_memory_buffer get_global_symmetric_memory_buffer"
    ),
    process_groups: (
        "create_group create_hierarchical_groups create_hybrid_dp_cp_groups get_nccl_options overwrite_nccl_comm_cfgs"
    ),
    ranks: (
        "RankGenerator default_embedding_ranks default_position_embedding_ranks generate_masked_orthogonal_rank_groups"
    ),
    process_group_collections: "coordinators_of process_group_collection",
    installation: "install",
    notes: "MISSING NOTES",
}
globals().update(collect(_NAMES) | getters.MADE)
_set_global_memory_buffer = buffers.set_global_memory_buffer
_set_global_symmetric_memory_buffer = buffers.set_global_symmetric_memory_buffer


def __getattr__(name: str) -> Any:
    """Returns Megatron's module variables of groups, which its tests and tools read; None without a group."""
    if name in lookup.VARIABLES:
        return lookup.group_of(lookup.VARIABLES[name])
    raise absent(__name__, name, notes.MISSING)
