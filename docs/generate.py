"""Draws the docs' pictures and writes tables from the source. `make docs` and the docs tests call it.

    python docs/generate.py            # rewrites docs/pictures/*.svg, docs/compat.md and the tables in other pages

Pictures have a white background and fixed colours, so that they are readable on a dark page.
"""

from __future__ import annotations

import ast
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
RESULTS = [ROOT / "benchmarks" / "results" / f"all_reduce_2_ranks_tight_{part}.json" for part in ("small", "large")]
PICTURES = DOCS / "pictures"
MARK = "<!-- written by docs/generate.py -->\n"
"""The line before and after a table in a page."""

LINES = {
    "op, in place": "parallel_state, in place",
    "coordinator": "parallel_state, new tensor",
    "vLLM op, in place": "vLLM CPU op",
    "Intel MPI": "Intel MPI",
    "MPICH": "MPICH",
    "Open MPI (int16)": "Open MPI (int16)",
    "gloo": "gloo",
}
"""Candidate in the results -> name in the picture."""


def _svg(width: int, height: int, title: str, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}" font-family="Helvetica, Arial, sans-serif" font-size="12">\n'
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff" stroke="#d0d7de"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _text(x: float, y: float, words: str, colour: str = "#24292f", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}"{more}>{escape(words)}</text>'


# The latency picture.


def latency_lines(paths: Sequence[Path]) -> dict[str, list[tuple[int, float]]]:
    """Returns (bytes, median microseconds) of each candidate in `LINES`, by its name in the picture."""
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in LINES.values()}
    for path in paths:
        for row in json.loads(path.read_text())["rows"]:
            for candidate, name in LINES.items():
                if candidate in row["us"]:
                    found[name].append((row["case"]["bytes"], statistics.median(row["us"][candidate])))
    return {name: sorted(line) for name, line in found.items() if line}


def latency_picture(paths: Sequence[Path] = RESULTS) -> str:
    """Returns the README's SVG: latency of all_reduce by size, with the peers of the same run."""
    picture = _imported("harness.picture", ROOT / "benchmarks")
    machine = json.loads(paths[0].read_text())["machine"]
    title = "all_reduce of bfloat16 between 2 CPU ranks"
    note = f"median; {machine['cores']} cores of an {machine['processor']}; lower is better"
    lines = latency_lines(paths)
    ours = [name for name in lines if name.startswith("parallel_state")]
    svg: str = picture.draw([picture.Panel(title, lines, note=note)], ours)
    return svg


def _imported(name: str, folder: Path) -> Any:
    """Imports a module from a folder of the checkout."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return import_module(name)


# The picture of the rooms.


def _depths(table: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Returns the length of each room's longest chain of imports: a room is drawn above all that it may import."""

    def depth(room: str) -> int:
        return max((1 + depth(below) for below in table[room]), default=0)

    return {room: depth(room) for room in table}


Bends = dict[tuple[str, str], list[str]]


def _layers(table: Mapping[str, Sequence[str]]) -> tuple[list[list[str]], Bends]:
    """Returns layers of rooms, the highest first, and the arrows as chains with a bend in each layer that they cross.

    A bend occupies a position in its layer, so that arrows don't cross rooms. A layer is sorted by the mean position
    of the rooms that point at each of its rooms.
    """
    depths = _depths(table)
    layers: list[list[str]] = [[] for _ in range(max(depths.values()) + 1)]
    for room, depth in depths.items():
        layers[-1 - depth].append(room)
    chains: Bends = {}
    above: dict[str, list[str]] = {}
    for room, below in table.items():
        for each in below:
            chain = [room]
            for level in range(len(layers) - depths[room], len(layers) - 1 - depths[each]):
                chain.append(f"{room}>{each}@{level}")
                layers[level].append(chain[-1])
            chains[room, each] = [*chain, each]
            for start, end in pairwise(chains[room, each]):
                above.setdefault(end, []).append(start)
    place: dict[str, float] = {}
    for layer in layers:
        layer.sort(key=lambda name: statistics.fmean(place[each] for each in above[name]) if name in above else 0.5)
        place |= {name: (i + 1) / (len(layer) + 1) for i, name in enumerate(layer)}
    return layers, chains


def _package_picture(rooms: Mapping[str, Sequence[str]], top: float, width: int, fill: str, line: str) -> list[str]:
    """Returns the boxes and arrows of one package, below `top`."""
    layers, chains = _layers(rooms)
    at: dict[str, tuple[float, float, float]] = {}
    for level, layer in enumerate(layers):
        wide = [_box_width(name) for name in layer]
        x = (width - sum(wide) - GAP * (len(layer) - 1)) / 2
        for name, box in zip(layer, wide, strict=True):
            at[name] = (x + box / 2, top + level * STEP, box)
            x += box + GAP
    body = []
    for chain in chains.values():
        points = [(at[chain[0]][0], at[chain[0]][1] + BOX)]
        for bend in chain[1:-1]:
            points += [(at[bend][0], at[bend][1]), (at[bend][0], at[bend][1] + BOX)]
        points.append((at[chain[-1]][0], at[chain[-1]][1] - 1))
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        body.append(f'<polyline points="{drawn}" fill="none" stroke="#6e7781" marker-end="url(#head)"/>')
    return body + [_box(name, *at[name], fill, line) for name in rooms]


BOX, GAP, STEP = 26, 16, 58
ARROW_HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0,0 L8,4 L0,8 z" fill="#6e7781"/></marker></defs>'
)


def _box_width(name: str) -> float:
    return 1.0 if ">" in name else 8.0 * len(name) + 22


def _box(name: str, middle: float, y: float, wide: float, fill: str, line: str) -> str:
    return (
        f'<rect x="{middle - wide / 2:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{BOX}" rx="5" fill="{fill}" '
        f'stroke="{line}"/>' + _text(middle, y + 17, name, more=' text-anchor="middle"')
    )


def rooms_picture() -> str:
    """Returns the SVG of both packages' rooms, from the table that `test_import_direction.py` asserts."""
    table = _imported("tests.rooms", ROOT)
    width, top = 900, 44.0
    body = [
        ARROW_HEAD,
        _text(20, 28, "Rooms: an arrow points to what may be imported", more=' font-size="15" font-weight="bold"'),
    ]
    for package, rooms, fill, line in (
        (table.UPPER, table.UPPER_ROOMS, "#ddf4ff", "#0969da"),
        (table.LOWER, table.LOWER_ROOMS, "#dafbe1", "#1a7f37"),
    ):
        levels = max(_depths(rooms).values()) + 1
        height = 34 + levels * STEP - (STEP - BOX) + 16
        body.append(
            f'<rect x="16" y="{top}" width="{width - 32}" height="{height}" rx="6" fill="none" stroke="{line}"/>'
        )
        body.append(_text(28, top + 22, package, line, ' font-weight="bold"'))
        body += _package_picture(rooms, top + 34, width, fill, line)
        if package == table.UPPER:
            middle, end = width / 2, top + height
            body.append(
                f'<line x1="{middle}" y1="{end}" x2="{middle}" y2="{end + 43}" stroke="#6e7781" stroke-width="2" '
                'marker-end="url(#head)"/>'
            )
            body.append(_text(middle + 12, end + 25, "never back", "#57606a"))
        top += height + 44
    return _svg(width, round(top - 28), "The rooms of the two packages", body)


# The picture of the floors.

FLOORS: tuple[tuple[str, str, tuple[tuple[str, ...], ...]], ...] = (
    (
        "Face",
        "Checks a call, finds its group, words its errors",
        (
            ("state", "collectives", "messages", "regions", "functions", "groups", "c10d"),
            ("launch", "metrics", "compile", "compat", "tools"),
        ),
    ),
    (
        "Ranks",
        "Computes rank lists, starts worlds, makes groups; one control thread per process detects exits",
        (("layout", "startup", "process_groups", "keywords", "liveness", "control"),),
    ),
    (
        "Data",
        "Moves bytes; one group object per family of transports",
        (
            ("catalog", "routing", "calls", "base"),
            ("cpu_communicator", "cpu", "nccl", "cuda", "peer", "machine", "process_group", "simulated"),
        ),
    ),
)
"""Name, purpose and lines of rooms of each floor, the highest first."""


def floors_picture() -> str:
    """Returns the SVG of the three floors; each room of both packages is on one of them."""
    table = _imported("tests.rooms", ROOT)
    colours = dict.fromkeys(table.UPPER_ROOMS, ("#ddf4ff", "#0969da"))
    colours |= dict.fromkeys(table.LOWER_ROOMS, ("#dafbe1", "#1a7f37"))
    drawn = [room for _, _, lines in FLOORS for line in lines for room in line]
    if sorted(drawn) != sorted(colours):
        raise ValueError(f"FLOORS and tests/rooms.py differ in {sorted(set(drawn) ^ set(colours))}")
    width, top = 900, 52.0
    body = [_text(20, 32, "model layer, scheduler, engine, torch.distributed program, command line", "#57606a")]
    for name, purpose, lines in FLOORS:
        height = 44 + len(lines) * (BOX + 12)
        body.append(
            f'<rect x="16" y="{top}" width="{width - 32}" height="{height}" rx="6" fill="#f6f8fa" stroke="#d0d7de"/>'
        )
        body.append(_text(28, top + 22, name, more=' font-size="15" font-weight="bold"'))
        body.append(_text(90, top + 22, purpose, "#57606a"))
        for level, line in enumerate(lines):
            x = 28.0
            for room in line:
                wide = _box_width(room)
                body.append(_box(room, x + wide / 2, top + 36 + level * (BOX + 12), wide, *colours[room]))
                x += wide + GAP
        top += height + 12
    body.append(_text(20, top + 12, "blue: parallel_state; green: device_communicators", "#57606a"))
    return _svg(width, round(top + 28), "The three floors and their rooms", body)


# Tables.


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([_row(head), _row(["---"] * len(head)), *map(_row, rows)]) + "\n"


def settings_table() -> str:
    """Returns the table of environment variables: default and meaning."""
    from device_communicators.base import settings

    rows = [
        (f"`{each.name}`", _default(each.name, each.default), f"{each.help} Must be {each.must_be}.")
        for each in settings.ALL
    ]
    return _table(("variable", "default", "meaning"), rows)


def _default(name: str, value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    if name.endswith("_BYTES") and value:
        return f"{value >> 30} GiB" if value >= 1 << 30 else f"{value >> 20} MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


def rooms_table() -> str:
    """Returns the table of rooms: purpose (from the docstring) and allowed imports."""
    table = _imported("tests.rooms", ROOT)
    rows = []
    for package, rooms in ((table.UPPER, table.UPPER_ROOMS), (table.LOWER, table.LOWER_ROOMS)):
        for room, below in rooms.items():
            purpose = _purpose(ROOT / package, room)
            rows.append((f"`{package}.{room}`", purpose, ", ".join(f"`{each}`" for each in below) or "–"))
    return _table(("room", "purpose", "may import"), rows)


def _purpose(package: Path, room: str) -> str:
    """Returns the first paragraph of the room's docstring."""
    path = package / room / "__init__.py"
    text = ast.get_docstring(ast.parse((path if path.exists() else package / f"{room}.py").read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def findings_table() -> str:
    """Returns the table of `check`'s findings."""
    from parallel_state.tools.check import rules

    rows = [(f"`{code}`", rule.severity, rule.about, rule.fix) for code, rule in rules.RULES.items()]
    return _table(("code", "severity", "problem", "fix"), rows)


def errors_tree() -> str:
    """Returns the tree of errors as a nested list with the first line of each docstring."""
    from device_communicators.base import errors

    def walk(kind: type, depth: int) -> Iterator[str]:
        about = (kind.__doc__ or "").strip().splitlines()[0]
        yield f"{'  ' * depth}- `{kind.__name__}`: {about}"
        for each in kind.__subclasses__():
            if each in vars(errors).values():
                yield from walk(each, depth + 1)

    return "\n".join(walk(errors.ParallelStateError, 0)) + "\n"


NAMES_INTRO = """# Names of other projects

<!-- Written by docs/generate.py from the compat modules and from the projects' own files. -->

A module of `parallel_state.compat` has the names of another project. This page lists those that differ or are missing.
All others have the parameters and defaults of the project's version below.
"""


def names_page() -> str | None:
    """Returns docs/compat.md, or None if the projects' files aren't cached (tests/references.py fetches them)."""
    compat_names = _imported("tests.compat_names", ROOT)

    if not all(each.is_cached() for project in compat_names.PROJECTS for each in project.references):
        return None
    parts = [NAMES_INTRO]
    for project in compat_names.PROJECTS:
        name = f"parallel_state.compat.{project.module}"
        rows = compat_names.rows(import_module(name), project.references, project.also)
        of = {state: [row for row in rows if row.state == state] for state in ("same", "note", "missing")}
        counts = ", ".join(
            f"{len(of[state])} {word}"
            for state, word in (("same", "the same"), ("note", "with a difference"), ("missing", "missing"))
        )
        versions = ", ".join(dict.fromkeys(f"{each.project} {each.version}" for each in project.references))
        parts.append(
            f"## {project.title}\n\nNames of `{name}`{f', compared with {versions}' if versions else ''}: {counts}.\n"
        )
        for state, head in (("note", "what differs"), ("missing", "why it is missing")):
            if of[state]:
                names: dict[str, list[str]] = {}
                for row in of[state]:
                    names.setdefault(row.why, []).append(f"`{row.name}`")
                parts.append(_table(("name", head), [(", ".join(found), why) for why, found in names.items()]))
    return "\n".join(parts)


TABLES = {
    "settings.md": settings_table,
    "reading.md": rooms_table,
    "failures.md": errors_tree,
    "check.md": findings_table,
}
"""Page -> maker of the table between its two marks."""


def pages() -> dict[str, str]:
    """Returns name -> text of every page with a table from the source."""
    found = {}
    for name, make in TABLES.items():
        before, _, after = (DOCS / name).read_text().split(MARK)
        found[name] = f"{before}{MARK}\n{make()}\n{MARK}{after}"
    return found


def pictures() -> dict[str, str]:
    """Returns name -> SVG of every picture that is drawn from the source or from results."""
    return {"latency.svg": latency_picture(), "floors.svg": floors_picture(), "rooms.svg": rooms_picture()}


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, svg in pictures().items():
        (PICTURES / name).write_text(svg)
    for name, text in pages().items():
        (DOCS / name).write_text(text)
    page = names_page()
    if page is not None:
        (DOCS / "compat.md").write_text(page)


if __name__ == "__main__":
    main()
