"""Runs torchft's own tests, from its wheel, over a backend on the CPU.

    python -m tests.torchft_suite fetch                # installs torchft into the user's cache: 25 MB
    python -m tests.torchft_suite BACKEND [NAME…]      # a line of JSON a test; the log on stderr

Tests of torchft's process groups run with `ProcessGroupParallelState` in the place of gloo's class. Tests of torch's
own groups, whose members torchft changes, run with groups of this backend. Ranks are threads or processes, as in the
original test. Managers use torchft's lighthouse, which is compiled.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import types
import unittest
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.references import CACHE
from tests.torch_suite import ROOT, Outcome, _outcomes

VERSION = "2026.10.26"
PACKAGES = (f"torchft-nightly=={VERSION}", "parameterized==0.9.0")
NEEDED = ("opentelemetry-sdk==1.45.2", "opentelemetry-exporter-otlp-proto-http==1.45.2")
FOLDER = CACHE / f"torchft-{VERSION}-{sys.implementation.cache_tag}"
TESTS = {
    "process_group_test": (
        "ProcessGroupTest.test_gloo_apis_0_cpu",
        "ProcessGroupTest.test_gloo_timeout",
        "ProcessGroupTest.test_functional_collectives",
        "ProcessGroupTest.test_process_group_wrapper",
        "ProcessGroupTest.test_managed_process_group",
        "NormalGlooMultiPgTest",
    ),
    "reconfigure_test": ("ReconfigureTest",),
    "manager_integ_test": (
        "ManagerIntegTest.test_ddp_recovery_0_async_quorum",
        "ManagerIntegTest.test_ddp_recovery_1_sync_quorum",
        "ManagerIntegTest.test_ddp_recovery_2_native_async_quorum",
        "ManagerIntegTest.test_ddp_recovery_3_native_sync_quorum",
    ),
}
"""The tests that make a group over gloo on a CPU. A class stands for all its tests."""
LIMIT_S = 600.0
_TEXTS_OF_GLOO = re.compile("timeout after|Connection closed by peer")
_TEXTS = r"global rank \d+ .*(has left|exited)|did not call configure"
"""What this library's errors say where torchft's tests expect gloo's texts."""


def fetch() -> str:
    """Installs torchft into the cache, unless it is there. Returns why that failed, or ""."""
    if (FOLDER / "ready").exists():
        return ""
    part = FOLDER.with_name(f"{FOLDER.name}.{os.getpid()}")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(part)]
    for more in (["--no-deps", *PACKAGES], list(NEEDED)):
        found = subprocess.run([*pip, *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if found.returncode:
            shutil.rmtree(part, ignore_errors=True)
            return found.stdout
    (part / "ready").touch()
    shutil.rmtree(FOLDER, ignore_errors=True)
    part.rename(FOLDER)
    return ""


def run(backend: str, names: Sequence[str] = (), *, log: Path) -> dict[str, Outcome]:
    """Runs the named tests, or all of TESTS, and returns their outcomes. Appends output to `log`."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", ""), str(FOLDER)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TORCH_FR_DUMP_ON_TIMEOUT": "0"}
    environment["PYTHONHASHSEED"] = "0"  # torchft numbers tests in the order of a set
    command = [sys.executable, "-m", "tests.torchft_suite", backend, *names]
    with open(log, "a", encoding="utf-8") as errors:
        found = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=LIMIT_S
        )
    outcomes = [Outcome(**json.loads(line)) for line in found.stdout.splitlines()]
    if found.returncode or not outcomes:
        raise AssertionError(f"torchft's tests over {backend} ended with {found.returncode}: see {log}")
    return {each.name: each for each in outcomes}


def _native_backend(store: Any, rank: int, size: int, enable_reconfigure: bool = False) -> Any:
    """Creates this library's backend with the arguments of torch's ProcessGroupGloo."""
    import torch.distributed as dist

    from device_communicators.base.torch_internals import backend_options

    options = backend_options(store, rank, size, timedelta(seconds=60), "torchft")
    options.enable_reconfigure = enable_reconfigure
    return dist.Backend._plugins["PARALLEL_STATE"].creator_fn(options, None)


def _replace_gloo() -> None:
    import torch.distributed as dist

    from device_communicators.c10d import creation
    from parallel_state.compat.torchft import ProcessGroupParallelState

    creation.load()  # compiles before the tests' deadlines start
    modules: list[Any] = [importlib.import_module(f"torchft.{name}") for name in TESTS]
    for module in modules:
        module.ProcessGroupGloo = ProcessGroupParallelState
    groups, changing, manager = modules
    changing._resize_worker = functools.partial(_resize_worker, "parallel_state")
    manager.dist = types.SimpleNamespace(**{**vars(dist), "ProcessGroupGloo": _native_backend})
    checked = unittest.TestCase.assertRaisesRegex

    def assert_raises(self: Any, kind: Any, expected: str, *more: Any, **others: Any) -> Any:
        return checked(self, kind, f"{expected}|{_TEXTS}" if _TEXTS_OF_GLOO.search(expected) else expected, *more)

    for kind in (groups.ProcessGroupTest, groups.MultiPgBaseTest):
        kind.assertRaisesRegex = assert_raises


def _resize_worker(backend: str, rank: int, port: int, _: str) -> None:
    import parallel_state  # noqa: F401  (registers the backend)

    changing = importlib.import_module("torchft.reconfigure_test")
    changing._resize_worker(rank, port, backend)


def _tests(names: Sequence[str]) -> Iterator[tuple[str, unittest.TestCase]]:
    for module, wanted in TESTS.items():
        found: list[Any] = [
            unittest.defaultTestLoader.loadTestsFromNames(wanted, importlib.import_module(f"torchft.{module}"))
        ]
        while found:
            each = found.pop()
            if isinstance(each, unittest.TestSuite):
                found += list(each)
                continue
            name = each.id().split(".", 2)[2]
            if not names or name in names:
                yield name, each


def _main(backend: str, names: Sequence[str]) -> None:
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the tests print
    if backend != "gloo":
        _replace_gloo()
    for outcome in _outcomes(_tests(names)):
        print(json.dumps(outcome._asdict()), file=results, flush=True)


if __name__ == "__main__":
    chosen, *rest = sys.argv[1:]
    if chosen != "fetch":
        _main(chosen, rest)
    elif problem := fetch():
        print(f"could not fetch torchft {VERSION}: {problem}", file=sys.stderr)
