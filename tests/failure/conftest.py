"""Checks that 2 s after a test no process, file or socket is left. Tests marked `side_by_side` mostly wait.
They run in threads before their module's first test, and each is reported at its turn. They can use the
fixtures `tmp_path`, `ranks` and those of the session."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.failure.leftovers import nothing_left_after
from tests.failure.ranks import Ranks
from tests.helpers.control_store import read_secret

LEFT_S = 2.0
AT_ONCE = 3
RUN = pytest.StashKey[Future[None]]()
OF_THE_SESSION = ("record_testsuite_property",)


@pytest.fixture(scope="module", autouse=True)
def _side_by_side(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    items = [each for each in request.session.items if each.path == request.path and isinstance(each, pytest.Function)]
    items = [item for item in items if item.get_closest_marker("side_by_side")]
    if not items:
        return
    of_the_session = {name: request.getfixturevalue(name) for name in OF_THE_SESSION}

    def run(item: pytest.Function, folder: Path) -> None:
        ranks = Ranks(4)
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        given = {**of_the_session, **parameters, "tmp_path": folder, "ranks": ranks}
        try:
            item.obj(**{name: given[name] for name in inspect.signature(item.obj).parameters})
        finally:
            ranks.kill()

    with nothing_left_after(LEFT_S), ThreadPoolExecutor(AT_ONCE) as threads:
        for item in items:
            item.stash[RUN] = threads.submit(run, item, tmp_path_factory.mktemp("side-by-side"))


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if RUN not in pyfuncitem.stash:
        return None
    pyfuncitem.stash[RUN].result()
    return True


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    with nothing_left_after(LEFT_S):
        yield


@pytest.fixture
def ranks(nothing_left: None) -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.kill()


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[bytes]:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(secrets.token_bytes(32))
    yield read_secret(path)
