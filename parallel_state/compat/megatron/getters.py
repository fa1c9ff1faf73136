"""Megatron's getters and setters: those that follow from a table, and those with flags."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from parallel_state import state
from parallel_state.compat.megatron.errors import NotInitializedError, RefusedError
from parallel_state.compat.megatron.lookup import (
    CHOSEN,
    HIERARCHICAL,
    HYBRID,
    gloo_group_of,
    group_of,
    has_group,
    is_before_start,
    or_raise,
    rank_of,
    ranks_of,
    size_of,
    usual_kind,
)
from parallel_state.compat.tables import named

_GETTERS = {
    "tensor_model_parallel": ("tp", "group world_size rank src_rank"),
    "pipeline_model_parallel": ("pp", "group world_size rank"),
    "model_parallel": ("model", "group src_rank"),
    "embedding": ("embedding", "group"),
    "position_embedding": ("position_embedding", "group"),
    "context_parallel": ("cp", "group world_size rank global_ranks"),
    "tensor_and_context_parallel": ("tp_cp", "group world_size rank"),
    "expert_model_parallel": ("ep", "group world_size rank src_rank"),
    "expert_tensor_parallel": ("etp", "group world_size rank"),
    "expert_tensor_and_model_parallel": ("tp_ep", "group world_size rank"),
    "intra_distributed_optimizer_instance": ("intra_dist_opt", "group"),
    "inter_distributed_optimizer_instance": ("inter_dist_opt", "group"),
    "gtp_weight_remat": ("gtp", "group world_size rank global_ranks"),
    "expert_gtp_weight_remat": ("egtp", "group world_size rank global_ranks"),
}
"""Megatron's stems: the kind of group that each means, and its getters that take no flags."""
_NOT_ZERO = ("tp", "pp")
"""Kinds whose size and rank raise before any initialisation; those of others are 0, as in Megatron."""
_SETTERS = ("tensor_model_parallel_world_size", "tensor_model_parallel_rank", "pipeline_model_parallel_world_size",
            "pipeline_model_parallel_rank", "virtual_pipeline_model_parallel_world_size",
            "expert_model_parallel_world_size", "expert_model_parallel_rank", "expert_tensor_parallel_world_size",
            "expert_tensor_parallel_rank", "data_parallel_rank")  # fmt: skip


def _getters() -> Iterator[Callable[..., Any]]:
    for stem, (kind, facts) in _GETTERS.items():
        for fact in facts.split():
            name = f"get_{stem}_{fact}"
            text = {
                "group": f"Returns this rank's `{kind}` process group; NotInitializedError, or None, without.",
                "global_ranks": f"Returns the global ranks of this rank's `{kind}` group.",
                "src_rank": f"Returns the global rank of the first one in this rank's `{kind}` group.",
                "world_size": f"Returns the number of ranks in this rank's `{kind}` group, or what was set.",
                "rank": f"Returns this rank's position in its `{kind}` group, or what was set.",
            }[fact]
            yield named(__name__, _getter(kind, fact, name), name, text)


def _getter(kind: str, fact: str, name: str) -> Callable[..., Any]:
    if fact == "group":

        def get_group(check_initialized: bool = True) -> Any:
            group = group_of(kind)
            return or_raise(group, kind) if check_initialized else group

        return get_group
    if fact == "global_ranks":

        def get_global_ranks(check_initialized: bool = True) -> list[int] | None:
            return ranks_of(kind) if check_initialized or group_of(kind) is not None else None

        return get_global_ranks
    if fact == "src_rank":
        return lambda: ranks_of(kind)[0]
    of, none_yet = (size_of if fact == "world_size" else rank_of), kind not in _NOT_ZERO

    def get_number() -> Any:
        chosen = CHOSEN.get(name)
        if chosen is not None:
            return chosen
        if kind == "etp" and group_of(kind) is None:  # as Megatron, for programs that set sizes without groups
            return CHOSEN.get(name.replace("expert_tensor", "tensor_model"))
        if none_yet and is_before_start():
            return 0
        if kind in ("gtp", "egtp") and group_of(kind) is None:
            return 0
        return of(kind)

    return get_number


def _setter(name: str) -> Callable[..., None]:
    """Returns a setter of what a getter returns from then on; None makes it the group's again."""

    def set_world_size(world_size: int | None) -> None:
        CHOSEN[f"get_{name}"] = world_size

    def set_rank(rank: int | None) -> None:
        CHOSEN[f"get_{name}"] = rank

    text = f"Sets what get_{name}() returns; None makes it the group's again. No other rank takes part."
    return named(__name__, set_rank if name.endswith("rank") else set_world_size, f"set_{name}", text)


MADE = {made.__name__: made for made in (*_getters(), *map(_setter, _SETTERS))}
"""All that follow from the tables, by name."""


def _get(fact: str) -> Any:
    return MADE[f"get_{fact}"]()


def is_initialized() -> bool:
    """Returns True if there are data-parallel groups."""
    return has_group("dp")


def is_unitialized() -> bool:
    """Returns `not is_initialized()`, with a DeprecationWarning: Megatron's name, in its spelling."""
    warnings.warn("is_unitialized is deprecated, use is_initialized instead", DeprecationWarning, stacklevel=2)
    return not is_initialized()


def model_parallel_is_initialized() -> bool:
    """Returns True if there are tensor-, pipeline- and data-parallel groups."""
    return all(map(has_group, ("tp", "pp", "dp")))


# Data-parallel groups, with Megatron's flags.


def _data_parallel(context: bool, partial: bool, gtp: bool) -> str:
    if partial and not context:
        raise RefusedError("partial_data_parallel needs with_context_parallel=True")
    return ("intra_dp_cp" if partial else "dp_cp" if context else "dp") + ("_gtp" if gtp else "")


def _expert_data_parallel(partial: bool, gtp: bool) -> str:
    return ("intra_edp" if partial else "edp") + ("_gtp" if gtp else "")


def get_data_parallel_group(
    with_context_parallel: bool = False,
    partial_data_parallel: bool = False,
    independent_all_gather: bool = False,
    *,
    with_gtp_remat: bool = True,
) -> Any:
    """Returns `dp`, with context parallelism `dp_cp`, or this optimizer instance's part of that, `intra_dp_cp`.

    `independent_all_gather`: the group of create_all_gather_group. `with_gtp_remat=False` leaves out ranks that gather
    each other's weights, and hold other data.
    """
    if with_context_parallel and independent_all_gather and not partial_data_parallel:
        return or_raise(group_of("dp_cp_ag"), "dp_cp all-gather")
    kind = _data_parallel(with_context_parallel, partial_data_parallel, with_gtp_remat)
    return or_raise(group_of(usual_kind(kind)), kind)


def has_separate_all_gather_group() -> bool:
    """Returns True with `create_all_gather_group`."""
    return group_of("dp_cp_ag") is not None


def get_data_parallel_group_gloo(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> Any:
    """Returns the gloo group of `get_data_parallel_group(…)`; NotInitializedError if none was made."""
    return gloo_group_of(_data_parallel(with_context_parallel, partial_data_parallel, False))


def get_data_parallel_world_size(
    with_context_parallel: bool = False, partial_data_parallel: bool = False, *, with_gtp_remat: bool = True
) -> int:
    """Returns the number of ranks in `get_data_parallel_group(…)`; 0 before init_process_group."""
    kind = _data_parallel(with_context_parallel, partial_data_parallel, with_gtp_remat)
    return 0 if is_before_start() else size_of(usual_kind(kind))


def get_data_parallel_rank(
    with_context_parallel: bool = False, partial_data_parallel: bool = False, *, with_gtp_remat: bool = True
) -> int:
    """Returns this rank's position in `get_data_parallel_group(…)`, or what was set; 0 before init_process_group."""
    chosen = CHOSEN.get("get_data_parallel_rank")
    if chosen is not None:
        return int(chosen)
    kind = _data_parallel(with_context_parallel, partial_data_parallel, with_gtp_remat)
    return 0 if is_before_start() else rank_of(usual_kind(kind))


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Returns the global rank of the first one in `dp`, or `dp_cp`."""
    return ranks_of("dp_cp" if with_context_parallel else "dp")[0]


def get_tensor_and_data_parallel_group(check_initialized: bool = True, with_context_parallel: bool = False) -> Any:
    """Returns the `tp_dp` group, or `tp_dp_cp`."""
    kind = "tp_dp_cp" if with_context_parallel else "tp_dp"
    return or_raise(group_of(kind), kind) if check_initialized else group_of(kind)


def get_amax_reduction_group(with_context_parallel: bool = False, tp_only_amax_red: bool = False) -> Any:
    """Returns the group over which FP8 scales are reduced: `tp_dp`, only `tp`, or these with `cp`."""
    kind = ("tp" if tp_only_amax_red else "tp_dp") + ("_cp" if with_context_parallel else "")
    return or_raise(group_of(kind), kind)


def get_expert_data_parallel_group(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False, *, with_gtp_remat: bool = True
) -> Any:
    """Returns the `edp` group, or this optimizer instance's part of it."""
    kind = usual_kind(_expert_data_parallel(partial_expert_data_parallel, with_gtp_remat))
    return or_raise(group_of(kind), kind) if check_initialized else group_of(kind)


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel: bool = False) -> Any:
    """Returns `get_expert_data_parallel_group(…)`, with a DeprecationWarning."""
    warnings.warn(
        "get_data_modulo_expert_parallel_group is deprecated, use get_expert_data_parallel_group instead",
        DeprecationWarning,
        stacklevel=2,
    )
    return get_expert_data_parallel_group(partial_expert_data_parallel=partial_expert_data_parallel)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> Any:
    """Returns the gloo group of `get_expert_data_parallel_group(…)`; NotInitializedError if none was made."""
    return gloo_group_of(_expert_data_parallel(partial_expert_data_parallel, False))


def get_expert_data_parallel_world_size(
    partial_expert_data_parallel: bool = False, *, with_gtp_remat: bool = True
) -> int:
    """Returns the number of ranks in `get_expert_data_parallel_group(…)`; 0 before init_process_group."""
    kind = usual_kind(_expert_data_parallel(partial_expert_data_parallel, with_gtp_remat))
    return 0 if is_before_start() else size_of(kind)


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False, *, with_gtp_remat: bool = True) -> int:
    """Returns this rank's position in `get_expert_data_parallel_group(…)`; 0 before init_process_group."""
    kind = usual_kind(_expert_data_parallel(partial_expert_data_parallel, with_gtp_remat))
    return 0 if is_before_start() else rank_of(kind)


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> Any:
    """Returns the `tp_ep_pp` group; with `with_egtp_remat` of ranks that gather each other's experts, too."""
    kind = usual_kind("tp_ep_pp_gtp" if with_egtp_remat else "tp_ep_pp")
    return or_raise(group_of(kind), kind) if check_initialized else group_of(kind)


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[Any] | None:
    """Returns this rank's context-parallel groups by level; NotInitializedError, or None, where none were made."""
    if not HIERARCHICAL and check_initialized:
        raise NotInitializedError("no hierarchical context-parallel groups; give hierarchical_context_parallel_sizes")
    return list(HIERARCHICAL) or None


def get_hybrid_data_context_parallel_groups(check_initialized: bool = True, group_size: int | None = None) -> Any:
    """Returns this rank's group of `group_size` neighbours in `dp_cp`, or all of that; KeyError for another size."""
    if get_data_parallel_world_size(with_context_parallel=True) == group_size:
        return or_raise(group_of("dp_cp"), "dp_cp") if check_initialized else group_of("dp_cp")
    return HYBRID[group_size]  # type: ignore[index]


# The pipeline.


def get_pipeline_model_parallel_first_rank() -> int:
    """Returns the global rank of this pipeline's first stage."""
    return ranks_of("pp")[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Returns the global rank of this pipeline's last stage."""
    return ranks_of("pp")[_get("pipeline_model_parallel_world_size") - 1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Returns the global rank of the next stage, round the end."""
    return ranks_of("pp")[(_get("pipeline_model_parallel_rank") + 1) % _get("pipeline_model_parallel_world_size")]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Returns the global rank of the previous stage, round the end."""
    return ranks_of("pp")[(_get("pipeline_model_parallel_rank") - 1) % _get("pipeline_model_parallel_world_size")]


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Returns the virtual stage that was set; None without."""
    return CHOSEN.get("get_virtual_pipeline_model_parallel_rank")


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Sets the virtual stage, with a DeprecationWarning; the state's as well where it has such a stage."""
    warnings.warn(
        "set_virtual_pipeline_model_parallel_rank is deprecated; pass vp_stage to is_pipeline_first_stage and others",
        DeprecationWarning,
        stacklevel=2,
    )
    CHOSEN["get_virtual_pipeline_model_parallel_rank"] = rank
    virtual = state.get_parallel_groups().virtual_pipeline if state.model_parallel_is_initialized() else None
    if virtual is not None and rank is not None and 0 <= rank < virtual.size:
        virtual.rank = rank


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Returns the number of virtual stages on each pipeline rank; None without."""
    return CHOSEN.get("get_virtual_pipeline_model_parallel_world_size")


def _is_stage(vp_stage: int | None, ignore_virtual: bool, last: bool) -> bool:
    size = get_virtual_pipeline_model_parallel_world_size()
    if ignore_virtual or size is None:
        return True
    if vp_stage is None:
        raise RefusedError("vp_stage must be given where there are virtual pipeline stages")
    return vp_stage == (size - 1 if last else 0)


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Returns True in the first pipeline stage; with `ignore_virtual=False` where `vp_stage` is the model's first."""
    return _is_stage(vp_stage, ignore_virtual, last=False) and _get("pipeline_model_parallel_rank") == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Returns True in the last pipeline stage; with `ignore_virtual=False` where `vp_stage` is the model's last."""
    last = _get("pipeline_model_parallel_world_size") - 1
    return _is_stage(vp_stage, ignore_virtual, last=True) and _get("pipeline_model_parallel_rank") == last


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Returns True where this rank, or with `ignore_virtual=False` its `vp_stage`, shares the word embedding."""
    if group_of("embedding") is None:
        return False
    ranks, rank = ranks_of("embedding"), dist.get_rank()
    if ignore_virtual or rank not in (ranks[0], ranks[-1]):
        return rank in ranks
    return (is_pipeline_first_stage if rank == ranks[0] else is_pipeline_last_stage)(False, vp_stage)


def is_rank_in_position_embedding_group() -> bool:
    """Returns True where this rank has the position embedding."""
    return group_of("position_embedding") is not None


def get_all_ranks() -> str:
    """Returns the ranks in tp, (gtp,) dp, cp, pp and ep as `0_1_0_3_0`: Megatron's names of shards."""
    gtp = [_get("gtp_weight_remat_rank")] if _get("gtp_weight_remat_world_size") > 1 else []
    found = (
        _get("tensor_model_parallel_rank"),
        *gtp,
        get_data_parallel_rank(),
        _get("context_parallel_rank"),
        _get("pipeline_model_parallel_rank"),
        _get("expert_model_parallel_rank"),
    )
    return "_".join(str(rank or 0) for rank in found)
