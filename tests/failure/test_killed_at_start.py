"""Row 41 of docs/failures.md: SIGKILL at a random time of a start. 3 seeds a transport, 100 with
FAILURE_TESTS=long; the folder FAILURE_TRIALS keeps results. A rank that dies before its peers know its
process is reported as missing at the start's deadline. Other deaths are detected at once."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

import parallel_state as ps
from tests import hosts
from tests.contract.attempts import Outcome, attempt, attempt_in_turn, environment
from tests.extent import LONG
from tests.failure.ranks import Ranks, start_again
from tests.failure.trials import folder_of_results, keep, kept, late, median_of
from tests.workers import WorkerPool

SEEDS = 100 if LONG else 3
START_S = 8.0
TIMEOUT_S = 30.0
SOON_S = 1.0
SLACK_S = 2.0
DEADLINE_S = 60.0


def _start(shared_memory: str) -> float:
    began = time.monotonic()
    with environment(PARALLEL_STATE_SHARED_MEMORY=shared_memory):
        ps.init_distributed_environment(timeout=TIMEOUT_S)
        ps.initialize_model_parallel(2, 2)
        took_s = time.monotonic() - began
        ps.destroy_distributed_environment()
    return took_s


def _until_killed(folder: str, shared_memory: str) -> tuple[bool, Outcome, float, float]:
    started = False
    variables = {"PARALLEL_STATE_SHARED_MEMORY": shared_memory, "PARALLEL_STATE_START_TIMEOUT_S": str(START_S)}

    with environment(**variables):
        Path(folder, f"begun-{os.environ['RANK']}").touch()
        told = attempt_in_turn(
            lambda: ps.init_distributed_environment(timeout=TIMEOUT_S), lambda: ps.initialize_model_parallel(2, 2)
        )
        while told.kind == "ok":
            started = True
            told = attempt(ps.get_world_group().barrier)
        told_s = time.monotonic()
        ps.destroy_distributed_environment()
    return started, told, told_s, time.monotonic() - told_s


def _kill_one(pool: WorkerPool, chance: random.Random, folder: Path, shared_memory: str) -> float:
    longest_s = max(pool.run(_start, shared_memory, timeout_s=DEADLINE_S))
    victim, delay_s = chance.randrange(4), chance.uniform(0.0, 1.1 * longest_s)
    pool._begin(_until_killed, (str(folder), shared_memory), None)
    until = time.monotonic() + DEADLINE_S
    while len(list(folder.glob("begun-*"))) < 4 and time.monotonic() < until:
        time.sleep(0.001)
    time.sleep(delay_s)
    os.kill(pool._processes[victim].pid, signal.SIGKILL)
    killed_s = time.monotonic()
    try:
        results, errors = pool._collect(DEADLINE_S, DEADLINE_S)
    finally:
        pool.kill()
    assert sorted(errors) == [victim], errors
    latest_s = 0.0
    for rank, (started, told, told_s, leaving_s) in results.items():
        if started:
            continue
        where = f"rank {rank}, rank {victim} killed after {delay_s:.3f} of {longest_s:.3f} s: {told}"
        assert set(told.suspect_ranks) == {victim}, where
        assert not any(word in told.text for word in ("gloo/transport", ".cc:", "🔺")), where
        assert leaving_s < SOON_S + SLACK_S, f"{leaving_s:.1f} s to leave; {where}"
        if told.kind == "RendezvousError":
            assert "did not" in told.text or "refused" in told.text or "gave no verdict" in told.text, where
            assert told.seconds < START_S + SOON_S, where
        else:
            assert told.kind in ("PeerDiedError", "CollectiveTimeoutError"), where
            assert told_s - killed_s < START_S, where
            latest_s = max(latest_s, told_s - killed_s)
    return latest_s


@pytest.mark.side_by_side
@pytest.mark.parametrize("transport", ["shared memory", "connections", "two hosts"])
def test_row_41_killed_while_it_starts(
    transport: str, tmp_path: Path, record_testsuite_property: Callable[[str, object], None]
) -> None:
    problem = hosts.problem() if transport == "two hosts" else None
    if problem is not None:
        pytest.skip(f"two hosts can't be made: {problem}")
    shared_memory = "off" if transport == "connections" else "on"
    results = folder_of_results(tmp_path)
    with ExitStack() as stack:
        made = stack.enter_context(hosts.Hosts(2)) if transport == "two hosts" else None
        numbers = itertools.count()

        def run(seed: int) -> float:
            folder = tmp_path / f"trial-{next(numbers)}"
            folder.mkdir()
            pool: WorkerPool = Ranks(4) if made is None else made.ranks([0, 0, 1, 1])
            try:
                return _kill_one(pool, random.Random(f"{transport} {seed}"), folder, shared_memory)
            finally:
                pool.kill()

        def trial(seed: int) -> dict[str, object]:
            again = functools.partial(run, seed)
            return {"seed": seed, "latest_s": median_of(again, again())}

        stem = f"row-41-{transport.replace(' ', '-')}"
        for seed in range(SEEDS):
            keep(results, f"{stem}-{seed}", functools.partial(trial, seed))
    start_again()
    found = [(each["seed"], each["latest_s"]) for each in kept(results, stem)]
    record_testsuite_property(f"row 41, {transport}: told after s", found)
    assert not late(found)
