"""Writes a plan as text for a terminal, and as JSON for programs.

Later versions keep the keys of the JSON, but can change its texts.

    groups           nodes: largest number of nodes of a group. crossing: number of groups on several nodes. same_as:
                     kinds with the same sets of ranks. process_group: "own", "world", "none", or the kind that owns it.
                     steps: axes, fastest first; neighbours on an axis are `stride` ranks apart.
                     ends_of: null, or the kind of larger groups that contain these groups. Then `steps` describes the
                     larger groups.
    communicators    sets: kinds that share a set of ranks. megabytes: [least, most]
    rank             with --rank: only kinds that have a group with this rank
    error, changes   for sizes that don't fit
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from shutil import get_terminal_size
from textwrap import fill
from typing import Any

from device_communicators.base.errors import LayoutError
from parallel_state.tools.arguments import columns
from parallel_state.tools.plan.fit import Change
from parallel_state.tools.plan.groups import (
    ALL_TO_ALL,
    BASIS,
    FIGURES,
    HIGH,
    LOW,
    Communicators,
    Kind,
    Plan,
    abbreviate,
    coordinates,
    steps_of,
    whole_of,
)
from parallel_state.tools.plan.remarks import Remark


def plan_text(plan: Plan, remarks: Sequence[Remark], communicators: Communicators) -> str:
    if plan.world_size == 1:
        return "\n".join([*heading(plan), "", "One rank needs no process group."])
    return "\n".join([*heading(plan), "", *_table(plan), "", *_remarks(remarks), "", *_cost(communicators)])


def heading(plan: Plan) -> list[str]:
    full, rest = divmod(plan.world_size, plan.gpus_per_node)
    nodes = f"{plan.nodes} {'node' if plan.nodes == 1 else 'nodes'} of {plan.gpus_per_node} GPUs"
    if rest:
        nodes += f", the last with {_ranks(rest)}" if full else f", {rest} used"
    return [f"{_ranks(plan.world_size)} on {nodes}, order {plan.request.order}", str(plan.layout)]


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _table(plan: Plan) -> Iterator[str]:
    rows = [["group", "groups", "ranks", "nodes", "first group", "process group", "made", "long name"]]
    rows += [
        [kind.name, str(kind.count), str(kind.size), str(kind.nodes), abbreviate(kind.first),
         _process_group(plan, kind), "yes" if kind.made else "", kind.axis.long_name]
        for kind in plan.kinds if kind.size > 1
    ]  # fmt: skip
    yield from columns(rows, right=(1, 2, 3))
    alone = [kind.name for kind in plan.kinds if kind.size == 1]
    if alone:
        yield ""
        yield _paragraph(f"one rank per group, so no process group: {', '.join(alone)}")
    reasons: dict[str, list[str]] = {}
    for name, reason in plan.layout.missing.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        yield _paragraph(f"not in this layout: {', '.join(names)}: {reason}")
    yield ""
    yield _paragraph(
        "nodes: the most that a group spans. made: created by initialize_model_parallel with these sizes; other kinds "
        "are created on demand. Equal sets of ranks share a process group. a:b:s is every s-th rank from a to below b."
    )


def _process_group(plan: Plan, kind: Kind) -> str:
    name = plan.process_group(kind)
    return name if name in ("own", "none") else f"= {name}"


def _remarks(remarks: Sequence[Remark]) -> Iterator[str]:
    if not remarks:
        yield "No warnings."
    for remark in remarks:
        yield _paragraph(f"{remark.level}: {remark.text} [{remark.code}]", indent="  ")


def _cost(communicators: Communicators) -> Iterator[str]:
    made, everything = communicators.made, communicators.all_kinds
    yield f"A rank is in {len(made)} process groups, {len(everything)} with every kind above."
    yield _paragraph("  " + "; ".join(" = ".join(names) for names in made), indent="  ")
    yield (f"The world has {communicators.groups_made} of them, {communicators.groups_of_all_kinds} with every kind; "
           f"torch creates each on every rank.")  # fmt: skip
    for number in dict.fromkeys((len(made), len(everything))):
        low, high = communicators.megabytes(number)
        yield f"GPU memory of {number} NCCL communicators: {low / 1000:.1f} … {high / 1000:.1f} GB per rank (estimate)"
    terms = f"communicators × {LOW} … {HIGH}"
    if communicators.all_to_all:
        terms += f"; the upper bound adds {ALL_TO_ALL}"
    yield _paragraph(f"  The figures are {BASIS}: {terms}. Memory is allocated at a group's first use.", indent="  ")


def rank_text(plan: Plan, rank: int) -> str:
    facts = _rank_json(plan, rank)
    before = "the first" if facts["first_stage"] else f"previous rank {facts['previous']}"
    after = "the last" if facts["last_stage"] else f"next rank {facts['next']}"
    rows = [["group", "rank in it", "of", "ranks", "process group", "made"]]
    for kind in plan.kinds:
        if kind.size > 1:
            group, place = facts["groups"].get(kind.name), ["–", "–", "not in a group"]
            if group is not None:
                place = [str(group["rank_in_group"]), str(len(group["ranks"])), abbreviate(group["ranks"])]
            rows.append([kind.name, *place, _process_group(plan, kind), "yes" if kind.made else ""])
    return "\n".join([
        *heading(plan),
        "",
        f"rank {rank}: node {facts['node']}, GPU {facts['gpu']}",
        "coordinates: " + (" ".join(f"{name}={at}" for name, at in facts["coordinates"].items()) or "one rank"),
        f"pipeline: stage {facts['stage']} of {facts['stages']}: {before}, {after}",
        "",
        *columns(rows, right=(1, 2)),
    ])  # fmt: skip


def _paragraph(text: str, indent: str = "") -> str:
    width = get_terminal_size((120, 40)).columns
    return fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def plan_json(
    plan: Plan, remarks: Sequence[Remark], communicators: Communicators, rank: int | None = None
) -> dict[str, Any]:
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
            "made": _sets_json(communicators, communicators.made, communicators.groups_made),
            "all_kinds": _sets_json(communicators, communicators.all_kinds, communicators.groups_of_all_kinds),
            "basis": BASIS,
            "figures": [vars(figure) for figure in FIGURES],
        },
    }
    if rank is not None:
        found["rank"] = _rank_json(plan, rank)
    return found


def _sets_json(communicators: Communicators, sets: Sequence[Sequence[str]], in_world: int) -> dict[str, Any]:
    megabytes = communicators.megabytes(len(sets))
    return {"sets": sets, "per_rank": len(sets), "in_world": in_world, "megabytes": megabytes}


def refusal_json(error: LayoutError, changes: Sequence[Change]) -> dict[str, Any]:
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
        **{name: getattr(kind, name) for name in ("count", "size", "first", "nodes", "crossing", "same_as")},
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
