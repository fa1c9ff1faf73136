"""Makes the functions of the compat modules: forwards another project's name to a function of this library."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def collect(table: Mapping[ModuleType, str]) -> dict[str, Any]:
    """Returns name -> object.

    `table`: module -> names, separated by spaces. `*` stands for all public functions and classes of the module.
    """
    found: dict[str, Any] = {}
    for module, names in table.items():
        for name in names.split():
            found |= _defined(module) if name == "*" else {name: getattr(module, name)}
    return found


def _defined(module: ModuleType) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    }


def reasons(table: Mapping[str, str]) -> dict[str, str]:
    """Returns name -> reason why a module lacks this name. `table`: reason -> names.

    In names, `MessageQueue.(recv buffer)` stands for `MessageQueue.recv` and `MessageQueue.buffer`.
    """
    found = {}
    for reason, names in table.items():
        for owner, members, name in re.findall(r"(\w+\.)\(([^)]*)\)|(\S+)", names):
            found.update({owner + each: reason for each in (members or name).split()})
    return found


def absent(module: str, name: str, missing: Mapping[str, str]) -> AttributeError:
    why = f": {missing[name]}" if name in missing else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{why}")


def named(module: str, function: Callable[..., Any], name: str, text: str) -> Any:
    function.__module__ = module
    function.__name__ = function.__qualname__ = name
    function.__doc__ = text
    return function


def forward(module: str, name: str, method: Callable[..., Any], find: Callable[[], Any], of: str) -> Any:
    """Creates a function `name` of `module` that calls `method` of the object that `find` returns.

    `of` describes the object in the new function's docstring.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(find(), method.__name__)(*args, **kwargs)

    signature = inspect.signature(method)
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore[attr-defined]
    return named(module, call, name, f"Calls `{method.__name__}` of {of}. {method.__doc__}")


def renamed(method: Callable[..., Any], names: str, text: str, then: Callable[[Any], Any] | None = None) -> Any:
    """Creates a function that calls `method`, with other parameter names and the docstring `text`.

    `names`: new names for the method's parameters, in order, separated by spaces. `dst!` loses its default. `group?` is
    a further parameter, which is ignored; such parameters must be last. `then` converts the result.
    """
    signature = inspect.signature(method)
    itself, *parameters = signature.parameters.values()
    kept, required = [itself], 0
    ours: dict[str, str] = {}
    for name, mark in re.findall(r"(\w+)([!?]?)", names):
        if mark == "?":
            kept.append(inspect.Parameter(name, itself.kind, default=None, annotation="Any"))
            continue
        each = parameters[len(ours)]
        ours[name] = each.name
        kept.append(each.replace(name=name, default=each.empty if mark else each.default))
        required = len(ours) if mark else required
    signature = signature.replace(
        parameters=kept, return_annotation=signature.return_annotation if then is None else Any
    )
    ignored = {each.name for each in kept[1:]} - ours.keys()

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if ignored:
            args, kwargs = args[: len(ours)], {name: kwargs[name] for name in kwargs.keys() - ignored}
        if len(args) < required:
            signature.bind(self, *args, **kwargs)  # raises TypeError for a missing argument marked `!`
        found = method(self, *args, **{ours.get(name, name): value for name, value in kwargs.items()})
        return found if then is None else then(found)

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__doc__ = text
    return call
