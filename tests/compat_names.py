"""Compares the public names of a compat module with those in the files of the project that it imitates.

The project's files are parsed with `ast`, not imported. A name is the same if its parameters have the same names,
order, kinds and defaults. `compat_notes.py` explains each different name, `MISSING` of the compat module each absent
one. Members of a class are names, too: `GroupCoordinator.send`.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tests.compat_notes import INTERNAL, NOTES
from tests.references import (
    MEGATRON,
    SGLANG,
    SGLANG_DP_ATTENTION,
    SGLANG_OPS,
    SGLANG_UTILS,
    VLLM,
    VLLM_OPS,
    VLLM_QUEUE,
    VLLM_UTILS,
    Reference,
)

SKIPPED = {"logger", "T", "P", "R"}
_MISSING = inspect.Parameter.empty
_PROPERTIES = {"property", "cached_property", "abstractproperty"}
_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional-only ",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.KEYWORD_ONLY: "keyword-only ",
    inspect.Parameter.VAR_KEYWORD: "**",
}


class Parameter(NamedTuple):
    name: str
    kind: str
    default: str


class Name(NamedTuple):
    """A name of a module. `parameters` is None if the name isn't a function or class."""

    parameters: list[Parameter] | None


class Row(NamedTuple):
    """Result for a name. `state` is "same", "note" or "missing", or describes an unexplained difference."""

    name: str
    state: str
    why: str = ""


def names_of(source: str, also: Iterable[str] = ()) -> dict[str, Name]:
    found: dict[str, Name] = {}
    wanted = set(also)

    def keep(name: str) -> bool:
        return name not in found and (name in wanted or not name.startswith("_")) and name not in SKIPPED

    for node in _statements(ast.parse(source).body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if keep(node.name):
                found[node.name] = Name(_parameters(node))
        elif isinstance(node, ast.ClassDef):
            if keep(node.name):
                found[node.name] = Name(_constructor(node))
                found |= {f"{node.name}.{name}": each for name, each in _members(node).items()}
        else:
            found |= {name: Name(None) for name in _assigned(node) if keep(name)}
    return found


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _statements(node.body)
            yield from _statements(getattr(node, "orelse", []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)
        else:
            yield node


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    return {ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in node.decorator_list}


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef, method: bool = False) -> list[Parameter]:
    kinds, arguments = inspect.Parameter, node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[""] * (len(positional) - len(arguments.defaults)), *map(ast.unparse, arguments.defaults)]
    found = [
        Parameter(
            each.arg,
            _KINDS[kinds.POSITIONAL_ONLY if i < len(arguments.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD],
            default,
        )
        for i, (each, default) in enumerate(zip(positional, defaults, strict=True))
    ]
    if method and "staticmethod" not in _decorators(node):
        del found[0]
    if arguments.vararg:
        found.append(Parameter(arguments.vararg.arg, "*", ""))
    for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(Parameter(each.arg, _KINDS[kinds.KEYWORD_ONLY], "" if value is None else ast.unparse(value)))
    if arguments.kwarg:
        found.append(Parameter(arguments.kwarg.arg, "**", ""))
    return found


def _constructor(node: ast.ClassDef) -> list[Parameter] | None:
    """Returns the parameters, or None if a base class in another file could define them."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return _parameters(each, method=True)
    if "dataclass" in _decorators(node) or any(ast.unparse(base).endswith("NamedTuple") for base in node.bases):
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
        return [
            Parameter(each.target.id, "", "" if each.value is None else ast.unparse(each.value))  # type: ignore[union-attr]
            for each in fields
            if "ClassVar" not in ast.unparse(each.annotation)
        ]
    return None


def _members(node: ast.ClassDef) -> dict[str, Name]:
    found: dict[str, Name] = {}
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            if not each.name.startswith("_"):
                found[each.name] = Name(None if _decorators(each) & _PROPERTIES else _parameters(each, method=True))
        else:
            found |= {name: Name(None) for name in _assigned(each) if not name.startswith("_")}
    for name in sorted(_set_on_self(node)):
        found.setdefault(name, Name(None))
    return found


def _set_on_self(node: ast.AST) -> set[str]:
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
        and not each.attr.startswith("_")
    }


def _find(module: ModuleType, name: str) -> Any:
    """Returns the named object, `_MISSING` if there is none, or None for an attribute that only instances have."""
    owner, _, member = name.rpartition(".")
    if not owner:
        return getattr(module, name, _MISSING)
    kind = getattr(module, owner, _MISSING)
    if not isinstance(kind, type):
        return _MISSING
    found = inspect.getattr_static(kind, member, _MISSING)
    if found is not _MISSING:
        return found
    return None if member in _attributes(kind) else _MISSING


@cache
def _attributes(kind: type) -> set[str]:
    found: set[str] = set()
    for each in kind.__mro__[:-1]:
        found |= set(vars(each).get("__annotations__", ())) | set(vars(each).get("__slots__", ()))
        for method in filter(inspect.isfunction, vars(each).values()):
            with contextlib.suppress(OSError):
                found |= _set_on_self(ast.parse(textwrap.dedent(inspect.getsource(method))))
    return found


def _difference(theirs: Name, ours: Any, of_instance: bool, namespace: Mapping[str, Any]) -> str:
    if theirs.parameters is None:
        return ""
    function = ours.__func__ if isinstance(ours, staticmethod | classmethod) else ours
    if not callable(function):
        return "is not callable"
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        return "has no signature"
    if of_instance and not isinstance(ours, staticmethod):
        del parameters[:1]
    words = [f"{_KINDS[each.kind]}{each.name}" for each in parameters]
    expected = [f"{each.kind}{each.name}" for each in theirs.parameters]
    if words != expected:
        return f"takes ({', '.join(words)}), not ({', '.join(expected)})"
    for mine, each in zip(parameters, theirs.parameters, strict=True):
        if not _same_default(mine.default, each.default, namespace):
            shown = "none" if mine.default is _MISSING else repr(mine.default)
            return f"has the default {shown} for {each.name}, not {each.default or 'none'}"
    return ""


def _same_default(ours: Any, theirs: str, namespace: Mapping[str, Any]) -> bool:
    if ours is _MISSING or not theirs:
        return ours is _MISSING and not theirs
    if theirs.startswith(("field(", "dataclasses.field(")):
        return True
    try:
        value = eval(theirs, dict(namespace))  # (a default in a file whose digest is pinned)
    except Exception:
        return theirs.rpartition(".")[2] in (repr(ours), getattr(ours, "__name__", None), getattr(ours, "name", None))
    return type(value) is type(ours) and bool(value == ours)


def rows(module: ModuleType, references: Iterable[Reference], also: Iterable[str] = ()) -> list[Row]:
    """Compares each name. If two files define a name, the first definition counts.

    `also`: private names that other projects import.
    """
    import torch
    import torch.distributed

    namespace = {"torch": torch, "dist": torch.distributed, **vars(module)}
    names: dict[str, Name] = {}
    references = list(references)
    if not references:  # a test of the project's tree finds the names in use
        names = dict.fromkeys([*module.__all__, *_missing(module)], Name(None))
    for reference in references:
        for name, each in names_of(reference.read(), also).items():
            names.setdefault(name, each)
    found = [_row(module, name, names[name], namespace) for name in names]
    unknown = [name for name in (*_notes(module), *_missing(module)) if name not in names]
    return found + [Row(name, "is in NOTES or MISSING, but no name of the project") for name in unknown]


def _notes(module: ModuleType) -> Mapping[str, str]:
    return NOTES.get(module.__name__.rpartition(".")[2], {})


def _missing(module: ModuleType) -> dict[str, str]:
    return {**getattr(module, "MISSING", {}), **INTERNAL.get(module.__name__.rpartition(".")[2], {})}


def _row(module: ModuleType, name: str, theirs: Name, namespace: Mapping[str, Any]) -> Row:
    owner, _, _ = name.rpartition(".")
    ours = _find(module, name)
    if ours is _MISSING:
        whole = owner if owner in _missing(module) else name
        if whole in _missing(module):
            return Row(name, "missing", _missing(module)[whole])
        return Row(name, "isn't there, and MISSING doesn't say why")
    if name in _missing(module):
        return Row(name, "is there, but MISSING says it isn't")
    if name in _notes(module):
        return Row(name, "note", _notes(module)[name])
    return Row(name, _difference(theirs, ours, bool(owner), namespace) or "same")


def differences(module: ModuleType, references: Iterable[Reference], also: Iterable[str] = ()) -> list[str]:
    """Returns a text for each name that is neither the same nor explained in NOTES or `module.MISSING`."""
    return [
        f"{row.name} {row.state}"
        for row in rows(module, references, also)
        if row.state not in ("same", "note", "missing")
    ]


def imported_names(folder: Path, module: str) -> dict[str, list[str]]:
    package, _, last = module.rpartition(".")
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(errors="replace")
        if module not in text and not (package in text and last in text):
            continue
        tree = ast.parse(text)
        aliases = {module}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == module:
                for each in node.names:
                    found.setdefault(each.name, []).append(str(path.relative_to(folder)))
            elif isinstance(node, ast.ImportFrom) and node.module == package:
                aliases |= {each.asname or each.name for each in node.names if each.name == last}
            elif isinstance(node, ast.Import):
                aliases |= {each.asname for each in node.names if each.name == module and each.asname}
        for node in ast.walk(tree):
            is_dotted = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute | ast.Name)
            if is_dotted and ast.unparse(node.value) in aliases:
                found.setdefault(node.attr, []).append(str(path.relative_to(folder)))
    return found


def missing_names(ours: ModuleType, folder: Path, *modules: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for module in modules:
        for name, files in imported_names(folder, module).items():
            is_module = f"{module}.{name}" in modules
            if not (is_module or hasattr(ours, name) or name in _missing(ours)):
                found[name] = files
    return found


class Project(NamedTuple):
    module: str
    title: str
    references: tuple[Reference, ...]
    also: tuple[str, ...] = ()


PROJECTS: tuple[Project, ...] = (
    Project("megatron", "Megatron-core", (MEGATRON,), ("_set_global_memory_buffer",)),
    Project(
        "vllm",
        "vLLM",
        (VLLM, VLLM_OPS, VLLM_UTILS, VLLM_QUEUE),
        (
            "_ENABLE_CUSTOM_ALL_REDUCE", "_WORLD", "_get_unique_name", "_init_stateless_group", "_node_count",
            "_register_group", "_replace_active_groups", "_split_tensor_dict",
        ),
    ),
    Project(
        "sglang",
        "SGLang 0.5.23",
        (SGLANG, SGLANG_OPS, SGLANG_UTILS, SGLANG_DP_ATTENTION),
        ("_groups", "_tag_groups_for_flashinfer_allreduce_only", "_tbo_event"),
    ),
    Project("deepspeed", "DeepSpeed's mpu", ()),
)  # fmt: skip
"""The projects with a compat module. A test and a table in the docs read them."""
