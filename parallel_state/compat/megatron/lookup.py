"""Finds this rank's groups by kind, and keeps the values of Megatron's setters.

A kind is the name of a group in this library (`tp`, `dp_cp`, …), or `dp_cp_ag`, which only Megatron has. A group that
the program assigned to Megatron's module variable is used instead.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from parallel_state import state
from parallel_state.compat.errors import NotInitializedError, as_megatrons
from parallel_state.functions.getters import LONG_NAMES
from parallel_state.layout.axes import BY_NAME

CHOSEN: dict[str, Any] = {}
HIERARCHICAL: list[Any] = []
HYBRID: dict[int, Any] = {}
BUFFERS: dict[str, Any] = {}
OPTIONS: dict[str, Any] = {}
"""`gloo`: True if there are gloo groups. `dp_cp_ag`: a second group with the ranks of `dp_cp`."""
GETTERS: dict[str, tuple[str, str]] = {
    **{BY_NAME[kind].long_name: (kind, " ".join(facts)) for kind, facts in LONG_NAMES.items()},
    "embedding": ("embedding", "group"),
    "position_embedding": ("position_embedding", "group"),
    "data_parallel": ("dp", "group_gloo world_size rank"),
    "tensor_and_data_parallel": ("tp_dp", "group"),
    "expert_data_parallel": ("edp", "group group_gloo world_size rank"),
    "gtp_weight_remat": ("dp_replicate", "group world_size rank global_ranks"),
    "expert_gtp_weight_remat": ("dp_replicate", "group world_size rank global_ranks"),
}
"""X in `get_X_rank` and others -> (kind of group, endings such as `rank`)."""
VARIABLES = {
    **{f"_{name.upper()}_GROUP": kind for name, (kind, _) in GETTERS.items() if kind != "inter_dist_opt"},
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "intra_edp",
    "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "inter_dist_opt",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "_DATA_PARALLEL_GROUP_WITH_CP_AG": "dp_cp_ag",
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "dp",
    "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "edp",
    "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "dp_cp",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": "tp_ep_pp",
}
variables: dict[str, Any] = {}
"""The names of `parallel_state.compat.megatron`, where programs assign Megatron's variables."""
_VARIABLE_OF = {kind: name for name, kind in reversed(VARIABLES.items())}
"""Kind of group -> Megatron's variable."""


def _assigned(kind: str) -> Any:
    return variables.get(_VARIABLE_OF.get(kind, ""))


def forget() -> None:
    for name in VARIABLES:
        variables.pop(name, None)
    for kept in (CHOSEN, HIERARCHICAL, HYBRID, BUFFERS, OPTIONS):
        kept.clear()


def group_of(kind: str) -> Any:
    assigned = _assigned(kind)
    if assigned is not None:
        return assigned
    if kind == "dp_cp_ag":
        return OPTIONS.get(kind)
    if not state.model_parallel_is_initialized():
        return None
    if kind == "inter_dist_opt" and "intra_dp_cp" not in state.get_parallel_groups().layout.parts:
        return None  # with one optimizer instance there is no group between instances
    group = state.try_get_group(kind)
    return None if group is None else group.device_group


def has_group(kind: str) -> bool:
    """Returns True if the groups are initialised, or if the program assigned Megatron's variable of this kind. Call
    this only for kinds that every layout has.
    """
    return _assigned(kind) is not None or state.model_parallel_is_initialized()


def ranks_of(kind: str) -> list[int]:
    with as_megatrons():
        return state.get_group_ranks(kind)


def required(kind: str) -> Any:
    group = group_of(kind)
    if group is None:
        raise NotInitializedError(f"the {kind} group is not initialized; call initialize_model_parallel() first")
    return group


def gloo_group_of(kind: str) -> Any:
    if not OPTIONS.get("gloo", True):
        raise NotInitializedError(
            f"the {kind} group has no gloo group, because initialize_model_parallel was called with "
            "create_gloo_process_groups=False"
        )
    with as_megatrons():
        return state.get_group(kind).cpu_group


def size_of(kind: str) -> int:
    assigned = _assigned(kind)
    return len(ranks_of(kind)) if assigned is None else int(assigned.size())


def rank_of(kind: str) -> int:
    assigned = _assigned(kind)
    if assigned is not None:
        return int(assigned.rank())
    with as_megatrons():
        return state.get_group_rank(kind)


def is_before_start() -> bool:
    return not dist.is_initialized() and not state.model_parallel_is_initialized()
