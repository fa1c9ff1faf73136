"""Compiles and loads this folder's C++ as one Python module."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sysconfig
import threading
from functools import cache
from pathlib import Path
from typing import Any

from device_communicators.base.build_cache import CacheError, about_cache
from device_communicators.base.member import Timeout
from device_communicators.control.store import ControlStore
from device_communicators.cpu import native, native_build
from device_communicators.cpu.native_build import BuildError, Recipe, Unit

logger = logging.getLogger("parallel_state")

SOURCES = Path(__file__).parent / "csrc"
LEAN = SOURCES / "lean"
"""Folder with replacements of the torch headers that take the longest to compile."""
_NAME = "parallel_state_c10d"
_LEVEL = ("-Og", "-finline-functions-called-once")
"""Takes three quarters of the CPU time of -O1. Calls take 0.2 us longer."""
_IMPORTING = threading.Lock()
_NO_TIMEOUT = Timeout(0.0)
"""0 s plus the extra time of `extended_deadline`. The compiled module adds it to its own timeouts."""
_ADVICE = ". It needs a C++ compiler and Python's headers"


@cache
def try_load() -> tuple[Any, str]:
    """Compiles and imports the C++ module. Returns (module, "") or (None, reason)."""
    try:
        [(path, problem)] = native.find_or_compile([recipe()])
        if path is not None and native.is_packaged(path):
            module, problem = _import(path)
            if module is not None:
                return module, ""
            [(path, problem)] = native.find_or_compile([recipe()], f"the wheel's {problem}")
    except (OSError, BuildError, CacheError) as error:
        path, problem = None, about_cache(error)
        advice = "" if isinstance(error, OSError) else _ADVICE
    else:
        advice = _ADVICE
    if path is None:
        return None, f"has no compiled part: {problem}{advice}"
    module, problem = _import(path)
    return module, f"has no compiled part: {problem}" if problem else ""


def _import(path: Path) -> tuple[Any, str]:
    with _IMPORTING:  # the module's types can be registered only once
        return _import_once(path)


@cache
def _import_once(path: Path) -> tuple[Any, str]:
    spec = importlib.util.spec_from_file_location(_NAME, path)
    if spec is None or spec.loader is None:
        return None, f"{path} is no module of Python"
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:  # another build of this torch
        return None, f"{path} can't be loaded: {error}"
    _NO_TIMEOUT.follow(module.extend_deadlines)
    _NO_TIMEOUT.publish()
    return module, ""


@cache
def compile_ahead() -> None:
    """Compiles the module before a deadline starts to run. Ignores errors: `try_load` returns them."""
    with contextlib.suppress(OSError, BuildError, CacheError):
        native.find_or_compile([native.wanted_recipe(), recipe()])


def recipe() -> Recipe:
    """Returns the sources and flags to compile the C++ module. Raises BuildError if Python's headers are missing."""
    sources = tuple(sorted(SOURCES.glob("*.cpp"), key=lambda path: (path.stem == "module", path.stem)))
    flags = native_build.torch_flags(sources, ("torch_python", "torch", "torch_cpu", "c10"))
    version = sysconfig.get_config_var("SOABI")
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").is_file():
        raise BuildError(f"there is no Python.h in {include}; install Python's headers (python3-dev)")
    flags["flags"] += (f"-DTORCH_EXTENSION_NAME={_NAME}",)
    flags["for_torch"] += f" {version}"
    flags["include_flags"] = (f"-I{LEAN}", *flags["include_flags"], "-isystem", include)
    return Recipe(
        'the backend "parallel_state" of torch.distributed',
        f"_c10d_torch{native_build.torch_minor()}.{version}.so",
        (Unit(sources, (*_LEVEL, *native_build.WITH_TORCH)),),
        folders=(*native_build.FOLDERS, SOURCES, LEAN / "ATen"),
        usual_cpu_s=27.0,
        **flags,
    )


@cache
def try_load_store() -> Any:
    """Returns the compiled module, whose class `Store` is a store for torch; None if the module can't be loaded.

    With a store in Python, torch's own threads would wait for the interpreter lock, and could crash when the
    interpreter exits.
    """
    module, problem = try_load()
    if module is None:
        logger.info("torch's threads need the interpreter lock for the control plane's store, which %s", problem)
    return module


def for_torch(store: Any) -> Any:
    """Returns a C++ client for the server of `store`. Returns `store` itself if it isn't a ControlStore or the compiled
    module is missing. The caller must keep a Python store alive, because torch doesn't.
    """
    module = try_load_store() if isinstance(store, ControlStore) else None
    if module is None:
        return store
    return module.Store(
        library=str(store.library.path),
        client=store.client(),
        name=str(store),
        address=store.address,
        served_by=store.served_by,
        access=store.access,
        main_thread=threading.main_thread().ident,
        timeout=store.timeout,
    )
