from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests import promises, workers
from tests.extent import LONG
from tests.hosts import HostRanks, Hosts, problem
from tests.workers import WorkerPool

# At a failure torch's flight recorder would write a file to the user's folder, and first import torch's compiler.
os.environ.setdefault("TORCH_FR_DUMP_ON_TIMEOUT", "0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [] if LONG else [item for item in items if item.get_closest_marker("long")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    workers.modules_of_tests |= {item.path.stem for item in items}
    workers.modules_of_new_ranks |= {
        item.module.__name__
        for item in items
        if isinstance(item, pytest.Function) and item.path.parent.name == "failure"
    }


class Notes:
    """Appends the collected tests, and the reasons of skips, to the file that `promises.COLLECTED` names."""

    def __init__(self, path: str) -> None:
        self._path = path

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            over, door = item.get_closest_marker("over"), item.get_closest_marker("door")
            self._add(id=item.nodeid, over=over.args if over else (), door=door.args[0] if door else "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):  # of an xfail it isn't a tuple
            self._add(id=report.nodeid, skipped=report.longrepr[2].removeprefix("Skipped: "))

    def _add(self, **facts: object) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(f"{json.dumps(facts)}\n")


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.pop(promises.COLLECTED, None)  # a pytest started by a test has other tests
    if path:
        config.pluginmanager.register(Notes(path))


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], WorkerPool]]:
    made: dict[int, WorkerPool] = {}

    def pool(world_size: int) -> WorkerPool:
        if world_size not in made:
            made[world_size] = WorkerPool(world_size)
        return made[world_size]

    yield pool
    for each in made.values():
        each.kill()


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    reason = problem()
    if reason is not None:
        pytest.skip(f"no hosts can be made here: {reason}")
    with Hosts(3) as made:
        yield made


@pytest.fixture(scope="session")
def on_hosts(hosts: Hosts) -> Callable[[Sequence[int]], HostRanks]:
    """Makes pools on several hosts: `on_hosts([0, 0, 1, 1])` has four ranks, two on each of two hosts."""
    made: dict[tuple[int, ...], HostRanks] = {}

    def pool(placement: Sequence[int]) -> HostRanks:
        key = tuple(placement)
        if key not in made:
            made[key] = hosts.ranks(key)
        return made[key]

    return pool
