from __future__ import annotations

import torch

from tests.contract.carriers import Carrier, Member
from tests.contract.cases import MOVABLE, Form, Unchanged, any_bytes, check_moved, forms, joined

EVERY_DTYPE = [(dtype, form) for dtype in MOVABLE for form in (Form((5, 3), "transposed"), Form((1,), "strided"))]


def _body(member: Member) -> None:
    cases = [(*case, dim) for case, dim in member.in_turn(EVERY_DTYPE, (0, -1))]
    cases += [(torch.float32, *place) for place in member.along_dims(list(forms()))]
    for dst, (dtype, form, dim) in member.with_roots(member.shared(cases), range(member.size)):
        xs = member.of_ranks(lambda rank, form=form, dtype=dtype: any_bytes(form, dtype, rank))
        x = xs[member.rank]
        with member.case(f"{dtype} {form} along dim {dim} to rank {dst}"):
            unchanged = Unchanged(x)
            found = member.group.gather(x, dst, dim)
            unchanged.check()
            if member.rank != dst:
                assert found is None, "only dst may get a tensor"
                continue
            assert found is not None
            check_moved(found, joined(xs, dim), x, alone=member.size == 1)


def test_gather(carrier: Carrier) -> None:
    carrier.run(_body)


def _defaults_body(member: Member) -> None:
    with member.case("the default is along the last dim, to rank 0"):
        xs = member.of_ranks(lambda rank: any_bytes(Form((2, 3, 5)), torch.int32, rank))
        found = member.group.gather(xs[member.rank])
        if member.rank == 0:
            assert found is not None
            check_moved(found, torch.cat(xs, -1), alone=member.size == 1)
        else:
            assert found is None


def _empty_body(member: Member) -> None:
    """An empty tensor's strides can be arbitrary, and torch then can't view it as bytes."""
    for x in (torch.ones(8)[::2][:0], torch.ones(6, 4).t()[:, :0], torch.ones(4, 4)[:0, ::2]):
        with member.case(f"nothing, of shape {list(x.shape)} and strides {x.stride()}"):
            found = member.group.gather(x, 0, 0)
            if member.rank == 0:
                assert found is not None
                check_moved(found, torch.cat([x] * member.size), alone=member.size == 1)
            check_moved(member.group.all_gather(x, 0), torch.cat([x] * member.size), x, alone=member.size == 1)
            if member.can_hear(0):
                check_moved(member.group.broadcast(x), x, x, alone=member.size == 1)
            check_moved(
                member.group.all_gatherv(x, 0, [x.shape[0]] * member.size),
                torch.cat([x] * member.size), x, alone=member.size == 1,
            )  # fmt: skip


def test_empty_tensors_of_any_strides(carrier: Carrier) -> None:
    carrier.run(_empty_body)


def test_the_defaults(carrier: Carrier) -> None:
    carrier.run(_defaults_body)
