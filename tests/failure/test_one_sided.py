"""A rank dies while others wait for its signal, or for that of another rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from device_communicators.c10d import creation
from tests.contract.attempts import Outcome, attempt, environment
from tests.contract.test_c10d import torch_world
from tests.failure.ranks import KILLED, Ranks
from tests.failure.trials import assert_in_time
from tests.failure.worlds import DEADLINE_S, LONG_TIMEOUT_S, ROUTES, kill_me, later, settings_of, world_over

TORCHS: Any = c10d


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    creation.load()


def _die(folder: str) -> None:
    Path(folder, "died").write_text(repr(time.monotonic()), encoding="utf-8")
    kill_me()


def _waits(rank: int, wait: Callable[[], Any], call: Callable[[], Any], folder: str) -> tuple[Outcome, float, Outcome]:
    if rank == 3:
        later(0.3, lambda: _die(folder))
        time.sleep(DEADLINE_S)
    return attempt(wait), time.monotonic(), attempt(call)


def _killed(folder: str, route: str) -> tuple[Outcome, float, Outcome]:
    with world_over(route, None, LONG_TIMEOUT_S) as group:
        window = group.window([4])
        src = 3 if group.rank != 1 else 0
        return _waits(group.rank, lambda: window.wait_signal(src), lambda: window.put(torch.ones(1), 3), folder)


def _killed_over_torch(folder: str, route: str, is_async: bool) -> tuple[Outcome, float, Outcome]:
    with environment(**settings_of(route)), torch_world(timeout_s=LONG_TIMEOUT_S) as (rank, _):
        window = TORCHS._new_window(torch.zeros(4))
        src = 3 if rank != 1 else 0
        return _waits(
            rank,
            lambda: window.wait_signal(src, is_async).wait(),
            lambda: window.put(torch.ones(1), 3, 0, False).wait(),
            folder,
        )


def _assert_told(ranks: Ranks, folder: Path, function: Callable[..., Any], *args: Any) -> None:
    def trial(own: Path) -> float:
        results = ranks.survivors(function, str(own), *args, timeout_s=DEADLINE_S)
        assert sorted(results) == [0, 1, 2] and ranks.exit_code(3) == KILLED
        for rank, (outcome, _, later_call) in results.items():
            assert outcome.kind == "PeerDiedError" and outcome.suspect_ranks == (3,), (rank, outcome)
            assert later_call.kind in ("PeerDiedError", "GroupFailedError"), (rank, later_call)
        return max(at_s for _, at_s, _ in results.values()) - float((own / "died").read_text())

    assert_in_time(trial, folder, before=ranks.kill)


@pytest.mark.parametrize("route", ROUTES)
def test_a_wait_ends_at_a_death(ranks: Ranks, tmp_path: Path, route: str) -> None:
    _assert_told(ranks, tmp_path, _killed, route)


@pytest.mark.skipif(not hasattr(TORCHS, "_new_window"), reason="needs torch >= 2.15")
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_a_wait_of_torchs_window_ends_at_a_death(ranks: Ranks, tmp_path: Path, route: str, is_async: bool) -> None:
    _assert_told(ranks, tmp_path, _killed_over_torch, route, is_async)


def _puts_into_the_dead() -> Outcome:
    with world_over("connections", None, LONG_TIMEOUT_S) as group:
        window = group.window([64 << 20], torch.uint8)
        x = torch.ones(64 << 20, dtype=torch.uint8)
        group.barrier()
        if group.rank == 1:
            later(0.2, kill_me)
            time.sleep(DEADLINE_S)
        if group.rank > 1:
            return attempt(window.wait_signal, 0)
        until = time.monotonic() + DEADLINE_S
        while (outcome := attempt(window.put, x, 1)).kind == "ok" and time.monotonic() < until:
            pass
        return outcome


def test_a_put_to_a_rank_that_dies_ends(ranks: Ranks, tmp_path: Path) -> None:
    def trial(_: Path) -> float:
        results = ranks.survivors(_puts_into_the_dead, timeout_s=DEADLINE_S)
        for rank, outcome in results.items():
            assert outcome.kind == "PeerDiedError" and outcome.suspect_ranks == (1,), (rank, outcome)
        return max(outcome.seconds for outcome in results.values()) - 0.2  # a call began at most so long before

    assert_in_time(trial, tmp_path, before=ranks.kill)


def _left(route: str) -> Outcome | None:
    with world_over(route, None, LONG_TIMEOUT_S) as group:
        window = group.window([4])
        if group.rank == 0:
            window.signal(1)
        if group.rank == 1:
            window.wait_signal(0)
            return attempt(window.wait_signal, 0)
        if group.rank > 1:
            window.signal(5 - group.rank)
            window.wait_signal(5 - group.rank)
    return None


@pytest.mark.parametrize("route", ROUTES)
def test_a_wait_for_a_rank_that_left_ends(ranks: Ranks, tmp_path: Path, route: str) -> None:
    def trial(_: Path) -> float:
        found = ranks.run(_left, route)
        assert found[1].suspect_ranks == (0,) and found[0] is found[2] is found[3] is None, found
        assert found[1].kind == "PeerDiedError" and "left" in found[1].text, found
        return float(found[1].seconds)

    assert_in_time(trial, tmp_path)


def _mismatch() -> Outcome:
    with world_over("shared memory", None, LONG_TIMEOUT_S) as group:
        return attempt(group.window, [4]) if group.rank != 2 else attempt(group.all_reduce, torch.ones(4))


def test_a_rank_in_another_call_is_named(ranks: Ranks) -> None:
    for outcome in ranks.run(_mismatch):
        assert outcome.kind == "CollectiveMismatchError" and "window" in outcome.text, outcome
