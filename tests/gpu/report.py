"""What the GPU tests found, as JSON and Markdown: which machine, which versions, and each check's outcome.

`make test-gpu` asks for it with GPU_TESTS_REPORT=folder. Written anew after each check, so that a run that is killed
leaves what it found; nothing is written before a check has run on a GPU. A run of a part of the tests (`-k`) adds to
the report of the same day, machine and commit. Checks leave figures and reasons by pytest's `record_property`.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_machine import unproven

from device_communicators.cuda import nccl_library
from device_communicators.machine import group_topology
from device_communicators.machine.topology import read_topology
from parallel_state.tools.bench.report import commit

_TOLD = 300
"""Characters of a failure's or a skip's reason in Markdown; the JSON has more."""
_KEPT = 4000


@dataclass
class Check:
    """One test: `passed`, `failed` or `skipped`, and why."""

    name: str
    outcome: str = ""
    seconds: float = 0.0
    reason: str = ""
    found: dict[str, Any] = field(default_factory=dict)


class Report:
    """The checks of one run so far."""

    def __init__(self, machine: dict[str, Any], folder: Path) -> None:
        self.machine = machine
        self.checks: dict[str, Check] = {}
        self.left_out = 0
        """How many tests were not asked for, nor reported earlier."""
        self.complete = False
        self._folder = folder
        self._started = datetime.now(timezone.utc)
        if self.path.exists():
            earlier = json.loads(self.path.read_text())
            if earlier["machine"] == machine:
                self.checks = {check["name"]: Check(**check) for check in earlier["checks"]}

    def add(self, report: pytest.TestReport) -> None:
        """A phase of a test: set-up, call or end. It has failed if one of them has."""
        name = _name(report.nodeid)
        if report.when == "setup":
            self.checks[name] = Check(name)
        check = self.checks[name]
        check.seconds += report.duration
        check.found.update(dict(report.user_properties))
        if report.outcome == "failed" or check.outcome == "failed":
            check.outcome = "failed"
        elif report.outcome == "skipped" or report.when == "call":
            check.outcome = report.outcome
        if report.outcome != "passed":
            check.reason = (check.reason + "\n" + _reason(report)).strip()[-_KEPT:]

    @property
    def path(self) -> Path:
        """Of the JSON; the Markdown is beside it."""
        gpu = re.sub(r"[^a-z0-9]+", "-", str(self.machine["gpu"]).lower()).strip("-") or "gpu"
        return self._folder / f"{gpu}-{self._started:%Y-%m-%d}.json"

    def write(self) -> None:
        """Where something has run."""
        if not any(check.outcome in ("passed", "failed") for check in self.checks.values()):
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n")
        self.path.with_suffix(".md").write_text(self.as_markdown())

    def as_json(self) -> dict[str, Any]:
        return {
            "started": self._started.isoformat(timespec="seconds"),
            "complete": self.complete,
            "left_out": self.left_out,
            "machine": self.machine,
            "outcomes": self._outcomes(),
            "checks": [
                {**vars(check), "seconds": round(check.seconds, 2)} for check in self.checks.values() if check.outcome
            ],
        }

    def _outcomes(self) -> dict[str, int]:
        return dict(Counter(check.outcome for check in self.checks.values() if check.outcome))

    def as_markdown(self) -> str:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self._outcomes().items()))
        whole = "" if self.complete else " The run didn't come to its end."
        some = f" {self.left_out} tests were not asked for." if self.left_out else ""
        lines = [f"# GPU tests on {self.machine['gpu']}, {self._started:%Y-%m-%d}", "", f"{counts}.{whole}{some}", ""]
        lines += [
            "| | |",
            "|---|---|",
            *(f"| {_cell(name)} | {_cell(value)} |" for name, value in self.machine.items()),
        ]
        lines += ["", "| check | outcome | s | |", "|---|---|---|---|"]
        for check in self.checks.values():
            if check.outcome:
                found = "; ".join(f"{name}: {value}" for name, value in check.found.items())
                told = " ".join(filter(None, (check.reason.strip().rpartition("\n")[2][:_TOLD], found)))
                lines.append(f"| {_cell(check.name)} | {check.outcome} | {check.seconds:.1f} | {_cell(told)} |")
        return "\n".join(lines) + "\n"


def _name(nodeid: str) -> str:
    return nodeid.rpartition("tests/gpu/")[2]


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longreprtext or report.longrepr or "")


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


class Recorder:
    """pytest's hooks that fill a report."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        names = {_name(item.nodeid) for item in items}
        self.report.left_out += len(names - self.report.checks.keys())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "tests/gpu/" in report.nodeid:
            self.report.add(report)
            if report.when == "teardown":
                self.report.write()

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.report.complete = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        self.report.write()


def machine() -> dict[str, Any]:
    """This one, as far as it can be told without starting CUDA in this process."""
    topology = read_topology()
    names = [str(gpu.name) for gpu in topology.gpus]
    library = nccl_library.load()
    return {
        "gpu": names[0] if names else topology.problem,
        "gpus": ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)),
        "visible": torch.cuda.device_count(),
        "driver": topology.driver_version,
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda,
        "NCCL": nccl_library.version_text(library.version),
        "several ranks on a GPU": group_topology.describe_sharing(library.version),
        "not provable here": "; ".join(unproven(len(topology.gpus))) or "nothing",
        **_common(),
    }


def dry_machine() -> dict[str, Any]:
    return {"gpu": "dry run", "torch": torch.__version__, **_common()}


def _common() -> dict[str, Any]:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return {"python": sys.version.split()[0], "system": system, "commit": commit()}
