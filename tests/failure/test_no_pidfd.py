"""Row 57 of docs/failures.md: rows 1 to 5 without `pidfd_open`, as before Linux 5.3 (ENOSYS) and in old
containers (EPERM)."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from device_communicators.liveness.health import Watcher
from tests.contract.test_rendezvous import held_port
from tests.failure.over_torch import OVER_TORCH
from tests.failure.random_kills import check_ends, kill_one
from tests.failure.ranks import Ranks
from tests.failure.test_killed import killed_in, latest, until_two_are_gone, wait_for_a_live_rank
from tests.failure.test_killed_at_random import _mixed_calls
from tests.failure.test_queues import _reader_dies
from tests.failure.trials import assert_in_time
from tests.failure.worlds import DEADLINE_S, ROUTES, ROUTES_AND_TORCH, seeds_on_routes
from tests.sandbox import needs_filters, refusing

pytestmark = needs_filters

CODES = (errno.ENOSYS, errno.EPERM)


def without(code: int, function: Callable[..., Any], *args: Any) -> Any:
    try:
        os.pidfd_open(os.getpid())
    except OSError:
        pass
    else:
        return refusing(["pidfd_open"], code, without, code, function, *args)
    return function(*args)


@pytest.mark.parametrize("route", ROUTES_AND_TORCH)
@pytest.mark.parametrize("code", CODES)
def test_row_57_rank_3_is_killed(ranks: Ranks, tmp_path: Path, code: int, route: str) -> None:
    def trial(folder: Path) -> float:
        results = ranks.survivors(without, code, killed_in, "all_reduce", route, [3], str(folder), timeout_s=DEADLINE_S)
        return latest(ranks, results, [3], folder, "0" if route == OVER_TORCH else "tp:0")

    assert_in_time(trial, tmp_path, before=ranks.kill)


@pytest.mark.parametrize("route", ROUTES)
def test_row_57_rank_0_which_serves_the_store_is_killed(ranks: Ranks, tmp_path: Path, route: str) -> None:
    def trial(folder: Path) -> float:
        with held_port() as port:
            results = ranks.survivors(
                without, CODES[0], killed_in, "all_reduce", route, [0], str(folder), port, timeout_s=DEADLINE_S
            )
        return latest(ranks, results, [0], folder)

    assert_in_time(trial, tmp_path, before=ranks.kill)


@pytest.mark.parametrize(("operation", "route"), [
    ("all_reduce of 4 MiB", ROUTES[0]), ("send and recv", ROUTES[1]), ("send_tensor_dict", ROUTES[0]),
])  # fmt: skip
def test_row_57_in_other_operations(ranks: Ranks, tmp_path: Path, operation: str, route: str) -> None:
    def trial(folder: Path) -> float:
        results = ranks.survivors(
            without, CODES[0], killed_in, operation, route, [2], str(folder), timeout_s=DEADLINE_S
        )
        return latest(ranks, results, [2], folder)

    assert_in_time(trial, tmp_path, before=ranks.kill)


@pytest.mark.parametrize("route", ROUTES)
def test_row_57_while_waiting_for_a_live_rank(ranks: Ranks, tmp_path: Path, route: str) -> None:
    def trial(folder: Path) -> float:
        results = ranks.survivors(
            without, CODES[1], wait_for_a_live_rank, "recv", route, str(folder), timeout_s=DEADLINE_S
        )
        told, leaving_s = results[0]
        assert told.outcome.kind == "PeerDiedError" and told.outcome.suspect_ranks == (3,), told
        return max(told.at_s - float((folder / "3").read_text()), leaving_s)

    assert_in_time(trial, tmp_path, before=ranks.kill)


def _seen_by_the_library_alone(folder: str) -> Any:
    Watcher._take_in = lambda self, change: None  # type: ignore[method-assign]
    return _reader_dies("one message", folder)


@pytest.mark.over("shared memory")
def test_row_57_the_reader_dies_and_no_thread_of_python_sees_it(ranks: Ranks, tmp_path: Path) -> None:
    def trial(folder: Path) -> float:
        results = ranks.survivors(without, CODES[1], _seen_by_the_library_alone, str(folder), timeout_s=DEADLINE_S)
        outcome, at_s = results[0]
        assert outcome.kind == "PeerDiedError" and outcome.suspect_ranks == (1,), outcome
        return at_s - float((folder / "1").read_text())

    assert_in_time(trial, tmp_path, before=ranks.kill)


@pytest.mark.parametrize("seed", seeds_on_routes(2))
def test_row_57_killed_amid_any_call(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    def trial(folder: Path) -> float:
        ranks.begin(without, CODES[seed], _mixed_calls, ROUTES[seed], seed, str(folder))
        victim, killed_s = kill_one(ranks, seed, folder)
        return check_ends(ranks, ranks.finish(DEADLINE_S), victim, killed_s)

    assert_in_time(trial, tmp_path, before=ranks.kill)


def test_two_that_are_killed_together_are_named_together(ranks: Ranks, tmp_path: Path) -> None:
    def trial(folder: Path) -> float:
        ranks.begin(without, CODES[0], until_two_are_gone, "all_reduce", ROUTES[0], str(folder))
        until = time.monotonic() + DEADLINE_S / 2
        while len(list(folder.iterdir())) < 4 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.05)
        os.killpg(ranks.pids[1], 9)
        killed_s = time.monotonic()
        results = ranks.finish(DEADLINE_S)
        assert all(set(told.outcome.suspect_ranks) == {1, 3} for told in results.values()), results
        return max(told.at_s - killed_s for told in results.values())

    assert_in_time(trial, tmp_path, before=ranks.kill)
