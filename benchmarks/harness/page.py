"""Writes a run's results as a self-contained HTML page. Its table has nccl-tests' columns, sizes and bandwidths
(doc/PERFORMANCE.md there).
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from harness.messages import COPY
from harness.picture import Panel, draw, draw_each
from harness.ranks import TORCH
from harness.rounds import Row
from harness.through_torch import LAYERS, OP, OP_AND_LAYERS
from parallel_state.tools.bench.report import bandwidths, dumps, figure, nccl_bytes, p50, p99, size_name
from parallel_state.tools.bench.rounds import OWN

SCHEMA = "parallel_state bench 1"
FILES = ("index.html", "report.svg", "table.txt", "report.json")
SYMMETRIC = f"{OWN} symmetric"
LIBRARIES = {"coordinator": OWN, "symmetric op": SYMMETRIC, "vLLM op": "vLLM"}
"""Candidate name without ", in place" → name on the page, if they differ."""
LOWER_BOUNDS = (COPY, LAYERS)
WITHOUT_OUTPUT = ("all_reduce", "broadcast")
PER_RANK = ("all_gather", "reduce_scatter", "all_to_all")
"""Operations whose element count in nccl-tests is one rank's share."""
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}


@dataclass
class Findings:
    about: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    """Each row's case has a `part`: collectives, messages or start-up."""
    used: dict[str, str] = field(default_factory=dict)
    """Library → version, or its route."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Library → reason."""
    interrupted: int = 0
    """Exit code of an interrupted run; else 0."""

    def part(self, name: str) -> list[Row]:
        return [row for row in self.rows if row.case["part"] == name]

    @property
    def wrong(self) -> list[tuple[str, str, str]]:
        return [
            (name, describe(row.case), problem.strip().splitlines()[-1])
            for row in self.rows
            for name, problem in row.wrong.items()
        ]


class Measured(NamedTuple):
    library: str
    in_place: bool
    us: list[float]
    wrong: int = 0
    mode: str = ""


def is_peer(name: str) -> bool:
    return not name.startswith(OWN) and name not in (OP, OP_AND_LAYERS, *LOWER_BOUNDS)


def describe(case: Mapping[str, Any]) -> str:
    if case["part"] == "torch" and "bytes" in case:
        return f"{case['kind']}, {case['operation']}, {size_name(case['bytes'])}"
    if case["part"] == "collectives":
        return f"{case['operation']}, {size_name(case['bytes'])}"
    return str((case.get("what") and f"{case['kind']}, {case['what']}") or case["part"])


def measured(row: Row) -> Iterator[Measured]:
    for name in [*row.us, *row.wrong]:
        base, _, mode = name.rpartition(", ") if "device" in row.case else (name, "", "")
        plain = base.removesuffix(", in place")
        # On GPUs all carriers return new tensors, except torch's eager calls. On CPUs peers work in place if possible.
        peers_way = (plain, mode) == (TORCH, "eager") if mode else plain not in LIBRARIES
        in_place = plain != base or (peers_way and row.case["operation"] in WITHOUT_OUTPUT)
        wrong = getattr(row.wrong.get(name), "elements", 0) or int(name in row.wrong)
        yield Measured(LIBRARIES.get(plain, plain), in_place, row.us.get(name, []), wrong, mode)


def by_operation(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[tuple[Row, list[Measured]]]]]:
    for operation in dict.fromkeys(row.case["operation"] for row in rows if row.case["operation"] != "barrier"):
        found = [(row, list(measured(row))) for row in rows if row.case["operation"] == operation]
        for mode in dict.fromkeys(each.mode for _, several in found for each in several):
            yield operation, mode, [(row, [each for each in several if each.mode == mode]) for row, several in found]


def size_of(row: Row) -> int:
    if "device" in row.case:
        return int(row.case["bytes"])
    return nccl_bytes(row.case["operation"], row.case["bytes"], row.case["ranks"])


def table(rows: Sequence[Row]) -> str:
    parts = []
    for operation, mode, chosen in by_operation(rows):
        for library in dict.fromkeys(each.library for _, found in chosen for each in found):
            lines = [_line(row, [each for each in found if each.library == library]) for row, found in chosen]
            head = f"# {operation}, {chosen[0][0].case['ranks']} ranks: {library}{mode and f', {mode}'}\n"
            parts.append(head + HEAD + "".join(line for line in lines if line))
    return "\n".join(parts)


_FIGURES = f"{'time':>10} {'algbw':>8} {'busbw':>8} {'#wrong':>7}"
_UNITS = f"{'(us)':>10} {'(GB/s)':>8} {'(GB/s)':>8} {'':>7}"
HEAD = (
    f"#{'':>43}{'out-of-place':>37}{'in-place':>37}\n"
    f"#{'size':>11} {'count':>12} {'type':>9} {'redop':>6}  {_FIGURES}  {_FIGURES}\n"
    f"#{'(B)':>11} {'(elements)':>12} {'':>9} {'':>6}  {_UNITS}  {_UNITS}\n"
)


def _line(row: Row, found: Sequence[Measured]) -> str:
    if not found:
        return ""
    operation, ranks, size = row.case["operation"], row.case["ranks"], size_of(row)
    count = size // ITEM_BYTES[row.case["dtype"]] // (ranks if operation in PER_RANK else 1)
    reduces = "sum" if "reduce" in operation else "none"
    cells = []
    for in_place in (False, True):
        each = next((each for each in found if each.in_place == in_place), None)
        if each is None or not each.us:
            wrong = "N/A" if each is None else str(each.wrong)
            cells.append(f"{'N/A':>10} {'N/A':>8} {'N/A':>8} {wrong:>7}")
            continue
        us = p50(each.us)
        algbw, busbw = bandwidths(operation, size, us, ranks)
        cells.append(f"{us:>10.2f} {algbw:>8.2f} {busbw:>8.2f} {each.wrong:>7}")
    return f"{size:>12} {count:>12} {row.case['dtype']:>9} {reduces:>6}  {cells[0]}  {cells[1]}\n"


def pictures(findings: Findings) -> tuple[list[Panel], list[str]]:
    panels: list[Panel] = []
    for operation, mode, chosen in by_operation(findings.part("collectives")):
        samples: dict[str, list[tuple[int, list[float]]]] = {}
        for row, several in chosen:
            for each in several:
                if each.us:
                    name = each.library + " in place" * (each.in_place and each.library == OWN)
                    samples.setdefault(name, []).append((size_of(row), each.us))
        ranks = chosen[0][0].case["ranks"]
        title = f"{operation}, {ranks} ranks{mode and f', {mode}'}"
        panels.append(_latency(f"{title}: latency", samples, SIZE))
        speeds = {
            name: [(size, bandwidths(operation, size, p50(us), ranks)[1]) for size, us in of_sizes]
            for name, of_sizes in samples.items()
        }
        panels.append(Panel(f"{title}: bus bandwidth", speeds, "GB/s", x_name=SIZE))
    messages = [row for row in findings.part("messages") if not row.case["idle_ms"]]
    for kind in dict.fromkeys(row.case["kind"] for row in messages):
        found: dict[str, list[tuple[int, list[float]]]] = {}
        for row in sorted(messages, key=lambda row: int(row.case["bytes"])):
            if row.case["kind"] == kind and row.case["what"] != "1 MB many":
                for name, us in row.us.items():
                    found.setdefault(name, []).append((row.case["bytes"], us))
        readers = f"{messages[0].case['readers']} reader{'s' if messages[0].case['readers'] > 1 else ''}"
        about = {"object": f"objects to {readers}", "broadcast": f"dicts of ten tensors to {readers}"}
        panels.append(_latency(about.get(kind, "dicts of two tensors to the next stage"), found, "bytes of a message"))
    names = [name for panel in panels for name in panel.lines]
    return panels, sorted({name for name in names if name.startswith(OWN)}, key=names.index)


SIZE = "size as nccl-tests define it"


def _latency(title: str, samples: Mapping[str, Sequence[tuple[int, list[float]]]], x_name: str) -> Panel:
    lines = {name: [(size, p50(us)) for size, us in found] for name, found in samples.items()}
    bands = {name: [(size, *quartiles(us)) for size, us in found] for name, found in samples.items()}
    return Panel(title, lines, bands=bands, x_name=x_name)


def quartiles(us: Sequence[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(us, n=4) if len(us) > 1 else (us[0],) * 3
    return max(low, min(us)), min(high, max(us))


def page(findings: Findings) -> str:
    collectives, messages, start = (findings.part(name) for name in ("collectives", "messages", "start-up"))
    about = findings.about
    ranks = about["settings"]["ranks"]
    others = [name for name in findings.used if is_peer(name)]
    against = f" beside {', '.join(others)}" if others else ""
    facts = {
        "machine": f"{about['machine']['processor']}, {about['machine']['cores']} cores",
        "system": about["machine"]["system"],
        "versions": ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
        "commit": about["commit"],
        "date": about["date"],
        "command": about["command"],
    }
    panels = "".join(f'<div class="wide">{svg}</div>' for svg in draw_each(*pictures(findings)))
    body = [
        f"<h1>parallel_state{escape(against)}: {ranks} ranks</h1>",
        *(f'<p class="{kind}">{escape(text)}</p>' for kind, text in notices(findings)),
        _html_table((), [(name, escape(str(value))) for name, value in facts.items()]),
        "<h2>Libraries</h2>",
        _html_table(
            ("library", "version, or route"),
            [(escape(name), f"<pre>{escape(text)}</pre>") for name, text in findings.used.items()]
            + [(escape(name), f"left out: {escape(reason)}") for name, reason in findings.left_out.items()],
        ),
        "<h2>Latency and bandwidth</h2>",
        "<p>Medians, with quartiles as bands. Solid lines are this library's. Hover over a dot for its figure.</p>",
        f'<div class="panels">{panels}</div>' if panels else "<p>Nothing was measured.</p>",
    ]
    if collectives:
        body += ["<h2>Ratios</h2>", f"<p>{escape(OWN)} ÷ peer, medians: below 1 is faster.</p>", *_ratios(collectives)]
    if messages:
        body += ["<h2>Messages</h2>", "<p>Microseconds from the sender's call to the last reader's return.</p>"]
        body += [_figures(row, describe(row.case) + (", idle" if row.case["idle_ms"] else "")) for row in messages]
    if through_torch := findings.part("torch"):
        body += [
            "<h2>Through torch.distributed</h2>",
            f"<p>Microseconds of a call, or of a step of training. {THROUGH}</p>",
        ]
        body += [_figures(row, describe(row.case)) for row in through_torch]
    barriers = [row for row in collectives if row.case["operation"] == "barrier"]
    body += [_figures(row, "barrier, µs") for row in barriers]
    if start:
        body.append("<h2>Start-up</h2>")
        body.append(
            "<p>Milliseconds from the order to start, everything imported, until the last rank had its groups and had "
            "made a first collective.</p>"
        )
        body += [_figures(row, "start-up", 1e3) for row in start]
    if collectives:
        body += ["<h2>The standard table</h2>", f'<div class="wide"><pre>{escape(table(collectives))}</pre></div>']
    if findings.wrong:
        body += ["<h2>No figures of</h2>", _html_table((), [tuple(map(escape, each)) for each in findings.wrong])]
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    return template.replace("@TITLE@", escape(f"parallel_state: {ranks} ranks")).replace("@BODY@", "\n".join(body))


def notices(findings: Findings) -> list[tuple[str, str]]:
    found = []
    rows = [row for row in findings.rows if row.strangers_cores is not None]
    disturbed = [row for row in rows if row.disturbed]
    cores = findings.about["machine"]["cores"]
    if disturbed:
        most = max(row.strangers_cores or 0.0 for row in disturbed)
        repeats = max(row.repeats for row in disturbed)
        again = f", although they were measured up to {repeats + 1} times" if repeats else ""
        text = (
            f"This machine was busy: others used up to {most:.1f} of {cores} cores in {len(disturbed)} of {len(rows)}"
        )
        found.append(("bad", f"{text} cases{again}. Don't quote these figures; run again on a quiet machine."))
    elif rows:
        repeated = sum(row.repeats > 0 for row in rows)
        again = f" ({repeated} disturbed cases were measured again)" if repeated else ""
        found.append(("good", f"The machine was quiet: others used less than 0.1 cores in each case{again}."))
    if findings.interrupted:
        found.append(("bad", "This run was interrupted: only what was measured until then is here."))
    if findings.wrong:
        found.append(("bad", f"{len(findings.wrong)} candidates failed or gave wrong answers: see the page's end."))
    return found


def _figures(row: Row, title: str, unit_us: float = 1.0) -> str:
    lines = []
    ours = row.us.get(OWN)
    for name, us in row.us.items():
        low, high = quartiles(us)
        ratio = "lower bound" if name in LOWER_BOUNDS else ""
        if ours and is_peer(name):
            ratio = _ratio_cell(p50(ours) / p50(us))
        values = [figure(value / unit_us) for value in (p50(us), low, high, p99(us))]
        lines.append((escape(name), *values, str(len(us)), ratio))
    return _html_table((escape(title), "p50", "p25", "p75", "p99", "samples", f"{OWN} ÷"), lines)


def _ratios(rows: Sequence[Row]) -> list[str]:
    found = []
    for operation, mode, chosen in by_operation(rows):
        lines: dict[str, list[str]] = {}
        for at, (_, several) in enumerate(chosen):
            figures = {(each.library, each.in_place): p50(each.us) for each in several if each.us}
            for (library, in_place), us in figures.items():
                ours = figures.get((OWN, in_place))
                if ours is not None and is_peer(library):
                    cells = lines.setdefault(library, ["–"] * len(chosen))
                    cells[at] = _ratio_cell(ours / us)
        sizes = [size_name(size_of(row)) for row, _ in chosen]
        if lines:
            table_rows = [(escape(library), *cells) for library, cells in lines.items()]
            found.append(_html_table((escape(f"{operation}{mode and f', {mode}'}"), *sizes), table_rows))
    return found


def _ratio_cell(ratio: float) -> str:
    return f'<span class="{"faster" if ratio < 1 else "slower"}">{figure(ratio)}</span>'


def _html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"] if head else []
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


THROUGH = (
    'The same calls over the backend "parallel_state" and over gloo. Torch\'s own layers are measured on its backend '
    '"fake", which moves nothing; the op in place is a coordinator\'s, without those layers, and then with a call that '
    "passes them before it. What gloo carries for the backend is measured without shared memory."
)


def problem_of(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        return f"{folder} is no folder"
    except OSError as error:
        return f"{folder}: {error.strerror}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder}: no permission to write"
    foreign = [name for name in FILES if (folder / name).exists()]
    if foreign and date_of(folder) is None:
        return f"{folder} has a {foreign[0]} that is no report's of this command: it would be overwritten"
    return None


def date_of(folder: Path) -> str | None:
    try:
        content = json.loads((folder / "report.json").read_text())
        return str(content["date"]) if content["benchmark"] == SCHEMA else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(folder: Path, findings: Findings) -> None:
    about = {"benchmark": SCHEMA, **findings.about, "used": findings.used, "left_out": findings.left_out}
    contents = {
        "report.json": dumps({**about, "interrupted": bool(findings.interrupted)}, findings.rows),
        "report.svg": draw(*pictures(findings)),
        "table.txt": table(findings.part("collectives")),
        "index.html": page(findings),
    }
    for name, content in contents.items():
        new = folder / f".{name}.new"
        new.write_text(content, encoding="utf-8")
        os.replace(new, folder / name)
