"""Creates process groups from rank lists, as Megatron does."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from device_communicators.base import settings
from device_communicators.base.errors import InvalidArgumentError, UnsupportedError
from device_communicators.base.torch_internals import is_registered
from device_communicators.c10d import creation
from parallel_state import state
from parallel_state.compat.megatron.ranks import hierarchical_ranks, hybrid_ranks
from parallel_state.groups.coordinator import GroupCoordinator
from parallel_state.groups.parallel_groups import ParallelGroups
from parallel_state.process_groups.options import GroupOptions

logger = logging.getLogger("parallel_state")

_OWN_BACKEND = "parallel_state"
CREATED: list[Any] = []


def backend_of_groups() -> str | None:
    """Returns the backend of new groups: "parallel_state", or None for the default group's backend, as on GPUs."""
    default = str(dist.get_backend())
    if "nccl" in default or default == "fake" or (default == "undefined" and torch.cuda.is_available()):
        return None
    if settings.CPU_BACKEND.name in os.environ and settings.CPU_BACKEND.get() != _OWN_BACKEND:
        return None
    try:
        creation.load()
    except UnsupportedError as error:
        logger.warning("Megatron's groups use torch's backend %r: %s", default, error)
        return None
    return _OWN_BACKEND


def forget_groups() -> None:
    while CREATED:
        group = CREATED.pop()
        if dist.is_initialized() and is_registered(group):
            dist.destroy_process_group(group)


def create_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
) -> Any:
    """Creates a process group of the global `ranks` (default: all). All ranks of the world must call this in the same
    order.

    With `use_local_synchronization`, only `ranks` must call this.
    """
    given = {**locals(), "ranks": None if ranks is None else list(ranks), "backend": backend or backend_of_groups()}
    group = dist.new_group(**given)
    if ranks is None or dist.get_rank() in ranks:
        CREATED.append(group)
    return group


def create_hierarchical_groups(
    rank: int,
    ranks: Sequence[int],
    hierarchical_group_sizes: Sequence[int],
    create_gloo_process_groups: bool = False,
    pg_options: Any = None,
    timeout: timedelta | None = None,
    group_desc: str | None = None,
) -> tuple[list[Any], list[Any]]:
    """Returns two lists with one item per level: this rank's groups, and its gloo groups (or None).

    All ranks of the world must call this. `rank`: this rank. `hierarchical_group_sizes` [2, 2, 4] divide 16 `ranks`
    into pairs of neighbors, pairs with stride 2, and groups of 4 with stride 4. Ranks outside `ranks` get empty lists.
    """
    groups: list[Any] = []
    gloo_groups: list[Any] = []
    levels = hierarchical_ranks(ranks, hierarchical_group_sizes)
    options = pg_options if isinstance(pg_options, list) else [pg_options] * len(levels)
    for level, (lists, chosen) in enumerate(zip(levels, options, strict=True)):
        for members in lists:
            name = f"HIERARCHICAL_{group_desc}_L{level}"
            made = create_group(members, timeout, pg_options=chosen, group_desc=name)
            gloo = create_group(members, timeout, "gloo", group_desc=name) if create_gloo_process_groups else None
            if rank in members:
                groups.append(made)
                gloo_groups.append(gloo)
    return groups, gloo_groups


def create_hybrid_dp_cp_groups(rank: int, ranks: Sequence[int], pg_options: Any) -> dict[int, Any]:
    """Divides `ranks` into groups of 2, of 4, … ranks. Returns a dict from group size to this rank's group.

    All ranks of the world must call this.
    """
    made = {}
    for members in hybrid_ranks(ranks):
        group = create_group(members, pg_options=pg_options, group_desc=f"HYBRID_DP_CP_GROUP_{len(members)}")
        if rank in members:
            made[len(members)] = group
    return made


KINDS = {
    "tp": "tp", "cp": "cp", "pp": "pp", "dp": "dp", "dp_cp": "dp_cp", "mp": "model", "tp_cp": "tp_cp", "tp_dp": "tp_dp",
    "tp_dp_cp": "tp_dp_cp", "embd": "embedding", "pos_embd": "position_embedding", "ep": "ep", "tp_ep_pp": "tp_ep_pp",
    "intra_dp_cp": "intra_dp_cp",
    # Only in the file of NCCL options:
    "ep_tp": "etp", "tp_ep_mp": "tp_ep", "ep_dp": "edp", "intra_ep_dp": "intra_edp", "inter_ep_dp": "inter_dist_opt",
    "intra_dist_opt_instance": "intra_dist_opt",
    # Only in a ProcessGroupCollection:
    "expt_tp": "etp", "tp_ep": "tp_ep", "tp_ep_pp_with_egtp_remat": "tp_ep_pp", "dp_cp_gtp_remat": "dp_cp",
    "expt_dp": "edp", "expt_dp_gtp_remat": "edp", "intra_expt_dp": "intra_edp", "intra_dist_opt": "intra_dist_opt",
    "gtp_remat": "dp_replicate", "expt_gtp_remat": "dp_replicate",
}  # fmt: skip
_NCCLS = ("cga_cluster_size", "min_ctas", "max_ctas")
_FIELDS = {"is_high_priority_stream": "high_priority_stream", **{name: name for name in _NCCLS}}


class UnsupportedNetError(InvalidArgumentError, RuntimeError):
    pass


def options_of(chosen: Mapping[str, Any]) -> GroupOptions:
    """Converts Megatron's NCCL options, `chosen`. Raises RuntimeError for an unknown `net_name`."""
    if str(chosen.get("net_name", "ib")).lower() not in ("ib", "socket"):
        raise UnsupportedNetError(f"net_name must be ib or socket, but is {chosen['net_name']!r}")
    return GroupOptions(**{ours: chosen[name] for name, ours in _FIELDS.items() if name in chosen})


def get_nccl_options(pg_name: str, nccl_comm_cfgs: Mapping[str, Mapping[str, Any]]) -> Any:
    if pg_name not in nccl_comm_cfgs:
        return None
    chosen = options_of(nccl_comm_cfgs[pg_name])
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=chosen.high_priority_stream)
    for name in (*_NCCLS, "net_name"):
        value = nccl_comm_cfgs[pg_name].get(name)
        if value is not None:
            setattr(options.config, name, value)
    return options


def overwrite_nccl_comm_cfgs(
    nccl_comm_cfgs: dict[str, dict[str, Any]], pg_name: str, key_value_pair: tuple[str, Any]
) -> None:
    nccl_comm_cfgs.setdefault(pg_name, {})[key_value_pair[0]] = key_value_pair[1]


def process_group_collection(groups: ParallelGroups | None = None) -> Any:
    """Returns Megatron's ProcessGroupCollection of `groups` (default: the current ones). Creates missing groups.

    A field is None if this rank has no group for it. Every rank must call this.
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
    """Returns field name -> GroupCoordinator for those fields `names` of a ProcessGroupCollection that have a group.

    The caller still owns the process groups. Every rank of the groups must call this with the same fields in the same
    order.
    """
    found = {name: getattr(collection, name, None) for name in names}
    return {
        name: GroupCoordinator.from_process_group(group, name=KINDS.get(name, name))
        for name, group in found.items()
        if group is not None
    }
