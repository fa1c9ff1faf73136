"""What was measured, as tables, and as JSON with all that one needs to judge it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from measure.rounds import Row
from measure.strangers import NOTICED

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("torch", "numpy", "msgspec")
BUS_FACTORS: dict[str, Callable[[int], float]] = {  # of the bytes that a rank holds, as nccl-tests count
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "all_to_all": lambda n: (n - 1) / n,
}


def p50(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def p99(samples: Sequence[float]) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


def ratio(row: Row, ours: str, peer: str) -> float | None:
    """Median over median; None where one of them has no figures."""
    if not row.us.get(ours) or not row.us.get(peer):
        return None
    return p50(row.us[ours]) / p50(row.us[peer])


def bandwidths(operation: str, size_bytes: int, us: float, ranks: int) -> tuple[float, float]:
    """Algorithm and bus bandwidth, 10⁹ B/s."""
    algorithm = size_bytes / us / 1e3
    return algorithm, algorithm * BUS_FACTORS.get(operation, lambda n: 0.0)(ranks)


def size_name(size_bytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit and size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"


def figure(value: float | None) -> str:
    """Three digits."""
    if value is None:
        return "–"
    for least, digits in ((99.5, 0), (9.95, 1), (0.0995, 2)):
        if abs(value) >= least:
            return f"{value:,.{digits}f}"
    return f"{value:.4f}"


def print_table(title: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[float | None]]]) -> None:
    """A line for each name, figures to the right."""
    rows = list(rows)
    if not rows:
        return
    wide = max(len(name) for name, _ in rows) + 2
    widths = [max(9, len(column) + 2) for column in columns]
    print(
        f"\n{title}\n{'':{wide}}" + "".join(f"{column:>{width}}" for column, width in zip(columns, widths, strict=True))
    )
    for name, figures in rows:
        cells = (f"{figure(each):>{width}}" for each, width in zip(figures, widths, strict=True))
        print(f"{name:{wide}}" + "".join(cells), flush=True)


def print_rows(title: str, rows: Sequence[Row], column: Callable[[Row], str], pairs: Sequence[tuple[str, str]]) -> None:
    """Medians and p99 in microseconds, a line for each candidate, a column for each row; then ratios of `pairs`."""
    names = list(dict.fromkeys(name for row in rows for name in row.us))
    columns = [column(row) for row in rows]
    for what, of in (("p50", p50), ("p99", p99)):
        lines = [(name, [of(row.us[name]) if row.us.get(name) else None for row in rows]) for name in names]
        print_table(f"{title}: {what}, us", columns, lines)
    ratios = [(f"{ours} ÷ {peer}", [ratio(row, ours, peer) for row in rows]) for ours, peer in pairs]
    print_table(f"{title}: ratios of medians", columns, [line for line in ratios if any(line[1])])
    busy = max((row.strangers_cores or 0.0 for row in rows), default=0.0)
    if busy > NOTICED:
        print(f"{title}: others used up to {busy:.1f} cores meanwhile; these figures are of little use")
    for row in rows:
        for name, problem in row.wrong.items():
            print(f"no figures of {name}, {column(row)}: {problem.splitlines()[0]}")


def machine() -> dict[str, Any]:
    """Where this ran, and on what."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def commit() -> str:
    """With a + where the working tree differs from it; of a copy without git what BENCHMARK_COMMIT says, or unknown."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    told = ""
    with contextlib.suppress(OSError):  # there is no git
        told = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()
    return told or os.environ.get("BENCHMARK_COMMIT") or "unknown"


def write_json(path: Path, rows: Sequence[Row], settings: Mapping[str, Any]) -> None:
    content = {
        "benchmark": Path(sys.argv[0]).name,
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "settings": dict(settings),
        "rows": [_rounded(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=None, separators=(",", ":")).replace('{"case"', '\n{"case"') + "\n")


def _rounded(row: Row) -> dict[str, Any]:
    values = dataclasses.asdict(row)
    values["us"] = {name: [_nanoseconds(sample) for sample in samples] for name, samples in row.us.items()}
    return values


def _nanoseconds(us: float) -> float:
    """Rounded to them, but what takes only some of them to thousandths."""
    return round(us, 3 if us >= 1 else 6)
