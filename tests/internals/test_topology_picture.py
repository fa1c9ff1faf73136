"""The picture of a machine, parsed without a browser."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from device_communicators.machine.topology import Topology
from parallel_state.__main__ import main
from parallel_state.tools.topology import topology_picture
from tests.internals.machines import FOLDER, NAMES, machine

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</title><script>alert(1)</script>&\"'"


def look(svg: str) -> tuple[ElementTree.Element, Counter[str]]:
    root = ElementTree.fromstring(svg)
    return root, Counter(line.get("class") for line in root.iter(f"{SVG}line"))


@pytest.mark.parametrize("name", NAMES)
def test_every_gpu_is_there_and_within_the_picture(name: str) -> None:
    found = machine(name)
    root, _ = look(topology_picture(found))
    boxes = [group.find(f"{SVG}rect") for group in root.iter(f"{SVG}g") if "gpu" in (group.get("class") or "").split()]
    assert len(boxes) == len(found.gpus)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    places = set()
    for box in boxes:
        assert box is not None
        x, y, wide, high = (float(box.get(side, -1)) for side in ("x", "y", "width", "height"))
        assert 0 <= x <= x + wide <= width and 0 <= y <= y + high <= height
        assert not [(a, b) for a, b in places if abs(a - x) < wide and abs(b - y) < high], "two GPUs on one place"
        places.add((x, y))


def test_lines() -> None:
    assert look(topology_picture(machine("dgx-h100")))[1] == {"nvlink": 8}  # into the hub
    assert look(topology_picture(machine("h200-nvl-2x4")))[1] == {"nvlink": 2 * 6, "pcie": 16}
    assert look(topology_picture(machine("l40s-pcie")))[1] == {"pcie": 6}
    assert look(topology_picture(machine("one-h200")))[1] == {}


def test_a_machine_without_gpus_says_why() -> None:
    root, lines = look(topology_picture(Topology(problem="there is no driver")))
    assert "No GPUs: there is no driver" in [text.text for text in root.iter(f"{SVG}text")]
    assert not lines


def test_names_are_escaped() -> None:
    found = machine("one-h200")
    svg = topology_picture(replace(found, gpus=(replace(found.gpus[0], name=HOSTILE),)))
    root, _ = look(svg)
    assert not list(root.iter(f"{SVG}script"))
    assert any(HOSTILE in (text.text or "") for text in root.iter(f"{SVG}text"))


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpus.svg"
    assert main(["topology", "--replay", str(FOLDER / "dgx-h100.json"), "--svg", str(path)]) == 0
    assert path.read_text() == topology_picture(machine("dgx-h100"))
    assert "NV18" in capsys.readouterr().out
    assert main(["topology", "--replay", str(FOLDER / "dgx-h100.json"), "--svg", "-"]) == 0
    assert capsys.readouterr().out == path.read_text(), "alone on stdout"
