"""Waits in shared memory end in time while another thread holds the interpreter lock."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path

import pytest
import torch

import parallel_state as ps
from device_communicators.liveness.health import Watcher
from tests.contract.attempts import Outcome, attempt
from tests.failure.ranks import Ranks
from tests.failure.trials import assert_in_time
from tests.failure.worlds import DEADLINE_S, LONG_TIMEOUT_S, kill_me, world_over

pytestmark = pytest.mark.side_by_side
T_S, BEGIN_S, HELD_S = 2.0, 0.3, 4.0


def _hold_the_lock_soon() -> None:
    def hold() -> None:
        time.sleep(BEGIN_S)
        ctypes.PyDLL(None).usleep(int(HELD_S * 1e6))

    threading.Thread(target=hold).start()


def _waited_s(group: ps.GroupCoordinator) -> float:
    collectives = group.context.host_memory.collectives
    words = (ctypes.c_int64 * 256)()
    collectives.library.ps_group_failure(collectives.number, words)
    return words[1] / 1e6


def _until_the_deadline() -> tuple[Outcome, float]:
    with world_over("shared memory", timeout_s=T_S) as group:
        group.barrier()
        if group.rank == 0:
            _hold_the_lock_soon()
        else:
            time.sleep(T_S + 0.5 if group.rank == 3 else BEGIN_S + HELD_S + 1.0)
        if group.rank in (1, 2):
            return Outcome("absent", "", 0.0), 0.0
        told = attempt(group.all_reduce, torch.ones(3))
        waited_s = _waited_s(group)
        if group.rank == 3:
            time.sleep(HELD_S)
        return told, waited_s


def test_a_wait_ends_at_its_deadline(ranks: Ranks, tmp_path: Path) -> None:
    def trial(_: Path) -> float:
        found = ranks.survivors(_until_the_deadline, timeout_s=DEADLINE_S)
        (at_0, waited_s), (at_3, _) = found[0], found[3]
        assert at_0.kind == "CollectiveTimeoutError", at_0
        assert "global rank 0 gave up" in at_3.text, at_3
        return max(waited_s - T_S, at_3.seconds)

    assert_in_time(trial, tmp_path)


def _until_a_death(folder: str, how: str) -> tuple[Outcome, float] | None:
    with pytest.MonkeyPatch.context() as patch:
        if how == "told by neighbours" and os.environ["RANK"] == "0":
            patch.setattr(Watcher, "end_waits_of", lambda *_: None)
        with world_over("shared memory", timeout_s=LONG_TIMEOUT_S) as group:
            group.barrier()
            if group.rank == 2:
                time.sleep(2 * BEGIN_S)
                Path(folder, "killed").write_text(repr(time.monotonic()), encoding="utf-8")
                kill_me()
            if group.rank:
                time.sleep(BEGIN_S + HELD_S + 1.0)
                return None
            if how == "lock held":
                _hold_the_lock_soon()
            started = time.monotonic()
            told = attempt(group.all_reduce, torch.ones(3))
            killed = float(Path(folder, "killed").read_text(encoding="utf-8"))
            return told, started + _waited_s(group) - killed


@pytest.mark.parametrize("how", ["lock held", "told by neighbours"])
def test_a_wait_ends_at_a_death(ranks: Ranks, tmp_path: Path, how: str) -> None:
    def trial(folder: Path) -> float:
        found = ranks.survivors(_until_a_death, str(folder), how, timeout_s=DEADLINE_S)
        told, late_s = found[0]
        assert told.kind == "PeerDiedError" and told.suspect_ranks == (2,), told
        return late_s

    assert_in_time(trial, tmp_path)
