"""Tests of behavior must survive a new implementation, so they use few private names. Tests of one module
belong in tests/internals, and are deleted with it. So no other file uses that folder."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import parallel_state
from tests.sources import tree_of

ROOT = Path(__file__).resolve().parents[2]
INTERNALS = ROOT / "tests" / "internals"
MOST_PRIVATE_ACCESSES = 150
MOST_INTERNAL_MODULES = 40
PACKAGES = ("parallel_state", "device_communicators")
FACES = (
    *PACKAGES,
    "parallel_state.launch",
    "parallel_state.metrics",
    "parallel_state.regions",
    "parallel_state.state",
    "device_communicators.base.errors",
    "device_communicators.base.settings",
)
FOREIGN = ("torch", "dist", "c10d", "ctypes", "os", "multiprocessing", "threading", "sys", "np", "pytest")


@functools.cache
def trees() -> list[tuple[str, ast.Module]]:
    paths = [path for path in sorted((ROOT / "tests").rglob("*.py")) if "internals" not in path.parts]
    return [(str(path.relative_to(ROOT)), tree_of(path)) for path in paths]


def private_accesses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    private = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr))
    for node in private:
        if _root(node.value) not in FOREIGN and ast.unparse(node.value) not in ("self", "cls", "super()"):
            yield node.lineno, ast.unparse(node)


def internal_modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [_module(node.module, alias.name) for alias in node.names]
        else:
            continue
        for name in names:
            is_face = name in FACES or f"{name}.".startswith("parallel_state.compat.")
            if name.partition(".")[0] in PACKAGES and not is_face:
                yield name


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _module(package: str, name: str) -> str:
    if package == "parallel_state" and name in parallel_state.__all__:
        return package
    path = ROOT / package.replace(".", "/") / name
    return f"{package}.{name}" if path.with_suffix(".py").exists() or (path / "__init__.py").exists() else package


def test_few_private_attributes_of_others_are_used() -> None:
    found = [f"{path}:{line}: {text}" for path, tree in trees() for line, text in private_accesses(tree)]
    assert len(found) <= MOST_PRIVATE_ACCESSES, "\n".join([f"{len(found)} accesses", *found])


def test_few_internal_modules_are_imported() -> None:
    found: dict[str, list[str]] = {}
    for path, tree in trees():
        for name in set(internal_modules(tree)):
            found.setdefault(name, []).append(path)
    lines = [f"{name}: {', '.join(paths)}" for name, paths in sorted(found.items())]
    assert len(found) <= MOST_INTERNAL_MODULES, "\n".join([f"{len(found)} modules", *lines])


def test_no_other_file_uses_the_tests_of_internals() -> None:
    uses = re.compile(r"\btests\.internals\b|\bfrom tests import .*\binternals\b")
    folders = ("tests", "benchmarks", "docs", *PACKAGES)
    paths = {path for folder in folders for path in (ROOT / folder).rglob("*.py")} - {*INTERNALS.rglob("*.py")}
    assert len(paths) > 500
    assert not [str(path) for path in paths if uses.search(path.read_text(encoding="utf-8"))]
