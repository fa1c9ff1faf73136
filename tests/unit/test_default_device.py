"""The library's own tensors ignore default devices: groups may be made under `with torch.device("meta")`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

from tests.sources import nodes_of

ROOT = Path(__file__).resolve().parents[2]
CONSTRUCTORS = {each.__name__ for each in _device_constructors()}
BUT = ("parallel_state/tools/bench/",)


def _calls_without_a_device(path: Path) -> list[str]:
    found = []
    for node in nodes_of(path):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        is_torchs = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        if is_torchs and node.func.attr in CONSTRUCTORS and "device" not in {each.arg for each in node.keywords}:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("package", ["device_communicators", "parallel_state"])
def test_every_tensor_has_its_device_said(package: str) -> None:
    paths = [path for path in sorted((ROOT / package).rglob("*.py")) if not str(path.relative_to(ROOT)).startswith(BUT)]
    assert len(paths) > 50
    assert not [line for path in paths for line in _calls_without_a_device(path)]
