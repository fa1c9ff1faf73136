"""The module that public classes name as theirs: the root that users import them from.

Tracebacks, `repr` and pickle show that name. Called at the end of a root's `__init__`; the errors are
`device_communicators.base.errors.X` until `parallel_state`, which exports them, is imported.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any, get_type_hints


def name_classes(root: Mapping[str, Any]) -> None:
    """Sets `__module__` of the classes in `__all__` of a root, whose globals are `root`.

    Annotations are evaluated before: `typing.get_type_hints` looks their names up in the class's module.
    """
    for public in (root[name] for name in root["__all__"]):
        if isinstance(public, type):
            with contextlib.suppress(NameError):  # a type that only type checkers import: it stays a string
                hints = get_type_hints(public, include_extras=True)
                public.__annotations__ = {own: hints[own] for own in inspect.get_annotations(public)}
            public.__module__ = root["__name__"]
