from __future__ import annotations

from dataclasses import dataclass

import pytest

from device_communicators.base.errors import LaunchError
from parallel_state.launch.config import LaunchConfig
from parallel_state.launch.processes import raise_failure
from parallel_state.launch.worker import Report


@dataclass
class Rank:
    rank: int
    told: Report
    ended: float | None
    exit_code: int

    failed = True

    def report(self) -> Report:
        return self.told

    def explain(self) -> str:
        return f"rank {self.rank} {self.told.summary}"

    def stacks(self) -> str:
        return ""


def _raised(rank: int, at: float, blames: tuple[int, ...] = ()) -> Rank:
    return Rank(rank, Report("error", at, 1, "raised", "", blames), at + 0.1, 1)


def _ended(rank: int, seen: float, exit_code: int) -> Rank:
    return Rank(rank, Report("running"), seen, exit_code)


@pytest.mark.parametrize(
    ("ranks", "first"),
    [
        ([_raised(0, 5.0), _raised(1, 4.9)], 1),
        ([_raised(0, 5.0, (2,)), _raised(1, 5.1, (2,)), _ended(2, 5.4, 1)], 2),
        ([_raised(0, 5.0, (2,)), _raised(2, 5.1)], 0),
        ([_raised(0, 5.0), _ended(2, 5.4, 1)], 0),
        ([_raised(0, 5.0), _ended(2, 5.4, -9)], 2),
        ([_raised(0, 5.0, (1,)), _ended(2, 5.2, 1), _ended(1, 5.4, 3)], 1),
    ],
)
def test_the_first_failure(ranks: list[Rank], first: int) -> None:
    with pytest.raises(LaunchError) as caught:
        raise_failure(ranks, [], 9.0, LaunchConfig(nproc=3, world_size=3))  # type: ignore[arg-type]
    assert caught.value.rank == first
    assert str(caught.value).startswith(f"rank {first} ")
