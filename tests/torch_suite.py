"""Runs torch's own torch.distributed tests, from its wheel, over a backend on the CPU.

    python -m tests.torch_suite BACKEND WORLD_SIZE [--of PART] [NAME…]    # a line of JSON a test; the log on stderr

Tests that depend on the backend's name run as for gloo, or as for MPI if gloo isn't accepted. Each rank is forked from
this process, which has all imports and no group. `--of rpc` runs the RPC tests that also make a process group, with 4
ranks each. `--of fault_tolerance` runs the tests of groups whose members change, with 3 ranks each. These tests aren't
in the wheel: see `tests/references.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import types
import unittest
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from unittest import mock

from tests.hosts import INTERFACE, enter
from tests.references import FAULT_TOLERANCE

ROOT = Path(__file__).resolve().parents[1]
_PACKAGE = "torch.testing._internal.distributed"
_SECONDS_A_TEST = 150


class Outcome(NamedTuple):
    name: str
    outcome: str
    """The result: passed, failed or skipped."""
    reason: str
    seconds: float


class _Opening(str):
    """A backend's name that also equals "gloo" and "mpi", and has the hash of "gloo"."""

    def __eq__(self, other: object) -> bool:
        return other in ("gloo", "mpi") or str(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


def run(
    backend: str,
    size: int,
    names: Sequence[str] = (),
    *,
    part: str = "",
    debug: str = "OFF",
    log: Path,
    hosts: Sequence[int] = (),
) -> dict[str, Outcome]:
    """Runs the named tests, or all, and returns their outcomes. Appends output to `log`.

    `hosts`: PIDs of processes that hold namespaces (`tests/hosts.py`). The ranks enter these in turn.
    """
    found = {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": debug}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as chosen, open(log, "a", encoding="utf-8") as errors:
        chosen.write("\n".join(names))
        chosen.seek(0)
        more = [*(["--of", part] if part else []), *(["--hosts", ",".join(map(str, hosts))] if hosts else [])]
        command = [sys.executable, "-m", "tests.torch_suite", backend, str(size), *more]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=chosen, stdout=subprocess.PIPE, stderr=errors, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            for line in process.stdout:
                outcome = Outcome(**json.loads(line))
                found[outcome.name] = outcome
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    missing = set(names) - set(found)
    if missing or not found:
        raise AssertionError(f"no outcome of {sorted(missing) or 'any test'} over {backend}: see {log}")
    return found


def _distributed_tests(backend: str) -> list[type[unittest.TestCase]]:
    """Returns torch's tests for this backend. torch reads the backend's name while it defines them."""
    from torch.testing._internal import common_distributed

    common_distributed.DistTestCases.backend_feature["plugin"].add(backend)
    with mock.patch.object(os, "environ", {**os.environ, "BACKEND": _Opening(backend)}):
        module = importlib.import_module(f"{_PACKAGE}.distributed_test")
    os.environ["BACKEND"] = "mpi"  # it decides which tests need 8 ranks, except for MPI
    for names in ("PROFILING", "CUDA_PROFILING", "SEND_RECV_PROFILING"):
        getattr(module, f"{names}_SUPPORTED_BACKENDS").append(backend)

    class DistributedTests(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

    return [DistributedTests]


def _rpc_tests() -> list[type[unittest.TestCase]]:
    suites = importlib.import_module(f"{_PACKAGE}.rpc_utils")
    agents = {
        "TensorPipe": ("tensorpipe_rpc_agent_test_fixture", suites.GENERIC_TESTS + suites.TENSORPIPE_TESTS),
        "Faulty": ("faulty_rpc_agent_test_fixture", suites.FAULTY_AGENT_TESTS),
    }
    found: list[type[unittest.TestCase]] = []
    for agent, (file, tests) in agents.items():
        fixture = importlib.import_module(f"{_PACKAGE}.rpc.{file}")
        mixin = getattr(fixture, f"{agent}RpcAgentTestFixture")
        found += suites.generate_tests(agent, mixin, tests, __name__).values()
    return found


def _fault_tolerance_tests(backend: str) -> list[type[unittest.TestCase]]:
    """Returns the test class that pytorch's test_c10d_fault_tolerance.py makes for a backend in its list."""
    beginning = "FAULT_TOLERANCE_BACKENDS = [\n"
    source = FAULT_TOLERANCE.path_in_cache().read_text()
    assert beginning in source, f"{FAULT_TOLERANCE.path} has changed"
    module = types.ModuleType("fault_tolerance")
    sys.modules[module.__name__] = module
    exec(source.replace(beginning, f'{beginning}    ("{backend}", "cpu"),\n', 1), module.__dict__)
    return [getattr(module, f"{backend.capitalize()}FaultToleranceTest")]


def _fork_ranks(hosts: Sequence[int] = ()) -> None:
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    make = multiprocessing.get_context("fork").Process

    def fork(*, target: Any, args: tuple[Any, ...], **more: Any) -> Any:
        rank, *_ = args
        return make(target=_on_host, args=(hosts[rank % len(hosts)] if hosts else 0, target, *args), **more)

    MultiProcessTestCase._spawn_processes = lambda test: test._start_processes(fork)


def _on_host(host_pid: int, target: Any, *args: Any, **more: Any) -> None:
    if host_pid:
        enter(host_pid)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    target(*args, **more)


def _make_groups_of(backend: str) -> None:
    """Makes init_process_group use this backend if a test requests gloo."""
    import torch.distributed as dist

    made = dist.init_process_group

    @functools.wraps(made)
    def make(*args: Any, **options: Any) -> None:
        if options.get("backend") == "gloo":
            options["backend"] = backend
        made(*args, **options)

    dist.init_process_group = make


def _makes_group(kind: type[unittest.TestCase], method: str) -> bool:
    source = inspect.getsource(inspect.unwrap(getattr(kind, method)))
    if re.search("initialize_pg|init_process_group", source):
        return True
    called = set(re.findall(r"self\.(_\w+)\(", source)) - {method}
    return any(_makes_group(kind, name) for name in called if inspect.isfunction(getattr(kind, name, None)))


def _outcomes(tests: Iterable[tuple[str, unittest.TestCase]]) -> Iterator[Outcome]:
    for name, test in tests:
        print(f"== {name}", file=sys.stderr, flush=True)
        result = unittest.TestResult()
        started = time.monotonic()
        unittest.TestSuite([test]).run(result)
        seconds = round(time.monotonic() - started, 2)
        bad = [text for _, text in (*result.failures, *result.errors)]
        skipped = [reason for _, reason in result.skipped]
        outcome = "failed" if bad else "skipped" if skipped else "passed"
        yield Outcome(name, outcome, "\n".join(bad or skipped), seconds)


def _main(backend: str, size: int, part: str, hosts: Sequence[int], names: Sequence[str], results: TextIO) -> None:
    import parallel_state  # noqa: F401  (registers the backend)

    with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder:
        os.environ.update(
            BACKEND=backend, WORLD_SIZE=str(size), INIT_METHOD=f"file://{folder}/init", MASTER_ADDR="127.0.0.1",
            DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(_SECONDS_A_TEST),
        )  # fmt: skip
        rpc = part == "rpc"
        parts = {"rpc": _rpc_tests, "fault_tolerance": lambda: _fault_tolerance_tests(backend)}
        classes = parts.get(part, lambda: _distributed_tests(backend))()
        _fork_ranks(hosts)
        _make_groups_of(backend)
        tests = {
            f"{kind.__name__}.{method}": kind(method)
            for kind in classes
            for method in unittest.TestLoader().getTestCaseNames(kind)
            if not rpc or _makes_group(kind, method)
        }
        for outcome in _outcomes((name, test) for name, test in tests.items() if not names or name in names):
            print(json.dumps(outcome._asdict()), file=results, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("backend")
    parser.add_argument("size", type=int)
    parser.add_argument("--of", default="", choices=("rpc", "fault_tolerance"))
    parser.add_argument("--hosts", default="", help="PIDs in the namespaces of hosts, which the ranks enter in turn")
    parser.add_argument("names", nargs="*", help="of tests; read from stdin where that is no terminal")
    given = parser.parse_args()
    wanted = given.names or ([] if sys.stdin.isatty() else sys.stdin.read().split())
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the tests print
    _main(given.backend, given.size, given.of, [int(pid) for pid in given.hosts.split(",") if pid], wanted, lines)
