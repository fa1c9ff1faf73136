"""This rank's groups by kind: those of the state, those that its layouts don't have, and those that a program has put.

A kind is a row of the axis table, or one of Megatron's beside it. What setters were given is kept here as well.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from parallel_state import state
from parallel_state.compat.megatron.errors import NotInitializedError, as_megatrons
from parallel_state.compat.megatron.process_groups import create_group

CHOSEN: dict[str, Any] = {}
"""What setters were given: by the getter's name."""
LISTED: dict[str, tuple[Any, list[int]]] = {}
"""Groups that the state's layouts don't have, by kind, with their ranks."""
HIERARCHICAL: list[Any] = []
HYBRID: dict[int, Any] = {}
BUFFERS: dict[str, Any] = {}
OPTIONS: dict[str, Any] = {}
"""Of the last initialisation: whether there are gloo groups."""
VARIABLES = {
    f"_{name}_GROUP{suffix}": kind
    for suffix, kinds in {
        "": {
            "TENSOR_MODEL_PARALLEL": "tp", "PIPELINE_MODEL_PARALLEL": "pp", "MODEL_PARALLEL": "model",
            "EMBEDDING": "embedding", "POSITION_EMBEDDING": "position_embedding", "DATA_PARALLEL": "dp",
            "CONTEXT_PARALLEL": "cp", "TENSOR_AND_DATA_PARALLEL": "tp_dp", "TENSOR_AND_CONTEXT_PARALLEL": "tp_cp",
            "EXPERT_MODEL_PARALLEL": "ep", "EXPERT_TENSOR_PARALLEL": "etp",
            "EXPERT_TENSOR_AND_MODEL_PARALLEL": "tp_ep", "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL": "tp_ep_pp",
            "EXPERT_DATA_PARALLEL": "edp", "INTRA_PARTIAL_EXPERT_DATA_PARALLEL": "intra_edp",
            "INTER_PARTIAL_EXPERT_DATA_PARALLEL": "inter_dist_opt",
            "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE": "intra_dist_opt", "GTP_WEIGHT_REMAT": "gtp",
            "EXPERT_GTP_WEIGHT_REMAT": "egtp",
        },
        "_WITH_CP": {"DATA_PARALLEL": "dp_cp", "INTRA_PARTIAL_DATA_PARALLEL": "intra_dp_cp",
                     "TENSOR_AND_DATA_PARALLEL": "tp_dp_cp"},
        "_WITH_CP_AG": {"DATA_PARALLEL": "dp_cp_ag"},
        "_WITH_GTP_REMAT": {"DATA_PARALLEL": "dp_gtp", "EXPERT_DATA_PARALLEL": "edp_gtp"},
        "_WITH_CP_WITH_GTP_REMAT": {"DATA_PARALLEL": "dp_cp_gtp"},
        "_WITH_EGTP": {"EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL": "tp_ep_pp_gtp"},
    }.items()
    for name, kind in kinds.items()
}  # fmt: skip
"""Megatron's module variables, which its tools read, and set to groups of their own, which then count."""
_VARIABLE_OF = {kind: name for name, kind in VARIABLES.items()}

WITHOUT_GTP = {"dp_gtp": "dp", "dp_cp_gtp": "dp_cp", "intra_dp_cp_gtp": "intra_dp_cp", "edp_gtp": "edp",
                "intra_edp_gtp": "intra_edp", "tp_ep_pp_gtp": "tp_ep_pp", "gtp": "dp_replicate",
                "egtp": "dp_replicate"}  # fmt: skip
"""Kinds that are others where no weights are gathered at each use; `dp_replicate` is this rank alone here."""


def usual_kind(kind: str) -> str:
    """Returns the kind without `_gtp` where there is no such group, so that Megatron's usual variable counts."""
    return kind if kind in LISTED else WITHOUT_GTP.get(kind, kind)


def _put(kind: str) -> Any:
    """Returns the group that a program has put into Megatron's variable, as its tools do; None if it hasn't."""
    return vars(sys.modules[__package__]).get(_VARIABLE_OF.get(kind, ""))


def forget() -> None:
    """Forgets all that is kept here, but for the groups of the state."""
    for name in VARIABLES:
        vars(sys.modules[__package__]).pop(name, None)
    for kept in (CHOSEN, LISTED, HIERARCHICAL, HYBRID, BUFFERS, OPTIONS):
        kept.clear()


def group_of(kind: str) -> Any:
    """Returns this rank's process group of a kind: the one that a program has put into Megatron's variable, if any."""
    put = _put(kind)
    if put is not None:
        return put
    if kind in LISTED:
        return LISTED[kind][0]
    if kind == "dp_cp_ag" or not state.model_parallel_is_initialized():
        return None
    if kind == "inter_dist_opt" and "intra_dp_cp" not in state.get_parallel_groups().layout.parts:
        return None  # one instance has no others to reduce with
    group = state.try_get_group(WITHOUT_GTP.get(kind, kind))
    return None if group is None else group.device_group


def has_group(kind: str) -> bool:
    """Returns True if this rank has its group of a kind that every layout has; makes no process group of one rank."""
    return _put(kind) is not None or kind in LISTED or state.model_parallel_is_initialized()


def ranks_of(kind: str) -> list[int]:
    """Returns the global ranks of this rank's group of a kind; NotInitializedError without."""
    if kind in LISTED:
        return LISTED[kind][1]
    with as_megatrons():
        return state.get_group_ranks(WITHOUT_GTP.get(kind, kind))


def or_raise(group: Any, kind: str) -> Any:
    """Returns `group`; NotInitializedError where it is None."""
    if group is None:
        raise NotInitializedError(f"the {kind} group is not initialized; call initialize_model_parallel() first")
    return group


def gloo_group_of(kind: str) -> Any:
    """Returns gloo's process group of a kind; NotInitializedError with create_gloo_process_groups=False."""
    if not OPTIONS.get("gloo", True):
        raise NotInitializedError(f"the gloo group of {kind} was not made: create_gloo_process_groups was False")
    if kind not in LISTED:
        with as_megatrons():
            return state.get_group(kind).cpu_group
    name = f"{kind}_gloo"
    if name not in LISTED:
        ranks = LISTED[kind][1]
        LISTED[name] = create_group(ranks, backend="gloo", use_local_synchronization=True, group_desc=name), ranks
    return LISTED[name][0]


def size_of(kind: str) -> int:
    """Returns the number of ranks in this rank's group of a kind; NotInitializedError without."""
    put = _put(kind)
    return len(ranks_of(kind)) if put is None else int(put.size())


def rank_of(kind: str) -> int:
    """Returns this rank's position in its group of a kind; NotInitializedError without."""
    put = _put(kind)
    if put is not None:
        return int(put.rank())
    if kind in LISTED:
        return LISTED[kind][1].index(dist.get_rank())
    with as_megatrons():
        return state.get_group_rank(WITHOUT_GTP.get(kind, kind))


def is_before_start() -> bool:
    """Returns True where there is neither a default group nor a division: sizes are 0 then, in most of Megatron."""
    return not dist.is_initialized() and not state.model_parallel_is_initialized()
