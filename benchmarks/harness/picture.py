"""Draws SVG line charts on logarithmic axes, with one line per candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from math import ceil, floor, log2, log10
from typing import NamedTuple

from parallel_state.tools.bench.report import size_name

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 66, 196, 44, 40
OURS = ("#0b6e4f", "#2a9d6f", "#66a61e", "#8c9a12")
PEERS = ("#c1121f", "#3a5a9b", "#8a5a9b", "#b8860b", "#d2691e", "#2a8ca3", "#5f6b76", "#b05a9b")
Lines = Mapping[str, Sequence[tuple[float, float]]]


class Panel(NamedTuple):
    title: str
    lines: Lines
    """Candidate → [(x, y), …]."""
    unit: str = "µs"
    x_text: Callable[[int], str] = size_name
    bands: Mapping[str, Sequence[tuple[float, float, float]]] = {}
    """Candidate → [(x, low, high), …], drawn behind its line."""
    note: str = ""


def draw(panels: Iterable[Panel | tuple[str, Lines]], ours: Sequence[str]) -> str:
    """Draws panels in two columns; empty ones are left out. `ours`: names drawn in green."""
    drawn = [Panel(*panel) for panel in panels if any(panel[1].values())]
    names = list(dict.fromkeys(name for panel in drawn for name in panel.lines))
    styles = _styles([name for name in names if name in ours], [name for name in names if name not in ours])
    bodies = [
        f'<g transform="translate({at % 2 * WIDTH},{at // 2 * HEIGHT})">{_panel(panel, styles)}</g>'
        for at, panel in enumerate(drawn)
    ]
    width, height = min(2, len(drawn)) * WIDTH, ceil(len(drawn) / 2) * HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11"><rect width="100%" height="100%" fill="#ffffff"/>\n'
        + "\n".join(bodies)
        + "\n</svg>\n"
    )


def _styles(ours: Sequence[str], peers: Sequence[str]) -> dict[str, tuple[str, str, float]]:
    styles = {name: (OURS[at % len(OURS)], "", 2.4) for at, name in enumerate(ours)}
    for at, name in enumerate(peers):
        styles[name] = (PEERS[at % len(PEERS)], ' stroke-dasharray="5 3"', 1.6)
    return styles


def _panel(panel: Panel, styles: Mapping[str, tuple[str, str, float]]) -> str:
    points = [point for line in panel.lines.values() for point in line]
    least, most = min(x for x, _ in points), max(x for x, _ in points)
    low, high = floor(log10(min(y for _, y in points))), ceil(log10(max(y for _, y in points)) + 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        across = log2(x / least) / log2(most / least) if most > least else 0.5
        up = min(1.0, max(0.0, (log10(y) - low) / (high - low)))
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    bottom = HEIGHT - BOTTOM
    parts = [f'<text x="{LEFT}" y="22" font-size="13" font-weight="bold">{escape(panel.title)}</text>']
    if panel.note:
        parts.append(f'<text x="{LEFT}" y="36" fill="#57606a">{escape(panel.note)}</text>')
    for power in range(low, high + 1):
        _, y = place(least, 10.0**power)
        label = f"{10**power:,}" if power >= 0 else f"{10.0**power:.{-power}f}"
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dde1e6"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#57606a">{label}</text>')
    parts.append(f'<text x="{LEFT - 6}" y="{TOP - 12}" text-anchor="end" fill="#57606a">{escape(panel.unit)}</text>')
    sizes = sorted({x for x, _ in points})
    for size in sizes[:: ceil(len(sizes) / 7)]:
        x, _ = place(size, 10.0**low)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="#eef1f4"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle" fill="#57606a">{panel.x_text(int(size))}</text>'
        )
    heights = _apart([(place(*line[-1])[1], name) for name, line in panel.lines.items() if line], bottom)
    for name, line in panel.lines.items():
        if not line:
            continue
        colour, dashes, width = styles[name]
        band = panel.bands.get(name, ())
        edge = [place(x, y) for x, y, _ in band] + [place(x, y) for x, _, y in reversed(band)]
        if edge:
            outline = " ".join(f"{x:.1f},{y:.1f}" for x, y in edge)
            parts.append(f'<polygon points="{outline}" fill="{colour}" opacity="0.13"/>')
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line))
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>')
        for x, y in line:
            at_x, at_y = place(x, y)
            text = f"{name}, {panel.x_text(int(x))}: {y:.4g} {panel.unit}"
            parts.append(f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="2.6" fill="{colour}">')
            parts.append(f"<title>{escape(text)}</title></circle>")
        weight = "" if dashes else ' font-weight="bold"'
        parts.append(
            f'<text x="{WIDTH - RIGHT + 10}" y="{heights[name]:.1f}" fill="{colour}"{weight}>{escape(name)}</text>'
        )
    return "".join(parts)


def _apart(places: Sequence[tuple[float, str]], bottom: float) -> dict[str, float]:
    found: dict[str, float] = {}
    last = 0.0
    for y, name in sorted(places):
        last = max(y + 4, last + 14)
        found[name] = last
    lowest = bottom
    for _, name in sorted(places, reverse=True):
        found[name] = min(found[name], lowest)
        lowest = found[name] - 14
    return found
