"""Compares this tree with another commit (`report.py --against COMMIT`): runs this tree's benchmark on both, in
alternating rounds. A ratio divides the medians; its interval is a 95 % bootstrap over pairs of rounds.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from device_communicators.base.errors import InvalidArgumentError
from harness.rounds import NOTICED, Plan, Row, measure_all
from harness.teams import Team, started
from parallel_state.tools.bench.report import ROOT, figure, p50, size_name
from parallel_state.tools.bench.rounds import OWN

PACKAGES = ("parallel_state", "device_communicators")
BENCH = Path("parallel_state/tools/bench")
MODULE = "harness.collectives"
NOW, BEFORE = "now", "before"
LIMIT = 1.03
"""This tree is slower if a ratio's whole interval is above this."""
DRAWS = 2000
BUILD_S = 900.0


class Ratio(NamedTuple):
    value: float
    low: float
    high: float

    @property
    def is_slower(self) -> bool:
        return self.low > LIMIT


def ratio_of(now: Sequence[float], before: Sequence[float], draws: int = DRAWS) -> Ratio:
    draw = random.Random(0)
    pairs = list(zip(now, before, strict=True))
    found = sorted(_ratio(draw.choices(pairs, k=len(pairs))) for _ in range(draws))
    return Ratio(_ratio(pairs), found[int(0.025 * draws)], found[int(0.975 * draws)])


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    now, before = zip(*pairs, strict=True)
    return p50(now) / p50(before)


class Labelled:
    def __init__(self, team: Team, label: str) -> None:
        self.name, self.pids, self._team, self._prefix = label, team.pids, team, f"{label}: "

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        if method == "prepare":
            return [[self._prefix + name for name in names] for names in self._team.ask(method, *arguments)]
        name, *rest = arguments
        return self._team.ask(method, name.removeprefix(self._prefix), *rest)


@contextmanager
def unpacked(commit: str) -> Iterator[Path]:
    if not (ROOT / ".git").exists():
        raise InvalidArgumentError(f"--against must be used in a checkout, but {ROOT} has no .git")
    command = ["git", "archive", "--format=zip", commit, *PACKAGES]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if archive.returncode != 0:
        why = archive.stderr.decode(errors="replace").strip()
        raise InvalidArgumentError(f"--against must name a commit that is here, but {commit!r} isn't: {why}")
    with tempfile.TemporaryDirectory(prefix="against_") as name:
        folder = Path(name)
        with zipfile.ZipFile(io.BytesIO(archive.stdout)) as content:
            content.extractall(folder)
        shutil.rmtree(folder / BENCH, ignore_errors=True)
        shutil.copytree(ROOT / BENCH, folder / BENCH, ignore=shutil.ignore_patterns("__pycache__"))
        for each in (folder, ROOT):
            _compile(each)
        yield folder


def _compile(folder: Path) -> None:
    script = (
        "import device_communicators as found; from device_communicators.cpu import native; native.load(); "
        f"exit(0 if found.__file__.startswith({str(folder)!r}) else f'python takes {{found.__file__}} instead')"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=BUILD_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:]
        raise InvalidArgumentError(f"the versions must both build, but that in {folder} doesn't: {''.join(reason)}")


def measure(
    commit: str, cases: Sequence[dict[str, Any]], ranks: int, settings: dict[str, Any], plan: Plan
) -> list[Row]:
    with unpacked(commit) as folder:
        roots = {NOW: ROOT, BEFORE: folder}
        teams = [
            Team(OWN, MODULE, ranks, settings, root=root, environment={"PYTHONPATH": str(root)}, forks=False)
            for root in roots.values()
        ]
        left_out: dict[str, str] = {}
        with started(teams, left_out) as ready:
            if len(ready) < len(teams):
                raise InvalidArgumentError(f"both versions must start, but one doesn't: {left_out.get(OWN)}")
            return measure_all([Labelled(*each) for each in zip(ready, roots, strict=True)], cases, plan)


def report(rows: Sequence[Row]) -> tuple[list[str], int]:
    lines = [f"{'':44}{'before, us':>12}{'now, us':>12}{'ratio':>8}  95 % of draws"]
    slower: list[str] = []
    wrong: list[str] = []
    for row in rows:
        wrong += [f"{name}: {reason}" for name, reason in row.wrong.items()]
        for name in (name.removeprefix(f"{NOW}: ") for name in row.us if name.startswith(f"{NOW}: ")):
            now, before = row.us[f"{NOW}: {name}"], row.us.get(f"{BEFORE}: {name}")
            if not before:
                continue
            found = ratio_of(now, before)
            title = f"{row.case['operation']} {size_name(row.case['bytes'])}, {name}"
            disturbed = f"  others used {row.strangers_cores} cores" if row.disturbed else ""
            lines.append(
                f"{title:44}{figure(p50(before)):>12}{figure(p50(now)):>12}{found.value:8.3f}"
                f"  {found.low:.3f} to {found.high:.3f}{disturbed}"
            )
            if found.is_slower:
                slower.append(title)
    lines += [f"slower, the interval lies above {LIMIT}: {title}" for title in slower]
    lines += [f"wrong: {text}" for text in wrong]
    if not slower and not wrong:
        lines.append(f"no interval lies above {LIMIT}")
    if any(row.disturbed for row in rows):
        lines.append(f"others used more than {NOTICED} cores in some cases: repeat them on a quiet machine")
    return lines, int(bool(slower or wrong))
