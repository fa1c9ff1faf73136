from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import hosts
from tests.clusters.cluster import Cluster
from tests.failure.leftovers import nothing_left_after

LEFT_S = 5.0


@pytest.fixture(scope="session")
def hosts_can_be() -> None:
    problem = hosts.problem()
    if problem is not None:
        pytest.skip(f"hosts can't be made: {problem}")


@pytest.fixture
def cluster(hosts_can_be: None, tmp_path: Path) -> Iterator[Cluster]:
    with nothing_left_after(LEFT_S), Cluster(tmp_path) as made:
        yield made
