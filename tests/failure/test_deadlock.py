"""Row 42 of docs/failures.md: ranks wait for each other in different groups, or one has left the loop."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import parallel_state as ps
from tests.contract.attempts import Outcome, attempt, environment
from tests.failure.over_torch import OVER_TORCH
from tests.failure.ranks import Ranks
from tests.failure.trials import assert_in_time
from tests.failure.worlds import DEADLINE_S, ROUTES, ROUTES_AND_TORCH, settings_of, world_over

T_S, SOFT_S = 4.0, 2.0
WITHIN_S = T_S + 1.0


class Told(NamedTuple):
    outcome: Outcome
    log: list[str]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


@contextmanager
def _four_groups(route: str) -> Iterator[ps.GroupCoordinator]:
    with environment(**settings_of(route)):
        ps.init_distributed_environment(timeout=T_S)
        ps.initialize_model_parallel(2, 2)
    try:
        yield ps.get_world_group()
    finally:
        ps.destroy_distributed_environment()


def _in_a_loop(
    world: AbstractContextManager[ps.GroupCoordinator], folder: str, body: Callable[[ps.GroupCoordinator], Outcome]
) -> Told:
    lines = _Lines()
    logging.getLogger("parallel_state").addHandler(lines)
    try:
        with environment(PARALLEL_STATE_SLOW_S=str(SOFT_S)), world as group:
            group.barrier()
            outcome = body(group)
            Path(folder, str(group.rank)).touch()
            until = time.monotonic() + DEADLINE_S / 2
            while len(list(Path(folder).iterdir())) < 4 and time.monotonic() < until:
                time.sleep(0.01)
    finally:
        logging.getLogger("parallel_state").removeHandler(lines)
    return Told(outcome, lines.found)


DICT = {"x": torch.ones(6)}
SPEC = ps.TensorDictSpec.of(DICT)


def _across_groups(route: str, folder: str, call: str) -> Told:
    """Rank 0 waits for 1, 1 for 3, 3 for 2, and 2 for 0."""

    def body(_: ps.GroupCoordinator) -> Outcome:
        group = ps.get_tp_group() if ps.get_rank() in (0, 3) else ps.get_pp_group()
        other = 1 - group.rank_in_group
        for one in (ps.get_tp_group(), ps.get_pp_group()):  # opens the queues, so that C++ carries the next dict
            for src in (0, 1):
                if one.rank_in_group == src:
                    one.send_tensor_dict(DICT, spec=SPEC)
                else:
                    one.recv_tensor_dict(spec=SPEC)
        return attempt({
            "all_reduce": lambda: group.all_reduce(torch.ones(6)),
            "recv": lambda: group.recv((6,), torch.float32, other),
            "recv_tensor_dict": lambda: group.recv_tensor_dict(other),
            "recv_tensor_dict with a spec": lambda: group.recv_tensor_dict(other, spec=SPEC),
        }[call])  # fmt: skip

    return _in_a_loop(_four_groups(route), folder, body)


def _evaluate(seconds: float) -> Outcome:
    time.sleep(seconds)
    return Outcome("ok", "", 0.0)


def _one_leaves_the_loop(route: str, folder: str, longer_s: Sequence[float], of_calls: bool) -> Told:
    def body(group: ps.GroupCoordinator) -> Outcome:
        with contextlib.ExitStack() as stack:
            if of_calls:
                stack.enter_context(group.within(T_S + longer_s[group.rank]))
            elif any(longer_s):
                group.timeout = T_S + longer_s[group.rank]
            for _ in range(3):
                group.all_reduce(torch.ones(6))
            return _evaluate(T_S + 1.0) if group.rank == 3 else attempt(group.all_reduce, torch.ones(6))

    return _in_a_loop(world_over(route, timeout_s=T_S), folder, body)


WAITS_FOR = {0: ("tp", 1, "pp"), 1: ("pp", 3, "tp"), 3: ("tp", 2, "pp"), 2: ("pp", 0, "tp")}


def _line_of_wait(log: list[str]) -> str:
    return next((line for line in log if "has waited for" in line), "")


def _latest(told: list[Told]) -> float:
    return max(outcome.seconds for outcome, _ in told)


@pytest.mark.side_by_side
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("call", ["all_reduce", "recv", "recv_tensor_dict", "recv_tensor_dict with a spec"])
def test_row_42_ranks_wait_in_different_groups(ranks: Ranks, tmp_path: Path, route: str, call: str) -> None:
    def trial(folder: Path) -> float:
        told = ranks.run(_across_groups, route, str(folder), call, timeout_s=DEADLINE_S)
        if _latest(told) >= WITHIN_S:
            return _latest(told)
        for rank, (outcome, log) in enumerate(told):
            group, awaited, other = WAITS_FOR[rank]
            does = rf"global rank {awaited} is in {call}\b.* of group '{other}:"
            assert outcome.kind == "CollectiveTimeoutError", (rank, outcome)
            assert awaited in outcome.suspect_ranks, (rank, outcome)
            line = _line_of_wait(log)
            if not re.search(does, outcome.text) or not re.search(does, line):
                return WITHIN_S  # a busy rank's state came after 0.3 s; if it never comes, most trials are late
            assert re.search(rf"^{call}.* of group '{group}:\d+'.* has waited for [2-4]\.\d s \(timeout 4 s\)", line)
        return _latest(told)

    assert_in_time(trial, tmp_path, WITHIN_S, before=ranks.kill)


@pytest.mark.side_by_side
@pytest.mark.parametrize("route", ROUTES_AND_TORCH)
def test_row_42_one_has_left_the_loop(ranks: Ranks, tmp_path: Path, route: str) -> None:
    _check_that_one_has_left(ranks, tmp_path, route)


@pytest.mark.side_by_side
@pytest.mark.parametrize("route", ROUTES_AND_TORCH)
def test_row_42_one_has_left_the_loop_with_a_timeout_of_each_rank(ranks: Ranks, tmp_path: Path, route: str) -> None:
    _check_that_one_has_left(ranks, tmp_path, route, (5.0, 0.0, 3.0, 0.0))


@pytest.mark.side_by_side
@pytest.mark.parametrize("route", ROUTES_AND_TORCH)
def test_row_42_one_has_left_the_loop_with_a_timeout_of_each_call(ranks: Ranks, tmp_path: Path, route: str) -> None:
    _check_that_one_has_left(ranks, tmp_path, route, (5.0, 0.0, 3.0, 0.0), of_calls=True)


def _check_that_one_has_left(
    ranks: Ranks, tmp_path: Path, route: str, longer_s: Sequence[float] = (0.0,) * 4, of_calls: bool = False
) -> None:
    def trial(folder: Path) -> float:
        *told, _ = ranks.run(_one_leaves_the_loop, route, str(folder), longer_s, of_calls, timeout_s=DEADLINE_S)
        does = r"global rank 3 is in no call of a group, at test_deadlock\.py:\d+ in _evaluate, called by test_deadlock"
        if _latest(told) >= WITHIN_S:
            return _latest(told)
        for rank, (outcome, log) in enumerate(told):
            assert outcome.kind == "CollectiveTimeoutError", (rank, outcome)
            assert outcome.suspect_ranks == (3,), (rank, outcome)
            line = _line_of_wait(log)
            if not (route == OVER_TORCH or re.search(does, outcome.text)) or not re.search(does, line):
                return WITHIN_S
            assert "global rank 0 is" not in line and "global rank 1 is" not in line, (rank, line)
        return _latest(told)

    assert_in_time(trial, tmp_path, WITHIN_S, before=ranks.kill)
