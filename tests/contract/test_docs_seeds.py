"""docs/seeds.md and coming_from.md name only objects that exist, and all that users of other libraries call."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import parallel_state as ps
from device_communicators.base import settings
from tests.cases import each
from tests.references import FAIRSEQ2, SGLANG, SGLANG_WIDTHS, VLLM, Reference

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "seeds.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| theirs")
]
OURS = sorted({name for _, ours, _ in ROWS for name in re.findall(r"`([^`]+)`", ours)})
GROUPS = ps.simulate(0, 8, 2, 2, ranks_per_node=8)
OWNERS: dict[str, Any] = {
    "group": GROUPS.tp,
    "groups": GROUPS,
    "LaunchConfig": {field.name for field in dataclasses.fields(ps.LaunchConfig)},
    "get_dp_group()": GROUPS.dp,
}


def find(name: str) -> Any:
    if name.startswith("PARALLEL_STATE_"):
        return next(setting for setting in settings.ALL if setting.name == name)
    owner, _, attribute = name.rpartition(".")
    if not owner:
        return getattr(ps, name)
    holder = OWNERS[owner]
    if isinstance(holder, set):
        assert attribute in holder
        return attribute
    # Looked up on the class: a simulated group lacks some attributes' values, for example process groups.
    return inspect.getattr_static(holder, attribute)


def test_every_row_has_three_cells() -> None:
    assert len(ROWS) > 60
    assert {len(row) for row in ROWS} == {3}
    for theirs, ours, note in ROWS:
        assert ours.startswith("`") or (ours == "–" and note), theirs


def test_the_names_of_ours_exist() -> None:
    each(OURS, _check_name)


def _check_name(name: str) -> None:
    name, _, arguments = name.partition("(") if not name.startswith("get_dp_group()") else (name, "", "")
    found = find(name)
    for argument in re.findall(r"(\w+)=", arguments):
        parameters = inspect.signature(found).parameters
        assert argument in parameters or f"{argument}" in {row.size_parameter for row in ps.AXES}, argument


def public_functions(reference: Reference, *classes: str) -> set[str]:
    tree = ast.parse(reference.read())
    inside = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in classes]
    nodes = [*tree.body, *(inner for node in inside for inner in node.body)]
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}


@pytest.mark.parametrize(
    ("reference", "classes"),
    [(VLLM, ["GroupCoordinator"]), (FAIRSEQ2, ["Gang", "Gangs"])],
    ids=["vllm", "fairseq2"],
)
def test_what_their_users_call_is_named(reference: Reference, classes: list[str]) -> None:
    theirs = " ".join(row[0] for row in ROWS)
    missing = {name for name in public_functions(reference, *classes) if not re.search(rf"[`.]{name}\b", theirs)}
    fakes = {name for name in missing if name.endswith("_fake")}
    assert missing == fakes


# Tables of the other page: their name, our name.

COMING_FROM = (ROOT / "docs" / "coming_from.md").read_text()
PAIRS = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", COMING_FROM, flags=re.MULTILINE)
ELSEWHERE = {"src", "dst", "parallel_state"}
"""Argument names, and the package."""


def test_coming_from_names_what_is_there() -> None:
    public = [*dir(ps), *dir(ps.GroupCoordinator), *dir(ps.TensorHandle), *ELSEWHERE]
    arguments = inspect.signature(ps.initialize_model_parallel).parameters
    known = {*public, *arguments, *(row.name for row in ps.AXES), *(row.size_parameter for row in ps.AXES)}
    found = 0
    for _, ours in PAIRS:
        for code in re.findall(r"`([^`]+)`", ours):
            for name in re.findall(r"^(?:group\.|\.)?([A-Za-z_]+)(?=\(|$)", code):
                assert name in known, code
                found += 1
    assert found > 40


def test_coming_from_names_what_sglang_has() -> None:
    section = COMING_FROM.partition("## SGLang")[2].partition("## ")[0]
    theirs = SGLANG.read() + SGLANG_WIDTHS.read()
    names = [name for row in re.findall(r"^\| ([^|]+) \|", section, flags=re.MULTILINE)
             for name in re.findall(r"`(\w+)`", row)]  # fmt: skip
    assert len(names) > 10
    for name in names:
        assert re.search(rf"\b{name}\b", theirs), name


def test_the_readme_links_the_page() -> None:
    assert "docs/seeds.md" in (ROOT / "README.md").read_text()
