from __future__ import annotations

import torch

from tests.contract.carriers import Carrier, Member
from tests.contract.cases import MOVABLE, Form, Unchanged, any_bytes, check_moved, forms

EVERY_DTYPE = [(dtype, form) for dtype in MOVABLE for form in (Form((5, 3), "transposed"), Form((1,), "strided"))]
EVERY_FORM = [(torch.float32, form) for form in forms()]


def _body(member: Member) -> None:
    for src in range(member.size):
        for dst in range(member.size):
            if src == dst or member.rank not in (src, dst):
                continue
            for dtype, form in EVERY_FORM + (EVERY_DTYPE if dst == (src + 1) % member.size else []):
                x = any_bytes(form, dtype, src, salt=dst)
                with member.case(f"{dtype} {form} from rank {src} to rank {dst}"):
                    if member.rank == src:
                        unchanged = Unchanged(x)
                        assert member.group.send(x, dst) is None
                        unchanged.check()
                    elif member.can_hear(src):
                        check_moved(member.group.recv(form.shape, dtype, src), x)
                    else:
                        member.refuses(
                            "nobody sends",
                            lambda form=form, dtype=dtype, src=src: member.group.recv(form.shape, dtype, src),
                        )
    if member.size == 1:
        member.cases += 1


def test_every_rank_to_every_other(carrier: Carrier) -> None:
    carrier.run(_body)


def _ring_body(member: Member) -> None:
    group, previous = member.group, (member.rank - 1) % member.size
    with member.case("a ring"):
        x = torch.full((3,), member.rank)
        if member.size == 1:
            return
        if member.simulated:
            group.send(x)
            return
        if member.rank == 0:
            group.send(x)
        found = group.recv([3], torch.int64)
        if member.rank != 0:
            group.send(x)
        assert found.tolist() == [previous] * 3


def test_the_defaults_are_the_next_and_the_previous(carrier: Carrier) -> None:
    carrier.run(_ring_body)


def _order_body(member: Member) -> None:
    """Messages between two ranks keep their order. Over gloo, 16384 floats just fit into the message that compares the
    calls, and 16385 don't."""
    if member.simulated or member.size == 1:
        member.cases += 1
        return
    count, first, last, lengths = 50, 0, member.size - 1, (1000, 16384, 16385, 50_000, 1)
    with member.case("fifty in a row"):
        if member.rank == first:
            for number in range(count):
                x = torch.full((lengths[number % len(lengths)],), float(number))
                member.group.send(x, last)
                x.fill_(-1)
        elif member.rank == last:
            for number in range(count):
                length = lengths[number % len(lengths)]
                found = member.group.recv([length], torch.float32, first)
                assert torch.equal(found, torch.full((length,), float(number))), number


def test_messages_arrive_in_order_as_they_were_when_sent(carrier: Carrier) -> None:
    carrier.run(_order_body)


def _shapes_body(member: Member) -> None:
    if member.simulated or member.size == 1 or member.rank > 1:
        member.cases += 1
        return
    for size in ([2, 3], (2, 3), torch.Size([2, 3]), [0, 5], []):
        with member.case(f"size {size!r}"):
            x = any_bytes(Form(tuple(size)), torch.int32, 0)
            if member.rank == 0:
                member.group.send(x, 1)
            else:
                check_moved(member.group.recv(size, torch.int32, 0), x)
                before = member.group.traffic()["recv"].bytes
    if member.rank == 1:
        assert before == (3 * 6 + 1) * 4


def test_sizes_may_be_any_sequence(carrier: Carrier) -> None:
    carrier.run(_shapes_body)
