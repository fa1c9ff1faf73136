"""Each row of the failure table compares its errors' `elapsed_s` with the measured time (`check_elapsed`)."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.promises import rows_of, rows_of_the_table
from tests.sources import tree_of

ROOT = Path(__file__).resolve().parents[2]
NO_ELAPSED = {
    **dict.fromkeys((19, 20, 28, 31, 37, 45, 59), "no call may fail"),
    25: "the launcher ends the ranks",
    36: "the bytes are decoded outside of a call",
    43: "UsageError: nothing was sent",
}
"""Rows of the table whose required result has no `elapsed_s`, and the reason."""

COMPARES = ("tests/contract/attempts.py", "check_elapsed")

Name = tuple[str, str]
"""A file, and a name that its top level defines."""


@functools.cache
def definitions(file: str) -> dict[str, list[ast.stmt]]:
    found: dict[str, list[ast.stmt]] = {}
    for node in tree_of(ROOT / file).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.setdefault(node.name, []).append(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for each in ast.walk(ast.Tuple([*targets])):
                if isinstance(each, ast.Name):
                    found.setdefault(each.id, []).append(node)
    return found


@functools.cache
def imported(file: str) -> dict[str, Name]:
    found: dict[str, Name] = {}
    for node in ast.walk(tree_of(ROOT / file)):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "tests":
            for alias in node.names:
                module = str(node.module).replace(".", "/")
                inner = f"{module}/{alias.name}.py"
                name = (inner, "") if (ROOT / inner).exists() else (f"{module}.py", alias.name)
                found[alias.asname or alias.name] = name
    return found


def used_by(file: str, name: str) -> Iterator[Name]:
    for statement in definitions(file).get(name, ()):
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module, inner = imported(file).get(node.value.id, ("", ""))
                if module and not inner:
                    yield module, node.attr
            elif isinstance(node, ast.Name):
                if node.id in definitions(file):
                    yield file, node.id
                elif node.id in imported(file):
                    yield imported(file)[node.id]


def compares(file: str, function: str) -> bool:
    seen: set[Name] = set()
    ahead: list[Name] = [(file, function)]
    while ahead:
        at = ahead.pop()
        if at not in seen and (ROOT / at[0]).exists():
            seen.add(at)
            ahead += used_by(*at)
    return COMPARES in seen


def test_each_row_compares_the_elapsed_time_or_says_why_not() -> None:
    table = rows_of_the_table()
    named = {f"tests/{place.partition('::')[0]}" for places in table.values() for place in places}
    files = named | {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "failure").glob("test_*.py")}
    found: set[int] = set()
    for file in files:
        for function in definitions(file):
            rows = rows_of(file, function, table) if function.startswith("test_") else set()
            if rows - found and compares(file, function):
                found |= rows
    assert set(table) - found == set(NO_ELAPSED)


@pytest.mark.slow
def test_a_test_without_the_comparison_is_found() -> None:
    assert compares("tests/failure/test_killed.py", "test_row_01_rank_3_is_killed")
    assert not compares("tests/failure/test_launcher.py", "test_row_25_launcher_gets_a_signal")
