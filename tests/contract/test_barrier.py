from __future__ import annotations

import torch
import torch.distributed as dist

from tests.contract.carriers import Carrier, Member

ROUNDS = 50


def _body(member: Member) -> None:
    group = member.group
    if member.simulated or member.size == 1:
        with member.case("nobody to wait for"):
            group.barrier()
        return
    store = dist.distributed_c10d._get_default_store()
    for number in range(ROUNDS):
        with member.case(f"barrier {number}"):
            key = f"{group.unique_name}/{group.ranks}/{number}"
            if number % member.size == member.rank:
                torch.randn(200, 200).mm(torch.randn(200, 200))
            store.add(key, 1)
            group.barrier()
            assert store.add(key, 0) == member.size, "the barrier returned before a rank entered it"


def test_nobody_passes_before_all_have_come(carrier: Carrier) -> None:
    carrier.run(_body)


def _counted_body(member: Member) -> None:
    with member.case("between collectives"):
        for number in range(5):
            member.group.barrier()
            assert member.group.all_reduce(torch.tensor([number])).item() == number * member.size
        assert member.group.barrier() is None
    if member.size > 1:
        assert member.group.traffic()["barrier"].calls == 6


def test_barriers_between_collectives(carrier: Carrier) -> None:
    carrier.run(_counted_body)
