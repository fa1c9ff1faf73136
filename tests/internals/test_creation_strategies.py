"""The calls of torch that create a group: one rank of eight over torch's fake backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from device_communicators.base import torch_internals
from parallel_state import GroupOptions
from parallel_state.process_groups import pool as groups
from parallel_state.process_groups.pool import ProcessGroupPool

PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
NCCL = GroupOptions("nccl", 5.0)


class Calls(list[Any]):
    named: Any = None

    def split(self, *, split_ranks: list[list[int]], **options: Any) -> object:
        self.append(("split", split_ranks))
        return object()

    def of_members(self, name: str, ranks: Any, *options: Any) -> object:
        self.append(("members", list(ranks)))
        return object()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=8)
    made = Calls()
    monkeypatch.setattr(dist, "split_group", made.split)
    monkeypatch.setattr(torch_internals, "new_group_of_members", made.of_members)
    monkeypatch.setattr(torch_internals, "name_ranks", lambda group: setattr(made, "named", group))
    monkeypatch.setattr(torch_internals, "set_timeout", lambda group, timeout_s: None)
    try:
        yield made
    finally:
        dist.destroy_process_group()


@pytest.fixture
def pool(calls: Calls) -> ProcessGroupPool:
    return ProcessGroupPool(5.0)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "bound_device", lambda: torch.device("cuda", 0))


def test_members_make_a_group_where_no_device_is_bound(pool: ProcessGroupPool, calls: Calls) -> None:
    for options in (NCCL, GroupOptions("gloo", 5.0)):
        pool.acquire([2, 3], options, division=lambda: PAIRS)
    assert calls == [("members", [2, 3])] * 2


@pytest.mark.usefixtures("bound")
def test_a_bound_communicator_is_split_once_for_all_lists(pool: ProcessGroupPool, calls: Calls) -> None:
    first = pool.acquire([2, 3], NCCL, division=lambda: PAIRS)
    second = pool.acquire([2, 3], NCCL, division=lambda: PAIRS)
    assert calls == [("split", PAIRS)] and calls.named is dist.group.WORLD
    assert first.process_group is second.process_group
    assert [pool.next_channel([2, 3]), pool.next_channel([2, 3]), pool.next_channel([2, 3, 4])] == [0, 1, 0]
    uneven = [[0, 1], [2, 3, 4, 5], [6, 7]]
    pool.acquire([2, 3, 4, 5], NCCL, division=lambda: uneven)
    assert calls[1:] == [("split", [[2, 3, 4, 5]])]
    pool.release(first)
    pool.acquire([2, 3], NCCL, division=lambda: PAIRS)
    assert len(calls) == 2, "somebody still uses them"


@pytest.mark.usefixtures("bound")
def test_what_only_members_ask_for_is_made_by_them(pool: ProcessGroupPool, calls: Calls) -> None:
    """A split needs all ranks. `acquire` reuses a group that it gets as `near`."""
    pool.acquire([2, 3], NCCL)
    axis = pool.acquire([0, 1, 2, 3], NCCL, division=lambda: HALVES)
    near = pool.acquire([0, 1, 2, 3], NCCL, near=[axis])
    assert near.process_group is axis.process_group
    pool.acquire([2, 3], GroupOptions("gloo", 5.0), division=lambda: PAIRS)
    assert calls == [("members", [2, 3]), ("split", HALVES), ("members", [2, 3])]


def test_the_world_and_one_rank_need_no_group(pool: ProcessGroupPool, calls: Calls) -> None:
    everyone = pool.acquire(range(8), pool.default_options, division=lambda: [list(range(8))])
    assert everyone.process_group is dist.group.WORLD
    assert pool.acquire([2], NCCL, division=lambda: [[rank] for rank in range(8)]).process_group is None
    assert calls == []
    pool.release(everyone)
    assert dist.is_initialized()


class _Made:
    def __init__(self) -> None:
        self.ends: list[str] = []

    def abort(self) -> None:
        self.ends.append("abort")


@pytest.mark.parametrize("failed", [True, False])
def test_a_failed_nccl_group_is_aborted_before_it_is_destroyed(
    pool: ProcessGroupPool, calls: Calls, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    made = _Made()
    monkeypatch.setattr(torch_internals, "new_group_of_members", lambda *_: made)
    monkeypatch.setattr(groups, "_destroy", lambda group: group.ends.append("destroy"))
    first, second = pool.acquire([2, 3], NCCL), pool.acquire([2, 3], NCCL)
    pool.release(first, failed=failed)
    assert made.ends == [], "the other one still uses it"
    pool.release(second)
    assert made.ends == (["abort", "destroy"] if failed else ["destroy"])
