from __future__ import annotations

from pathlib import Path
from typing import Any

from device_communicators import Row
from device_communicators.peer.communicator import PeerMemoryCommunicator
from device_communicators.peer.device import PeerDevice
from device_communicators.peer.memory import IpcSharing, SharingMethod, SymmetricSharing
from device_communicators.peer.thresholds import ALGORITHMS, Thresholds, dump
from parallel_state import GroupCoordinator

__all__ = ["ALGORITHMS", "TABLE", "WAYS", "peers_of", "row_over", "share_by", "write_table"]
WAYS: dict[str, SharingMethod] = {"symmetric": SymmetricSharing, "ipc": IpcSharing}

TABLE = "PARALLEL_STATE_PEER_MEMORY_TABLE"


def write_table(folder: Path, arch: str) -> str:
    """Writes sizes with which tests of up to 8 ranks call every kernel. Returns the file's path."""
    path = folder / "rows.json"
    gathers = dict.fromkeys(("all_gather", "reduce_scatter"), 512 << 10)
    pushes = dict.fromkeys(("push", "all_gather_push", "reduce_scatter_push"), 16 << 10)
    sizes = {**gathers, **pushes, "pull": 64 << 10, "two_shot": 2 << 20, "fused": 512 << 10}
    dump([Thresholds(arch, 8, **sizes, source="a test")], path, "a test")
    return str(path)


def peers_of(group: GroupCoordinator) -> PeerMemoryCommunicator:
    found = [each for each in group.route.communicators if isinstance(each, PeerMemoryCommunicator)]
    assert found, group.explain()
    return found[0]


def share_by(way: str) -> None:
    PeerDevice.ways = (WAYS[way],)


def row_over(group: GroupCoordinator, way: str) -> Row:
    gpu = PeerDevice(group.device)
    gpu.ways = (WAYS[way],)

    class Here(Row):
        def load(self) -> Any:
            return lambda context: PeerMemoryCommunicator(context, gpu)

    return Here("peer_memory", "", "")
