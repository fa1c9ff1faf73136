"""Writes stub files for names that exist only at run time, and classes of keywords: `make stubs`.

tests/unit/test_public_names.py checks that the files are up to date.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import device_communicators
import parallel_state
from parallel_state.functions import getters
from parallel_state.layout.axes import BY_PARAMETER

HEAD = "# Written by `make stubs` from the table in __init__.py.\n"


def stubs() -> dict[Path, str]:
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
    found[Path(parallel_state.__file__).with_name("keywords.py")] = keywords()
    found[Path(getters.__file__).with_suffix(".pyi")] = getter_stub()
    return found


def keywords() -> str:
    named = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
    sizes = {name: "int | None" for row in BY_PARAMETER.items() for name in (row[0], row[1].name) if name not in named}
    options = {
        name: str(each.annotation)
        for name, each in inspect.signature(parallel_state.initialize_model_parallel).parameters.items()
        if each.kind == inspect.Parameter.KEYWORD_ONLY and name not in (*named, "timeout")
    }
    launch = {
        field.name: str(field.type).replace("'", '"')
        for field in fields(parallel_state.LaunchConfig)
        if field.name != "nproc"
    }
    classes = (
        (
            "Sizes",
            "TypedDict, total=False",
            "Sizes of the axes in `layout.axes.AXES`. `cp` is short for `context_parallel_size`, and so on.",
            sizes,
        ),
        ("ModelParallelOptions", "Sizes, total=False", "Keywords of initialize_model_parallel.", options),
        ("LaunchOptions", "TypedDict, total=False", "Fields of LaunchConfig.", launch),
    )
    text = [
        '"""Keyword arguments of functions that take `**options`.\n\n',
        'Written by `make stubs` from the axis table, a signature and LaunchConfig.\n"""\n\n',
        "from __future__ import annotations\n\n",
        "from collections.abc import Callable, Mapping\nfrom typing import Literal, TypedDict\n\n",
        "from torch.distributed.device_mesh import DeviceMesh\n\n",
        "from parallel_state.layout.axes import RankPicker\n",
        "from parallel_state.process_groups.options import GroupOptions\n",
    ]
    for name, bases, about, members in classes:
        text.append(f'\n\nclass {name}({bases}):\n    """{about}"""\n\n')
        text += [f"    {member}: {kind}\n" for member, kind in members.items()]
    return "".join(text)


def getter_stub() -> str:
    names = "".join(f'    "{name}",\n' for name in getters.__all__)
    lines = []
    for name in getters.__all__:
        signature, _ = getters._MADE[name]
        overloads = [signature]
        if "Literal" in signature:
            overloads.append("(check_initialized: bool) -> GroupCoordinator | None")
        mark = "@overload\n" if len(overloads) > 1 else ""
        lines += [f"{mark}def {name}{each}: ...\n" for each in overloads]
    return (
        "# Written by `make stubs` from the axis table.\n"
        "from collections.abc import Callable, Sequence\nfrom typing import Any, Literal, NoReturn, overload\n\n"
        "from parallel_state.groups.coordinator import GroupCoordinator\n\n"
        f"__all__ = [\n{names}]\n\n"
        "FACTS: dict[str, tuple[str, Callable[[str], Any], str]]\nLONG_NAMES: dict[str, tuple[str, ...]]\n\n"
        f"{''.join(lines)}"
        "def raise_missing(name: str, known: Sequence[str]) -> NoReturn: ...\n"
    )


def write() -> None:
    for path, text in stubs().items():
        path.write_text(text)


if __name__ == "__main__":
    write()
