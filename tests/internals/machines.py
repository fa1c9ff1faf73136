from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from device_communicators.cpu import native_build
from device_communicators.machine.nvml import NoAnswerError
from device_communicators.machine.topology import Topology, read_topology
from tests.helpers import compiled

FOLDER = Path(__file__).parents[1] / "topologies"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
_SOURCES = Path(__file__).parents[1] / "native"


class Recording:
    """Answers `topology` by question -> arguments ("0 5", or "*" for all others) -> answer."""

    def __init__(self, record: Mapping[str, Mapping[str, Any]]) -> None:
        self._record = record

    def ask(self, question: str, *where: int) -> Any:
        answers = self._record.get(question, {})
        answer = answers.get(" ".join(map(str, where)), answers.get("*", {"no answer": "not recorded"}))
        if isinstance(answer, dict) and "no answer" in answer:
            raise NoAnswerError(answer["no answer"])
        return answer


def record(name: str, **changes: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    for question, answers in copy.deepcopy(changes).items():
        told.setdefault(question, {}).update(answers)
    return told


def machine(name: str, **changes: dict[str, Any]) -> Topology:
    return read_topology(Recording(record(name, **changes)))


def stand_in(source: str, folder: Path, name: str, *flags: str) -> Path:
    compiler = native_build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    command = [*compiler, "-shared", "-fPIC", "-O1", "-std=c++17", *flags, str(_SOURCES / source), "-o"]
    made = compiled.kept(
        f"{source}.so", command, [_SOURCES / source], lambda path: subprocess.run([*command, str(path)], check=True)
    )
    library = folder / name
    shutil.copyfile(made, library)
    return library
