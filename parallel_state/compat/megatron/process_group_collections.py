"""Converts between our groups and Megatron's ProcessGroupCollection."""

from __future__ import annotations

import importlib
from dataclasses import fields
from typing import Any

from parallel_state import state
from parallel_state.groups.coordinator import GroupCoordinator
from parallel_state.groups.parallel_groups import ParallelGroups

KINDS = {
    "tp": "tp", "pp": "pp", "mp": "model", "embd": "embedding", "pos_embd": "position_embedding", "cp": "cp",
    "tp_cp": "tp_cp", "ep": "ep", "expt_tp": "etp", "tp_ep": "tp_ep", "tp_ep_pp": "tp_ep_pp",
    "tp_ep_pp_with_egtp_remat": "tp_ep_pp", "tp_dp_cp": "tp_dp_cp", "dp": "dp", "dp_cp": "dp_cp",
    "dp_cp_gtp_remat": "dp_cp", "expt_dp": "edp", "expt_dp_gtp_remat": "edp", "intra_dp_cp": "intra_dp_cp",
    "intra_expt_dp": "intra_edp", "intra_dist_opt": "intra_dist_opt", "gtp_remat": "dp_replicate",
    "expt_gtp_remat": "dp_replicate",
}  # fmt: skip
"""Field of a ProcessGroupCollection -> our kind of group."""


def process_group_collection(groups: ParallelGroups | None = None) -> Any:
    """Returns Megatron's ProcessGroupCollection of `groups` (default: the current ones). Every rank calls it.

    It has the fields of the installed megatron-core; fields without a group are None. Missing groups are made. After
    `install()`, Megatron's own `ProcessGroupCollection.use_mpu_process_groups()` does the same for the groups of
    `initialize_model_parallel`.
    """
    kind_of_collection = importlib.import_module("megatron.core.process_groups_config").ProcessGroupCollection
    groups = groups or state.get_parallel_groups()
    known = {field.name for field in fields(kind_of_collection)}
    kinds = {name: kind for name, kind in KINDS.items() if name in known}
    if "intra_dp_cp" in groups.layout.parts:
        kinds["inter_dist_opt"] = "inter_dist_opt"
    found = {name: groups.try_get(kind) for name, kind in kinds.items()}
    return kind_of_collection(**{name: None if each is None else each.device_group for name, each in found.items()})


def coordinators_of(collection: Any, *names: str) -> dict[str, GroupCoordinator]:
    """Returns a GroupCoordinator for each named field of a ProcessGroupCollection, by field: `tp`, `dp_cp`, ….

    Every rank of the groups calls it with the same fields in the same order. Fields without a group on this rank are
    left out. The coordinators borrow the process groups: `destroy()` ends only what a coordinator made itself.
    """
    found = {name: getattr(collection, name, None) for name in names}
    return {
        name: GroupCoordinator.from_process_group(group, name=KINDS.get(name, name))
        for name, group in found.items()
        if group is not None
    }
