from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from device_communicators import REDUCE_OPS
from tests.contract.carriers import Carrier, Member
from tests.contract.cases import (
    FLOATS,
    INTEGERS,
    LAYOUTS,
    MOVABLE,
    REDUCIBLE,
    Form,
    InPlace,
    Unchanged,
    check_reduced,
    forms,
    is_defined,
    real_numbers,
    reduced,
    small_numbers,
)

EVERY_NUMBER = list(itertools.product(REDUCIBLE, REDUCE_OPS))
EVERY_FORM = [(form, dtype) for form in forms() for dtype in (torch.float32, torch.bool)]


def _cases(member: Member, layouts: Sequence[str]) -> list[tuple[torch.dtype, str, Form]]:
    each_op = member.in_turn(EVERY_NUMBER, [Form((5, 3), layout) for layout in layouts])
    cases = [(*number, form) for number, form in each_op]
    cases += [(dtype, op, Form((2, 0))) for dtype, op in member.in_turn(REDUCIBLE, REDUCE_OPS)]
    each_form = [(form, dtype) for form, dtype in EVERY_FORM if form.layout in layouts]
    return cases + [(dtype, op, form) for (form, dtype), op in member.in_turn(each_form, REDUCE_OPS)]


def _body(member: Member) -> None:
    for dtype, op, form in member.shared(_cases(member, LAYOUTS)):
        xs = member.of_ranks(lambda rank, form=form, dtype=dtype: small_numbers(form, dtype, rank))
        x = xs[member.rank]
        name = f"{op} of {dtype} {form}"
        if not member.carries("all_reduce", x, op, is_defined(dtype, op)):
            member.refuses(name, lambda x=x, op=op: member.group.all_reduce(x, op))
            continue
        if not is_defined(dtype, op):
            continue
        with member.case(name):
            unchanged = Unchanged(x)
            found = member.group.all_reduce(x, op)
            unchanged.check()
            check_reduced(found, reduced(xs, op), x, reduce_op=op, alone=member.size == 1)


def test_all_reduce(carrier: Carrier) -> None:
    carrier.run(_body)


WRITABLE = [layout for layout in LAYOUTS if layout != "expanded"]


def _in_place_body(member: Member) -> None:
    for dtype, op, form in member.shared(_cases(member, WRITABLE)):
        xs = member.of_ranks(lambda rank, form=form, dtype=dtype: small_numbers(form, dtype, rank))
        x = xs[member.rank]
        name = f"in place, {op} of {dtype} {form}"
        if not member.carries("all_reduce_", x, op, is_defined(dtype, op)):
            unchanged = Unchanged(x)
            member.refuses(name, lambda x=x, op=op: member.group.all_reduce_(x, op))
            unchanged.check()
            continue
        if not is_defined(dtype, op):
            continue
        with member.case(name):
            expected = reduced(xs, op)
            place = InPlace(x)
            place.check(member.group.all_reduce_(x, op), alone=member.size == 1)
            check_reduced(x, expected, reduce_op=op, alone=True)


@pytest.mark.slow
def test_all_reduce_in_place(carrier: Carrier) -> None:
    carrier.run(_in_place_body)


def _around_it_body(member: Member) -> None:
    for dtype in (torch.float32, torch.int16, torch.complex64, torch.bool):
        with member.case(f"a slice of {dtype}"):
            whole = member.of_ranks(lambda rank, dtype=dtype: small_numbers(Form((6, 8)), dtype, rank))
            mine = whole[member.rank].clone()
            member.group.all_reduce_(mine[1:5:2, 2:7:3])
            expected = whole[member.rank].clone()
            expected[1:5:2, 2:7:3] = reduced([x[1:5:2, 2:7:3] for x in whole], "sum")
            assert torch.equal(mine, expected)


def test_in_place_on_a_slice_leaves_the_rest(carrier: Carrier) -> None:
    carrier.run(_around_it_body)


def _rounding_body(member: Member) -> None:
    for dtype in FLOATS:
        for op in ("sum", "avg"):
            with member.case(f"{op} of real numbers in {dtype}"):
                xs = member.of_ranks(lambda rank, dtype=dtype: real_numbers(Form((257, 3)), dtype, rank))
                found = member.group.all_reduce(xs[member.rank], op).double()
                expected = torch.stack([x.double() for x in xs]).sum(0)
                # Each of the size - 1 additions, and the division, rounds a number no larger than the sum of all.
                bound = member.size * torch.finfo(dtype).eps * torch.stack([x.double().abs() for x in xs]).sum(0)
                if op == "avg":
                    expected, bound = expected / member.size, bound / member.size
                assert bool(((found - expected).abs() <= bound).all()), (found - expected).abs().max()


def test_sums_of_real_numbers_are_as_good_as_the_dtype(carrier: Carrier) -> None:
    carrier.run(_rounding_body)


def _same_everywhere_body(member: Member) -> list[bytes]:
    sums = []
    for dtype in FLOATS:
        with member.case(f"{dtype}"):
            x = member.of_ranks(lambda rank, dtype=dtype: real_numbers(Form((257, 3)), dtype, rank))[member.rank]
            sums.append(bytes(member.group.all_reduce(x).view(-1).view(torch.uint8).tolist()))
    return sums


def test_all_ranks_get_the_same_bits(carrier: Carrier) -> None:
    results = carrier.run(_same_everywhere_body)
    if carrier.size.group == carrier.size.processes and not carrier.simulated:
        assert all(result == results[0] for result in results)


def _views_body(member: Member) -> None:
    xs = member.of_ranks(lambda rank: small_numbers(Form((5,)), torch.complex64, rank))
    x = xs[member.rank]
    with member.case("conjugated"):
        expected = reduced([each.conj().resolve_conj() for each in xs], "sum")
        check_reduced(member.group.all_reduce(x.conj()), expected, reduce_op="sum", alone=member.size == 1)
    with member.case("negated"):
        expected = reduced([each.conj().imag.resolve_neg() for each in xs], "sum")
        check_reduced(member.group.all_reduce(x.conj().imag), expected, reduce_op="sum", alone=member.size == 1)


def test_lazily_conjugated_and_negated_tensors(carrier: Carrier) -> None:
    carrier.run(_views_body)


def _not_reducible_body(member: Member) -> None:
    for dtype in MOVABLE:
        if dtype not in REDUCIBLE and member.size > 1:
            x = torch.zeros(8, dtype=torch.uint8).view(dtype)
            for op in REDUCE_OPS:
                if member.row == "nccl" and dtype in (torch.uint32, torch.uint64):
                    continue
                assert not member.carries("all_reduce", x, op, False)
                member.refuses(f"{op} of {dtype}", lambda x=x, op=op: member.group.all_reduce(x, op))
    with member.case("afterwards"):
        assert member.group.all_reduce(torch.ones(1)).item() == member.size


def test_a_dtype_without_a_sum_is_refused_and_the_group_goes_on(carrier: Carrier) -> None:
    carrier.run(_not_reducible_body)


_EXTREMES = [0, 1, -1, 2, -2, 3, -7, 63, -64, 100, 127, -128]


def _integer_average_body(member: Member) -> None:
    for dtype in INTEGERS:
        info = torch.iinfo(dtype)
        numbers = torch.tensor(_EXTREMES).clamp(info.min)
        limits = torch.tensor([info.max, info.max - 1, info.min, info.min // 2])
        drawn = torch.cat([numbers, numbers.flip(0), limits]).to(dtype)
        xs = member.of_ranks(lambda rank, drawn=drawn: drawn.roll(rank))
        x, expected = xs[member.rank], reduced(xs, "avg")
        with member.case(f"all_reduce of {dtype}"):
            check_reduced(member.group.all_reduce(x, "avg"), expected, x, reduce_op="avg", alone=member.size == 1)
        with member.case(f"all_reduce_ of {dtype}"):
            assert torch.equal(member.group.all_reduce_(x.clone(), "avg"), expected)
        with member.case(f"all_reduce_async of {dtype}"):
            found = member.group.all_reduce_async(x, "avg").wait()
            assert torch.equal(found, expected), f"{found} is not {expected}"
        whole = torch.stack([x] * member.size)
        with member.case(f"reduce_scatter of {dtype}"):
            assert torch.equal(member.group.reduce_scatter(whole, 0, "avg")[0], expected)
        with member.case(f"reduce_scatterv of {dtype}"):
            assert torch.equal(member.group.reduce_scatterv(whole, 0, [1] * member.size, "avg")[0], expected)


def test_an_average_of_integers_wraps_and_is_divided_toward_zero(carrier: Carrier) -> None:
    carrier.run(_integer_average_body)


def _large_average_body(member: Member) -> None:
    group, x = member.group, torch.full((member.size * 2,), 40000.0, dtype=torch.float16)
    with member.case("all_reduce"):
        assert torch.equal(group.all_reduce(x, "avg"), x)
    with member.case("reduce_scatter"):
        assert torch.equal(group.reduce_scatter(x, 0, "avg"), x[:2] if member.size > 1 else x)
    with member.case("reduce_scatterv"):
        assert torch.equal(group.reduce_scatterv(x, 0, [2] * member.size, "avg"), x[:2] if member.size > 1 else x)


def test_an_average_of_large_half_precision_numbers(carrier: Carrier) -> None:
    carrier.run(_large_average_body)
