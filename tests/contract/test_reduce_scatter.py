from __future__ import annotations

import itertools

import torch

from device_communicators import REDUCE_OPS
from tests.contract.carriers import Carrier, Member
from tests.contract.cases import (
    FLOATS,
    LAYOUTS,
    REDUCIBLE,
    Form,
    Unchanged,
    check_reduced,
    forms,
    is_defined,
    multiplied,
    real_numbers,
    reduced,
    small_numbers,
    with_dim,
)

SLICES = ((1,), (7,), (5, 3), (3, 1), (1, 4), (2, 3, 5), (0,), (3, 0), (0, 4), (2, 0, 3))
EVERY_NUMBER = list(itertools.product(REDUCIBLE, REDUCE_OPS))
ITS_FORMS = [(Form((5, 3), layout), dim) for dim in (0, -1) for layout in LAYOUTS]


def _body(member: Member) -> None:
    cases = [(*number, *place) for number, place in member.in_turn(EVERY_NUMBER, ITS_FORMS)]
    slices = member.along_dims(list(forms(SLICES)))
    cases += [(dtype, "sum", *place) for place, dtype in member.in_turn(slices, (torch.float32, torch.bool))]
    for dtype, op, part, dim in member.shared(cases):
        form = Form(multiplied(part.shape, dim, member.size), part.layout)
        xs = member.of_ranks(lambda rank, form=form, dtype=dtype: small_numbers(form, dtype, rank))
        x = xs[member.rank]
        name = f"{op} of {dtype} {form} along dim {dim}"
        if not member.carries("reduce_scatter", x, op, is_defined(dtype, op)):
            member.refuses(name, lambda x=x, dim=dim, op=op: member.group.reduce_scatter(x, dim, op))
            continue
        if not is_defined(dtype, op):
            continue
        with member.case(name):
            unchanged = Unchanged(x)
            found = member.group.reduce_scatter(x, dim, op)
            unchanged.check()
            expected = reduced(xs, op).chunk(member.size, dim)[member.rank] if x.numel() else x.new_empty(part.shape)
            check_reduced(found, expected, x, reduce_op=op, alone=member.size == 1)


def test_reduce_scatter(carrier: Carrier) -> None:
    carrier.run(_body)


def _default_dim_body(member: Member) -> None:
    with member.case("the last dim is the default, sum the default op"):
        xs = member.of_ranks(lambda rank: small_numbers(Form((2, 3 * member.size)), torch.float32, rank))
        expected = reduced(xs, "sum").chunk(member.size, -1)[member.rank]
        found = member.group.reduce_scatter(xs[member.rank])
        check_reduced(found, expected, reduce_op="sum", alone=member.size == 1)
        found = member.group.reduce_scatterv(xs[member.rank])
        check_reduced(found, expected, reduce_op="sum", alone=member.size == 1)


def test_the_default_dim_is_the_last(carrier: Carrier) -> None:
    carrier.run(_default_dim_body)


V_SHAPES = ((7,), (4, 3), (3, 1), (2, 3, 5), (2, 0, 3))
SIZES_OF_RANKS = ((2, 3, 1, 4), (0, 2, 0, 5), (3, 0, 0, 0), (0, 0, 0, 0), (2, 2, 2, 2))


def _v_body(member: Member) -> None:
    cases = [
        (*number, (4, 3), dim, SIZES_OF_RANKS[0]) for number, dim in member.in_turn(EVERY_NUMBER, Form((4, 3)).dims)
    ]
    along_dims = member.along_dims([Form(shape) for shape in V_SHAPES])
    shapes = [(form.shape, dim, sizes) for form, dim in along_dims for sizes in SIZES_OF_RANKS]
    cases += [(torch.float32, op, *place) for place, op in member.in_turn(shapes, ("sum", "max"))]
    for dtype, op, shape, dim, all_sizes in member.shared(cases):
        sizes = member.of_ranks(lambda rank, all_sizes=all_sizes: all_sizes[rank])
        form = Form(with_dim(shape, dim, sum(sizes)))
        if dim < 0 and 0 not in form.shape:
            form = form._replace(layout="strided")
        xs = member.of_ranks(lambda rank, form=form, dtype=dtype: small_numbers(form, dtype, rank))
        x = xs[member.rank]
        name = f"{op} of {dtype} {form} along dim {dim}, sizes {sizes}"
        if not member.carries("reduce_scatterv", x, op, is_defined(dtype, op)):
            member.refuses(
                name, lambda x=x, dim=dim, sizes=sizes, op=op: member.group.reduce_scatterv(x, dim, sizes, op)
            )
            continue
        if not is_defined(dtype, op):
            continue
        with member.case(name):
            unchanged = Unchanged(x)
            found = member.group.reduce_scatterv(x, dim, sizes, op)
            unchanged.check()
            expected = reduced(xs, op).split(sizes, dim)[member.rank]
            check_reduced(found, expected, x, reduce_op=op, alone=member.size == 1)


def test_reduce_scatterv(carrier: Carrier) -> None:
    carrier.run(_v_body)


def _rounding_body(member: Member) -> None:
    for dtype in FLOATS:
        for op in ("sum", "avg"):
            xs = member.of_ranks(lambda rank, dtype=dtype: real_numbers(Form((64 * member.size, 3)), dtype, rank))
            total = torch.stack([x.double() for x in xs]).sum(0).chunk(member.size)[member.rank]
            # Each of the size - 1 additions, and the division, rounds a number no larger than the sum of all.
            bound = member.size * torch.finfo(dtype).eps * torch.stack([x.double().abs() for x in xs]).sum(0)
            bound = bound.chunk(member.size)[member.rank]
            if op == "avg":
                total, bound = total / member.size, bound / member.size
            for name in ("reduce_scatter", "reduce_scatterv"):
                with member.case(f"{name}, {op} of real numbers in {dtype}"):
                    x = xs[member.rank]
                    if name == "reduce_scatter":
                        found = member.group.reduce_scatter(x, 0, op)
                    else:
                        found = member.group.reduce_scatterv(x, 0, [64] * member.size, op)
                    assert bool(((found.double() - total).abs() <= bound).all()), (found - total).abs().max()


def test_sums_of_real_numbers_are_as_good_as_the_dtype(carrier: Carrier) -> None:
    carrier.run(_rounding_body)
