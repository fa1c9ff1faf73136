from __future__ import annotations

from pathlib import Path

import pytest

from device_communicators.c10d import creation
from tests.failure.changing import IS_THERE
from tests.failure.test_reconfigure import _merge_and_split, check_abort, check_kills
from tests.hosts import Hosts, problem

pytestmark = [
    pytest.mark.skipif(not IS_THERE, reason="needs torch >= 2.15"),
    pytest.mark.skipif(problem() is not None, reason=f"no hosts can be made here: {problem()}"),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    creation.load()


def test_groups_merge_and_split_over_hosts(tmp_path: Path) -> None:
    with Hosts(2) as hosts, hosts.ranks((0, 0, 1, 1)) as ranks:
        assert ranks.run(_merge_and_split, str(tmp_path)) == [True] * 4


def test_abort_ends_the_calls_of_all_hosts(tmp_path: Path) -> None:
    with Hosts(2) as hosts, hosts.ranks((0, 0, 1, 1)) as ranks:
        check_abort(ranks, tmp_path)


def test_killed_ranks_are_replaced_over_hosts(tmp_path: Path) -> None:
    with Hosts(2) as hosts, hosts.ranks((0, 0, 1, 1, 0, 1, 0)) as ranks:
        check_kills(ranks, tmp_path, 4, 3, 120.0)
