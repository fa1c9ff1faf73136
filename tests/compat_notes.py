"""Explains names of the compat modules that differ from the project's. `docs/generate.py` prints them in compat.md."""

from __future__ import annotations

from parallel_state.compat.tables import reasons

_MEGATRON = reasons({
    "as in 0.16, plus main's keyword-only gtp_remat_size, expert_gtp_remat_size, rank_offset and local_world_size, "
    "which must have their defaults": "initialize_model_parallel",
    "wrong sizes raise an error that is both RuntimeError and AssertionError": "RankGenerator",
    "main's `with_gtp_remat` is keyword-only and changes nothing; positional arguments are as in 0.16": (
        "get_data_parallel_group get_data_parallel_world_size get_data_parallel_rank get_expert_data_parallel_group "
        "get_expert_data_parallel_world_size get_expert_data_parallel_rank"
    ),
    "has main's `with_egtp_remat`, which changes nothing": "get_expert_tensor_model_pipeline_parallel_group",
    "the buffer has Megatron's interface and is on the device of the groups, which may be the CPU": (
        "get_global_memory_buffer"
    ),
    "as in 0.16; main has the rank in `gtp` in second place": "get_all_ranks",
    "on the CPU the default backend is parallel_state": "create_group",
    "needs no einops": "create_hierarchical_groups",
    "a group of gloo, or of PARALLEL_STATE_CPU_BACKEND if that is set": (
        "get_data_parallel_group_gloo get_expert_data_parallel_group_gloo"
    ),
    "also destroys the process groups and resets the value of set_data_parallel_rank": "destroy_model_parallel",
})  # fmt: skip
_VLLM = reasons({
    "has more fields than `stream`: this library's capture needs them": "GraphCaptureContext",
    "returns the tensor-parallel group: an engram table is divided over it": "get_etp_group",
    "returns the expert-parallel group, so its calls don't overlap with that group's": "get_eplb_group",
    "returns the group of a model's ranks, also if they are on several hosts": "get_inner_dp_world_group",
    "affects only groups that are made later": "set_custom_all_reduce",
    "raises InvalidArgumentError where vLLM asserts": "split_tensor_along_last_dim divide ensure_divisibility",
    "refuses readers on other hosts; vLLM's own queue supports them": "MessageQueue",
    "always makes a gloo group, whatever `backend` is": "stateless_init_torch_distributed_process_group",
})  # fmt: skip
_SGLANG = reasons({
    "timeouts, pickling of objects and errors are this library's; rejects elastic ranks": (
        "init_distributed_environment"
    ),
    "rejects elastic ranks": "init_world_group",
    "the rank lists must cover the world; flags of SGLang's kernels have no effect": "init_model_parallel_group",
    "sizes are 1 until they are set; rejects elastic ranks": "initialize_model_parallel",
    "the rank lists must cover the world, which it makes if there is none; flags of SGLang's kernels have no effect": (
        "GroupCoordinator"
    ),
    "works on every device; SGLang's returns None without ROCm": "GroupCoordinator.fused_allreduce_rmsnorm",
    "also works on the CPU": "GroupCoordinator.(all_gatherv reduce_scatterv)",
    "sends over the CPU group": "GroupCoordinator.broadcast_object_list",
    "`work` is this library's handle: wait() and is_completed()": "P2PWork",
    "also ends waits for exited ranks in gloo groups": "abort_distributed_environment",
    "needs this library's world": "create_custom_parallel_group",
    "raises InvalidArgumentError, a ValueError, not AssertionError": "divide ensure_divisibility",
    "supports CUDA and the CPU": "get_default_distributed_backend",
    "returns the engine that SGLang started in this process": "get_mooncake_transfer_engine",
    "has no effect: get_parallel() has the flags": "initialize_dp_attention_flags",
    "has no effect: this library doesn't use these kernels of SGLang": (
        "set_mscclpp set_torch_symm_mem_all_reduce set_flashinfer_allreduce_only"
    ),
    "returns False: elastic ranks are unsupported": "world_dp_gather_enabled",
})  # fmt: skip
_DEEPSPEED = {
    "get_model_parallel_rank": "the rank in tp × pp, as in DeepSpeed's grid; Megatron's is the rank in tp",
    "get_model_parallel_world_size": "the size of tp × pp, as in DeepSpeed's grid; Megatron's is the size of tp",
}
NOTES = {"megatron": _MEGATRON, "vllm": _VLLM, "sglang": _SGLANG, "deepspeed": _DEEPSPEED}
INTERNAL = {
    "vllm": reasons({
        "used by vLLM's own package `distributed` only": (
            "TensorMetadata _split_tensor_dict _get_unique_name _register_group all_reduce all_reduce_fake "
            "reduce_scatter reduce_scatter_fake all_gather all_gather_fake get_cpu_distributed_timeout_or_none "
            "get_distributed_timeout_or_none"
        ),
        "internal to vLLM's queue; this library's queue has its own ring": (
            "USE_SCHED_YIELD sched_yield memory_fence from_bytes_big SPINLOOP_EXT_ENABLED SPINLOOP_TIMEOUT_SECONDS "
            "VLLM_RINGBUFFER_WARNING_INTERVAL LONG_WAIT_TIME_LOG_MSG "
            "SHM_READER_RECHECK_INTERVAL_MS SHM_NOTIFY_POLL_INTERVAL_S to_bytes_big SpinCondition ShmRingBuffer "
            "MessageQueue.(acquire_write acquire_read recv buffer current_idx deadline local_reader_rank local_socket "
            "n_warning remote_socket started tensor_arena timeout warning_wait_time_ms)"
        ),
        "a field of the message queue's handle, which is `message_queue.Handle` here": (
            "Handle.(local_reader_ranks buffer_handle local_subscribe_addr local_notify_addr remote_subscribe_addr "
            "remote_addr_ipv6 tensor_arena_handle)"
        ),
    }),
    "sglang": reasons({
        "used by SGLang's own coordinator only": (
            "TensorMetadata outplace_all_reduce reg_all_gather_into_tensor reg_reduce_scatter_tensor "
            "reg_all_to_all_single get_torch_distributed_pg_options"
        ),
        "SGLang's private copies of vLLM's getters": "vllm_get_pp_group vllm_get_tp_group vllm_get_world_group",
    }),
}  # fmt: skip
"""Reasons why a compat module lacks a name that only its own project uses."""
