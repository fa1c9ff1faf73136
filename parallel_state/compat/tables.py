"""Builds an engine's module from tables: names that lie elsewhere, functions that are a method's, and absent names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def collect(table: Mapping[ModuleType, str]) -> dict[str, Any]:
    """Returns what modules have under the names that a table lists after each: `*` for their functions and classes."""
    found = {}
    for module, names in table.items():
        listed = names.split() if names != "*" else [name for name in vars(module) if _is_own(module, name)]
        found.update({name: getattr(module, name) for name in listed})
    return found


def _is_own(module: ModuleType, name: str) -> bool:
    return not name.startswith("_") and getattr(vars(module)[name], "__module__", "") == module.__name__


def absent(module: str, name: str, missing: Mapping[str, str]) -> AttributeError:
    """Returns the error for a name that a module hasn't, with the reason that its table gives."""
    why = f": {missing[name]}" if name in missing else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{why}")


def named(module: str, function: Callable[..., Any], name: str, text: str) -> Any:
    """Gives a function that was made from a module's table its name and docstring; returns it."""
    function.__module__ = module
    function.__name__ = function.__qualname__ = name
    function.__doc__ = text
    return function


def forward(module: str, name: str, method: Callable[..., Any], find: Callable[[], Any], of: str) -> Any:
    """Returns a module's function with a method's parameters that calls it on what `find` returns: `of` in words."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(find(), method.__name__)(*args, **kwargs)

    signature = inspect.signature(method)
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore[attr-defined]
    return named(module, call, name, f"Calls `{method.__name__}` of {of}. {method.__doc__}")


def renamed(method: Callable[..., Any], names: str, text: str) -> Any:
    """Returns a method of ours under an engine's names for its parameters, without those that the engine hasn't."""
    itself, *parameters = inspect.signature(method).parameters.values()
    ours = {name: each.name for name, each in zip(names.split(), parameters, strict=False)}

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **{ours.get(name, name): value for name, value in kwargs.items()})

    kept = [each.replace(name=name) for name, each in zip(ours, parameters, strict=False)]
    call.__signature__ = inspect.Signature([itself, *kept])  # type: ignore[attr-defined]
    call.__doc__ = text
    return call
