"""Rows 9 and 40 of docs/failures.md over two hosts. The odd ranks are a whole host, its lead, or another
rank."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

import parallel_state as ps
from tests.contract.attempts import Outcome
from tests.extent import LONG
from tests.failure.test_other_calls import ARGUMENTS as USUAL_ARGUMENTS
from tests.failure.test_other_calls import BATCH, DEADLINE_S, METHODS, PAIRS, Call, apart_by, in_a_group, names, wrong
from tests.failure.worlds import world_over
from tests.hosts import HostRanks, Hosts, problem

TIMEOUT_S = 12.0
AT_ONCE_S = 3.0
ODD = ((2, 3), (2,), (3,))
STEPS = (3, 13, 17)


def _gathered(first: int, group: ps.GroupCoordinator) -> object:
    usual = max(first, 4) if first < 5 else 90_000
    return group.all_gatherv(torch.ones(usual), 0, [first, usual, usual, usual])


def _pool(placement: tuple[int, ...]) -> Iterator[HostRanks]:
    reason = problem()
    if reason is not None:
        pytest.skip(f"no hosts can be made here: {reason}")
    with Hosts(max(placement) + 1) as hosts, hosts.ranks(placement) as pool:
        pool.run(int, timeout_s=DEADLINE_S)
        yield pool


@pytest.fixture(scope="module")
def ranks() -> Iterator[HostRanks]:
    yield from _pool((0, 0, 1, 1))


@pytest.fixture(scope="module")
def ranks_alone() -> Iterator[HostRanks]:
    yield from _pool((0, 1, 2, 3))


ARGUMENTS = {
    **USUAL_ARGUMENTS,
    # The odd rank may differ here, so its own part must be wrong on any.
    "sizes of all_gatherv": (partial(_gathered, 4), partial(_gathered, 3), ("all_gatherv", "all_gatherv")),
    "sizes of a large all_gatherv": (
        partial(_gathered, 90_000), partial(_gathered, 80_000), ("all_gatherv", "all_gatherv")),
    "sizes of reduce_scatterv": (
        lambda g: g.reduce_scatterv(torch.ones(16), 0, [4, 4, 4, 4]),
        lambda g: g.reduce_scatterv(torch.ones(16), 0, [3, 5, 4, 4]), ("reduce_scatterv", "reduce_scatterv")),
}  # fmt: skip


def _of(case: str | tuple[str, str]) -> tuple[Call, Call, tuple[str, str]]:
    return ARGUMENTS[case] if isinstance(case, str) else (METHODS[case[0]], METHODS[case[1]], names(case))


def _calls(cases: list[str | tuple[str, str]], odd: tuple[int, ...]) -> list[Outcome]:
    with world_over("shared memory", timeout_s=TIMEOUT_S) as world:
        return [in_a_group("shared memory", world, _of(case)[world.rank in odd]) for case in cases]


def _check(ranks: HostRanks, cases: list[str | tuple[str, str]], odd: tuple[int, ...]) -> None:
    told = ranks.run(_calls, cases, odd, timeout_s=DEADLINE_S)
    texts = []
    for case, *outcomes in zip(cases, *told, strict=True):
        texts += [f"{case}, {odd}: {text}" for text in wrong(outcomes, _of(case)[2])]
        late = {rank: round(each.seconds, 2) for rank, each in enumerate(outcomes) if each.seconds > AT_ONCE_S}
        texts += [f"{case}, {odd}: late {late}"] if late else []
    assert not texts, "\n".join(texts)


def _chosen(odd: tuple[int, ...]) -> list[tuple[str, str]]:
    # Started and blocking calls don't meet: see test_transfers_and_collectives.
    pairs = PAIRS if LONG else apart_by(STEPS[ODD.index(odd)])[ODD.index(odd) :: 2]
    return [pair for pair in pairs if pair[0].endswith("_async") == pair[1].endswith("_async")]


BATCHES = [(odd, start) for odd in ODD for start in range(0, len(_chosen(odd)), BATCH)]


@pytest.mark.parametrize(("odd", "start"), BATCHES, ids=str)
def test_every_call_against_every_other(ranks: HostRanks, odd: tuple[int, ...], start: int) -> None:
    _check(ranks, list(_chosen(odd)[start : start + BATCH]), odd)


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_arguments_that_differ(ranks: HostRanks, odd: tuple[int, ...]) -> None:
    _check(ranks, list(ARGUMENTS)[0 if LONG else ODD.index(odd) :: 1 if LONG else len(ODD)], odd)


def test_arguments_that_differ_where_each_rank_is_alone_on_its_host(ranks_alone: HostRanks) -> None:
    for odd in ODD if LONG else ODD[1:2]:
        _check(ranks_alone, list(ARGUMENTS), odd)
