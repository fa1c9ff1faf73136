"""Row 5 of docs/failures.md: after SIGKILL at a random time no rank gets wrong data. 6 seeds, 200 with
FAILURE_TESTS=long; the JUnit file has the times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.extent import LONG
from tests.failure.random_kills import End, check_ends, kill_one, until_killed
from tests.failure.ranks import Ranks
from tests.failure.trials import assert_in_time
from tests.failure.worlds import (
    DEADLINE_S,
    LONG_TIMEOUT_S,
    OPERATIONS,
    ROUTES,
    calls_of_all,
    seeds_on_routes,
    world_over,
)

SEEDS = seeds_on_routes(200 if LONG else 6)


def _mixed_calls(route: str, seed: int, folder: str) -> tuple[End, float]:
    order = random.Random(seed).choices(OPERATIONS, k=1000)
    with world_over(route, timeout_s=LONG_TIMEOUT_S) as group:
        calls = calls_of_all(group)
        end = until_killed(folder, group.rank, lambda number: calls[order[number % len(order)]])
        left = time.monotonic()
    return end, time.monotonic() - left


@pytest.mark.parametrize("seed", SEEDS)
def test_row_05_killed_amid_any_call(
    ranks: Ranks, tmp_path: Path, seed: int, record_testsuite_property: Callable[[str, object], None]
) -> None:
    def trial(folder: Path) -> float:
        ranks.begin(_mixed_calls, ROUTES[seed % len(ROUTES)], seed, str(folder))
        victim, killed_s = kill_one(ranks, seed, folder)
        return check_ends(ranks, ranks.finish(DEADLINE_S), victim, killed_s)

    found = assert_in_time(trial, tmp_path, before=ranks.kill)
    record_testsuite_property(f"row 5, seed {seed}: last told after s", found)
