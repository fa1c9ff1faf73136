"""Hybrid sharding: shards within a node, copies on other nodes, as fairseq2's `sdp` and `rdp`. Only the second of three
reductions leaves the node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import parallel_state as ps
from parallel_state import simulate
from tests.contract.attempts import whose, world
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 60.0
SIZE = 6


def _groups() -> dict[str, Any]:
    with world(2, data_parallel_shard_size=2):
        groups = ps.get_parallel_groups()
        names = ("tp", "dp", "dp_shard", "dp_replicate", "dp_intra_node", "dp_inter_node")
        gradient = torch.arange(2.0 * SIZE).view(2 * SIZE, 1) * 2.0**groups.world.rank
        shard = groups.rdp.all_reduce(groups.sdp.reduce_scatter(gradient, 0))
        return {
            "ranks": {name: whose(groups.get(name)) for name in names},
            "names": (groups.sdp is ps.get_dp_shard_group(), groups.rdp is ps.get_dp_replicate_group()),
            "simulated": {name: simulate(groups.world.rank, 8, 2, ranks_per_node=8, dp_shard=2).get(name).ranks
                          for name in names},
            "shard": shard.shape,
            "in three steps": torch.equal(groups.sdp.all_gather(shard, 0), groups.dp.all_reduce(gradient)),
            "expected": torch.equal(
                groups.dp.all_reduce(gradient),
                torch.arange(2.0 * SIZE).view(2 * SIZE, 1) * sum(2.0**rank for rank in groups.dp.ranks),
            ),
        }  # fmt: skip


def test_gradients_reduced_in_three_steps(pools: Pools) -> None:
    for rank, facts in enumerate(pools(8).run(_groups, timeout_s=DEADLINE_S)):
        odd, copy = rank % 2, rank // 4
        data = [odd, odd + 2, odd + 4, odd + 6]
        assert facts["ranks"] == {
            "tp": [rank - odd, rank - odd + 1],
            "dp": data,
            "dp_shard": data[2 * copy : 2 * copy + 2],
            "dp_replicate": [rank % 4, rank % 4 + 4],
            "dp_intra_node": data,
            "dp_inter_node": [rank],
        }
        assert facts["simulated"] == facts["ranks"]
        assert facts["names"] == (True, True)
        assert facts["shard"] == (SIZE, 1)
        assert facts["in three steps"]
        assert facts["expected"]


def _trained(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, 4 * SIZE), nn.Tanh(), nn.Linear(4 * SIZE, SIZE)).double()


def _rows() -> torch.Tensor:
    return torch.randn(8, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _by_fsdp() -> dict[str, Any]:
    with world(2, data_parallel_shard_size=2):
        groups, mesh = ps.get_parallel_groups(), ps.get_device_mesh("dp_replicate", "dp_shard")
        model = fully_shard(_model(), mesh=mesh)
        weights = _trained(model, _rows().chunk(4)[groups.dp.rank_in_group])
        local = weights[0].to_local()
        return {
            "groups": (mesh.get_group("dp_shard") is groups.sdp.device_group,
                       mesh.get_group("dp_replicate") is groups.rdp.device_group),
            "weights": [weight.full_tensor() for weight in weights],
            "gathered": groups.sdp.all_gather(local, 0),
            "copies agree": torch.equal(groups.rdp.all_reduce(local), 2 * local),
        }  # fmt: skip


def test_fsdp_by_the_same_groups(pools: Pools) -> None:
    expected = _trained(_model(), _rows())
    for facts in pools(8).run(_by_fsdp, timeout_s=DEADLINE_S):
        assert facts["groups"] == (True, True)
        assert facts["copies agree"]
        assert torch.equal(facts["gathered"], facts["weights"][0])
        for found, weight in zip(facts["weights"], expected, strict=True):
            torch.testing.assert_close(found, weight.detach(), rtol=0, atol=1e-14)


def test_data_parallel_groups_of_nodes() -> None:
    for rank in range(8):
        groups = simulate(rank, 8, 2, ranks_per_node=4, data_parallel_shard_size=2)
        inside, across = groups.get("dp_intra_node"), groups.get("dp_inter_node")
        first = rank // 4 * 4 + rank % 2
        assert inside.ranks == groups.sdp.ranks == [first, first + 2]
        assert across.ranks == groups.rdp.ranks == [rank % 4, rank % 4 + 4]


@pytest.mark.parametrize(
    ("tp", "per_node", "inside", "across"),
    [
        (1, 4, [0, 1, 2, 3], [0, 4, 8, 12]),
        (2, 8, [0, 2, 4, 6], [0, 8]),
        (4, 4, [0], [0, 4, 8, 12]),
        (8, 4, [0], [0, 8]),
        (2, 16, [0, 2, 4, 6, 8, 10, 12, 14], [0]),
    ],
)
def test_nodes_and_tensor_parallelism(tp: int, per_node: int, inside: list[int], across: list[int]) -> None:
    with simulate(0, 16, tp, ranks_per_node=per_node).use():
        assert ps.get_dp_intra_node_group().ranks == inside
        assert ps.get_dp_inter_node_group().ranks == across


def test_without_sharding_the_replicated_group_is_the_data_parallel_one() -> None:
    plain, fully, copies = (simulate(3, 8, 2, **sizes) for sizes in ({}, {"dp_shard": -1}, {"dp_replicate": -1}))
    assert plain.rdp is plain.dp
    assert plain.sdp.world_size == 1
    assert (fully.sdp.ranks, fully.rdp.ranks) == (fully.dp.ranks, [3])
    assert (copies.sdp.ranks, copies.rdp.ranks) == ([3], copies.dp.ranks)


def _sharded_afterwards() -> dict[str, Any]:
    with world(2):
        groups = ps.get_parallel_groups()
        found = {"before": (groups.rdp is groups.dp, groups.sdp.world_size)}
        for size in (None, 2):
            sharded = ps.create_fsdp_groups(groups, size)
            found[str(size)] = (whose(sharded.sdp), whose(sharded.rdp), whose(sharded.tp) == whose(groups.tp))
            sharded.close()
        found["after"] = whose(groups.dp)
        return found


def test_groups_are_sharded_afterwards(pools: Pools) -> None:
    for rank, found in enumerate(pools(8).run(_sharded_afterwards, timeout_s=DEADLINE_S)):
        data = [rank % 2 + 2 * at for at in range(4)]
        first = data[:2] if rank < 4 else data[2:]
        assert found == {
            "before": (True, 1),
            "None": (data, [rank], True),
            "2": (first, [rank % 4, rank % 4 + 4], True),
            "after": data,
        }


def test_nodes_that_cut_a_group_unevenly() -> None:
    groups = simulate(0, 12, 2, ranks_per_node=8)
    with pytest.raises(ps.LayoutError, match="unevenly"):
        groups.get("dp_intra_node")
    with pytest.raises(ps.LayoutError, match="pass ranks_per_node"):
        simulate(0, 12, 2).get("dp_inter_node")
