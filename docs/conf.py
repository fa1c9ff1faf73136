"""Sphinx configuration: Markdown pages, and the API from docstrings."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

import parallel_state.functions.getters  # noqa: E402

project = "parallel_state"
author = "the parallel_state authors"
copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "README.md"]
html_theme = "furo"
html_title = project
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
add_module_names = False
python_use_unqualified_type_names = True
suppress_warnings = ["misc.highlighting_failure"]
"""A code block may contain an ellipsis, which the lexer rejects."""


class ApiNames(SphinxDirective):
    """Documents the public names of `parallel_state` that the named modules define."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        prefixes = self.arguments[0].split()
        lines: list[str] = []
        homes = {name: module for module, names in parallel_state._NAMES.items() for name in names}
        for name in public_names():
            public = getattr(parallel_state, name)
            home = homes.get(name, "")  # a class's `__module__` is "parallel_state"
            if name == "GroupCoordinator" or not any(home == each or home.startswith(f"{each}.") for each in prefixes):
                continue
            kind = "autoclass" if inspect.isclass(public) else "autofunction"
            lines += [f".. {kind}:: parallel_state.{name}"]
            if kind == "autoclass" and not issubclass(public, Exception):
                lines += ["   :members:"]
            lines += [""]
        if not lines:
            raise self.error(f"{self.arguments[0]} defines no public name of parallel_state")
        parent = nodes.Element()
        self.state.nested_parse(StringList(lines, self.arguments[0]), self.content_offset, parent)
        return parent.children


def public_names() -> list[str]:
    """Returns the names on the API page: all public ones but getters made from the axis table, and tables."""
    made = set(parallel_state.functions.getters.__all__) - set(vars(parallel_state.state))
    return sorted(set(parallel_state.__all__) - made - {"AXES", "PRESETS"})


def to_rst(lines: list[str]) -> list[str]:
    """Returns a docstring as reStructuredText with code in backticks, literal indented blocks and no other markup."""
    out: list[str] = []
    in_block = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not in_block and (not out or not out[-1].strip()):
            out += ["::", ""]
            in_block = True
        elif in_block and line.strip() and not indented:
            in_block = False
        out.append(line if in_block else _escaped(line))
    return out


def _escaped(line: str) -> str:
    parts = re.split(r"(`[^`]+`)", line)
    return "".join(
        f"``{part.strip('`')}``\\ " if part.startswith("`") and len(part) > 2 else re.sub(r"([*_|\\])", r"\\\1", part)
        for part in parts
    )


def _process_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = to_rst(lines)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("autoapi-names", ApiNames)
    app.connect("autodoc-process-docstring", _process_docstring)
    return {"parallel_read_safe": True}
