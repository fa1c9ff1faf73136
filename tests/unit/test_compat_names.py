from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import compat_names, references
from tests.doc_blocks import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import generate

THEIRS = """
import torch
LIMIT = 3
_hidden = 4
logger = None
if LIMIT:
    def given(x, size: int = 4, *rest, op=torch.distributed.ReduceOp.SUM, **more): ...
def absent(): ...
def _used_by_the_tree(): ...
class Group:
    kind = "group"
    def __init__(self, ranks, *, name=None): self.ranks, self._own, self.size = ranks, name, len(ranks)
    @property
    def first(self): return 0
    def send(self, tensor, dst=None): ...
    @staticmethod
    def make(rank=0): ...
"""

OURS = """
import torch
LIMIT = 3
NOTES, MISSING = {}, {"absent": "nobody calls it"}
def given(x, size=4, *rest, op=torch.distributed.ReduceOp.SUM, **more): ...
def _used_by_the_tree(): ...
class Group:
    kind, ranks, size, first = "group", [], 0, 0
    def __init__(self, ranks, *, name=None): ...
    def send(self, tensor, dst=None): ...
    @staticmethod
    def make(rank=0): ...
"""


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(references, "CACHE", tmp_path)
    reference = references.Reference("theirs", "1", "theirs.py", hashlib.sha256(THEIRS.encode()).hexdigest())
    reference.keep(THEIRS.encode())

    def run(old: str = "", new: str = "") -> list[str]:
        assert old in OURS
        module = ModuleType("ours")
        exec(OURS.replace(old, new, 1), vars(module))
        monkeypatch.setitem(compat_names.NOTES, "ours", module.NOTES)
        return compat_names.differences(module, [reference], ["_used_by_the_tree"])

    return run


def test_equal_names_have_no_difference(compare: Any) -> None:
    assert compare() == []


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("size=4", "size=5", "given has the default 5 for size, not 4"),
        ("size=4, *rest", "*rest, size=4", "given takes (x, *rest, keyword-only size, keyword-only op, **more), not "),
        ("ReduceOp.SUM", "ReduceOp.MAX", "given has the default"),
        ("tensor, dst=None", "x, dst=None", "Group.send takes (x, dst), not (tensor, dst)"),
        ("ranks, *, name", "ranks, name", "Group takes (ranks, name), not (ranks, keyword-only name)"),
        (', size, first = "group", [], 0, 0', ', first = "group", [], 0', "Group.size isn't there"),
        ("LIMIT = 3", "", "LIMIT isn't there"),
        ("def _used_by_the_tree(): ...", "", "_used_by_the_tree isn't there"),
        ('{"absent": "nobody calls it"}', "{}", "absent isn't there"),
        ("def given", "def absent(): ...\ndef given", "absent is there, but MISSING says it isn't"),
        ("NOTES, MISSING = {}", "NOTES, MISSING = {'gone': 'why'}", "gone is in NOTES or MISSING, but no name"),
    ],
)  # fmt: skip
def test_a_difference_is_found(compare: Any, old: str, new: str, found: str) -> None:
    assert [each for each in compare(old, new) if each.startswith(found)]


@pytest.mark.parametrize("project", compat_names.PROJECTS, ids=lambda project: project.module)
def test_each_name_of_a_project_is_accounted_for(project: compat_names.Project) -> None:
    module = importlib.import_module(f"parallel_state.compat.{project.module}")
    assert compat_names.differences(module, project.references, project.also) == []


def test_the_page_is_that_of_the_modules() -> None:
    page = generate.names_page()
    if page is None:
        pytest.skip("the projects' files are missing; python tests/references.py fetches them")
    assert (ROOT / "docs" / "compat.md").read_text() == page, "run: python docs/generate.py"


def test_names_that_a_tree_imports_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from x.state import get_tp as tp, get_pp\n")
    (tmp_path / "b.py").write_text(
        "from x import state as s\ns.get_dp()\nimport x.state\nx.state.get_ep()\ny.get_no()\n"
    )
    found = compat_names.imported_names(tmp_path, "x.state")
    assert found == {"get_tp": ["a.py"], "get_pp": ["a.py"], "get_dp": ["b.py"], "get_ep": ["b.py"]}
