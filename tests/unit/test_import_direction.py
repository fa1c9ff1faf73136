from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

import device_communicators
import parallel_state
from device_communicators import CATALOG
from tests.rooms import LOWER, LOWER_ROOMS, UPPER, UPPER_ROOMS, reachable
from tests.sources import nodes_of, tree_of

ROOT = Path(__file__).resolve().parents[2]
CONCRETE = {row.module for row in CATALOG}
ROOMS = {LOWER: LOWER_ROOMS, UPPER: UPPER_ROOMS}

MAY_PICKLE = (
    "parallel_state/messages/codec/values.py",
    "parallel_state/launch/",
    "parallel_state/compat/vllm/__init__.py",
    "parallel_state/compat/pickles.py",
)
"""Files that may pickle: for the caller's `allow_pickle`, functions for `launch`'s own processes, and what the
engines themselves pickle. vLLM has a module named `pickle`."""
CHECKERS_ONLY = "device_communicators/cpu/types.py"
"""The only file with imports for type checkers alone: its modules aren't imported before ranks meet (test_import)."""
MEASURES_PICKLING = "parallel_state/tools/bench/collectives.py"
"""Times torch's own object transfers, between its own processes."""


class Source(NamedTuple):
    name: str
    package: str
    room: str
    """The sub-package or file below the package's root. Empty for its `__init__` and `__main__`."""
    path: Path

    @property
    def tree(self) -> ast.Module:
        return tree_of(self.path)

    @property
    def nodes(self) -> tuple[ast.AST, ...]:
        return nodes_of(self.path)


class Import(NamedTuple):
    module: str
    line: int


def sources() -> list[Source]:
    found = []
    for package in (LOWER, UPPER):
        for path in sorted((ROOT / package).rglob("*.py")):
            inside = path.relative_to(ROOT / package)
            room = "" if inside.name in ("__init__.py", "__main__.py") and len(inside.parts) == 1 else inside.parts[0]
            name = str(path.relative_to(ROOT))
            found.append(Source(name, package, room.removesuffix(".py"), path))
    return found


SOURCES = sources()


def imports_of(source: Source) -> Iterator[Import]:
    """Yields imports at any depth, also those for annotations. `from a import b` yields `a` and `a.b`."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source.name}:{node.lineno}: imports are absolute"
            yield Import(str(node.module), node.lineno)
            yield from (Import(f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def tops_of(source: Source) -> set[str]:
    return {each.module.split(".")[0] for each in imports_of(source)}


def test_every_room_has_a_row() -> None:
    for package, rooms in ROOMS.items():
        found = {each.room for each in SOURCES if each.package == package and each.room}
        assert found == set(rooms)
        for room in rooms:
            assert room not in reachable(room, rooms)


def test_arrows_between_rooms_run_one_way() -> None:
    wrong = []
    for source in SOURCES:
        rooms = ROOMS[source.package]
        if source.room == "":
            allowed = set(rooms) - {"compat", *(["tools"] if source.path.name == "__init__.py" else [])}
        else:
            allowed = {source.room, *reachable(source.room, rooms)}
        for found in imports_of(source):
            package, _, rest = found.module.partition(".")
            if package == UPPER and source.package == LOWER:
                wrong.append(f"{source.name}:{found.line}: the lower package imports the upper one")
            if package != source.package or package not in ROOMS:
                continue
            room = rest.split(".")[0]
            if room in rooms and room not in allowed:
                wrong.append(f"{source.name}:{found.line}: {source.room or package} must not import {room}")
    assert not wrong, "\n".join(wrong)


def test_no_import_cycle() -> None:
    names = {each.name[: -len(".py")].replace("/", ".").removesuffix(".__init__"): each for each in SOURCES}
    below = {
        name: {each.module for each in imports_of(source) if each.module in names} - {name}
        for name, source in names.items()
    }
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name not in done:
            for each in sorted(below[name]):
                if not name.startswith(f"{each}."):  # a package's own __init__ runs before its modules
                    visit(each, (*way, name))
            done.add(name)

    for name in sorted(below):
        visit(name, ())


def test_annotations_are_imported_as_other_names() -> None:
    """A name that only type checkers know hides an import that goes the wrong way, and costs `get_type_hints`."""
    folders = [ROOT / each for each in (LOWER, UPPER, "benchmarks", "tests", "examples")]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py")) if path != ROOT / CHECKERS_ONLY]
    found = [str(path.relative_to(ROOT)) for path in files if "if TYPE_" + "CHECKING" in path.read_text()]
    assert not found, f"import the name as any other, or from {CHECKERS_ONLY}: {found}"


def test_a_room_says_what_it_is_for() -> None:
    for source in SOURCES:
        assert ast.get_docstring(source.tree), source.name


def test_the_lower_package_imports_nothing_by_name() -> None:
    """Except the catalog, whose rows name modules, and the roots' tables of public names."""
    for source in SOURCES:
        for node in source.nodes:
            if isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func) and source.package == LOWER:
                assert source.room == "catalog" or source.path.name == "public_names.py", f"{source.name}:{node.lineno}"
    assert all(module.startswith(f"{LOWER}.") for module in CONCRETE)


def test_only_the_catalog_knows_communicators_by_class() -> None:
    """The lower package may share helper functions of these files, but not the class or the module."""
    for source in SOURCES:
        for node in source.nodes:
            if isinstance(node, ast.Import):
                assert not CONCRETE & {alias.name for alias in node.names}, source.name
            elif isinstance(node, ast.ImportFrom):
                names = {alias.name for alias in node.names}
                assert not CONCRETE & {f"{node.module}.{name}" for name in names}, source.name
                if node.module in CONCRETE:
                    assert all(name.islower() for name in names), f"{source.name} imports {names} from {node.module}"
                    assert source.package == LOWER, source.name


def test_only_state_assigns_globals() -> None:
    for source in SOURCES:
        found = [node.lineno for node in source.nodes if isinstance(node, ast.Global)]
        assert not found or source.name == "parallel_state/state.py", f"{source.name}: lines {found}"


def test_layout_is_pure() -> None:
    standard = {"__future__", "collections", "dataclasses", "functools", "itertools", "math", LOWER, UPPER}
    (ranks,) = [each for each in SOURCES if each.name == "parallel_state/layout/ranks.py"]
    assert tops_of(ranks) <= standard
    (errors,) = [each for each in SOURCES if each.name == "device_communicators/base/errors.py"]
    assert tops_of(errors) <= standard | {"difflib", "re"}
    for source in SOURCES:
        assert (source.package, source.room) != (UPPER, "layout") or "torch" not in tops_of(source), source.name


def test_no_assert() -> None:
    """`python -O` drops them."""
    for source in SOURCES:
        found = [node.lineno for node in source.nodes if isinstance(node, ast.Assert)]
        assert not found, f"{source.name}: lines {found}"


def test_threads_are_started_by_one_class() -> None:
    for source in SOURCES:
        if source.name != "device_communicators/base/helper_threads.py":
            called = [ast.unparse(node.func) for node in source.nodes if isinstance(node, ast.Call)]
            assert not {"threading.Thread", "Thread", "threading.Timer", "Timer"} & set(called), source.name


def test_no_pickle_but_where_the_caller_asked_for_it() -> None:
    picklers = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
    # torch's object collectives and torch.load unpickle as well
    unpicklers = {"broadcast_object_list", "all_gather_object", "scatter_object_list", "recv_object_list", "load"}
    for source in SOURCES:
        assert not picklers & tops_of(source) or source.name.startswith(MAY_PICKLE), source.name
        for node in source.nodes if source.name != MEASURES_PICKLING else ():
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.value.id not in ("dist", "torch") or node.attr not in unpicklers, source.name


def test_exports_are_exactly_all() -> None:
    for root in (device_communicators, parallel_state):
        listed = [name for names in root._NAMES.values() for name in names]
        assert len(set(listed)) == len(listed)
        assert set(root.__all__) >= set(listed)
        assert set(dir(root)) - {"__version__"} == set(root.__all__)
        for name in root.__all__:
            assert getattr(root, name) is not None
            assert not name.startswith("_")


def methods_of(public: type) -> Iterator[tuple[str, FunctionType]]:
    for base in public.__mro__:
        if base.__module__.split(".")[0] in ("parallel_state", "device_communicators"):
            for name, member in vars(base).items():
                function = getattr(member, "__func__", member)
                if not name.startswith("_") and isinstance(function, FunctionType):
                    yield f"{base.__name__}.{name}", function


def test_what_is_public_is_documented() -> None:
    """Methods of one statement need no docstring."""
    for name in parallel_state.__all__:
        public = getattr(parallel_state, name)
        if name in ("AXES", "PRESETS"):
            continue
        assert inspect.isclass(public) or inspect.isfunction(public) or inspect.ismodule(public), name
        assert public.__doc__, name
        assert not public.__doc__.startswith(f"{name}("), f"{name}: the docstring that dataclasses make up"
        for method_name, method in methods_of(public) if inspect.isclass(public) else ():
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
            assert isinstance(definition, ast.FunctionDef)
            assert method.__doc__ or len(definition.body) == 1, f"{method_name} needs a docstring"
