"""Imports public names at first use. Commands that don't need torch then start without importing torch."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, get_type_hints

from device_communicators.base.limits import naming_shortages  # imported early: later no descriptor may be left

Names = Mapping[str, Sequence[str]]
"""Maps the name of a module to the public names that it defines. A public submodule, such as `metrics`, lists its own
name.
"""


def load_on_use(root: dict[str, Any], names: Names) -> tuple[list[str], Callable[[str], Any]]:
    """Returns the sorted public names, and the package's `__getattr__` (PEP 562), which imports them. `root`: the
    package's globals. `names`: the public names by module.
    """
    module_of = {name: module for module, defined in names.items() for name in defined}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {root['__name__']!r} has no attribute {name!r}", name=name)
        with naming_shortages(f"importing {module_of[name]}"):
            module = import_module(module_of[name])
        root[name] = module if module.__name__ == f"{root['__name__']}.{name}" else getattr(module, name)
        name_classes(root["__name__"], names)
        return root[name]

    return sorted(module_of), load


def name_classes(root: str, names: Names) -> None:
    """Sets `__module__` of public classes to `root`, the package's name, if their module is already imported. `names`:
    the public names by module.
    """
    for module, defined in names.items():
        for public in (vars(sys.modules[module]).get(name) for name in defined) if module in sys.modules else ():
            if isinstance(public, type) and public.__module__ != root:
                with contextlib.suppress(NameError):  # a type that only type checkers import stays a string
                    hints = get_type_hints(public, include_extras=True)
                    public.__annotations__ = {own: hints[own] for own in inspect.get_annotations(public)}
                public.__module__ = root
