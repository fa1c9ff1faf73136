"""SGLang's parallel state (0.5.23): the names of `sglang.srt.distributed` and of `layers.dp_attention`.

    from parallel_state.compat import sglang

    sglang.init_distributed_environment(backend="gloo")
    sglang.get_parallel().override_permanently(tp_size=4, ep_size=2)
    sglang.initialize_model_parallel()
    x = sglang.tensor_model_parallel_all_reduce(x)

Or call `sglang.install()` before SGLang creates its groups. docs/compat.md lists the differences.
"""

from __future__ import annotations

from datetime import timedelta as timedelta
from typing import Any

from device_communicators.base.errors import AlreadyInitializedError, UnsupportedError
from parallel_state.compat.sglang import communication_op, coordinator, dp_attention, parallel_state, utils
from parallel_state.compat.sglang.context import ParallelContext as ParallelContext
from parallel_state.compat.sglang.context import get_parallel as get_parallel
from parallel_state.compat.tables import absent, collect, reasons

globals().update(collect({
    **dict.fromkeys((communication_op, parallel_state, dp_attention), "*"),
    utils: "* all_gather_single divide ensure_divisibility reduce_scatter_single", coordinator: "* REDUCE_OP_SUM",
}))  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in MISSING:
        raise absent(__name__, name, MISSING)
    return getattr(parallel_state, name)


def install() -> None:
    """Makes SGLang in this process create this library's groups, by hooks of SGLang's plug-ins. Idempotent.

    Raises AlreadyInitializedError if SGLang has already created groups, and UnsupportedError if a hook isn't applied.
    """
    from sglang.srt.distributed import parallel_state as theirs
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    ours = coordinator.GroupCoordinator
    if theirs.GroupCoordinator is ours:
        return
    if theirs._WORLD is not None:
        raise AlreadyInitializedError("SGLang has already created its groups; call install() before it does so")
    for name in _HOOKED.split():
        HookRegistry.register(f"{theirs.__name__}.{name}", getattr(parallel_state, name), HookType.REPLACE)
    HookRegistry.apply_hooks()
    if theirs.GroupCoordinator is not ours:
        raise UnsupportedError(f"SGLang didn't apply the hooks of {__name__}; its log has the cause")
    utils.logger.info("SGLang's groups are now those of %s", __name__)


_HOOKED = "GroupCoordinator init_distributed_environment destroy_distributed_environment abort_distributed_environment"
"""`install` replaces these names. SGLang still computes its own layout of ranks."""

MISSING = reasons({
    "part of SGLang's scheduling of tokens, buffers and padding; SGLang's own module works over these groups": (
        "DpPaddingMode set_dp_buffer_len get_global_dp_buffer get_local_dp_buffer get_global_dp_buffer_len "
        "get_local_dp_buffer_len set_local_dp_buffer_len set_dp_buffer_len_from_batch get_dp_global_num_tokens "
        "get_dp_hidden_size get_dp_dtype get_dp_device set_is_extend_in_batch get_is_extend_in_batch is_dp_max_padding "
        "init_dp_gathered_buffer multimodal_encoder_runs_here reject_attn_tp_shard_with_tp_reduce get_dp_local_info "
        "get_dp_local_slice_cpu memcpy_cpu memcpy_func memcpy mask_dp_pad_moe_topk_ids is_dp_gatherv_active "
        "note_rank_barrier_in_prefill_graph dp_gather_partial dp_gather_replicate dp_scatter can_use_dp_reduce_scatter "
        "dp_reduce_scatter_tensor get_dp_tbo_comm_stream _tbo_event dp_gather_partial_async get_tbo_persistent_buffer "
        "dp_reduce_scatterv_async"
    ),
    "for ranks that join a running deployment over Mooncake; use parallel_state.reinitialize instead": (
        "enable_joiner_all_gather update_dp_attention_post_scale"
    ),
    "a CUDA kernel of SGLang; the route chooses one of this library's kernels": "CustomAllReduceV2",
})  # fmt: skip
