from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import parallel_state as ps
from device_communicators.machine.group_topology import agree_on_topology, find_shared_gpus, uuid_of
from device_communicators.machine.topology import read_topology
from tests.gpu.ranks import GpuRanks, device, needs_a_gpu, on_gpu
from tests.gpu.test_programs import start

Gpus = Callable[[int], GpuRanks]
ROOT = Path(__file__).resolve().parents[2]


def test_the_driver_tells_its_gpus(record_property: Callable[[str, object], None]) -> None:
    needs_a_gpu("there is no driver")
    topology = read_topology()
    assert topology.problem is None, topology.problem
    assert topology.gpus
    for gpu in topology.gpus:
        assert gpu.uuid.startswith("GPU-")
        assert gpu.name
        assert gpu.pci_id is not None or "pci_id" in gpu.unknown
        record_property(gpu.uuid, {"name": gpu.name, "pci": gpu.pci_id, "unknown": gpu.unknown})


@pytest.mark.parametrize("arguments", [[], ["--json", "-"]], ids=" ".join)
def test_the_command(arguments: list[str]) -> None:
    out = start("-m", "parallel_state", "topology", *arguments)
    assert out
    if "--json" in arguments:
        assert isinstance(json.loads(out), dict)


def _agreed_body() -> dict[str, Any]:
    group = ps.get_world_group()
    found = agree_on_topology(group.context, read_topology(), uuid_of(device()))
    return {
        "on a GPU": on_gpu(),
        "gpus": [gpu.uuid for gpu in found.gpus],
        "problems": [gpu.problem for gpu in found.gpus],
        "shared": [list(ranks) for ranks in found.shared_gpus],
        "mesh": [bool(found.nvlink_full_mesh), found.nvlink_full_mesh.reason],
        "peers": [bool(found.peer_access), found.peer_access.reason],
        "found": sorted(map(sorted, find_shared_gpus(group.context, uuid_of(device())).values())),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_agree(gpus: Gpus, record_property: Callable[[str, object], None], size: int) -> None:
    answers = gpus(size).run(_agreed_body, tp=size, timeout_s=180)
    assert all(answer == answers[0] for answer in answers)
    answer = answers[0]
    record_property("agreed", answer)
    if answer["on a GPU"]:
        assert answer["problems"] == [None] * size
        shares = len(set(answer["gpus"])) < size
        assert bool(answer["shared"]) == shares
        assert answer["found"] == sorted(answer["shared"])
