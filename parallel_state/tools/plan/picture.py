"""Draws a plan as SVG elements for `page`: nodes as boxes, GPUs as cells, coloured by the groups of one kind.

With more than MAX_RANKED ranks cells have no rank number, with more than MAX_NUMBERED no group number, and with more
than MAX_TITLED no hover text, so that a page stays below 2 MB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, sqrt

from parallel_state.tools.plan.groups import Kind, Plan

MAX_RANKED = 128
MAX_NUMBERED = 2048
MAX_TITLED = 4096
MAX_RANKS = 16384

# Hues 150° apart in OKLCH, so that neighbouring groups differ most; alternately light and dark for color-blind readers.
LIGHT = ("#b3d4ff", "#ee8f63", "#4aebeb", "#e488be", "#ace48c", "#a39ef9",
         "#da9e3f", "#8edefe", "#f18790", "#73ecbc", "#ca91e3", "#ded66a")  # fmt: skip
DARK = ("#154d8c", "#a6552d", "#055959", "#9e4f7e", "#2d5a04", "#6863b1",
        "#93640c", "#00566e", "#a94e58", "#095b41", "#89579e", "#554f00")  # fmt: skip
LIGHT_TEXT, DARK_TEXT = "#14181f", "#f4f6fa"

_NEUTRAL = {"page": "#ffffff", "text": "#14181f", "soft": "#5b6472", "line": "#c9d0da", "box": "#f3f5f8",
            "none": "#e3e7ed", "cell": LIGHT_TEXT}  # fmt: skip
_DARK_NEUTRAL = {"page": "#12151b", "text": "#e9edf4", "soft": "#9aa4b4", "line": "#3a424f", "box": "#1b2028",
                 "none": "#2a313c", "cell": DARK_TEXT}  # fmt: skip


def _rules(neutral: Mapping[str, str], colors: Sequence[str]) -> str:
    return (
        f":root{{{';'.join(f'--{name}:{color}' for name, color in neutral.items())}}}"
        f".drawing text{{fill:{neutral['text']}}}.drawing .soft{{fill:{neutral['soft']}}}"
        f".drawing .box{{fill:{neutral['box']};stroke:{neutral['line']}}}"
        f".drawing .gpu text{{fill:{neutral['cell']}}}.none{{fill:{neutral['none']}}}"
        + "".join(f".c{index}{{fill:{color}}}" for index, color in enumerate(colors))
    )


STYLE = (
    ".drawing text{font-family:system-ui,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}"
    ".drawing .gpu text{text-anchor:middle;pointer-events:none;font-variant-numeric:tabular-nums}"
    f"{_rules(_NEUTRAL, LIGHT)}@media(prefers-color-scheme:dark){{{_rules(_DARK_NEUTRAL, DARK)}}}"
)


@dataclass(frozen=True)
class Geometry:
    cell_width: float
    cell_height: float
    gap: float
    padding: float
    label_height: float
    gpu_columns: int
    gpu_rows: int
    node_columns: int
    node_rows: int

    @classmethod
    def of(cls, plan: Plan) -> Geometry:
        cell_width, cell_height, gap, padding, label = next(
            measures for limit, *measures in _MEASURES if plan.world_size <= limit
        )
        columns = _gpu_columns(plan.gpus_per_node)
        rows = ceil(plan.gpus_per_node / columns)
        width = columns * (cell_width + gap) + 2 * padding + NODE_GAP * gap
        height = rows * (cell_height + gap) + 2 * padding + label + NODE_GAP * gap
        shape = 2.0 if plan.world_size <= MAX_RANKED else 1.25
        node_columns = _node_columns(plan.nodes, width / height / shape)
        return cls(cell_width, cell_height, gap, padding, label, columns, rows,
                   node_columns, ceil(plan.nodes / node_columns))  # fmt: skip

    @property
    def node_width(self) -> float:
        return self.gpu_columns * (self.cell_width + self.gap) - self.gap + 2 * self.padding

    @property
    def node_height(self) -> float:
        return self.gpu_rows * (self.cell_height + self.gap) - self.gap + 2 * self.padding + self.label_height

    @property
    def width(self) -> float:
        return self.node_columns * (self.node_width + NODE_GAP * self.gap) - NODE_GAP * self.gap

    @property
    def height(self) -> float:
        return self.node_rows * (self.node_height + NODE_GAP * self.gap) - NODE_GAP * self.gap

    def node_at(self, node: int) -> tuple[float, float]:
        row, column = divmod(node, self.node_columns)
        return column * (self.node_width + NODE_GAP * self.gap), row * (self.node_height + NODE_GAP * self.gap)

    def cell_at(self, gpu: int) -> tuple[float, float]:
        """Returns a cell's position within its node."""
        row, column = divmod(gpu, self.gpu_columns)
        return (self.padding + column * (self.cell_width + self.gap),
                self.padding + self.label_height + row * (self.cell_height + self.gap))  # fmt: skip


NODE_GAP = 4
"""Gap between nodes, as a multiple of the gap between cells."""
_MEASURES = (
    # Largest number of ranks, width and height of a cell, gap, padding of a node, height of its label.
    (MAX_RANKED, 54.0, 40.0, 3.0, 8.0, 18.0),
    (512, 34.0, 24.0, 2.0, 6.0, 14.0),
    (MAX_NUMBERED, 25.0, 17.0, 2.0, 5.0, 12.0),
    (MAX_TITLED, 13.0, 10.0, 1.0, 4.0, 10.0),
    (MAX_RANKS, 7.0, 6.0, 1.0, 2.0, 0.0),
)


def _gpu_columns(gpus: int) -> int:
    """Returns 4 for 8 GPUs (4 × 2), 4 for 16, 9 for 72. For a prime number some places stay empty."""
    even = [columns for columns in range(ceil(sqrt(gpus)), gpus + 1) if gpus % columns == 0]
    return even[0] if even[0] <= 4 * sqrt(gpus) / 2 else ceil(sqrt(gpus))


def _node_columns(nodes: int, shape: float) -> int:
    """Returns the number of nodes in a row. Prefers divisors of `nodes`, so that strides line up.

    `shape` is a node's width : height, divided by the wanted width : height of the drawing.
    """

    def badness(columns: int) -> float:
        ratio = columns * shape / ceil(nodes / columns)
        return max(ratio, 1 / ratio) * (1.0 if nodes % columns == 0 else 2.5)

    return min(range(1, nodes + 1), key=badness)


def default_kind(plan: Plan) -> str:
    """Returns the kind of group that a picture shows by default: the first with more than one rank, else tp."""
    return next((kind.name for kind in plan.kinds if kind.made and kind.size > 1), plan.kinds[0].name)


def group_of_each_rank(plan: Plan, name: str) -> list[int]:
    """Returns, for each rank, the index of its group of that kind; -1 for a rank in none."""
    index = [-1] * plan.world_size
    for number, ranks in enumerate(plan.layout.groups(name)):
        for rank in ranks:
            index[rank] = number
    return index


def shown(kind: Kind) -> str:
    name, long_name = kind.name, kind.axis.long_name
    ranks, on = "rank" if kind.size == 1 else "ranks", "one node" if kind.nodes == 1 else f"up to {kind.nodes} nodes"
    return (f"Coloured by {name}{'' if long_name == name else f' ({long_name})'}: {kind.count} groups of {kind.size} "
            f"{ranks}, each on {on}. {kind.axis.about}")  # fmt: skip


def how_to_read(plan: Plan, kind: Kind) -> str:
    if plan.world_size <= MAX_NUMBERED:
        read = "The number in a cell is its group" + ("; above it the rank." if plan.world_size <= MAX_RANKED else ".")
    else:
        read = f"With more than {MAX_NUMBERED} ranks, cells are too small for the numbers of their groups."
    return read + (f" Colours repeat every {len(LIGHT)} groups." if kind.count > len(LIGHT) else "")


def nodes(plan: Plan, name: str, geometry: Geometry) -> Iterator[str]:
    """Yields the drawing: a `<g class="node">` per node, with a `gpu` per rank, in the order of ranks."""
    index = group_of_each_rank(plan, name)
    for node in range(plan.nodes):
        x, y = geometry.node_at(node)
        yield f'<g class="node" transform="translate({x:g},{y:g})">'
        yield f'<rect class="box" width="{geometry.node_width:g}" height="{geometry.node_height:g}" rx="3"/>'
        if geometry.label_height:
            yield (f'<text class="soft" x="{geometry.padding:g}" y="{geometry.label_height:g}" '
                   f'font-size="{min(12, geometry.label_height - 2):g}">node {node}</text>')  # fmt: skip
        first = node * plan.gpus_per_node
        for rank in range(first, min(first + plan.gpus_per_node, plan.world_size)):
            yield _cell(plan, name, geometry, rank, index[rank])
        yield "</g>"


def _cell(plan: Plan, name: str, geometry: Geometry, rank: int, group: int) -> str:
    x, y = geometry.cell_at(rank % plan.gpus_per_node)
    look = f'class="gpu {"none" if group < 0 else f"c{group % len(LIGHT)}"}"'
    width, height = geometry.cell_width, geometry.cell_height
    box = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    if plan.world_size > MAX_TITLED:
        return f"<rect {look} {box}/>"
    node, gpu = plan.place(rank)
    label = f"{name} group {group}" if group >= 0 else f"in no {name} group"
    title = f"<title>rank {rank}: node {node}, GPU {gpu}, {escape(label)}</title>"
    if plan.world_size > MAX_NUMBERED:
        return f"<g {look}>{title}<rect {box}/></g>"
    number = str(group) if group >= 0 else "–"
    at = f'x="{x + width / 2:g}"'
    if plan.world_size > MAX_RANKED:
        text = f'<text {at} y="{y + height / 2 + 3.5:g}" font-size="{10 if height < 20 else 12}">{number}</text>'
    else:
        text = (f'<text class="rank" {at} y="{y + 15:g}" font-size="11">{rank}</text>'
                f'<text {at} y="{y + 32:g}" font-size="15" font-weight="600">{number}</text>')  # fmt: skip
    return f'<g {look}>{title}<rect {box} rx="2"/>{text}</g>'
