"""Fixtures of the failure tests: nothing may be left two seconds after any of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_state.launch.store import read_secret
from tests.failure.leftovers import nothing_left_after
from tests.failure.ranks import Ranks

LEFT_S = 2.0


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
