"""reduce_scatter and reduce_scatterv."""

from __future__ import annotations

import torch

from device_communicators import REDUCE_OPS
from tests.contract.carriers import Carrier, Member
from tests.contract.cases import (
    FLOATS,
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
EVERY_DTYPE = [(dtype, Form((5, 3), layout)) for dtype in REDUCIBLE for layout in ("contiguous", "transposed")]
EVERY_FORM = [(dtype, form) for dtype in (torch.float32, torch.bool) for form in forms(SLICES)]


def _body(member: Member) -> None:
    for dtype, part in EVERY_DTYPE + EVERY_FORM:
        for dim in part.dims:
            form = Form(multiplied(part.shape, dim, member.size), part.layout)
            for op in REDUCE_OPS if part.shape == (5, 3) and dim >= 0 else ("sum",):
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
                    expected = (
                        reduced(xs, op).chunk(member.size, dim)[member.rank] if x.numel() else x.new_empty(part.shape)
                    )
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
    every_dtype = [(dtype, (4, 3), op, SIZES_OF_RANKS[0]) for dtype in REDUCIBLE for op in REDUCE_OPS]
    every_shape = [
        (torch.float32, shape, op, sizes) for shape in V_SHAPES for sizes in SIZES_OF_RANKS for op in ("sum", "max")
    ]
    for dtype, shape, op, all_sizes in every_dtype + every_shape:
        sizes = member.of_ranks(lambda rank, all_sizes=all_sizes: all_sizes[rank])
        for dim in Form(shape).dims:
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
