"""`python -m parallel_state topology`: shows the GPUs of this machine and their connections.

Without a driver it prints the reason; the exit code is 0 then, too.

The picture shows the GPUs on a circle, coloured by NUMA node. A thick line is a connection by NVLinks, the thicker the
more links; NVSwitches are a hub in the middle. Without NVLinks a thin line is the PCIe path, dotted between NUMA nodes.
Details are hover texts. The file has no script and no external resource.
"""

from __future__ import annotations

import argparse
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from itertools import combinations
from math import cos, pi, sin
from typing import Any

from device_communicators.machine.nvml import NoAnswerError, Reader, Recorder, RecordError, Recording, open_nvml
from device_communicators.machine.topology import PCIE_PATHS, Gpu, Path, Topology, read_topology
from device_communicators.machine.topology_text import topology_text
from device_communicators.machine.visible_devices import Visible, visible_devices
from parallel_state.tools.arguments import command_parser
from parallel_state.tools.output import add_json, as_json, write, write_chosen
from parallel_state.tools.plan.picture import NEUTRAL, STYLE, colored, heading, svg_file, themed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        topology = _read(options.replay, options.record)
        visible = visible_devices(topology.gpus, {} if options.replay else os.environ)
    except OSError as error:
        parser.error(f"cannot use {error.filename}: {error.strerror}")
    except RecordError as error:
        parser.error(f"{options.replay} isn't a file that --record wrote: {error}")
    makers = {"json": lambda: as_json(_as_json(topology, visible)), "svg": lambda: topology_picture(topology)}
    if not write_chosen(parser, options, makers):
        print(topology_text(topology, visible))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "topology", "[options]",
        "Shows the GPUs of this machine: NVLink, PCIe, NUMA nodes, peer access.",
    )  # fmt: skip
    add_json(parser)
    parser.add_argument("--svg", metavar="FILE", help="write a picture of the GPUs and their connections")
    parser.add_argument("--record", metavar="FILE", help="write all answers of the driver, for a bug report")
    parser.add_argument("--replay", metavar="FILE", help="show the machine of a file written by --record")
    return parser


def _read(replay: str | None, record: str | None) -> Topology:
    if replay is not None:
        text = pathlib.Path(replay).read_text(encoding="utf-8", errors="replace")
        return _recorded(Recording.parse(text), record)
    if record is None:
        return read_topology()
    try:
        with open_nvml() as nvml:
            return _recorded(nvml, record)
    except NoAnswerError as error:
        return Topology(problem=str(error))


def _recorded(reader: Reader, record: str | None) -> Topology:
    recorder = Recorder(reader)
    topology = read_topology(recorder)
    if record is not None:
        write(record, recorder.text())
    return topology


def _as_json(topology: Topology, visible: Visible) -> dict[str, Any]:
    content = asdict(topology)
    content["paths"] = [
        {"from": one, "to": two, "label": path.label, **asdict(path)} for (one, two), path in topology.paths.items()
    ]
    content["visible"] = [device.uuid for device in visible.devices]
    content["remarks"] = [*topology.remarks, *visible.remarks]
    return content


_WIDTH, _HEIGHT, _MARGIN, _LINE = 104.0, 50.0, 16.0, 18.0
_STYLE = STYLE + themed(
    lambda neutral, _: (
        f".nvlink{{stroke:{neutral['text']}}}.pcie{{stroke:{neutral['soft']}}}"
        f".hub{{fill:{neutral['box']};stroke:{neutral['text']}}}"
    )
)
_PCIE_LINES = {"BRD": ("whole", ""), "PIX": ("whole", ""), "PXB": ("long dashes", "12 3"), "PHB": ("dashes", "7 4"),
               "NODE": ("short dashes", "3 4"), "SYS": ("dotted", "1 4")}  # fmt: skip

_NVLINK = f'class="nvlink" stroke="{NEUTRAL["text"]}"'
_PCIE = f'class="pcie" stroke="{NEUTRAL["soft"]}" stroke-width="1"'

Point = tuple[float, float]


def topology_picture(topology: Topology) -> str:
    """Returns an SVG file; without GPUs it shows the reason."""
    radius = max(150.0, len(topology.gpus) * (_WIDTH + 24) / (2 * pi)) if len(topology.gpus) > 1 else 0.0
    lines = list(_words(topology))
    top = _MARGIN + _LINE * (len(lines) + 1) + 8
    width = max(2 * radius + _WIDTH, 11.0 * len(lines[0]), 8.0 * max(map(len, lines))) + 2 * _MARGIN
    height = top + (2 * radius + _HEIGHT if topology.gpus else 0.0) + _MARGIN
    middle = (width / 2, top + radius + _HEIGHT / 2)
    places = dict(zip((gpu.index for gpu in topology.gpus), _circle(len(topology.gpus), radius, middle), strict=True))
    parts = [
        heading(_MARGIN, _MARGIN + _LINE * (row + 1) - 5, line, is_first=row == 0) for row, line in enumerate(lines)
    ]
    parts += [*_edges(topology, places), *_hub(topology, places, middle)]
    parts += [_box(gpu, places[gpu.index]) for gpu in topology.gpus]
    return svg_file(lines[0], _STYLE, width, height, parts)


def _words(topology: Topology) -> Iterator[str]:
    if topology.problem is not None:
        yield f"No GPUs: {topology.problem}"
        return
    models = list(dict.fromkeys(gpu.name or "unknown model" for gpu in topology.gpus))
    yield f"{len(topology.gpus)} × {models[0]}" if len(models) == 1 else f"{len(topology.gpus)} GPUs"
    nodes = sorted({gpu.numa_node for gpu in topology.gpus if gpu.numa_node is not None})
    if nodes:
        yield f"Coloured by NUMA node: {', '.join(map(str, nodes))}"
    paths = topology.paths.values()
    if any(path.nvlinks for path in paths):
        how = "through NVSwitch" if any(path.switched for path in paths) else "directly"
        counts = sorted({path.nvlinks for path in paths if path.nvlinks})
        yield f"Thick lines: {' or '.join(map(str, counts))} NVLinks between two GPUs, {how}"
    over_pcie = {path.pcie for path in paths if not path.nvlinks}
    for word, meaning in PCIE_PATHS.values():
        if word in over_pcie:
            yield f"Thin lines, {_PCIE_LINES[word][0]} ({word}): PCIe {meaning}"


def _circle(count: int, radius: float, middle: Point) -> list[Point]:
    start = -pi / 2 if count != 2 else pi
    angles = [start + 2 * pi * place / max(count, 1) for place in range(count)]
    return [(middle[0] + radius * cos(angle), middle[1] + radius * sin(angle)) for angle in angles]


def _edges(topology: Topology, places: Mapping[int, Point]) -> Iterator[str]:
    for one, two in combinations(places, 2):
        path = topology.paths[one, two]
        text = f"GPU{one} – GPU{two}: {_about(path)}"
        if path.nvlinks and not path.switched:
            look = f'{_NVLINK} stroke-width="{1.5 + path.nvlinks / 2:g}"'
            yield _line(places[one], places[two], look, text)
        elif not path.nvlinks:
            _, dashes = _PCIE_LINES.get(path.pcie or "", ("", ""))
            look = f'{_PCIE} stroke-dasharray="{dashes}"' if dashes else _PCIE
            yield _line(places[one], places[two], look, text)


def _about(path: Path) -> str:
    pcie = "PCIe path unknown" if path.pcie is None else f"PCIe {path.pcie}"
    links = "NVLinks unknown" if path.nvlinks is None else f"{path.nvlinks} NVLinks" if path.nvlinks else "no NVLink"
    return f"{links}, {pcie}, peer access {path.peer_problem or 'as the driver reports'}"


def _hub(topology: Topology, places: Mapping[int, Point], middle: Point) -> Iterator[str]:
    if not any(path.switched for path in topology.paths.values()):
        return
    for gpu in topology.gpus:
        if gpu.switch_links:
            look = f'{_NVLINK} stroke-width="{1.5 + gpu.switch_links / 4:g}"'
            yield _line(places[gpu.index], middle, look, f"GPU{gpu.index}: {gpu.switch_links} NVLinks into switches")
    x, y = middle
    hub = f'class="hub" fill="{NEUTRAL["box"]}" stroke="{NEUTRAL["text"]}" stroke-width="1.5"'
    yield f'<rect {hub} x="{x - 52:g}" y="{y - 20:g}" width="104" height="40" rx="20"/>'
    yield f'<text text-anchor="middle" x="{x:g}" y="{y + 5:g}" font-size="14" font-weight="600">NVSwitch</text>'


def _line(one: Point, two: Point, look: str, text: str) -> str:
    ends = f'x1="{one[0]:.1f}" y1="{one[1]:.1f}" x2="{two[0]:.1f}" y2="{two[1]:.1f}"'
    return f"<line {look} {ends}><title>{escape(text)}</title></line>"


def _box(gpu: Gpu, at: Point) -> str:
    x, y = at[0] - _WIDTH / 2, at[1] - _HEIGHT / 2
    centered = f'x="{at[0]:.1f}" fill="{NEUTRAL["cell"]}" text-anchor="middle"'
    below = f"{len(gpu.slices)} MIG slices" if gpu.mig else gpu.pci_id or ""
    node = "NUMA node unknown" if gpu.numa_node is None else f"NUMA node {gpu.numa_node}"
    text = f"{gpu.uuid}, {gpu.name or 'unknown model'}, {node}"
    return (
        f"<g {colored(-1 if gpu.numa_node is None else gpu.numa_node)}><title>{escape(text)}</title>"
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{_WIDTH:g}" height="{_HEIGHT:g}" rx="4"/>'
        f'<text {centered} y="{at[1] - 2:.1f}" font-size="16" font-weight="600">GPU{gpu.index}</text>'
        f'<text {centered} y="{at[1] + 16:.1f}" font-size="12">{escape(below)}</text></g>'
    )
