from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from math import ceil, floor, log2, log10
from typing import NamedTuple

from parallel_state.tools.bench.report import size_name

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 66, 196, 44, 56
OURS = ("#1a8f4c", "#0e8fa0", "#8a8f1a", "#3b82f6", "#8e5bd6", "#5f7f6f")
PEERS = ("#e5484d", "#d9730d", "#d6409f", "#a0714f", "#7d8590", "#5b6ee1", "#b08800", "#c0507a")
"""Colours with a contrast of at least 3 on white and on the dark scheme's background."""
DASHES = {True: ("", "9 3", "2 3"), False: ("5 3", "2 2", "8 2 2 2")}
SCHEME = (
    "<style>.ink{fill:#24292f}.faint{fill:#57606a}.grid{stroke:#dde1e6}"
    "@media(prefers-color-scheme:dark){.paper{fill:#0d1117}.ink{fill:#e6edf3}.faint{fill:#9198a1}"
    ".grid{stroke:#30363d}}</style>"
)
Lines = Mapping[str, Sequence[tuple[float, float]]]


class Panel(NamedTuple):
    title: str
    lines: Lines
    """Candidate → [(x, y), …]."""
    unit: str = "µs"
    x_text: Callable[[int], str] = size_name
    x_name: str = "size"
    bands: Mapping[str, Sequence[tuple[float, float, float]]] = {}
    """Candidate → [(x, low, high), …], drawn behind its line."""
    note: str = ""


def draw(panels: Iterable[Panel | tuple[str, Lines]], ours: Sequence[str]) -> str:
    bodies = [
        f'<g transform="translate({at % 2 * WIDTH},{at // 2 * HEIGHT})">{body}</g>'
        for at, body in enumerate(_bodies(panels, ours))
    ]
    return _svg(min(2, len(bodies)) * WIDTH, ceil(len(bodies) / 2) * HEIGHT, "\n".join(bodies))


def draw_each(panels: Iterable[Panel | tuple[str, Lines]], ours: Sequence[str]) -> list[str]:
    return [_svg(WIDTH, HEIGHT, body) for body in _bodies(panels, ours)]


def _bodies(panels: Iterable[Panel | tuple[str, Lines]], ours: Sequence[str]) -> list[str]:
    drawn = [Panel(*panel) for panel in panels if any(panel[1].values())]
    names = list(dict.fromkeys(name for panel in drawn for name in panel.lines))
    styles = _styles([name for name in names if name in ours], [name for name in names if name not in ours])
    return [_panel(panel, styles) for panel in drawn]


def _svg(width: int, height: int, body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="11">{SCHEME}<rect width="100%" height="100%" class="paper" '
        'fill="#ffffff"/>'
        f"\n{body}\n</svg>\n"
    )


def _styles(ours: Sequence[str], peers: Sequence[str]) -> dict[str, tuple[str, str, float]]:
    found = {}
    for names, colours, dashes, width in ((ours, OURS, DASHES[True], 2.4), (peers, PEERS, DASHES[False], 1.6)):
        for at, name in enumerate(names):
            pattern = dashes[at // len(colours) % len(dashes)]
            dashed = f' stroke-dasharray="{pattern}"' if pattern else ""
            found[name] = (colours[at % len(colours)], dashed, width)
    return found


def _panel(panel: Panel, styles: Mapping[str, tuple[str, str, float]]) -> str:
    points = [point for line in panel.lines.values() for point in line]
    least, most = min(x for x, _ in points), max(x for x, _ in points)
    low, high = floor(log10(min(y for _, y in points))), ceil(log10(max(y for _, y in points)) + 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        across = log2(x / least) / log2(most / least) if most > least else 0.5
        up = min(1.0, max(0.0, (log10(y) - low) / (high - low)))
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    bottom = HEIGHT - BOTTOM
    parts = [f'<text x="{LEFT}" y="22" font-size="13" font-weight="bold" class="ink">{escape(panel.title)}</text>']
    if panel.note:
        parts.append(f'<text x="{LEFT}" y="36" class="faint">{escape(panel.note)}</text>')
    for power in range(low, high + 1):
        _, y = place(least, 10.0**power)
        label = f"{10**power:,}" if power >= 0 else f"{10.0**power:.{-power}f}"
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" class="faint">{label}</text>')
    parts.append(f'<text x="{LEFT - 6}" y="{TOP - 12}" text-anchor="end" class="faint">{escape(panel.unit)}</text>')
    sizes = sorted({x for x, _ in points})
    for size in sizes[:: ceil(len(sizes) / 7)]:
        x, _ = place(size, 10.0**low)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" class="grid" opacity="0.5"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle" class="faint">{panel.x_text(int(size))}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.1f}" y="{bottom + 36}" text-anchor="middle" class="faint">'
        f"{escape(panel.x_name)}</text>"
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
        weight = ' font-weight="bold"' if width > 2 else ""
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
