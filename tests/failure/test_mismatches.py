"""Rows 6 to 12 of docs/failures.md: ranks whose calls differ all raise, name both calls, and leave tensors
untouched. Of four ranks, rank 2 makes the other call."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import parallel_state as ps
from tests.contract.attempts import Outcome, attempt, environment
from tests.failure.over_torch import OVER_TORCH, OverTorch
from tests.failure.ranks import Ranks
from tests.failure.worlds import DEADLINE_S, ROUTES, TIMEOUT_S, settings_of, world_over

OTHER = 2
SMALL, LARGE = 10, 50_000
PARTS = "row 6: parts of an all_to_all"
ONE_WAY = "row 10"
"""A broadcast's source doesn't wait. A rank that got its data continues; its next call fails."""

Call = Callable[[ps.GroupCoordinator, Tensor], object]


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    pool = Ranks(4)
    pool.run(int, timeout_s=DEADLINE_S)
    yield pool
    pool.kill()


def _reduce(group: ps.GroupCoordinator, x: Tensor) -> object:
    return group.all_reduce_(x)


def _twice(group: ps.GroupCoordinator, x: Tensor) -> object:
    return group.all_reduce_(torch.cat([x, x]))


def _scattered(group: ps.GroupCoordinator, splits: list[int]) -> object:
    return group.all_to_all(torch.ones(sum(splits)), 0, output_split_sizes=[1, 1, 1, 1], input_split_sizes=splits)


ROWS: dict[str, tuple[str, Call, Call, tuple[str, str]]] = {
    "row 6: elements": ("small", _reduce, _twice, ("10 ×", "20 ×")),
    "row 6: elements, of large ones": ("large", _reduce, _twice, ("50000 ×", "100000 ×")),
    "row 6: elements, one of them none": (
        "small", lambda g, x: g.all_gather(x), lambda g, x: g.all_gather(x[:0]), ("all_gather", "all_gather")),
    "row 6: elements, started": (
        "large", lambda g, x: g.all_reduce_async(x).wait(), lambda g, x: g.all_reduce_async(x[:7]).wait(),
        ("50000 ×", "7 ×")),
    PARTS: (
        "small", lambda g, x: _scattered(g, [1, 1, 1, 1]), lambda g, x: _scattered(g, [1, 2, 1, 0]),
        ("2 rows", "expects 1")),
    "row 6: even parts of an all_to_all": (
        "small", lambda g, x: g.all_to_all(x[:4]), lambda g, x: g.all_to_all(x[:8]), ("all_to_all", "expects")),
    "row 7: dtypes": ("small", _reduce, lambda g, x: g.all_reduce_(x.int()), ("float32", "int32")),
    "row 7: dtypes, of large ones": ("large", _reduce, lambda g, x: g.all_reduce_(x.int()), ("float32", "int32")),
    "row 8: reductions": ("small", _reduce, lambda g, x: g.all_reduce_(x, "max"), ("sum", "max")),
    "row 9: all_reduce and broadcast": ("small", _reduce, lambda g, x: g.broadcast(x), ("all_reduce", "broadcast")),
    "row 9: all_reduce and barrier": ("large", _reduce, lambda g, x: g.barrier(), ("all_reduce", "barrier")),
    "row 9: all_gather and all_reduce": ("large", lambda g, x: g.all_gather(x), _reduce, ("all_gather", "all_reduce")),
    "row 10: sources": (
        "small", lambda g, x: g.broadcast_(x, 0), lambda g, x: g.broadcast_(x, 1), ("broadcast", "broadcast")),
    "row 10: sources, of large ones": (
        "large", lambda g, x: g.broadcast_(x, 0), lambda g, x: g.broadcast_(x, 1), ("broadcast", "broadcast")),
    "row 10: sources of a scatter": (
        "small", lambda g, x: g.scatter(x.repeat(4) if g.rank == 0 else None, 0, size=x.shape, dtype=x.dtype),
        lambda g, x: g.scatter(x.repeat(4) if g.rank == 1 else None, 1, size=x.shape, dtype=x.dtype),
        ("scatter", "scatter")),
}  # fmt: skip


@contextmanager
def _groups(route: str) -> Iterator[Callable[[], Any]]:
    with world_over(route) as world:

        def new_group() -> Any:
            if route == OVER_TORCH:
                group: Any = OverTorch(dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)))
            else:
                group = world.make_sub_group(range(4))
            group.barrier()
            world.barrier()  # else the others' next call could fail the group while this rank is still in its barrier
            return group

        with environment(**({} if route == OVER_TORCH else settings_of(route))):
            yield new_group


def _differ(route: str) -> dict[str, tuple[Outcome, Outcome, bool, bool]]:
    found = {}
    with _groups(route) as new_group:
        for name, (size, usual, other, _) in ROWS.items():
            group = new_group()
            x = torch.full((SMALL if size == "small" else LARGE,), float(group.rank + 1))
            before = x.clone()
            told = attempt(other if group.rank == OTHER else usual, group, x)
            again = attempt(group.all_reduce, torch.ones(3))
            found[name] = told, again, torch.equal(x, before), "scatter" in name or bool((x == 1).all())
    return found


def calls_over(four: Ranks, route: str) -> list[dict[str, tuple[Outcome, Outcome, bool, bool]]]:
    return four.run(_differ, route, timeout_s=len(ROWS) * DEADLINE_S / 4)


@pytest.fixture(scope="module")
def differ(four: Ranks) -> Callable[[str], list[dict[str, tuple[Outcome, Outcome, bool, bool]]]]:
    return functools.cache(lambda route: calls_over(four, route))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ROWS)
def test_rows_06_to_10_calls_that_differ(differ: Callable[[str], Any], name: str, route: str) -> None:
    check_rows_06_to_10(differ(route), name, route)


def check_rows_06_to_10(found: list[dict[str, tuple[Outcome, Outcome, bool, bool]]], name: str, route: str) -> None:
    for rank, (told, again, untouched, right) in enumerate(each[name] for each in found):
        if name.startswith(ONE_WAY) and rank != OTHER and told.kind == "ok":
            assert again.kind == "CollectiveMismatchError", again
            assert right, "who came through must have what rank 0 sent"
            continue
        assert told.kind == "CollectiveMismatchError", told
        if name != PARTS:
            assert all(word in told.text for word in ROWS[name][3]), told
        assert told.suspect_ranks, told
        assert told.seconds < TIMEOUT_S, told
        assert again.kind == "GroupFailedError", again
        assert untouched


PAIRS: dict[str, tuple[int, int, torch.dtype]] = {
    "a larger buffer": (SMALL, SMALL + 1, torch.float32),
    "a smaller buffer": (SMALL, SMALL - 1, torch.float32),
    "another dtype": (SMALL, SMALL, torch.int32),
    "a larger buffer, of large ones": (LARGE, LARGE + 1, torch.float32),
    "a smaller buffer, of large ones": (LARGE, LARGE - 1, torch.float32),
    "another dtype, of large ones": (LARGE, LARGE, torch.int32),
    "a small buffer for much": (LARGE, SMALL, torch.float32),
    "a large buffer for little": (SMALL, LARGE, torch.float32),
    "a buffer for nothing": (SMALL, 0, torch.float32),
}


def _pairs(route: str) -> dict[str, tuple[Outcome, bool]]:
    found = {}
    with _groups(route) as new_group:
        for name, (sent, expected, dtype) in PAIRS.items():
            group = new_group()
            if group.rank == 0:
                found[name] = attempt(group.send, torch.ones(sent), 1), True
            if group.rank == 1:
                out = torch.full((expected,), 7, dtype=dtype)
                if route == OVER_TORCH:
                    told = attempt(dist.recv, out, 0, group.group)
                else:
                    told = attempt(lambda: group.route.run("recv", out, out, 0))  # noqa: B023
                found[name] = told, bool((out == 7).all())
    return found


def pairs_over(four: Ranks, route: str) -> list[dict[str, tuple[Outcome, bool]]]:
    return four.run(_pairs, route, timeout_s=len(PAIRS) * DEADLINE_S / 4)


@pytest.fixture(scope="module")
def pairs(four: Ranks) -> Callable[[str], list[dict[str, tuple[Outcome, bool]]]]:
    return functools.cache(lambda route: pairs_over(four, route))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", PAIRS)
def test_row_11_a_receiver_that_expects_something_else(pairs: Callable[[str], Any], name: str, route: str) -> None:
    check_row_11(pairs(route), name, route)


def check_row_11(found: list[dict[str, tuple[Outcome, bool]]], name: str, route: str) -> None:
    (sender, _), (receiver, untouched) = (each[name] for each in found[:2])
    assert receiver.kind == "CollectiveMismatchError", receiver
    assert receiver.suspect_ranks == (0,)
    assert receiver.seconds < TIMEOUT_S
    assert untouched
    # A small tensor is sent before the receiver can object.
    assert sender.kind in ("ok", "CollectiveMismatchError"), sender
    if route == "connections" and PAIRS[name][0] == LARGE:
        assert sender.kind == "CollectiveMismatchError", sender
        assert sender.suspect_ranks == (1,)


def _swapped(route: str) -> Outcome:
    with environment(PARALLEL_STATE_DEBUG="1"), world_over(route) as group:
        first, second = torch.ones(2, 3), torch.ones(3, 2)
        calls = [lambda: group.all_reduce(first), lambda: group.all_reduce(second)]
        for call in calls[::-1] if group.rank == OTHER else calls:
            told = attempt(call)
            if told.kind != "ok":
                return told
        return told


@pytest.mark.parametrize("route", ROUTES)
def test_row_12_calls_in_another_order_in_debug_mode(four: Ranks, route: str) -> None:
    for told in four.run(_swapped, route, timeout_s=DEADLINE_S):
        assert told.kind == "CollectiveMismatchError", told
        assert "[2, 3]" in told.text and "[3, 2]" in told.text
        assert told.text.count("test_mismatches.py:") == 2


def _many_transfers(route: str) -> list[Any]:
    with world_over(route) as group:
        sizes = [1, 1000, 1025, 5000, 3, 100_000, 0, 70_000]
        after, before = (group.rank + 1) % 4, (group.rank - 1) % 4
        sent = [group.isend(torch.full((n,), float(100 * group.rank + i)), after) for i, n in enumerate(sizes)]
        started = [group.all_reduce_async(torch.full((n,), float(i))) for i, n in enumerate(sizes)]
        total = group.all_reduce(torch.ones(2)).tolist()
        received = [group.irecv((n,), torch.float32, before) for n in sizes]
        moved = [group.broadcast_async(torch.full((n,), float(group.rank)), 3) for n in sizes]
        found = [x.wait().unique().tolist() for x in received[::-1]][::-1]
        gathered = group.all_gather_async(torch.full((9000,), float(group.rank))).wait().unique().tolist()
        parts = group.reduce_scatter_async(torch.ones(80_000)).wait().unique().tolist()
        sums = [x.wait().unique().tolist() for x in started]
        broadcasts = [x.wait().unique().tolist() for x in moved]
        for each in sent:
            each.wait()
        started_at = time.monotonic()
        group.barrier()
        return [found, sums, broadcasts, total, gathered, parts, time.monotonic() - started_at < DEADLINE_S]


@pytest.mark.parametrize("route", ROUTES)
def test_calls_that_match_come_through_in_any_order_of_waits(four: Ranks, route: str) -> None:
    for rank, told in enumerate(four.run(_many_transfers, route, timeout_s=DEADLINE_S)):
        before = (rank - 1) % 4
        kinds = range(8)
        assert told == [
            [[] if i == 6 else [100.0 * before + i] for i in kinds],
            [[] if i == 6 else [4.0 * i] for i in kinds],
            [[] if i == 6 else [3.0] for i in kinds],
            [4.0, 4.0],
            [0.0, 1.0, 2.0, 3.0],
            [4.0],
            True,
        ]
