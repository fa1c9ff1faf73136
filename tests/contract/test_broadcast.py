from __future__ import annotations

import torch

from tests.contract.carriers import Carrier, Member
from tests.contract.cases import MOVABLE, Form, InPlace, Unchanged, any_bytes, check_moved, forms

EVERY_DTYPE = [(dtype, form) for dtype in MOVABLE for form in (Form((5, 3), "transposed"), Form((1,), "strided"))]
EVERY_FORM = [(torch.float32, form) for form in forms()]


def _body(member: Member) -> None:
    for src, (dtype, form) in member.with_roots(member.shared(EVERY_DTYPE + EVERY_FORM)):
        xs = [any_bytes(form, dtype, rank, salt=src) for rank in range(member.size)]
        x = xs[member.rank]
        with member.case(f"{dtype} {form} from rank {src}"):
            unchanged = Unchanged(x)
            found = member.group.broadcast(x, src)
            unchanged.check()
            check_moved(found, xs[src], x, alone=member.size == 1)


def test_broadcast(carrier: Carrier) -> None:
    carrier.run(_body)


def _in_place_body(member: Member) -> None:
    for src, (dtype, form) in member.with_roots(member.shared(EVERY_DTYPE + EVERY_FORM)):
        xs = [any_bytes(form, dtype, rank, salt=src) for rank in range(member.size)]
        x = xs[member.rank]
        if form.layout == "expanded":
            continue
        with member.case(f"in place, {dtype} {form} from rank {src}"):
            expected = xs[src].clone()
            place = InPlace(x)
            place.check(member.group.broadcast_(x, src), alone=member.size == 1)
            check_moved(x, expected, alone=True)


def test_broadcast_in_place(carrier: Carrier) -> None:
    carrier.run(_in_place_body)


def _around_it_body(member: Member) -> None:
    for src in range(member.size):
        if member.can_hear(src):
            with member.case(f"from rank {src}"):
                whole = [any_bytes(Form((6, 8)), torch.int32, rank) for rank in range(member.size)]
                mine = whole[member.rank].clone()
                member.group.broadcast_(mine[1:5:2, 2:7:3], src)
                expected = whole[member.rank].clone()
                expected[1:5:2, 2:7:3] = whole[src][1:5:2, 2:7:3]
                assert torch.equal(mine, expected)


def test_in_place_on_a_slice_leaves_the_rest(carrier: Carrier) -> None:
    carrier.run(_around_it_body)


def _default_body(member: Member) -> None:
    if member.can_hear(0):
        with member.case("the default is from rank 0"):
            found = member.group.broadcast(torch.tensor([member.rank + 1]))
            assert found.tolist() == [1]
    else:
        member.refuses("rank 0 doesn't exist", lambda: member.group.broadcast(torch.tensor([1])))
        with member.case("the group goes on"):
            member.group.barrier()


def test_the_default_is_rank_zero(carrier: Carrier) -> None:
    carrier.run(_default_body)
