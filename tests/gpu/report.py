"""The report of a GPU run, as JSON and Markdown, which `make test-gpu` requests with GPU_TESTS_REPORT=folder.
It is rewritten after each check, so a killed run leaves its results. A partial run updates the report of
the same day and machine. Another machine's report is never overwritten."""

from __future__ import annotations

import itertools
import json
import os
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
_KEPT = 4000
_RUNNING = "running"
"""If the run was killed, it was in this check."""


@dataclass
class Check:
    name: str
    outcome: str = ""
    seconds: float = 0.0
    reason: str = ""
    found: dict[str, Any] = field(default_factory=dict)
    commit: str = ""


class Report:
    def __init__(self, machine: dict[str, Any], folder: Path) -> None:
        self.machine = machine
        self.checks: dict[str, Check] = {}
        self.left_out = 0
        """Number of tests that were neither selected nor reported earlier."""
        self.by_name = False
        """Only tests selected by name ran, so the number of others is unknown."""
        self.complete = False
        self._earlier = {"complete": True, "by_name": True}
        self._folder = folder
        self._started = datetime.now(timezone.utc)
        gpu = re.sub(r"[^a-z0-9]+", "-", str(machine["gpu"]).lower()).strip("-") or "gpu"
        name = f"{gpu}-{self._started:%Y-%m-%d}"
        names = (f"{name}-{number}.json" if number > 1 else f"{name}.json" for number in itertools.count(1))
        self.path = next(path for path in map(folder.joinpath, names) if not path.exists() or self._goes_on(path))

    def _goes_on(self, path: Path) -> bool:
        """Loads an earlier report of this machine. Returns False for another machine's."""
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if {**earlier["machine"], "commit": ""} != {**self.machine, "commit": ""}:
            return False
        self.checks = {check["name"]: Check(**check) for check in earlier["checks"]}
        self._earlier = earlier
        return True

    def begin(self, name: str) -> None:
        self.checks[name] = Check(name, _RUNNING, commit=str(self.machine["commit"]))
        self.write()

    def add(self, report: pytest.TestReport) -> None:
        name = _name(report.nodeid)
        if report.when == "setup":
            self.checks[name] = Check(name, _RUNNING, commit=str(self.machine["commit"]))
        check = self.checks[name]
        check.seconds += report.duration
        check.found.update(dict(report.user_properties))
        if report.outcome == "failed" or check.outcome == "failed":
            check.outcome = "failed"
        elif report.outcome == "skipped" or report.when == "call":
            check.outcome = report.outcome
        if report.outcome != "passed":
            check.reason = (check.reason + "\n" + _reason(report)).strip()[-_KEPT:]

    def write(self) -> None:
        if not any(check.outcome in ("passed", "failed") for check in self.checks.values()):
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n")
        self.path.with_suffix(".md").write_text(self.as_markdown())

    def as_json(self) -> dict[str, Any]:
        return {
            "started": self._started.isoformat(timespec="seconds"),
            "complete": self.complete and self._earlier["complete"],
            "by_name": self.by_name and self._earlier["by_name"],
            "left_out": self.left_out,
            "machine": self.machine,
            "outcomes": dict(Counter(check.outcome for check in self.checks.values())),
            "checks": [{**vars(check), "seconds": round(check.seconds, 2)} for check in self.checks.values()],
        }

    def as_markdown(self) -> str:
        content = self.as_json()
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(content["outcomes"].items()))
        whole = "" if content["complete"] else " The run didn't come to its end."
        some = f" {self.left_out} tests were not asked for." if self.left_out else ""
        some += " Only tests that were asked for by name ran." if content["by_name"] else ""
        lines = [f"# GPU tests on {self.machine['gpu']}, {self._started:%Y-%m-%d}", "", f"{counts}.{whole}{some}", ""]
        lines += [
            "| | |",
            "|---|---|",
            *(f"| {_cell(name)} | {_cell(value)} |" for name, value in self.machine.items()),
        ]
        lines += ["", "| check | outcome | s | commit | |", "|---|---|---|---|---|"]
        for check in self.checks.values():
            found = "; ".join(f"{name}: {value}" for name, value in check.found.items())
            told = " ".join(filter(None, (check.reason.strip().rpartition("\n")[2][:_TOLD], found)))
            lines.append(
                f"| {_cell(check.name)} | {check.outcome} | {check.seconds:.1f} | {check.commit} | {_cell(told)} |"
            )
        return "\n".join(lines) + "\n"


def _name(nodeid: str) -> str:
    return nodeid.rpartition("tests/gpu/")[2] + (" under MPS" if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") else "")


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longreprtext or report.longrepr or "")


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


class Recorder:
    def __init__(self, report: Report) -> None:
        self.report = report

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        names = {_name(item.nodeid) for item in items}
        self.report.left_out += len(names - self.report.checks.keys())

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.report.by_name = any("::" in argument for argument in session.config.args)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if "tests/gpu/" in nodeid:
            self.report.begin(_name(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "tests/gpu/" in report.nodeid:
            self.report.add(report)
            if report.when == "teardown":
                self.report.write()

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.report.complete = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        self.report.write()


def machine() -> dict[str, Any]:
    """Doesn't start CUDA in this process."""
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
