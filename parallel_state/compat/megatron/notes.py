"""Lists what differs from `megatron.core.parallel_state`, name by name, for docs and tests."""

from __future__ import annotations

_REMAT = "main's `with_gtp_remat` is by keyword only; what comes by position is as in 0.16"

NOTES: dict[str, str] = {
    "initialize_model_parallel": "as 0.16; main's four other arguments, by keyword only: gtp_remat_size, "
    "expert_gtp_remat_size, rank_offset, local_world_size",
    "RankGenerator": "with main's `gtp_remat`; wrong sizes raise an error that is RuntimeError and AssertionError",
    "get_data_parallel_group": _REMAT,
    "get_data_parallel_world_size": _REMAT,
    "get_data_parallel_rank": _REMAT,
    "get_expert_data_parallel_group": _REMAT,
    "get_expert_data_parallel_world_size": _REMAT,
    "get_expert_data_parallel_rank": _REMAT,
    "get_expert_tensor_model_pipeline_parallel_group": "with main's `with_egtp_remat`",
    "get_global_memory_buffer": "a buffer of the same interface, which is on the CPU where the groups are",
    "get_all_ranks": "as 0.16; main has the rank in `gtp` in second place, which is here where gtp_remat_size isn't 1",
    "create_group": "on the CPU, without a backend, a group of the backend parallel_state",
    "create_hierarchical_groups": "needs no einops",
    "get_data_parallel_group_gloo": "of gloo, or of PARALLEL_STATE_CPU_BACKEND if that is set",
    "get_expert_data_parallel_group_gloo": "of gloo, or of PARALLEL_STATE_CPU_BACKEND if that is set",
    "destroy_model_parallel": "destroys the process groups as well, and forgets what set_data_parallel_rank was given",
}
MISSING: dict[str, str] = {"HAVE_EINOPS": "nothing here needs einops"}
