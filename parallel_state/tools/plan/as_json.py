"""A plan as JSON, for programs: the keys are a promise, the text in them is not.

Keys; new ones may come, none goes:

    format            1
    world_size, gpus_per_node, nodes, order
    layout            the sizes in words
    sizes             axis -> size, of every axis that has a size option
    groups            a list of {name, long_name, about, count, size, first (all ranks of the first group), nodes (that
                      a group touches at most), crossing (how many groups touch several), same_as (kinds with the same
                      sets of ranks), process_group ("own", "world", "none", or the kind whose it is), made (by
                      initialize_model_parallel), steps (the axes it spans, fastest first, as {axis, size, stride}),
                      ends_of (for embedding groups and parts of groups, the kind that they take ranks from, whose
                      `steps` are told)}.
                      A group's ranks are its first rank plus all sums of index · stride
    missing           name -> why this layout doesn't have that kind of group
    warnings          a list of {level ("warning" or "note"), code, text}
    communicators     {made, all_kinds: {sets (lists of kinds that share a set of ranks), per_rank, in_world,
                      megabytes: [least, most]}, basis, figures: [{what, megabytes, source}]}
    rank              with --rank: {rank, node, gpu, coordinates, stage, stages, first_stage, last_stage, previous,
                      next, groups: name -> {ranks, rank_in_group}}; kinds that it is in no group of are left out

and for sizes that don't fit only {format, error, changes: [{values: option -> new value or null, text}]}.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from device_communicators.errors import LayoutError
from parallel_state.tools.plan.communicators import BASIS, FIGURES, Communicators
from parallel_state.tools.plan.fit import Change
from parallel_state.tools.plan.groups import Kind, Plan, coordinates, steps_of, whole_of
from parallel_state.tools.plan.remarks import Remark


def plan_json(
    plan: Plan, remarks: Sequence[Remark], communicators: Communicators, rank: int | None = None
) -> dict[str, Any]:
    """The whole plan, and one rank's view if asked for; the module's text lists the keys."""
    counts = {
        "made": (communicators.made, communicators.groups_made),
        "all_kinds": (communicators.all_kinds, communicators.groups_of_all_kinds),
    }
    found: dict[str, Any] = {
        "format": 1,
        "world_size": plan.world_size,
        "gpus_per_node": plan.gpus_per_node,
        "nodes": plan.nodes,
        "order": plan.request.order,
        "layout": str(plan.layout),
        "sizes": {kind.name: kind.size for kind in plan.kinds if kind.axis.size_parameter},
        "groups": [_kind_json(kind, plan) for kind in plan.kinds],
        "missing": dict(plan.layout.missing),
        "warnings": [vars(remark) for remark in remarks],
        "communicators": {
            **{
                name: {"sets": sets, "per_rank": len(sets), "in_world": in_world,
                       "megabytes": communicators.megabytes(len(sets))}
                for name, (sets, in_world) in counts.items()
            },
            "basis": BASIS,
            "figures": [vars(figure) for figure in FIGURES],
        },
    }  # fmt: skip
    if rank is not None:
        found["rank"] = _rank_json(plan, rank)
    return found


def refusal_json(error: LayoutError, changes: Sequence[Change]) -> dict[str, Any]:
    """For sizes that don't fit."""
    return {
        "format": 1,
        "error": str(error),
        "changes": [{"values": dict(change.values), "text": str(change)} for change in changes],
    }


def _kind_json(kind: Kind, plan: Plan) -> dict[str, Any]:
    return {
        "name": kind.name,
        "long_name": kind.axis.long_name,
        "about": kind.axis.about,
        "count": kind.count,
        "size": kind.size,
        "first": kind.first,
        "nodes": kind.nodes,
        "crossing": kind.crossing,
        "same_as": kind.same_as,
        "process_group": plan.process_group(kind),
        "made": kind.made,
        "steps": [step._asdict() for step in steps_of(plan.layout, kind.name)],
        "ends_of": whole_of(plan.layout, kind.name),
    }


def _rank_json(plan: Plan, rank: int) -> dict[str, Any]:
    node, gpu = plan.place(rank)
    stages = plan.layout.group_of(rank, "pp")
    stage = stages.index(rank)
    groups = {kind.name: plan.layout.group_of(rank, kind.name) for kind in plan.kinds}
    return {
        "rank": rank,
        "node": node,
        "gpu": gpu,
        "coordinates": coordinates(plan.layout, rank),
        "stage": stage,
        "stages": len(stages),
        "first_stage": stage == 0,
        "last_stage": stage == len(stages) - 1,
        "previous": stages[stage - 1] if stage else None,
        "next": stages[stage + 1] if stage + 1 < len(stages) else None,
        "groups": {
            name: {"ranks": ranks, "rank_in_group": ranks.index(rank)} for name, ranks in groups.items() if ranks
        },
    }
