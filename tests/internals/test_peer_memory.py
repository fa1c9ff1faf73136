from __future__ import annotations

import json
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from device_communicators import GroupContext
from device_communicators.base.member import Timeout
from device_communicators.peer import memory as peer_memory
from device_communicators.peer.memory import IpcSharing, NotSharedError, SymmetricSharing

CPU = torch.device("cpu")


def context(rank: int, timeout_s: float = 10.0) -> GroupContext:
    return GroupContext("g", tuple(range(3)), rank, CPU, Timeout(timeout_s), make_cpu_group=lambda: "the CPU group")


class FakeStorage:
    def __init__(self, rank: int) -> None:
        self.rank, self.shared = rank, 0

    def _share_cuda_(self) -> tuple[Any, ...]:
        self.shared += 1
        tag = f"{self.rank}:{self.shared}".encode()
        return 5, b"\x00\xff" + tag, 4096, 512, b"counter " + tag, self.shared, b"event", True


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)


def test_ipc_gives_each_peer_a_handle_of_its_own_and_maps_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    storages = [FakeStorage(rank) for rank in range(3)]
    opened: list[tuple[Any, ...]] = []

    def new_shared(*arguments: Any) -> Any:
        opened.append(arguments)
        return SimpleNamespace(data_ptr=lambda: 1000 + len(opened))

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", new_shared, raising=False)
    sharings: list[Any] = [IpcSharing(context(rank), 4096) for rank in range(3)]
    assert all(int(each._tensor.sum()) == 0 for each in sharings), "not zeroed"
    for sharing, storage in zip(sharings, storages, strict=True):
        sharing._tensor = SimpleNamespace(untyped_storage=lambda storage=storage: storage, data_ptr=lambda: 7)
    offers = json.loads(json.dumps([each.offer() for each in sharings]))
    assert [storage.shared for storage in storages] == [2, 2, 2], "torch counts one receiver for each handle"
    assert offers[1][1] is None
    assert sharings[1].map(offers) == [1001, 7, 1002]
    assert opened == [
        (2, b"\x00\xff0:1", 4096, 512, b"counter 0:1", 1, b"event", True),
        (2, b"\x00\xff2:2", 4096, 512, b"counter 2:2", 2, b"event", True),
    ]
    sharings[1].close()
    with pytest.raises(NotSharedError, match="closed"):
        sharings[1].map(offers)


def _symmetric(monkeypatch: pytest.MonkeyPatch, rendezvous: Any, timeout_s: float = 10.0) -> Any:
    from torch.distributed import _symmetric_memory

    monkeypatch.setattr(_symmetric_memory, "rendezvous", rendezvous)
    fake = SimpleNamespace(empty_strided_p2p=lambda size, stride, dtype, device: torch.ones(size, dtype=dtype))
    monkeypatch.setattr("torch._C._distributed_c10d._SymmetricMemory", fake)
    return SymmetricSharing(context(0, timeout_s), 256)


def test_torchs_rendezvous_is_over_the_cpu_group_and_gives_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def rendezvous(tensor: torch.Tensor, group: Any) -> Any:
        asked.append((tensor.numel(), int(tensor.sum()), group))
        return SimpleNamespace(buffer_ptrs=[512, 1024, 2048])

    sharing = _symmetric(monkeypatch, rendezvous)
    assert sharing.offer() == [2, None]
    assert sharing.map([[0, "a"], [1, "b"], [2, "c"]]) == [512, 1024, 2048]
    assert asked == [(256, 0, "the CPU group")]
    sharing.close()
    assert sharing.tensor is None and sharing.handle is None


def test_what_torch_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def rendezvous(tensor: torch.Tensor, group: Any) -> Any:
        raise RuntimeError("detected allocations from overlapping devices")

    with pytest.raises(RuntimeError, match="overlapping devices"):
        _symmetric(monkeypatch, rendezvous).map([[0, "a"]] * 3)


def test_a_rendezvous_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    sharing = _symmetric(monkeypatch, lambda tensor, group: time.sleep(3), timeout_s=0.4)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="rendezvous of symmetric memory of 'g' had not ended"):
        sharing.map([[0, "a"]] * 3)
    assert time.monotonic() - started < 2
    assert peer_memory._one_line(TimeoutError("a\nb")) == "TimeoutError: a"


def test_gpus_that_have_one_number_in_their_processes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    sharing = _symmetric(monkeypatch, lambda tensor, group: pytest.fail("not to be tried"))
    with pytest.raises(NotSharedError, match=r"ranks 0 and 2 are both cuda:0 .*set_device"):
        sharing.map([[0, "a"], [1, "b"], [0, "c"]])


AT_THE_END = """
from device_communicators.peer import memory as peer_memory

class Spy:
    def close(self): pass
    def __init__(self, name): self.name = name
    def __del__(self): print("freed", self.name)

kept = [peer_memory.PeerMemory(Spy(name), [256], 1, "a test") for name in ("left", "closed", "forgotten")]
kept[0].leak()
kept[1].close()
"""


@pytest.mark.slow
def test_memory_that_is_left_outlives_the_interpreter() -> None:
    """Freeing must not wait for a stuck device, nor use a CUDA context that is gone."""
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split("\n")) == (0, ["freed closed", ""]), done.stderr
