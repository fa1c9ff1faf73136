"""Microseconds over bytes on logarithmic axes, a line for each candidate, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log2, log10

from measure.report import size_name

WIDTH, HEIGHT = 430, 320
LEFT, RIGHT, TOP, BOTTOM = 56, 140, 34, 44
OURS = ("#0b6e4f", "#2a9d6f", "#6cc29a", "#a3d9bf")
PEERS = ("#c1121f", "#3a5a9b", "#8a5a9b", "#b8860b", "#777777", "#444444")
Lines = Mapping[str, Sequence[tuple[float, float]]]


def draw(panels: Sequence[tuple[str, Lines]], ours: Sequence[str]) -> str:
    """Panels `(title, candidate → [(bytes, us), …])`, two beside each other; `ours` are the names drawn in green."""
    bodies = [
        f'<g transform="translate({at % 2 * WIDTH},{at // 2 * HEIGHT})">{_panel(title, lines, ours)}</g>'
        for at, (title, lines) in enumerate(panels)
    ]
    width, height = min(2, len(panels)) * WIDTH, ceil(len(panels) / 2) * HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="10"><rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(bodies)
        + "\n</svg>\n"
    )


def _panel(title: str, lines: Lines, ours: Sequence[str]) -> str:
    points = [point for line in lines.values() for point in line]
    if not points:
        return ""
    least, most = min(x for x, _ in points), max(x for x, _ in points)
    low, high = floor(log10(min(y for _, y in points))), ceil(log10(max(y for _, y in points)) + 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        across = log2(x / least) / max(log2(most / least), 1e-9)
        up = (log10(y) - low) / (high - low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text x="{LEFT}" y="20" font-size="12" font-weight="bold">{escape(title)}</text>']
    for power in range(low, high + 1):
        x, y = place(least, 10.0**power)
        label = f"{10**power if power >= 0 else 10.0**power:,} us"
        parts.append(f'<line x1="{x}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 5}" y="{y + 3:.1f}" text-anchor="end">{label}</text>')
    sizes = sorted({x for x, _ in points})
    for size in sizes[:: ceil(len(sizes) / 7)]:
        x, _ = place(size, 10.0**low)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{size_name(int(size))}</text>')
    ends = [(place(*line[-1])[1], name) for name, line in lines.items()]
    heights = _apart(ends, HEIGHT - BOTTOM)
    for name, line in lines.items():
        colour, dashes = _style(name, [n for n in lines if n in ours], [n for n in lines if n not in ours])
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line))
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>')
        x = WIDTH - RIGHT + 6
        parts.append(f'<text x="{x}" y="{heights[name]:.1f}" fill="{colour}">{escape(name)}</text>')
    return "".join(parts)


def _style(name: str, ours: Sequence[str], peers: Sequence[str]) -> tuple[str, str]:
    if name in ours:
        return OURS[ours.index(name) % len(OURS)], ""
    return PEERS[peers.index(name) % len(PEERS)], ' stroke-dasharray="5 3"'


def _apart(places: Sequence[tuple[float, str]], bottom: float) -> dict[str, float]:
    """Heights for the lines' names, none on top of another, none below the axis."""
    found: dict[str, float] = {}
    last = 0.0
    for y, name in sorted(places):
        last = max(y + 3, last + 12)
        found[name] = last
    lowest = bottom
    for _, name in sorted(places, reverse=True):
        found[name] = min(found[name], lowest)
        lowest = found[name] - 12
    return found
