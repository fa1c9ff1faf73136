from __future__ import annotations

import torch

from tests.contract.carriers import Carrier, Member
from tests.contract.cases import (
    MOVABLE,
    Form,
    Unchanged,
    any_bytes,
    check_moved,
    forms,
    multiplied,
    sliced,
)

SLICES = ((1,), (7,), (5, 3), (3, 1), (1, 4), (2, 3, 5), (0,), (3, 0), (0, 4), (2, 0, 3))
EVERY_DTYPE = [(dtype, form) for dtype in MOVABLE for form in (Form((5, 3), "transposed"), Form((1,), "strided"))]


def _body(member: Member, told: str) -> None:
    cases = [(torch.float32, *place) for place in member.along_dims(list(forms(SLICES)))]
    if told == "by every caller":
        cases += [(*case, dim) for case, dim in member.in_turn(EVERY_DTYPE, (0, -1))]
    else:
        cases = cases[::3]
    for src, (dtype, part, dim) in member.with_roots(member.shared(cases)):
        form = Form(multiplied(part.shape, dim, member.size), part.layout)
        x = any_bytes(form, dtype, src)
        with member.case(f"{dtype} {form} along dim {dim} from rank {src}, size told {told}"):
            given = x if member.rank == src else None
            unchanged = Unchanged(x)
            if told == "by every caller":
                found = member.group.scatter(given, src, dim, size=part.shape, dtype=dtype)
            else:
                found = member.group.scatter(given, src, dim)
            unchanged.check()
            check_moved(found, sliced(x, dim, member.size, member.rank), x, alone=member.size == 1)


def test_scatter(carrier: Carrier) -> None:
    carrier.run(_body, "by every caller")


def test_scatter_where_only_src_knows_the_size(carrier: Carrier) -> None:
    carrier.run(_body, "by src")


def _ignored_body(member: Member) -> None:
    for src in range(member.size):
        if member.can_hear(src):
            with member.case(f"from rank {src}"):
                x = any_bytes(Form((2 * member.size, 3)), torch.int32, src)
                given = x if member.rank == src else torch.zeros(7, 7, dtype=torch.float64)
                expected = sliced(x, 0, member.size, member.rank)
                check_moved(member.group.scatter(given, src), expected, alone=member.size == 1)
                found = member.group.scatter(given, src, size=[2, 3], dtype=torch.int32)
                check_moved(found, expected, alone=member.size == 1)


def test_what_other_ranks_pass_is_ignored(carrier: Carrier) -> None:
    carrier.run(_ignored_body)
