"""A world over a default group of our backend detects deaths by that group's control plane, without a second one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import parallel_state as ps
from tests.contract.attempts import Outcome, attempt
from tests.failure.over_torch import torch_world
from tests.failure.ranks import Ranks
from tests.failure.worlds import DEADLINE_S, kill_me

pytestmark = pytest.mark.side_by_side
SOON_S = 2.0
LONG_S = DEADLINE_S / 2


class Found(NamedTuple):
    told: Outcome
    own_sum: float
    again: Outcome
    planes: int
    last_sum: float


def _threads() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in Path("/proc/self/task").glob("*/comm")]


def _start_twice() -> Found:
    with torch_world() as own, pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":

            def fail(*args: Any, **kwargs: Any) -> None:
                raise ZeroDivisionError("the reason")

            patch.setattr(ps.state, "init_world_group", fail)
        told = attempt(ps.init_distributed_environment, timeout=LONG_S)
        patch.undo()
        own_sum = own.all_reduce(torch.ones(1)).item()
        again = attempt(ps.init_distributed_environment, timeout=LONG_S)
        planes = _threads().count("ps-control\n")
        ps.destroy_distributed_environment()
        return Found(told, own_sum, again, planes, own.all_reduce(torch.ones(1)).item())


def test_a_start_that_fails_ends_on_all_ranks_and_leaves_the_program_s_group_usable(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(_start_twice, timeout_s=DEADLINE_S)):
        assert found.told.kind == ("ZeroDivisionError" if rank == 1 else "CommunicationError"), found
        if rank != 1:
            assert found.told.suspect_ranks == (1,), found
            assert "gave up its start (ZeroDivisionError: the reason)" in found.told.text, found
            assert found.told.seconds < LONG_S, found
        assert found.again.kind == "ok", found
        assert (found.own_sum, found.last_sum, found.planes) == (4.0, 4.0, 1), found


def _die_in_the_world() -> tuple[Outcome, Outcome]:
    with torch_world() as own:
        ps.init_distributed_environment(timeout=LONG_S)
        if os.environ["RANK"] == "2":
            kill_me()
        told = attempt(ps.get_world_group().barrier)
        of_own = attempt(own.barrier)
        ps.destroy_distributed_environment()
        return told, of_own


def test_a_killed_rank_is_named_by_the_world_and_by_the_program_s_group(ranks: Ranks) -> None:
    for told, of_own in ranks.survivors(_die_in_the_world, timeout_s=DEADLINE_S).values():
        assert told.kind == "PeerDiedError" and told.suspect_ranks == (2,), told
        assert told.seconds < SOON_S, told
        assert of_own.kind == "PeerDiedError" and of_own.suspect_ranks == (2,), of_own
