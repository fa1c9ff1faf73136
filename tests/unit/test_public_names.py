"""Public names: none hides a module."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import device_communicators
import parallel_state
from parallel_state.launch import LaunchConfig, launch
from parallel_state.launch.launcher import launch as defined
from tests.cases import each

ROOTS = (device_communicators, parallel_state)


def _packages() -> Iterator[ModuleType]:
    """Yields both roots and every package below them."""
    for root in ROOTS:
        yield root
        for found in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            if found.ispkg:
                yield importlib.import_module(found.name)


def test_no_public_name_hides_a_module() -> None:
    """`import package.name` and `package.name` must not be two objects."""

    def check(package: ModuleType) -> None:
        for module in pkgutil.iter_modules(package.__path__):
            public = vars(package).get(module.name)
            name = f"{package.__name__}.{module.name}"
            assert public is None or public is importlib.import_module(name), f"{name} is also a {type(public)}"

    packages = list(_packages())
    assert len(packages) > 20
    each(packages, check)


def test_launch_is_called_as_a_function_and_imported_from_its_package() -> None:
    assert parallel_state.launch is importlib.import_module("parallel_state.launch")
    assert launch is defined
    assert parallel_state.LaunchConfig is LaunchConfig
    assert parallel_state.launch(len, 1, args=["two"]) == launch(len, 1, args=["two"]) == [3]
    assert inspect.signature(parallel_state.launch) == inspect.signature(launch)
    assert inspect.getdoc(parallel_state.launch) == inspect.getdoc(launch)
    assert pickle.loads(pickle.dumps(parallel_state.launch)) is parallel_state.launch
