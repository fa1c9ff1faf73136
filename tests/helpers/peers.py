from __future__ import annotations

from typing import Any

from device_communicators import Row
from device_communicators.peer.communicator import PeerMemoryCommunicator
from device_communicators.peer.device import PeerDevice
from device_communicators.peer.memory import IpcSharing, SharingMethod, SymmetricSharing
from device_communicators.peer.thresholds import ALGORITHMS
from parallel_state import GroupCoordinator

__all__ = ["ALGORITHMS", "WAYS", "peers_of", "row_over", "share_by"]
WAYS: dict[str, SharingMethod] = {"symmetric": SymmetricSharing, "ipc": IpcSharing}


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
