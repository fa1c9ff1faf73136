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
    process_group_collections,
    process_groups,
    ranks,
)
from parallel_state.compat.tables import absent, collect, reasons

_NAMES = {
    **dict.fromkeys((division, getters, buffers), "*"),
    process_groups: (
        "create_group create_hierarchical_groups create_hybrid_dp_cp_groups get_nccl_options overwrite_nccl_comm_cfgs"
    ),
    ranks: (
        "RankGenerator default_embedding_ranks default_position_embedding_ranks generate_masked_orthogonal_rank_groups"
    ),
    process_group_collections: "coordinators_of process_group_collection",
    installation: "install",
}
globals().update(collect(_NAMES))
_set_global_memory_buffer = buffers.set_global_memory_buffer
_set_global_symmetric_memory_buffer = buffers.set_global_symmetric_memory_buffer


def __getattr__(name: str) -> Any:
    """Returns Megatron's module variables of groups, which its tests and tools read; None without a group."""
    if name in lookup.VARIABLES:
        return lookup.group_of(lookup.VARIABLES[name])
    raise absent(__name__, name, MISSING)


NOTES = reasons({
    "as 0.16; main's four other arguments, by keyword only: gtp_remat_size, expert_gtp_remat_size, rank_offset, "
    "local_world_size": "initialize_model_parallel",
    "with main's `gtp_remat`; wrong sizes raise an error that is RuntimeError and AssertionError": "RankGenerator",
    "main's `with_gtp_remat` is by keyword only; what comes by position is as in 0.16": (
        "get_data_parallel_group get_data_parallel_world_size get_data_parallel_rank get_expert_data_parallel_group "
        "get_expert_data_parallel_world_size get_expert_data_parallel_rank"
    ),
    "with main's `with_egtp_remat`": "get_expert_tensor_model_pipeline_parallel_group",
    "a buffer of the same interface, which is on the CPU where the groups are": "get_global_memory_buffer",
    "as 0.16; main has the rank in `gtp` in second place, which is here where gtp_remat_size isn't 1": "get_all_ranks",
    "on the CPU, without a backend, a group of the backend parallel_state": "create_group",
    "needs no einops": "create_hierarchical_groups",
    "of gloo, or of PARALLEL_STATE_CPU_BACKEND if that is set": (
        "get_data_parallel_group_gloo get_expert_data_parallel_group_gloo"
    ),
    "destroys the process groups as well, and forgets what set_data_parallel_rank was given": "destroy_model_parallel",
})  # fmt: skip
MISSING = {"HAVE_EINOPS": "nothing here needs einops"}
