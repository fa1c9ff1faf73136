"""Writes a plan as one HTML page.

`page.js` computes groups from the axes, as `layout.Grid` does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from parallel_state.layout.axes import BY_NAME
from parallel_state.tools.plan.groups import Kind, Plan, whole_of
from parallel_state.tools.plan.remarks import Remark

MAX_RANKS = 16384
_COLORS = 12


def page(plan: Plan, name: str, remarks: Sequence[Remark]) -> str:
    data = json.dumps(page_data(plan, name), separators=(",", ":"), ensure_ascii=False)
    style, script = (Path(__file__).with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".css", ".js"))
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(str(plan.layout))}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{escape(str(plan.layout))}</h1>
<p>{plan.world_size} ranks on {plan.nodes} × {plan.gpus_per_node} GPUs, order {escape(plan.request.order)}</p>
{_remarks(remarks)}</header>
<div class="kinds">
{_buttons(plan, name)}</div>
<main>
<section aria-label="Nodes and GPUs">
<p id="shows" aria-live="polite"></p>
<p class="soft">A cell shows its rank and below it the number of its group, if there is room. Colours repeat every \
{_COLORS} groups. Arrow keys move from GPU to GPU. Enter or a click selects one, Escape deselects it.</p>
<div id="drawing"></div>
</section>
<aside aria-label="One rank">
<form id="find"><label for="number">Rank</label> <input id="number" type="number" min="0" \
max="{plan.world_size - 1}" value="0"></form>
<div id="panel"></div>
</aside>
</main>
<script type="application/json" id="data">{for_script(data)}</script>
<script>
{script}</script>
</body>
</html>
"""


def for_script(text: str) -> str:
    """Escapes JSON, so that a text in the JSON can't end the HTML script element that contains it."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def page_data(plan: Plan, name: str) -> dict[str, Any]:
    """Returns the data from which `page.js` computes the groups. `name`: the kind of groups (such as "tp") to show
    first.
    """
    grids = [[list(axis) for axis in grid.axes if axis[1] > 1] for grid in plan.layout.grids]
    return {
        "world": plan.world_size,
        "perNode": plan.gpus_per_node,
        "colors": _COLORS,
        "chosen": name,
        "grids": grids,
        "axes": [axis for axis in BY_NAME if any(axis == each[0] for grid in grids for each in grid)],
        "kinds": [_kind_data(kind, plan) for kind in distinct_kinds(plan, name)],
    }


def default_kind(plan: Plan) -> str:
    return next((kind.name for kind in plan.kinds if kind.made and kind.size > 1), plan.kinds[0].name)


def _shown(kind: Kind) -> str:
    name, long_name = kind.name, kind.axis.long_name
    ranks, on = "rank" if kind.size == 1 else "ranks", "one node" if kind.nodes == 1 else f"up to {kind.nodes} nodes"
    return (f"Coloured by {name}{'' if long_name == name else f' ({long_name})'}: {kind.count} groups of {kind.size} "
            f"{ranks}, each on {on}. {kind.axis.about}")  # fmt: skip


def distinct_kinds(plan: Plan, chosen: str) -> list[Kind]:
    return [
        kind
        for kind in plan.kinds
        if (kind.size > 1 or chosen in (kind.name, *kind.same_as))
        and kind == next(other for other in plan.kinds if other.name in (kind.name, *kind.same_as))
    ]


def _kind_data(kind: Kind, plan: Plan) -> dict[str, Any]:
    whole = whole_of(plan.layout, kind.name) or kind.name
    grid, places = plan.layout.grid_of(whole), None
    if kind.name in plan.layout.ends:
        parent = plan.layout.groups(whole)[0]
        places = [parent.index(rank) for rank in kind.first]
    return {
        "names": [kind.name, *kind.same_as],
        "size": kind.size,
        "shows": _shown(kind),
        "grid": plan.layout.grids.index(grid),
        "axes": [axis for axis in plan.layout.axes_of(whole) if grid.size(axis) > 1],
        "places": places,
        "parts": _numbers_of_parts(kind, plan) if kind.name in plan.layout.parts else None,
    }


def _numbers_of_parts(kind: Kind, plan: Plan) -> list[list[int]]:
    numbers = {ranks[0]: number for number, ranks in enumerate(plan.layout.groups(kind.name))}
    wholes = plan.layout.groups(plan.layout.parts[kind.name][0])
    return [[numbers[rank] for rank in ranks[:: kind.size]] for ranks in wholes]


def _remarks(remarks: Sequence[Remark]) -> str:
    if not remarks:
        return ""
    items = "".join(
        f'<li class="{escape(remark.level)}"><strong>{escape(remark.level)}</strong> {escape(remark.text)}</li>\n'
        for remark in remarks
    )
    return f"<ul>\n{items}</ul>\n"


def _buttons(plan: Plan, chosen: str) -> str:
    kinds = distinct_kinds(plan, chosen)
    by_name = {kind.name: kind for kind in plan.kinds}
    made = [kind for kind in kinds if any(by_name[name].made for name in (kind.name, *kind.same_as))]
    rows = (("Made at start", made), ("On demand", [kind for kind in kinds if kind not in made]))
    return "".join(
        f'<div role="group" aria-label="{label}"><span>{label}</span> '
        + " ".join(_button(kind, chosen, kinds.index(kind)) for kind in members)
        + "</div>\n"
        for label, members in rows
        if members
    )


def _button(kind: Kind, chosen: str, index: int) -> str:
    names = (kind.name, *kind.same_as)
    others = f" <small>= {escape(' = '.join(kind.same_as))}</small>" if kind.same_as else ""
    return (
        f'<button type="button" data-kind="{index}" aria-pressed="{"true" if chosen in names else "false"}" '
        f'title="{kind.count} groups of {kind.size}. {escape(kind.axis.about)}"><b>{escape(kind.name)}</b>{others} '
        f"<small>{kind.count} × {kind.size}</small></button>"
    )
