"""Row 46 of docs/failures.md: the other rows for torch.distributed calls on backend "parallel_state"."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parallel_state as ps
from device_communicators.base.torch_internals import backend_of
from device_communicators.c10d import creation
from tests.contract.attempts import Outcome, attempt
from tests.contract.test_rendezvous import held_port
from tests.extent import LONG
from tests.failure.domains import Trial, results_in, run_to_the_bound, run_trials
from tests.failure.over_torch import OVER_TORCH, OverTorch, torch_world
from tests.failure.ranks import Ranks
from tests.failure.test_killed import (
    LOOPS_S,
    POISONED_WITHIN_S,
    check_elapsed_in,
    check_row_04,
    check_row_16,
    killed_in,
    latest,
)
from tests.failure.test_mismatches import PAIRS, ROWS, calls_over, check_row_11, check_rows_06_to_10, pairs_over
from tests.failure.test_other_calls import ARGUMENTS, ODD, wrong
from tests.failure.test_stopped import all_but, check_row_15
from tests.failure.trials import assert_in_time, folder_of_results, late
from tests.failure.worlds import (
    DEADLINE_S,
    LONG_TIMEOUT_S,
    OPERATIONS,
    TIMEOUT_S,
    Told,
    calls_of_all,
    facts_of,
    kill_me,
    some,
    until_it_fails,
)

pytestmark = pytest.mark.over("shared memory")
HERE = tuple(name for name in OPERATIONS if name not in ("all_reduce_add_rms_norm", "send_tensor_dict"))
DEFAULT = "0"


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    creation.load()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    pool = Ranks(4)
    pool.run(int, timeout_s=DEADLINE_S)
    yield pool
    pool.kill()


@pytest.mark.parametrize("victim", [3, 0])
def test_row_46_as_rows_01_and_02_a_rank_is_killed(ranks: Ranks, tmp_path: Path, victim: int) -> None:
    def trial(folder: Path) -> float:
        with held_port() as port:
            store = port if victim == 0 else None
            results = ranks.survivors(
                killed_in, "all_reduce", OVER_TORCH, [victim], str(folder), store, timeout_s=DEADLINE_S
            )
        return latest(ranks, results, [victim], folder, DEFAULT)

    assert_in_time(trial, tmp_path, before=ranks.kill)


@pytest.mark.parametrize("operation", HERE)
def test_row_46_as_row_03_in_every_operation(ranks: Ranks, tmp_path: Path, operation: str) -> None:
    victim = HERE.index(operation) % 4

    def trial(folder: Path) -> float:
        results = ranks.survivors(killed_in, operation, OVER_TORCH, [victim], str(folder), timeout_s=DEADLINE_S)
        return latest(ranks, results, [victim], folder, DEFAULT)

    assert_in_time(trial, tmp_path, before=ranks.kill)


def test_row_46_as_row_03_errors_count_from_the_begin_of_their_calls(ranks: Ranks, tmp_path: Path) -> None:
    check_elapsed_in(ranks, HERE, OVER_TORCH, tmp_path)


WAITS = (
    "recv", "recv of an object", "irecv", "broadcast of an object", "send, ring full", "all_reduce", "all_reduce_async",
    "barrier", "all_gather of an object",
)  # fmt: skip


@pytest.mark.parametrize("waits", WAITS)
def test_row_46_as_row_04_while_waiting_for_a_live_rank(ranks: Ranks, tmp_path: Path, waits: str) -> None:
    check_row_04(ranks, tmp_path, waits, OVER_TORCH)


def _in_a_chain(joined: bool, folder: str) -> tuple[Told, float] | None:
    """Each rank waits for the next one in another group; rank 3 dies. With `joined`, rank 2 waits in one of
    our groups."""
    with torch_world(timeout_s=LONG_TIMEOUT_S) as world:
        pairs = [dist.new_group([first, first + 1]) for first in range(3)]
        if joined:
            ps.initialize_model_parallel(pipeline_model_parallel_size=2)
        world.barrier()
        told = None
        if world.rank == 3:
            time.sleep(LOOPS_S)
            Path(folder, "3").write_text(repr(time.monotonic()), encoding="utf-8")
            kill_me()
        elif joined and world.rank == 1:
            group = ps.get_pp_group()
            told = until_it_fails(group, lambda: group.recv((4,), torch.float32, 1))
        else:
            group = OverTorch(pairs[world.rank])
            told = until_it_fails(group, lambda: group.recv((4,), torch.float32, 1))
        left = time.monotonic()
        if joined:
            ps.destroy_distributed_environment()
    return told, time.monotonic() - left


@pytest.mark.parametrize("joined", [False, True])
def test_a_death_ends_waits_of_groups_that_it_is_not_in(ranks: Ranks, tmp_path: Path, joined: bool) -> None:
    def trial(folder: Path) -> float:
        results = ranks.survivors(_in_a_chain, joined, str(folder), timeout_s=DEADLINE_S)
        assert sorted(results) == [0, 1, 2]
        for told, _ in results.values():
            assert told.outcome.kind == "PeerDiedError", told
            assert told.outcome.suspect_ranks == (3,), told
            assert told.again.kind == "GroupFailedError", told
        killed_s = float((folder / "3").read_text())
        return max(max(told.at_s - killed_s, leaving_s) for told, leaving_s in results.values())

    assert_in_time(trial, tmp_path, before=ranks.kill)


@pytest.fixture(scope="module")
def rows_that_differ(four: Ranks) -> Any:
    return calls_over(four, OVER_TORCH)


@pytest.mark.parametrize("name", ROWS)
def test_row_46_as_rows_06_to_10_calls_that_differ(rows_that_differ: Any, name: str) -> None:
    check_rows_06_to_10(rows_that_differ, name, OVER_TORCH)


@pytest.fixture(scope="module")
def transfers_that_differ(four: Ranks) -> Any:
    return pairs_over(four, OVER_TORCH)


@pytest.mark.parametrize("name", PAIRS)
def test_row_46_as_row_11_a_receiver_that_expects_something_else(transfers_that_differ: Any, name: str) -> None:
    check_row_11(transfers_that_differ, name, OVER_TORCH)


def test_row_46_as_row_15_a_rank_is_stopped_and_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    check_row_15(ranks, tmp_path, OVER_TORCH)


@pytest.mark.parametrize("of_calls", [False, True], ids=["set on the group", "of each call"])
def test_row_46_as_row_15_with_a_timeout_of_each_rank(ranks: Ranks, tmp_path: Path, of_calls: bool) -> None:
    check_row_15(ranks, tmp_path, OVER_TORCH, all_but(3), of_calls)


@pytest.mark.parametrize("operation", some(["all_reduce", "broadcast_object", "send_object"], 1))
def test_row_46_as_row_16_two_ranks_die_together(ranks: Ranks, tmp_path: Path, operation: str) -> None:
    check_row_16(ranks, tmp_path, operation, OVER_TORCH)


def _after_a_failure() -> dict[str, float]:
    """Returns the seconds that each later call takes: the fastest of five, because the machine may be busy."""
    with torch_world(timeout_s=LONG_TIMEOUT_S) as world:
        pair, other = OverTorch(dist.new_group([0, 1])), OverTorch(dist.new_group([2, 3]))
        world.all_reduce(torch.ones(1))
        if world.rank == 3:
            kill_me()
        told = until_it_fails(world, lambda: world.all_reduce(torch.ones(1)))
        assert told.outcome.kind == "PeerDiedError", told
        backend = backend_of(world.group, torch.device("cpu"))
        if hasattr(backend, "get_error"):  # torch 2.13 has it in C++ only
            assert backend.get_error() == torch._C._distributed_c10d.ErrorType.REMOTE_ERROR  # type: ignore[attr-defined]
        first = attempt((pair if world.rank < 2 else other).barrier)
        assert (first.kind, first.suspect_ranks) == ("PeerDiedError", (3,)), first
        found = {}
        for name, again in calls_of_all(world).items():
            if name not in HERE or "MiB" in name:
                continue
            outcomes = [attempt(again) for _ in range(5)]
            assert {outcome.kind for outcome in outcomes} == {"GroupFailedError"}, (name, outcomes)
            assert "has ended" in outcomes[0].text
            found[name] = min(outcome.seconds for outcome in outcomes)
        assert facts_of(world.first_failure)["suspect_ranks"] == (3,)
    return found


def test_row_46_as_row_17_later_calls_fail_at_once(ranks: Ranks) -> None:
    results = ranks.survivors(_after_a_failure, timeout_s=DEADLINE_S)
    assert sorted(results) == [0, 1, 2]
    for found in results.values():
        assert max(found.values()) < POISONED_WITHIN_S, found


DIFFERENT = (
    "sizes of all_gatherv", "order of the sizes of all_gatherv", "dst of gather", "the odd rank's dst of gather",
    "src of scatter", "splits of all_to_all", "shape of all_reduce", "dims of all_reduce_", "dtype of all_gather",
    "dtype of broadcast", "src of broadcast",
)  # fmt: skip


def _differ() -> dict[str, Outcome]:
    found = {}
    with torch_world(timeout_s=TIMEOUT_S) as world:
        for name in DIFFERENT:
            usual, other, _ = ARGUMENTS[name]
            group = OverTorch(dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)))
            told = attempt(other if world.rank == ODD else usual, group)
            found[name] = attempt(group.all_reduce, torch.ones(3)) if told.kind == "ok" else told
    return found


def test_row_46_as_row_40_arguments_that_differ(four: Ranks) -> None:
    told = four.run(_differ, timeout_s=DEADLINE_S)
    found: list[str] = []
    for name in DIFFERENT:
        words = ("parts of", "parts of") if "all_gatherv" in name else ARGUMENTS[name][2]
        found += [f"{name}: {text}" for text in wrong([outcomes[name] for outcomes in told], words)]
    assert not found, "\n".join(found)


def test_row_46_as_rows_05_and_39_random_programs_and_kills(tmp_path: Path) -> None:
    """10 seeds; with FAILURE_TESTS=long 200 of up to 8 ranks."""
    if LONG:
        folder = folder_of_results(tmp_path)
        run_trials(OVER_TORCH, range(200), folder)
        trials = results_in(folder, OVER_TORCH)
    else:

        def run(seed: int) -> Trial:
            (tmp_path / str(seed)).mkdir()
            return run_to_the_bound(OVER_TORCH, seed, tmp_path / str(seed), most_ranks=4)

        with ThreadPoolExecutor(2) as threads:
            trials = list(threads.map(run, range(10)))
    wrong_ones = [f"seed {trial.seed}, {trial.layout}: {text}" for trial in trials for text in trial.wrong]
    assert not wrong_ones, "\n".join(wrong_ones)
    assert not late((trial.seed, trial.latest_s or [trial.last_s]) for trial in trials)
