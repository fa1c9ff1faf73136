from __future__ import annotations

import importlib
import inspect
import os
import pickle
import pkgutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pytest

import device_communicators
import parallel_state
from device_communicators import GroupContext
from parallel_state.launch import LaunchConfig, launch
from tests import stubs
from tests.cases import each

ROOTS = (device_communicators, parallel_state)


def _packages() -> Iterator[ModuleType]:
    for root in ROOTS:
        yield root
        for found in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            if found.ispkg:
                yield importlib.import_module(found.name)


def test_no_public_name_hides_a_module() -> None:
    """`import package.name` and `package.name` must be the same object."""

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
    assert inspect.isfunction(launch)
    assert parallel_state.LaunchConfig is LaunchConfig
    assert parallel_state.launch(len, 1, args=["two"]) == launch(len, 1, args=["two"]) == [3]
    assert inspect.signature(parallel_state.launch) == inspect.signature(launch)
    assert inspect.getdoc(parallel_state.launch) == inspect.getdoc(launch)
    assert pickle.loads(pickle.dumps(parallel_state.launch)) is parallel_state.launch


def test_public_classes_say_where_users_import_them_from() -> None:
    classes = {
        (root.__name__, name): getattr(root, name)
        for root in ROOTS
        for name in root.__all__
        if isinstance(getattr(root, name), type)
    }

    def check(root: str, name: str) -> None:
        kind = classes[root, name]
        assert kind.__module__ == root, kind
        assert pickle.loads(pickle.dumps(kind)) is kind
        if kind is not GroupContext:
            assert set(vars(kind).get("__annotations__", ())) <= set(get_type_hints(kind))

    assert len(classes) > 40
    each(classes, check)
    shown = "".join(traceback.format_exception_only(parallel_state.PeerDiedError("rank 3")))
    assert shown == "parallel_state.PeerDiedError: rank 3\n"


def test_stubs_name_what_the_roots_load() -> None:
    for path, text in stubs.stubs().items():
        assert path.read_text() == text, "run `make stubs`"


UNPICKLE = """
import pickle, sys
from device_communicators.base import errors
own = pickle.dumps(errors.PeerDiedError("a", suspect_ranks=[3]))
assert errors.PeerDiedError.__module__ == "device_communicators.base.errors" and "parallel_state" not in sys.modules
error = pickle.loads(bytes.fromhex(sys.argv[1]))
assert type(error) is errors.PeerDiedError and error.suspect_ranks == (3,), error
assert type(pickle.loads(own)) is errors.PeerDiedError
print(own.hex())
"""


@pytest.mark.slow
def test_errors_are_unpickled_whichever_package_was_imported() -> None:
    pickled = pickle.dumps(parallel_state.PeerDiedError("a", suspect_ranks=[3])).hex()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    found = subprocess.run(
        [sys.executable, "-c", UNPICKLE, pickled], env=environment, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr
    error = pickle.loads(bytes.fromhex(found.stdout.strip()))
    assert type(error) is parallel_state.PeerDiedError
    assert error.suspect_ranks == (3,)
