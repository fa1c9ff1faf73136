"""Fixtures of the failure tests: nothing may be left two seconds after any of them.

Those marked `side_by_side` mostly wait. They run in threads, before the first test of their module, and nothing may be
left after all of them; each is reported at its turn. Of fixtures they may have `tmp_path`, `ranks` and what the session
has.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.failure.leftovers import nothing_left_after
from tests.failure.ranks import Ranks
from tests.internals.control_store import read_secret

LEFT_S = 2.0
AT_ONCE = 4
RUN = pytest.StashKey[Future[None]]()
OF_THE_SESSION = ("record_testsuite_property",)


@pytest.fixture(scope="module", autouse=True)
def _side_by_side(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs those tests of the module that are marked so."""
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
    """Reports a test that has run side by side with others; leaves all others to pytest."""
    if RUN not in pyfuncitem.stash:
        return None
    pyfuncitem.stash[RUN].result()
    return True


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process, no name in /dev/shm, no listening socket."""
    with nothing_left_after(LEFT_S):
        yield


@pytest.fixture
def ranks(nothing_left: None) -> Iterator[Ranks]:
    """Four ranks of this test alone, which are killed at its end."""
    pool = Ranks(4)
    yield pool
    pool.kill()


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[bytes]:
    """The job's, from a file, so that the tests know it; without one, launch makes up one that nobody knows."""
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(secrets.token_bytes(32))
    yield read_secret(str(path))
