"""SGLang's parallel state (0.5.23): the names of `sglang.srt.distributed` and of attention's data parallelism.

    from parallel_state.compat import sglang
    sglang.init_distributed_environment(backend="gloo")
    sglang.get_parallel().override_permanently(tp_size=4, ep_size=2)
    sglang.initialize_model_parallel()
    x = sglang.tensor_model_parallel_all_reduce(x)

Or `sglang.install()` before the first import of SGLang, whose own layers then run on it. What differs is in `NOTES`,
what isn't here in `MISSING`.
"""

from __future__ import annotations

import sys
from datetime import timedelta as timedelta
from typing import Any

from device_communicators.base.errors import AlreadyInitializedError
from parallel_state.compat.sglang import communication_op, coordinator, dp_attention, parallel_state, utils
from parallel_state.compat.sglang.context import ParallelContext as ParallelContext
from parallel_state.compat.sglang.context import get_parallel as get_parallel
from parallel_state.compat.tables import absent, collect, reasons

globals().update(collect({
    **dict.fromkeys((communication_op, parallel_state, dp_attention), "*"),
    utils: "* all_gather_single divide ensure_divisibility reduce_scatter_single", coordinator: "* REDUCE_OP_SUM",
}))  # fmt: skip


def __getattr__(name: str) -> Any:
    """Returns SGLang's globals, `_TP` and the like."""
    if name in MISSING:
        raise absent(__name__, name, MISSING)
    return getattr(parallel_state, name)


def install() -> None:
    """Puts these modules in the place of SGLang's, for what this process imports from now on. Twice is fine.

    Those of `sglang.srt.distributed`; its `layers.dp_attention` then runs over them. Raises AlreadyInitializedError
    where SGLang's own are imported already.
    """
    places = {
        f"sglang.srt.distributed.{part.__name__.rpartition('.')[2]}": part
        for part in (parallel_state, communication_op, utils)
    }
    imported = [name for name, part in places.items() if sys.modules.get(name) not in (None, part)]
    if imported:
        raise AlreadyInitializedError(f"{', '.join(imported)} is imported already; call install() before")
    sys.modules.update(places)
    utils.logger.info("%s are those of %s from now on", ", ".join(places), __name__)


NOTES = reasons({
    "timeouts, pickle for objects and errors are ours; elastic ranks are refused": "init_distributed_environment",
    "elastic ranks are refused": "init_world_group",
    "the lists divide the world; flags of SGLang's kernels have no effect": "init_model_parallel_group",
    "sizes are 1 until they are set; elastic ranks are refused": "initialize_model_parallel",
    "the lists divide the world, which is made on demand; flags of SGLang's kernels have no effect": "GroupCoordinator",
    "is there on every device; SGLang's gives None off ROCm": "GroupCoordinator.fused_allreduce_rmsnorm",
    "works on the CPU, too": "GroupCoordinator.(all_gatherv reduce_scatterv)",
    "travels over the CPU": "GroupCoordinator.broadcast_object_list",
    "its work is our handle: wait() and is_completed()": "P2PWork",
    "also ends waits for ranks that are gone in groups over gloo": "abort_distributed_environment",
    "needs our world": "create_custom_parallel_group",
    "raises InvalidArgumentError, a ValueError, not AssertionError": "divide ensure_divisibility",
    "knows CUDA and the CPU": "get_default_distributed_backend",
    "the one that SGLang has started in this process": "get_mooncake_transfer_engine",
    "None, as off NPUs": "get_torch_distributed_pg_options",
    "has no effect: get_parallel() says it": "initialize_dp_attention_flags",
    "a function over a registered op; the route chooses the kernel": "outplace_all_reduce",
    "has no effect: the kernels are SGLang's": (
        "set_mscclpp set_torch_symm_mem_all_reduce set_flashinfer_allreduce_only"
    ),
    "False: no rank joins": "world_dp_gather_enabled",
})  # fmt: skip
MISSING = reasons({
    "the tokens of a batch, their buffers and how they are padded are SGLang's schedule; its own module runs over "
    "these groups": (
        "DpPaddingMode set_dp_buffer_len get_global_dp_buffer get_local_dp_buffer get_global_dp_buffer_len "
        "get_local_dp_buffer_len set_local_dp_buffer_len set_dp_buffer_len_from_batch get_dp_global_num_tokens "
        "get_dp_hidden_size get_dp_dtype get_dp_device set_is_extend_in_batch get_is_extend_in_batch is_dp_max_padding "
        "init_dp_gathered_buffer multimodal_encoder_runs_here reject_attn_tp_shard_with_tp_reduce get_dp_local_info "
        "get_dp_local_slice_cpu memcpy_cpu memcpy_func memcpy mask_dp_pad_moe_topk_ids is_dp_gatherv_active "
        "note_rank_barrier_in_prefill_graph dp_gather_partial dp_gather_replicate dp_scatter can_use_dp_reduce_scatter "
        "dp_reduce_scatter_tensor get_dp_tbo_comm_stream _tbo_event dp_gather_partial_async get_tbo_persistent_buffer "
        "dp_reduce_scatterv_async"
    ),
    "ranks that join a running deployment over Mooncake; here ranks start again with parallel_state.reinitialize": (
        "enable_joiner_all_gather update_dp_attention_post_scale"
    ),
    "a kernel of SGLang's for CUDA; the route chooses among ours": "CustomAllReduceV2",
    "where SGLang keeps vLLM's own getters while they are patched": (
        "vllm_get_pp_group vllm_get_tp_group vllm_get_world_group"
    ),
})  # fmt: skip
