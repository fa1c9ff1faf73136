from __future__ import annotations

import torch

from tests.contract.carriers import Carrier, Member
from tests.contract.cases import (
    MOVABLE,
    Form,
    Unchanged,
    any_bytes,
    check_moved,
    check_new,
    forms,
    joined,
    with_dim,
)

EVERY_DTYPE = [(dtype, form) for dtype in MOVABLE for form in (Form((5, 3), "transposed"), Form((1,), "strided"))]
EVERY_FORM = [(torch.float32, form) for form in forms()]


def _body(member: Member) -> None:
    cases = [(*case, dim) for case, dim in member.in_turn(EVERY_DTYPE, (0, -1))]
    cases += [(torch.float32, *place) for place in member.along_dims(list(forms()))]
    for dtype, form, dim in member.shared(cases):
        xs = member.of_ranks(lambda rank, form=form, dtype=dtype: any_bytes(form, dtype, rank))
        x = xs[member.rank]
        with member.case(f"{dtype} {form} along dim {dim}"):
            unchanged = Unchanged(x)
            found = member.group.all_gather(x, dim)
            unchanged.check()
            check_moved(found, joined(xs, dim), x, alone=member.size == 1)


def test_all_gather(carrier: Carrier) -> None:
    carrier.run(_body)


def _default_dim_body(member: Member) -> None:
    with member.case("the last dim is the default"):
        xs = member.of_ranks(lambda rank: any_bytes(Form((2, 3, 5)), torch.int32, rank))
        check_moved(member.group.all_gather(xs[member.rank]), torch.cat(xs, -1), alone=member.size == 1)


def test_the_default_dim_is_the_last(carrier: Carrier) -> None:
    carrier.run(_default_dim_body)


def _list_body(member: Member) -> None:
    for dtype, form in EVERY_DTYPE + EVERY_FORM:
        xs = member.of_ranks(lambda rank, form=form, dtype=dtype: any_bytes(form, dtype, rank))
        x = xs[member.rank]
        with member.case(f"{dtype} {form}"):
            unchanged = Unchanged(x)
            found = member.group.all_gather_to_list(x)
            unchanged.check()
            assert isinstance(found, list)
            assert len(found) == member.size
            for one, expected in zip(found, xs, strict=True):
                check_moved(one, expected, x, alone=member.size == 1)


def test_all_gather_to_list(carrier: Carrier) -> None:
    carrier.run(_list_body)


V_DTYPES = [dtype for dtype in MOVABLE if dtype != torch.float4_e2m1fn_x2]
V_FORMS = [Form(shape) for shape in ((7,), (4, 3), (3, 1), (2, 3, 5), (0, 4), (2, 0, 3))]
SIZES_OF_RANKS = ((2, 3, 1, 4), (0, 2, 0, 5), (3, 0, 0, 0), (0, 0, 0, 0), (2, 2, 2, 2))


def _v_body(member: Member) -> None:
    cases = [(dtype, (4, 3), dim, SIZES_OF_RANKS[0]) for dtype, dim in member.in_turn(V_DTYPES, Form((4, 3)).dims)]
    cases += [
        (torch.float32, form.shape, dim, sizes) for form, dim in member.along_dims(V_FORMS) for sizes in SIZES_OF_RANKS
    ]
    for dtype, shape, dim, sizes_of_ranks in member.shared(cases):
        sizes = member.of_ranks(sizes_of_ranks.__getitem__)
        shapes = [with_dim(shape, dim, length) for length in sizes]
        xs = member.of_ranks(
            lambda rank, dtype=dtype, shapes=shapes: any_bytes(Form(shapes[rank], _layout(rank, shapes)), dtype, rank)
        )
        x = xs[member.rank]
        with member.case(f"{dtype} {shape} along dim {dim}, sizes {sizes}"):
            unchanged = Unchanged(x)
            found = member.group.all_gatherv(x, dim, sizes)
            unchanged.check()
            check_moved(found, joined(xs, dim), x, alone=member.size == 1)


def _layout(rank: int, shapes: list[tuple[int, ...]]) -> str:
    return "strided" if rank % 2 and 0 not in shapes[rank] else "contiguous"


def test_all_gatherv(carrier: Carrier) -> None:
    carrier.run(_v_body)


def _v_default_body(member: Member) -> None:
    xs = member.of_ranks(lambda rank: any_bytes(Form((2, 3)), torch.int32, rank))
    x = xs[member.rank]
    with member.case("without sizes it is all_gather along dim 0"):
        check_moved(member.group.all_gatherv(x), torch.cat(xs), x, alone=member.size == 1)
    with member.case("sizes may be a tuple"):
        check_moved(member.group.all_gatherv(x, sizes=(2,) * member.size), torch.cat(xs), x, alone=member.size == 1)


def test_all_gatherv_of_equal_sizes(carrier: Carrier) -> None:
    carrier.run(_v_default_body)


def _alone_body(member: Member) -> None:
    with member.case("a scalar becomes a vector in a group of any size"):
        found = member.group.all_gather(torch.tensor(3.0))
        check_new(found, torch.full((member.size,), 3.0), alone=True)


def test_a_scalar_becomes_a_vector(carrier: Carrier) -> None:
    carrier.run(_alone_body)
