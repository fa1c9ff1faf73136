"""Who may import whom, and what the two packages don't contain: read from the source, without importing it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest

import parallel_state
from device_communicators import CATALOG

ROOT = Path(__file__).resolve().parents[2]
UPPER = sorted((ROOT / "parallel_state").rglob("*.py"))
LOWER = sorted((ROOT / "device_communicators").rglob("*.py"))
CONCRETE = {row.module for row in CATALOG}

MAY_PICKLE = ("codec_values.py", "launch")
"""By the caller's explicit `allow_pickle`; and a function for the processes that `launch` itself starts."""


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


each_file = pytest.mark.parametrize("path", UPPER + LOWER, ids=name_of)


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports_of(path: Path) -> Iterator[str]:
    """Every module that the file imports, at any depth; `from a import b` gives both `a` and `a.b`."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: imports are absolute"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top_of(modules: Iterator[str]) -> set[str]:
    return {module.split(".")[0] for module in modules}


def test_both_packages_are_looked_at() -> None:
    assert {"state.py", "layout.py"} <= {path.name for path in UPPER}
    assert {"catalog.py", "process_group.py"} <= {path.name for path in LOWER}
    assert "device_communicators.process_group" in CONCRETE


@pytest.mark.parametrize("path", LOWER, ids=name_of)
def test_the_lower_package_never_imports_the_upper_one(path: Path) -> None:
    assert "parallel_state" not in top_of(imports_of(path))
    for node in ast.walk(tree_of(path)):  # nor by name
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module":
            assert path.name == "catalog.py"
    assert all(row.module.startswith("device_communicators.") for row in CATALOG)


@each_file
def test_only_the_catalog_knows_communicators_by_class(path: Path) -> None:
    """Helper functions of a communicator's file may be shared, its class and the whole module not."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            assert not CONCRETE & {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            assert not CONCRETE & {f"{node.module}.{name}" for name in names}
            if node.module in CONCRETE:
                assert all(name.islower() for name in names), f"{name_of(path)} imports {names} from {node.module}"
                assert path.parent.name == "device_communicators"


@each_file
def test_only_state_assigns_globals(path: Path) -> None:
    found = [node.lineno for node in ast.walk(tree_of(path)) if isinstance(node, ast.Global)]
    assert not found or name_of(path) == "parallel_state/state.py", f"lines {found}"


def test_layout_is_pure() -> None:
    modules = top_of(imports_of(ROOT / "parallel_state" / "layout.py"))
    standard = {"__future__", "collections", "dataclasses", "functools", "itertools", "math"}
    assert modules <= {*standard, "device_communicators"}
    assert "device_communicators.errors" in set(imports_of(ROOT / "parallel_state" / "layout.py"))
    assert top_of(imports_of(ROOT / "device_communicators" / "errors.py")) == {"__future__", "collections"}


@each_file
def test_no_assert(path: Path) -> None:
    """`python -O` drops them."""
    assert not [node.lineno for node in ast.walk(tree_of(path)) if isinstance(node, ast.Assert)]


@each_file
def test_no_pickle_but_where_the_caller_asked_for_it(path: Path) -> None:
    picklers = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
    assert not picklers & top_of(imports_of(path)) or path.name.startswith(MAY_PICKLE)
    # torch's object collectives and torch.load unpickle as well
    unpicklers = {"broadcast_object_list", "all_gather_object", "scatter_object_list", "recv_object_list", "load"}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("dist", "torch"):
            assert node.attr not in unpicklers, f"line {node.lineno}: {node.value.id}.{node.attr}"


@each_file
def test_every_module_says_what_belongs_in_it(path: Path) -> None:
    assert ast.get_docstring(tree_of(path))


@pytest.mark.parametrize("package", ["parallel_state", "device_communicators"])
def test_exports_are_exactly_all(package: str) -> None:
    tree = tree_of(ROOT / package / "__init__.py")
    imported: list[str] = []
    exported: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            imported += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign):
            assert isinstance(node.value, ast.List)
            names = [each for each in node.value.elts if not isinstance(each, ast.Starred)]
            exported = [ast.literal_eval(name) for name in names]
            if len(names) < len(node.value.elts):  # those of the axis table
                imported = [name for name in imported if name not in ("*", "_getters")]
        else:
            assert isinstance(node, ast.Expr), "an __init__ holds a docstring, imports and __all__"
    assert sorted(imported) == sorted(exported)
    assert len(set(exported)) == len(exported)


def methods_of(public: type) -> Iterator[tuple[str, FunctionType]]:
    """The public methods that our own classes give it."""
    for base in public.__mro__:
        if base.__module__.split(".")[0] in ("parallel_state", "device_communicators"):
            for name, member in vars(base).items():
                function = getattr(member, "__func__", member)
                if not name.startswith("_") and isinstance(function, FunctionType):
                    yield f"{base.__name__}.{name}", function


@pytest.mark.parametrize("name", parallel_state.__all__)
def test_what_is_public_is_documented(name: str) -> None:
    """A method may go without where it is one statement, and its name says all of it."""
    public = getattr(parallel_state, name)
    if name in ("AXES", "PRESETS"):
        return  # data, whose rows say what they are
    assert inspect.isclass(public) or inspect.isfunction(public)
    assert public.__doc__
    assert not public.__doc__.startswith(f"{name}("), "the docstring that dataclasses make up"
    for method_name, method in methods_of(public) if inspect.isclass(public) else ():
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
        assert isinstance(definition, ast.FunctionDef)
        assert method.__doc__ or len(definition.body) == 1, f"{method_name} needs a docstring"
