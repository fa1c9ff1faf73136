"""Tests of every communicator: `carrier.run(_body)` calls `_body` on the ranks of a group with one row of CATALOG, the
table of communicators. Processes find bodies by name, so they are at module level. For simulated groups, this process
calls the body as the first and as the last rank, and all ranks hold equal tensors. A communicator must support all
requests unless its row is `partial`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor

import parallel_state as ps
from device_communicators import CATALOG, GroupContext, Request, Row, build_route, register_route, unique_name
from device_communicators.base.errors import UnsupportedError
from parallel_state import GroupCoordinator
from tests.contract.cases import Form
from tests.extent import LONG
from tests.workers import WorkerPool

S = TypeVar("S")
T = TypeVar("T")


class Size(NamedTuple):
    processes: int
    group: int

    def __str__(self) -> str:
        return str(self.group) if self.group == self.processes else f"{self.group}-of-{self.processes}"


ROWS = tuple(row for row in CATALOG if row.fits_device("cpu") and not row.fake)
ROW_NAMES = tuple(row.name for row in ROWS)

PLACEMENTS = {Size(2, 2): (0, 1), Size(3, 3): (0, 0, 1), Size(4, 4): (0, 1, 0, 1)}
SIZES = (Size(3, 3), Size(4, 4), Size(4, 2))
"""In the last size, ranks in the group differ from global ranks."""


def sizes_of(row: Row) -> tuple[Size, ...]:
    """A group of one rank uses no communicator, so only the last row (gloo) has this size. That row is slow on four
    ranks, so only long runs have these."""
    if row.several_hosts:
        return tuple(PLACEMENTS)
    if LONG:
        return (Size(1, 1), Size(2, 2), *SIZES)
    return (Size(1, 1), *(size for size in SIZES if size.group != 4)) if row is CATALOG[-1] else SIZES


CASES = tuple((row, size) for row in ROWS for size in sizes_of(row))


class Member:
    def __init__(self, group: GroupCoordinator, row: str) -> None:
        self.group = group
        self.row = row
        self.simulated = group.context.simulated
        self.rank = group.rank_in_group
        self.size = group.world_size
        self.cases = 0
        self._first_turn = ROW_NAMES.index(row) + self.size if row in ROW_NAMES else self.size

    def of_ranks(self, make: Callable[[int], T]) -> list[T]:
        if not self.simulated:
            return [make(rank) for rank in range(self.size)]
        mine = make(self.rank)
        return [mine] * self.size

    def can_hear(self, peer: int) -> bool:
        return not self.simulated or peer == self.rank

    def shared(self, cases: Sequence[T]) -> Sequence[T]:
        sizes = [size.group for row in ROWS if row.name == self.row for size in sizes_of(row) if size.group > 1]
        sizes = sizes or [3, 2]  # for kernels in peer memory, which have no row
        return cases if LONG or self.size not in sizes else cases[sizes.index(self.size) :: len(sizes)]

    def in_turn(self, cases: Sequence[S], others: Sequence[T]) -> list[tuple[S, T]]:
        if LONG:
            return list(itertools.product(cases, others))
        turn, count = self._first_turn, len(others)
        return [(case, others[(turn + number + number // count) % count]) for number, case in enumerate(cases)]

    def along_dims(self, forms: Sequence[Form]) -> list[tuple[Form, int]]:
        dims = [(form, dim) for form in forms for dim in form.dims if dim >= 0]
        return [(form, dim - back * len(form.dims) // 2) for (form, dim), back in self.in_turn(dims, (0, 1))]

    def with_roots(self, cases: Sequence[T], roots: Sequence[int] | None = None) -> list[tuple[int, T]]:
        found = [peer for peer in range(self.size) if self.can_hear(peer)] if roots is None else roots
        turns = [(root, case) for case, root in self.in_turn(cases, found)]
        return turns if LONG else turns + [(root, cases[0]) for root in found]

    def carries(self, operation: str, x: Tensor, reduce_op: str | None, defined: bool) -> bool:
        if self.size == 1:
            return defined
        request = Request(operation, x.dtype, x.device.type, x.numel(), reduce_op)
        refusals = {c.name: c.refusal(request) for c in self.group.route.communicators}
        carried = None in refusals.values()
        assert carried == defined, f"{request} {'is' if defined else 'is not'} defined, but the refusals are {refusals}"
        return carried

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            raise AssertionError(f"{name}, on {self.group.context}: {type(error).__name__}: {error}") from error
        self.cases += 1

    def refuses(self, name: str, call: Callable[[], object]) -> None:
        with self.case(name), pytest.raises(UnsupportedError, match=self.group.unique_name):
            call()


class Carrier:
    def __init__(self, row: Row, size: Size, pools: Callable[[int], WorkerPool]) -> None:
        self.row = row
        self.size = size
        self.simulated = row.simulated
        self._pools = pools

    def run(self, body: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        if self.simulated:
            answers = [_call(member, body, args) for member in self._simulated_members()]
        else:
            pool = self._pools(self.size.processes)
            answers = pool.run(_run_on_rank, self.row.name, body, args, tp=self.size.group, timeout_s=timeout_s)
        for reason, cases, _ in answers:
            assert reason is None, f"{self.row.name} takes no group of CPU processes: {reason}"
            assert cases > 0, f"{body.__name__} had no case"
        return [result for _, _, result in answers]

    def _simulated_members(self) -> Iterator[Member]:
        ranks = list(range(self.size.processes))[-self.size.group :]
        for rank in sorted({ranks[0], ranks[-1]}):
            yield only(self.row, ps.simulated_group(ranks, rank))


def only(row: Row, group: GroupCoordinator) -> Member:
    group.route = build_route(group.context, (row, CATALOG[-1]) if row.partial else (row,))
    register_route(group.route)
    return Member(group, row.name)


def twin_of(group: GroupCoordinator) -> GroupCoordinator:
    context: GroupContext = dataclasses.replace(group.context, name=unique_name("contract"))
    return GroupCoordinator(context, group.traits)


def _run_on_rank(row_name: str, body: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str | None, int, Any]:
    torch.manual_seed(0)
    (row,) = (row for row in CATALOG if row.name == row_name)
    member = only(row, twin_of(ps.get_tp_group()))
    if row_name in member.group.route.refusals:
        return member.group.route.refusals[row_name], 0, None
    answer = _call(member, body, args)
    member.group.route.close()
    return answer


def _call(member: Member, body: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str | None, int, Any]:
    result = body(member, *args)
    return None, member.cases, result
