"""The picture of `init_scaling`: small panels of lines on logarithmic axes, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log2, log10
from statistics import median
from typing import Any

from init_scaling_report import steps_ms, store_operations

WIDTH, HEIGHT, MARGIN = 330, 250, 46
COLOURS = {"ours": "#0b6e4f", "new_group": "#c1121f", "device_mesh": "#3a5a9b", "megatron-core": "#c1121f"}
Series = dict[str, list[tuple[float, float]]]


def draw(result: Mapping[str, Any]) -> str:
    """The whole picture; panels without points are left out."""
    panels: list[tuple[str, str, Series]] = []
    if result["counts"]:
        panels.append(("calls of torch that make groups, on each rank", "ranks", _calls(result["counts"])))
    if result["times"]:
        panels.append(("ms of initialize_model_parallel, fake backend", "ranks", _times(result["times"])))
    if result["real"]:
        panels.append(("ms to the first all-reduces, gloo (experts)", "ranks", _total(result["real"])))
        panels.append(("store operations of all ranks (experts)", "ranks", _store(result["real"])))
    bodies = [
        f'<g transform="translate({(at % 2) * WIDTH},{at // 2 * HEIGHT})">{_panel(*panel)}</g>'
        for at, panel in enumerate(panels)
    ]
    width, height = min(2, len(panels)) * WIDTH, ceil(len(panels) / 2) * HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="10"><rect width="100%" height="100%" fill="white"/>'
        + "\n".join(bodies)
        + "</svg>\n"
    )


def _calls(rows: Sequence[Mapping[str, Any]]) -> Series:
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        if row["cp"] > 1:  # the layout that grows, not the cited ones
            points = found.setdefault(row["variant"], {})
            points[row["world_size"]] = max(points.get(row["world_size"], 0), row["cost"]["calls"])
    return {name: sorted(points.items()) for name, points in found.items()}


def _times(rows: Sequence[Mapping[str, Any]]) -> Series:
    found: Series = {}
    for row in rows:
        if not row["variant"].endswith("only"):
            found.setdefault(row["variant"], []).append((row["world_size"], median(row["ms"])))
    return found


def _total(rows: Sequence[Mapping[str, Any]]) -> Series:
    found: Series = {}
    for row in _shown(rows):
        found.setdefault(_name(row), []).append((row["ranks"], steps_ms(row)[3]))
    return found


def _store(rows: Sequence[Mapping[str, Any]]) -> Series:
    found: Series = {}
    for row in _shown(rows):
        found.setdefault(_name(row), []).append((row["ranks"], store_operations(row)))
    return found


def _shown(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["layout"] == "experts" and not row["variant"].endswith("all kinds")]


def _name(row: Mapping[str, Any]) -> str:
    return row["variant"] + (", lazy gloo" if row["lazy"] else "")


def _panel(title: str, x_title: str, series: Series) -> str:
    points = [point for each in series.values() for point in each]
    if not points:
        return ""
    least_x, most_x = min(x for x, _ in points), max(x for x, _ in points)
    low, high = floor(log10(min(y for _, y in points))), ceil(log10(max(y for _, y in points)) + 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        across = log2(x / least_x) / max(log2(most_x / least_x), 1e-9)
        up = (log10(y) - low) / (high - low)
        return MARGIN + across * (WIDTH - MARGIN - 110), HEIGHT - MARGIN - up * (HEIGHT - 2 * MARGIN)

    parts = [f'<text x="{MARGIN - 30}" y="24" font-size="11" font-weight="bold">{escape(title)}</text>']
    for power in range(low, high + 1):
        x, y = place(least_x, 10.0**power)
        parts.append(f'<line x1="{x}" x2="{WIDTH - 110}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 4}" y="{y + 3:.1f}" text-anchor="end">{10**power:,}</text>')
    for size in sorted({x for x, _ in points}):
        x, _ = place(size, 10.0**low)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 14}" text-anchor="middle">{size:,}</text>')
    parts.append(f'<text x="{MARGIN}" y="{HEIGHT - MARGIN + 28}">{escape(x_title)}</text>')
    labels = _apart([(place(*each[-1])[1], name) for name, each in series.items()])
    for name, each in series.items():
        colour = COLOURS.get(name.split(",")[0], "#555")
        dashes = ' stroke-dasharray="4 3"' if "," in name else ""
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in each))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>')
        parts.append(f'<text x="{WIDTH - 104}" y="{labels[name]:.1f}" fill="{colour}">{escape(name)}</text>')
    return "".join(parts)


def _apart(places: Sequence[tuple[float, str]]) -> dict[str, float]:
    """Heights for the lines' names, none on top of another."""
    found: dict[str, float] = {}
    last = 0.0
    for y, name in sorted(places):
        last = max(y + 3, last + 12)
        found[name] = last
    return found
