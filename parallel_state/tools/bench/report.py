"""Formats measurements, and writes them as JSON with the machine, commit and versions."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from parallel_state.tools.bench.rounds import Row

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("torch", "parallel-state", "numpy", "msgspec")
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "all_to_all": lambda n: (n - 1) / n,
}
"""Operation -> function that returns busbw ÷ algbw for n ranks, from nccl-tests' doc/PERFORMANCE.md."""


def p50(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def p99(samples: Sequence[float]) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


def bandwidths(operation: str, size_bytes: int, us: float, ranks: int) -> tuple[float, float]:
    """Returns algbw and busbw (as in nccl-tests) in 10⁹ B/s for a call of `us` µs. `size_bytes`: from `nccl_bytes`."""
    algorithm = size_bytes / us / 1e3
    return algorithm, algorithm * BUS_FACTORS.get(operation, lambda n: 0.0)(ranks)


def nccl_bytes(operation: str, given_bytes: int, ranks: int) -> int:
    """Returns the size that nccl-tests reports for a call with `given_bytes` of input on each rank."""
    return given_bytes * ranks if operation == "all_gather" else given_bytes


def size_name(size_bytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit and size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"


def figure(value: float | None) -> str:
    if value is None:
        return "–"
    for least, digits in ((99.5, 0), (9.95, 1), (0.0995, 2)):
        if abs(value) >= least:
            return f"{value:,.{digits}f}"
    return f"{value:.4f}"


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
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
    if os.environ.get("BENCHMARK_COMMIT"):
        return os.environ["BENCHMARK_COMMIT"]
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    output = ""
    with contextlib.suppress(OSError):  # git isn't installed
        if (ROOT / ".git").exists():  # an installed package may be inside another repository
            output = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()
    return output or "unknown"


def write_json(path: Path, rows: Sequence[Row], settings: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"benchmark": Path(sys.argv[0]).name, **circumstances(), "settings": settings}
    path.write_text(dumps(about, rows), encoding="utf-8")


def recorded(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if not isinstance(value, Path)}


def circumstances() -> dict[str, Any]:
    return {"commit": commit(), "machine": machine(), "versions": versions()}


def dumps(about: Mapping[str, Any], rows: Sequence[Row]) -> str:
    content = {**about, "rows": [_rounded(row) for row in rows]}
    return json.dumps(content, separators=(",", ":")).replace('{"case"', '\n{"case"') + "\n"


def _rounded(row: Row) -> dict[str, Any]:
    us = {name: [round(sample, 3 if sample >= 1 else 6) for sample in samples] for name, samples in row.us.items()}
    return {**dataclasses.asdict(row), "us": us}
