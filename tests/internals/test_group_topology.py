"""One process simulates ranks and their GPUs, and tests what the ranks conclude."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from device_communicators.base.member import Timeout
from device_communicators.machine import group_topology
from device_communicators.machine.group_topology import GroupTopology, RankGpu, agree_on_topology
from device_communicators.machine.topology import Topology
from device_communicators.routing.communicator import GroupContext
from tests.internals.machines import machine

NONE = Topology(problem="there is no libnvidia-ml.so.1")
Place = tuple[Topology, str | None]


def agree(places: Sequence[Place]) -> list[GroupTopology]:
    size = len(places)
    devices = [group_topology._own_gpu(*place) for place in places]
    gpus = [RankGpu(**each) for each in devices]
    views = [group_topology._views_of(rank, gpus, places[rank][0]) for rank in range(size)]
    found = []
    for rank, place in enumerate(places):
        rounds = iter((devices, views))

        def exchange(context: GroupContext, mine: Any, operation: str, rounds: Any = rounds) -> Any:
            told = next(rounds)
            assert told[context.rank] == mine
            return told

        context = GroupContext("tp:0", tuple(range(size)), rank, torch.device("cpu"), Timeout(60.0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group_topology, "exchange_facts", exchange)
            found.append(agree_on_topology(context, *place))
    return found


def one(places: Sequence[Place]) -> GroupTopology:
    found = agree(places)
    assert all(each == found[0] for each in found)
    return found[0]


def on(topology: Topology, *gpus: int) -> list[Place]:
    return [(topology, topology.gpus[gpu].uuid) for gpu in gpus]


def test_switches() -> None:
    found = one(on(machine("dgx-h100"), *range(8)))
    assert found.nvlink_full_mesh
    assert found.nvlink_full_mesh.reason == "18 or more NVLinks between any two"
    assert found.fewest_nvlinks == 18
    assert found.peer_access.reason == "the driver reports it"
    assert found.shared_gpus == ()


def test_islands() -> None:
    nodes = machine("h200-nvl-2x4")
    assert one(on(nodes, 7, 5, 6, 4)).nvlink_full_mesh
    across = one(on(nodes, 2, 3, 4))
    assert not across.nvlink_full_mesh
    assert across.nvlink_full_mesh.reason == "from the GPU of rank 0 to that of rank 2 there is no NVLink"
    assert across.fewest_nvlinks == 0
    assert across.peer_access


def test_pcie() -> None:
    found = one(on(machine("l40s-pcie"), 0, 1, 2))
    assert not found.nvlink_full_mesh
    assert found.peer_access.reason == "from the GPU of rank 0 to that of rank 2: P2P read is chipset not supported"
    assert one(on(machine("l40s-pcie"), 2, 3)).peer_access


def test_one_rank_that_sees_otherwise_is_enough() -> None:
    good = machine("dgx-h100")
    bad = machine("dgx-h100", p2p_status={"1 0 1": 4, "1 0 2": 4})
    found = one([(good, good.gpus[0].uuid), (bad, bad.gpus[1].uuid)])
    assert found.nvlink_full_mesh.reason == (
        "from the GPU of rank 1 to that of rank 0 P2P nvlink is disabled by registry key"
    )
    assert found.peer_access.reason == (
        "from the GPU of rank 1 to that of rank 0: P2P write is disabled by registry key"
    )  # fmt: skip
    fewer = machine("dgx-h100", link_is_active={"0 0": False})
    assert one([(good, good.gpus[0].uuid), (fewer, fewer.gpus[1].uuid)]).fewest_nvlinks == 17


def test_ranks_on_one_gpu() -> None:
    node = machine("dgx-h100")
    found = one(on(node, 3, 1, 3, 1, 0))
    assert found.shared_gpus == ((0, 2), (1, 3))
    assert found.sharers(3) == (1, 3)
    assert found.sharers(4) == ()
    assert found.nvlink_full_mesh and found.peer_access


def test_torch_writes_uuids_without_prefix() -> None:
    node = machine("dgx-h100")
    found = one([(node, node.gpus[0].uuid), (node, node.gpus[0].uuid.removeprefix("GPU-"))])
    assert found.shared_gpus == ((0, 1),)


def test_a_gpu_in_mig_mode_has_no_peers() -> None:
    (gpu,) = machine("a100-mig").gpus
    for uuid in (gpu.uuid, "MIG-11111111-0000-0000-0000-000000000000"):
        found = one([(machine("a100-mig"), uuid)] * 2)
        assert found.peer_access.reason == found.nvlink_full_mesh.reason
        assert f"rank 0 has no GPU: {uuid} is in MIG mode" in found.peer_access.reason


def test_two_hosts() -> None:
    here = machine("dgx-h100")
    there = machine("dgx-h100", uuid={str(gpu): f"GPU-{gpu}-there" for gpu in range(8)})
    found = one([*on(here, 0, 1), *on(there, 0, 1)])
    assert found.peer_access.reason == "rank 0 doesn't see the GPU of rank 2: another host or container"
    assert found.nvlink_full_mesh.reason == found.peer_access.reason
    assert found.fewest_nvlinks == 18


def test_a_rank_without_a_gpu() -> None:
    node = machine("dgx-h100")
    for place, why in (
        ((NONE, None), "there is no libnvidia-ml.so.1"),
        ((NONE, "GPU-1"), "there is no libnvidia-ml.so.1"),
        ((node, None), "it has no GPU"),
        ((node, "GPU-1"), "NVML doesn't know its device GPU-1"),
    ):
        found = one([(node, node.gpus[0].uuid), place])
        for vote in (found.nvlink_full_mesh, found.peer_access):
            assert not vote
            assert vote.reason == f"rank 1 has no GPU: {why}"
        assert found.shared_gpus == ()
        assert found.fewest_nvlinks is None


def test_a_group_of_one_needs_nobody() -> None:
    node = machine("one-h200")
    context = GroupContext("tp:0", (5,), 0, torch.device("cpu"), Timeout(60.0))
    found = agree_on_topology(context, node, node.gpus[0].uuid)
    assert found.nvlink_full_mesh and found.peer_access
    assert found.gpus[0].uuid == node.gpus[0].uuid


def test_ranks_with_a_gpu_each_are_told_nothing() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert group_topology.share_gpus(1, 2, 2, 22809, environ) == {}
    assert environ == {"CUDA_VISIBLE_DEVICES": "4,5"}


@pytest.mark.parametrize(
    ("visible", "gpus", "expected"),
    [("", 1, "0000"), ("", 2, "0101"), ("7", 1, "7777"), (" GPU-a, GPU-b", 2, ["GPU-a", "GPU-b"] * 2)],
)
def test_ranks_take_turns_on_the_gpus_that_are_visible(visible: str, gpus: int, expected: Any) -> None:
    found = [group_topology.variables_of(rank, 4, gpus, 22809, {"CUDA_VISIBLE_DEVICES": visible}) for rank in range(4)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == list(expected)
    assert len({each["NCCL_HOSTID"] for each in found}) == 4
    assert {each["NCCL_SOCKET_IFNAME"] for each in found} == {"lo"}


def test_newer_versions_of_nccl_have_a_way_of_their_own() -> None:
    found = group_topology.variables_of(1, 2, 1, 23003, {})
    assert found["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "NCCL_HOSTID" not in found
    assert "NCCL_HOSTID" in group_topology.variables_of(1, 2, 1, 23002, {})


def test_what_was_set_for_nccl_stays() -> None:
    environ = {"NCCL_SOCKET_IFNAME": "eth0", "CUDA_VISIBLE_DEVICES": "3"}
    written = group_topology.share_gpus(1, 2, 1, 22809, environ)
    assert environ["NCCL_SOCKET_IFNAME"] == "eth0"
    assert "NCCL_SOCKET_IFNAME" not in written
    assert environ["NCCL_HOSTID"] == f"{socket.gethostname()}-rank-1"
    assert environ["CUDA_VISIBLE_DEVICES"] == "3"
