"""Row 15 of docs/failures.md: a stopped rank is named at the deadline, and its group has failed when it
resumes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.contract.attempts import Outcome, attempt
from tests.failure.ranks import Ranks
from tests.failure.trials import assert_in_time
from tests.failure.worlds import DEADLINE_S, ROUTES, Told, until_it_fails, world_over

T_S = 2.0


def _until_the_stopped_fails(
    route: str, folder: str, longer_s: Sequence[float], of_calls: bool
) -> tuple[Told, list[str]]:
    with world_over(route, timeout_s=T_S) as group, contextlib.ExitStack() as stack:
        if of_calls:
            stack.enter_context(group.within(T_S + longer_s[group.rank]))
        elif any(longer_s):
            group.timeout = T_S + longer_s[group.rank]
        group.barrier()
        Path(folder, str(group.rank)).write_text(str(os.getpid()), encoding="utf-8")
        told = until_it_fails(group, lambda: group.all_reduce(torch.ones(5)))
        if group.rank != 2:
            Path(folder, f"failed-{group.rank}").touch()
        until = time.monotonic() + DEADLINE_S / 2
        while not Path(folder, "goes on").exists() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.3)
        later = [attempt(group.all_reduce, torch.ones(5)).kind, attempt(group.broadcast_object, 1).kind]
    return told, later


def _stop_and_go_on(folder: Path) -> None:
    until = time.monotonic() + DEADLINE_S / 2
    while not all((folder / str(rank)).exists() for rank in range(4)) and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.3)
    stopped = int((folder / "2").read_text())
    os.kill(stopped, signal.SIGSTOP)
    try:
        while not all((folder / f"failed-{rank}").exists() for rank in (0, 1, 3)) and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        os.kill(stopped, signal.SIGCONT)
        (folder / "goes on").touch()


@pytest.mark.parametrize("route", ROUTES)
def test_row_15_a_rank_is_stopped_and_goes_on(ranks: Ranks, tmp_path: Path, route: str) -> None:
    check_row_15(ranks, tmp_path, route)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("first", [0, 1, 3], ids="rank {} is the first".format)
def test_row_15_with_a_timeout_of_each_rank(ranks: Ranks, tmp_path: Path, route: str, first: int) -> None:
    check_row_15(ranks, tmp_path, route, all_but(first))


def all_but(first: int) -> list[float]:
    return [0.0 if rank == first else 4.0 + rank for rank in range(4)]


@pytest.mark.parametrize("route", ROUTES)
def test_row_15_with_a_timeout_of_each_call(ranks: Ranks, tmp_path: Path, route: str) -> None:
    check_row_15(ranks, tmp_path, route, all_but(1), of_calls=True)


def _comes_late(folder: str) -> tuple[Outcome, int | None]:
    def all_failed(ranks: Sequence[int]) -> bool:
        return all(Path(folder, str(rank)).exists() for rank in ranks)

    def until_failed(*ranks: int) -> None:
        until = time.monotonic() + DEADLINE_S / 2
        while not all_failed(ranks) and time.monotonic() < until:
            time.sleep(0.01)

    def call() -> None:
        group.broadcast(torch.ones(1 << 15), 0)  # from rank 0 to 1 and 2, from 2 to 3
        group.all_reduce(torch.ones(5))

    with world_over("connections", timeout_s=T_S) as group:
        group.barrier()
        if group.rank == 2:
            until_failed(0, 1, 3)
        told = attempt(call)
        Path(folder, str(group.rank)).touch()
        until_failed(*range(4))
        return told, getattr(group.route.first_failure, "sequence", None)


def test_a_late_rank_after_a_call_that_some_completed(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(_comes_late, str(tmp_path), timeout_s=DEADLINE_S)
    for rank, (told, number) in enumerate(found):
        assert told.kind == "CollectiveTimeoutError" and told.suspect_ranks == (2,), (rank, told)
        assert number == (2 if rank == 3 else 3), (rank, number, told)
    assert "number 2 had completed on global rank 0, global rank 1, global rank 2, but" in found[2][0].text, found[2]


def check_row_15(
    ranks: Ranks, tmp_path: Path, route: str, longer_s: Sequence[float] = (0.0,) * 4, of_calls: bool = False
) -> None:
    def trial(folder: Path) -> float:
        thread = threading.Thread(target=_stop_and_go_on, args=(folder,))
        thread.start()
        try:
            results = ranks.survivors(
                _until_the_stopped_fails, route, str(folder), longer_s, of_calls, timeout_s=DEADLINE_S
            )
        finally:
            thread.join(DEADLINE_S)
        assert sorted(results) == [0, 1, 2, 3]
        for rank, (told, later) in results.items():
            assert later == ["GroupFailedError"] * 2, (rank, told, later)
            if rank != 2:
                assert told.outcome.kind == "CollectiveTimeoutError", (rank, told)
                assert told.outcome.suspect_ranks == (2,), (rank, told)
            else:
                assert told.outcome.kind in ("CollectiveTimeoutError", "PeerDiedError", "CommunicationError"), (
                    told.outcome.text
                )
        return max(told.outcome.seconds for rank, (told, _) in results.items() if rank != 2)

    assert_in_time(trial, tmp_path, T_S + 1.0, before=ranks.kill)
