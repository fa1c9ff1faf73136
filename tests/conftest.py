"""Fixtures: pools of ranks, one per world size, shared by the whole run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.workers import WorkerPool


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], WorkerPool]]:
    """`pools(4)` is the pool of four ranks; it starts with its first use."""
    made: dict[int, WorkerPool] = {}

    def pool(world_size: int) -> WorkerPool:
        if world_size not in made:
            made[world_size] = WorkerPool(world_size)
        return made[world_size]

    yield pool
    for each in made.values():
        each.kill()
