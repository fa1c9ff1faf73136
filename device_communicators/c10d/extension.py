"""Modules of Python that are compiled for the installed torch and Python, because they use the C++ classes of torch."""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from device_communicators.base.build_cache import CacheError, about_cache
from device_communicators.base.torch_internals import pybind_abi
from device_communicators.cpu import native, native_build
from device_communicators.cpu.native_build import BuildError, Recipe

SOURCES = Path(__file__).parent / "csrc"
_ADVICE = ". It needs a C++ compiler and Python's headers"


def try_load(what: str, name: str, sources: Sequence[Path], folders: Sequence[Path]) -> tuple[Any, str]:
    """Returns the module `name` and "", or None and the reason. Compiles it if needed.

    `what`: in words. `folders`: of the sources and of the headers that belong to them.
    """
    try:
        path, problem = native.find_or_compile(_recipe(what, name, sources, folders))
    except (OSError, BuildError, CacheError) as error:
        path, problem = None, about_cache(error)
        advice = "" if isinstance(error, OSError) else _ADVICE
    else:
        advice = _ADVICE
    if path is None:
        return None, f"has no compiled part: {problem}{advice}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        return None, f"has no compiled part: {path} is no module of Python"
    try:
        module = importlib.util.module_from_spec(spec)  # loads the library
        spec.loader.exec_module(module)
    except ImportError as error:  # another build of the same version of torch
        return None, f"has no compiled part: {path} can't be loaded: {error}"
    return module, ""


def _recipe(what: str, name: str, sources: Sequence[Path], folders: Sequence[Path]) -> Recipe:
    flags = native_build.torch_flags(sources, ("torch_python", "torch", "torch_cpu", "c10"))
    version = sysconfig.get_config_var("SOABI")
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").is_file():
        raise BuildError(f"there is no Python.h in {include}; install Python's headers (python3-dev)")
    pybind = tuple(f'-D{macro}="{value}"' for macro, value in pybind_abi().items())
    flags["flags"] += (f"-DTORCH_EXTENSION_NAME={name}", *pybind)
    flags["for_torch"] += f" {version}"
    flags["include_flags"] += ("-isystem", include)
    packaged = f"_{name.removeprefix('parallel_state_')}_torch{torch.__version__.replace('+', '_')}.{version}.so"
    return Recipe(what, packaged, tuple(sources), folders=tuple(folders), **flags)
