"""Tests of behavior must survive a new implementation, so they use few private names. Tests of one module
belong in tests/internals, and are deleted with it. So no other file uses that folder."""

from __future__ import annotations

import ast
import functools
import re
import textwrap
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
OURS = (*PACKAGES, "tests", "benchmarks")


@functools.cache
def trees() -> list[tuple[str, ast.Module]]:
    paths = [path for path in sorted((ROOT / "tests").rglob("*.py")) if "internals" not in path.parts]
    return [(str(path.relative_to(ROOT)), tree_of(path)) for path in paths]


def private_accesses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    foreign = foreign_names(tree)
    private = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr))
    for node in private:
        if _root(node.value) not in foreign and ast.unparse(node.value) not in ("self", "cls", "super()"):
            yield node.lineno, ast.unparse(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in PACKAGES:
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.startswith("_"))


def foreign_names(tree: ast.Module) -> set[str]:
    """Returns the names that are only bound by imports from other projects."""
    foreign, others = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                module = alias.name if isinstance(node, ast.Import) else node.module or "tests"
                name = alias.asname or alias.name.partition(".")[0]
                (others if module.partition(".")[0] in OURS else foreign).add(name)
        elif isinstance(node, ast.arg):
            others.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            others.add(node.id)
    return foreign - others


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
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _module(package: str, name: str) -> str:
    if package == "parallel_state" and name in parallel_state.__all__:
        return package
    path = ROOT / package.replace(".", "/") / name
    return f"{package}.{name}" if path.with_suffix(".py").exists() or (path / "__init__.py").exists() else package


def test_few_private_attributes_of_others_are_used() -> None:
    found = [f"{path}:{line}: {text}" for path, tree in trees() for line, text in private_accesses(tree)]
    assert len(found) <= MOST_PRIVATE_ACCESSES, "\n".join([f"{len(found)} accesses", *found])


def test_private_names_of_imports_from_other_projects_do_not_count() -> None:
    lines = """
        import os, torch, torch.distributed as dist
        from multiprocessing import forkserver
        from device_communicators import c10d
        from device_communicators.cpu.native import _load
        torch._C._x + dist.Backend._plugins + forkserver._pid
        c10d._x + torch.ops._get()._x
        def f(os): return os._x
    """
    found = sorted(private_accesses(ast.parse(textwrap.dedent(lines))))
    assert found == [(5, "_load"), (7, "c10d._x"), (7, "torch.ops._get()._x"), (8, "os._x")]


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
