"""What the demo prints of its ranks: who does what, which way tensors go, and how much went. Answers: `inference`.

A survey is what `Engine.survey` gives: of every rank, axis -> its group's ranks, route, and traffic so far.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import minilm
from rich.console import Console
from rich.markup import escape
from rich.table import Table


class Place(NamedTuple):
    """Where a rank stands in the layout."""

    stage: int
    replica: int
    shard: int


def show_layout(console: Console, title: str, places: Sequence[Place]) -> None:
    """The ranks of each stage and replica; `places` are those of all ranks."""
    stages, replicas = (1 + max(place[axis] for place in places) for axis in (0, 1))
    console.print(title)
    table = Table("stage", *(f"replica {replica}" for replica in range(replicas)), box=None, header_style="dim")
    for stage in range(stages):
        ranks: list[list[int]] = [[] for _ in range(replicas)]
        for rank, place in enumerate(places):
            if place.stage == stage:
                ranks[place.replica].append(rank)
        table.add_row(f"{stage}: {minilm.describe_stage(stage, stages)}", *(f"ranks {escape(str(r))}" for r in ranks))
    console.print(table, "")


def show_routes(console: Console, survey: list[dict[str, Any]]) -> None:
    """Who carries what in each group; the groups of one axis mostly share a route, which is shown once."""
    console.print("[bold]routes[/]")
    for axis in survey[0]:
        groups = defaultdict(list)
        for rank in survey:
            _, *route = rank[axis]["route"].splitlines()  # the first line names the group
            if rank[axis]["ranks"] not in groups["\n".join(route)]:
                groups["\n".join(route)].append(rank[axis]["ranks"])
        for route, members in groups.items():
            title = escape(f"{axis} {' '.join(map(str, members))}")
            console.print(f"{title}\n[dim]{escape(route)}[/]", soft_wrap=True)
    console.print()


def show_traffic(console: Console, survey: list[dict[str, Any]]) -> None:
    """Calls and bytes of one rank of each group, the one with most; groups with the same numbers share a row."""
    table = Table("group", "operation", "calls", "bytes", box=None, header_style="dim")
    table.columns[2].justify = table.columns[3].justify = "right"
    for axis in survey[0]:
        most: dict[tuple[str, str], tuple[int, int]] = {}
        for rank in survey:
            for operation, numbers in rank[axis]["traffic"].items():
                key = operation, str(rank[axis]["ranks"])
                most[key] = max(most.get(key, (0, 0)), tuple(numbers))
        rows = defaultdict(list)
        for (operation, ranks), numbers in most.items():
            rows[operation, numbers].append(ranks)
        for (operation, (calls, size)), groups in rows.items():
            table.add_row(escape(f"{axis} {' '.join(groups)}"), operation, f"{calls:,}", f"{size:,}")
    console.print("[bold]traffic[/] of one rank of each group, warm-up included", table, "", sep="\n")
