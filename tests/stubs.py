"""Stubs of both packages' roots, by which type checkers and editors know the names that are loaded at their first use.

`make stubs` runs this file, which writes them and the stub of the getters; tests/unit/test_public_names.py compares.
"""

from __future__ import annotations

from pathlib import Path

import device_communicators
import parallel_state
from parallel_state.functions import getters

HEAD = "# Written by `make stubs` from the table in __init__.py.\n"


def stubs() -> dict[Path, str]:
    """Returns the text of each stub by its path."""
    found = {}
    for root in (device_communicators, parallel_state):
        imports = {}
        for module, names in root._NAMES.items():
            parent, _, last = module.rpartition(".")
            imports[parent if names == [last] and parent == root.__name__ else module] = names
        lines = [f"from {module} import {name} as {name}\n" for module in sorted(imports) for name in imports[module]]
        if root is parallel_state:
            lines.append("from parallel_state.functions.getters import *\n")
            lines = [*sorted(lines, key=lambda line: line.split()[1]), "\n__version__: str\n"]
        found[Path(root.__file__).with_suffix(".pyi")] = "".join([HEAD, *lines])
    return found


if __name__ == "__main__":
    getters.write_stub()
    for path, text in stubs().items():
        path.write_text(text)
