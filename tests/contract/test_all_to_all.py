from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from device_communicators.base.errors import InvalidArgumentError
from tests.contract.carriers import Carrier, Member
from tests.contract.cases import (
    MOVABLE,
    Form,
    Unchanged,
    any_bytes,
    check_moved,
    forms,
    joined,
    multiplied,
    sliced,
)
from tests.helpers.doors import op_arguments

SLICES = ((1,), (7,), (5, 3), (3, 1), (1, 4), (2, 3, 5), (0,), (3, 0), (0, 4), (2, 0, 3))
COPIED_BY_TORCH = tuple(dtype for dtype in MOVABLE if dtype != torch.float4_e2m1fn_x2)
EVERY_DTYPE = [(dtype, form) for dtype in COPIED_BY_TORCH for form in (Form((5, 3)), Form((1,), "strided"))]


def _body(member: Member) -> None:
    cases = [(*case, *dims) for case, dims in member.in_turn(EVERY_DTYPE, list(itertools.product((0, -1), (0, -1))))]
    places = member.in_turn(member.along_dims(list(forms(SLICES))), range(12))
    cases += [(torch.float32, form, dim, form.dims[turn % len(form.dims)]) for (form, dim), turn in places]
    for dtype, part, scatter_dim, gather_dim in member.shared(list(dict.fromkeys(cases))):
        form = Form(multiplied(part.shape, scatter_dim, member.size), part.layout)
        xs = member.of_ranks(lambda rank, form=form, dtype=dtype: any_bytes(form, dtype, rank))
        x = xs[member.rank]
        with member.case(f"{dtype} {form} scattered along {scatter_dim}, gathered along {gather_dim}"):
            unchanged = Unchanged(x)
            found = member.group.all_to_all(x, scatter_dim, gather_dim)
            unchanged.check()
            slices = [sliced(each, scatter_dim, member.size, member.rank) for each in xs]
            check_moved(found, joined(slices, gather_dim), x, alone=member.size == 1)


def test_all_to_all(carrier: Carrier) -> None:
    carrier.run(_body)


def _rows_body(member: Member, pattern: str) -> None:
    table = _table(pattern)
    ranks = member.of_ranks(lambda rank: rank)
    inputs = [table[member.rank][to] for to in range(member.size)]
    # In a simulated group every rank sends this rank's tensor.
    outputs = [table[sender][member.rank] for sender in ranks]
    rows = list(itertools.product(((), (3,), (2, 0), (2, 3)), ("contiguous", "strided")))
    if pattern == "even beside uneven":  # rows that exceed the slots of shared memory
        rows.append(((9001,), "contiguous"))
    cases = [(dtype, *each) for each, dtype in member.in_turn(rows, (torch.float32, torch.bool))]
    if pattern == "uneven":
        cases += [(dtype, *each) for dtype, each in member.in_turn(MOVABLE, rows)]
    for dtype, columns, layout in member.shared(cases):
        xs = member.of_ranks(
            lambda rank, dtype=dtype, columns=columns, layout=layout: _rows(
                sum(table[rank][: member.size]), columns, dtype, layout, rank
            )
        )
        x = xs[member.rank]
        with member.case(f"{dtype}, {inputs} rows of {columns} {layout}, for {outputs}"):
            blocks = [
                each.split(table[sender][: member.size])[member.rank] for sender, each in zip(ranks, xs, strict=True)
            ]
            unchanged = Unchanged(x)
            found = member.group.all_to_all(x, output_split_sizes=outputs, input_split_sizes=inputs)
            unchanged.check()
            check_moved(found, joined(blocks, 0), x, alone=member.size == 1)


def _table(pattern: str) -> list[list[int]]:
    if pattern == "uneven":
        return [[(2 * a + b) % 4 for b in range(4)] for a in range(4)]
    if pattern == "one sender":
        return [[b + 1 if a == 1 else 0 for b in range(4)] for a in range(4)]
    if pattern == "even beside uneven":
        return [[3 if 0 in (a, b) else (a + b) % 3 for b in range(4)] for a in range(4)]
    if pattern == "one receiver":
        return [[a + 1 if b == 0 else 0 for b in range(4)] for a in range(4)]
    return [[0] * 4 for _ in range(4)]


def _rows(count: int, columns: tuple[int, ...], dtype: torch.dtype, layout: str, rank: int) -> Tensor:
    shape = (count, *columns)
    return any_bytes(Form(shape, "contiguous" if 0 in shape else layout), dtype, rank)


def test_all_to_all_of_uneven_rows(carrier: Carrier) -> None:
    carrier.run(_rows_body, "uneven")


def test_all_to_all_where_one_rank_has_even_rows(carrier: Carrier) -> None:
    carrier.run(_rows_body, "even beside uneven")


def test_all_to_all_where_one_rank_sends_all(carrier: Carrier) -> None:
    carrier.run(_rows_body, "one sender")


def test_all_to_all_where_one_rank_receives_all(carrier: Carrier) -> None:
    carrier.run(_rows_body, "one receiver")


def test_all_to_all_of_nothing(carrier: Carrier) -> None:
    carrier.run(_rows_body, "nothing")


def _one_side_body(member: Member) -> None:
    xs = member.of_ranks(lambda rank: any_bytes(Form((2 * member.size, 3)), torch.int32, rank))
    expected = torch.cat([x.chunk(member.size)[member.rank] for x in xs])
    equal = [2] * member.size
    for given in ({}, {"output_split_sizes": equal}, {"input_split_sizes": equal}):
        with member.case(f"given {given}"):
            check_moved(member.group.all_to_all(xs[member.rank], **given), expected, alone=member.size == 1)


def test_split_sizes_that_are_left_out_are_equal(carrier: Carrier) -> None:
    carrier.run(_one_side_body)


def _bare_op_body(member: Member) -> None:
    op, (token, key) = torch.ops.parallel_state.all_to_all, op_arguments(member.group)
    equal = [2] * member.size
    odd, even = torch.zeros(2 * member.size + 1), torch.zeros(2 * member.size)
    wrong = [(even, equal, None), (even, None, equal), (even, [], [])]
    for x, *splits in [*wrong, (odd, None, None)] if member.size > 1 else wrong:
        with member.case(f"{len(x)} rows, {splits}"), pytest.raises(InvalidArgumentError, match="nothing was sent"):
            op(x, token, *splits, key)
    if member.size > 1:
        assert torch.equal(op(even, token, None, None, key), op(even, token, equal, equal, key))


def test_the_bare_op_never_drops_rows(carrier: Carrier) -> None:
    carrier.run(_bare_op_body)
