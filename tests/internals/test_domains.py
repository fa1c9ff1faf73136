from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import parallel_state as ps
from device_communicators.cpu import host_memory, native
from tests.contract.attempts import world
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 120.0

try:
    native.load()
except native.NativeUnavailableError as error:
    pytest.skip(f"no shared-memory library: {error}", allow_module_level=True)


def _domains(most: int) -> tuple[Any, str, list[float]]:
    allowed, host_memory.MAX_RANKS = host_memory.MAX_RANKS, most
    try:
        with world(4):
            group = ps.get_tp_group()
            x = torch.full((3,), float(group.rank_in_group))
            sums = [
                group.all_reduce(x),
                group.all_gather(x, 0),
                group.all_to_all(x[:1].repeat(4)),
                group.broadcast(x, 3),
            ]
            memory = group.context.host_memory
            assert memory is not None
            return memory.domains, memory.apart, [each.sum().item() for each in sums]
    finally:
        host_memory.MAX_RANKS = allowed


@pytest.mark.parametrize(
    ("most", "domains"),
    [(4, ((0, 1, 2, 3),)), (3, ((0, 1, 2), (3,))), (2, ((0, 1), (2, 3))), (1, ((0,), (1,), (2,), (3,)))],
)
def test_a_host_of_more_ranks_than_share_a_segment_has_several(pools: Pools, most: int, domains: object) -> None:
    for found, why, sums in pools(4).run(_domains, most, timeout_s=DEADLINE_S):
        assert found == domains
        assert ("4 of its ranks are on one host" in why) == (most < 4), why
        assert sums == [18.0, 18.0, 6.0, 9.0]
