from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.contract.attempts import Outcome, attempt
from tests.failure.ranks import KILLED, Ranks
from tests.failure.worlds import DEADLINE_S

STAY_S = 15.0
LATEST_S = 0.25


class End(NamedTuple):
    outcome: Outcome
    at_s: float
    calls: int


def until_killed(folder: str, rank: int, calls: Callable[[int], Callable[[], Any]]) -> End:
    """Makes calls until one fails. Then it stays until all survivors' calls have failed, or for `STAY_S`: its
    exit would inform them."""
    calls(0)()
    Path(folder, f"begun-{rank}").touch()
    until, number, outcome = time.monotonic() + DEADLINE_S / 2, 0, Outcome("ok", "", 0.0)
    while outcome.kind == "ok" and time.monotonic() < until:
        number += 1
        outcome = attempt(calls(number))
    end = End(outcome, time.monotonic(), number)
    Path(folder, f"ended-{rank}").touch()
    while len(list(Path(folder).glob("ended-*"))) < 3 and time.monotonic() < end.at_s + STAY_S:
        time.sleep(0.005)
    return end


def kill_one(ranks: Ranks, seed: int, folder: Path) -> tuple[int, float]:
    chance = random.Random(seed)
    victim, delay_s = chance.randrange(4), chance.uniform(0.0, LATEST_S)
    until = time.monotonic() + DEADLINE_S / 2
    while len(list(folder.glob("begun-*"))) < 4 and time.monotonic() < until:
        time.sleep(0.002)
    time.sleep(delay_s)
    os.kill(ranks.pids[victim], signal.SIGKILL)
    return victim, time.monotonic()


def check_ends(ranks: Ranks, results: dict[int, tuple[End, float]], victim: int, killed_s: float) -> float:
    assert ranks.exit_code(victim) == KILLED
    assert sorted(results) == [rank for rank in range(4) if rank != victim]
    for rank, (end, _) in results.items():
        assert end.outcome.kind == "PeerDiedError", f"rank {rank}, call {end.calls}: {end}"
        assert set(end.outcome.suspect_ranks) == {victim}, f"rank {rank}, call {end.calls}: {end}"
    return max(max(end.at_s - killed_s, leaving_s) for end, leaving_s in results.values())
