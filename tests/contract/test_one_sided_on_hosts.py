from __future__ import annotations

import itertools
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parallel_state as ps
from device_communicators.c10d import creation
from tests.contract.attempts import Outcome, attempt, environment, world
from tests.contract.test_one_sided import (
    DEADLINE_S,
    DTYPES,
    LITMUS_DEADLINE_S,
    TORCHS,
    _message_passing,
    _torchs,
    needs_torchs_windows,
)
from tests.extent import LONG
from tests.failure.changing import Member
from tests.failure.over_torch import torch_world
from tests.helpers.host_faults import as_too_many_to_mesh, transfer_socket
from tests.hosts import HostRanks

OnHosts = Callable[[Sequence[int]], HostRanks]
PLACEMENTS = [(0, 1), (0, 0, 1, 1), (0, 1, 0), (0, 1, 2)]
ROUNDS = 100_000 if LONG else 5_000
LARGE = 64 << 20


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    creation.load()


def _to_all(placement: Sequence[int], connections: str) -> int:
    cases = 0
    with environment(PARALLEL_STATE_CONNECTIONS=connections), world(len(placement)):
        group = ps.get_world_group()
        size, rank = group.world_size, group.rank_in_group
        for dtype, count in itertools.product(DTYPES, (1, 7, 5000, 90_000)):
            window = group.window([size, count], dtype)
            assert not window.tensor.to(torch.float64 if not dtype.is_complex else dtype).any(), "it isn't zeros"
            group.barrier()
            for turn in range(2):
                for dst in range(size):
                    x = ((torch.arange(2 * count) + rank + dst + turn) % 2).to(dtype)[::2]
                    window.put(x, dst, rank * count, signal=turn > 0)
                    if turn == 0:
                        window.signal(dst)
                for src in range(size):
                    window.wait_signal(src)
                    x = ((torch.arange(2 * count) + src + rank + turn) % 2).to(dtype)[::2]
                    assert torch.equal(window.tensor[src], x), (dtype, count, src, turn)
                group.barrier()
                cases += 1
            window.put(torch.ones(count, dtype=dtype), (rank + 1) % size, rank * count)
            window.deregister()
            assert window.tensor[rank - 1].eq(1).all(), "it has come before `deregister` returns"
    return cases


@pytest.mark.parametrize(("placement", "connections"), [*((each, "1") for each in PLACEMENTS), ((0, 1), "3")], ids=str)
def test_puts_and_signals(on_hosts: OnHosts, placement: tuple[int, ...], connections: str) -> None:
    found = on_hosts(placement).run(_to_all, placement, connections, timeout_s=DEADLINE_S)
    assert found == [8 * len(DTYPES)] * len(placement)


def _mapped() -> list[Outcome]:
    with world(4):
        group = ps.get_world_group()
        window = group.window([2])
        window.tensor.fill_(group.rank_in_group)
        group.barrier()
        found = [attempt(window.map_remote_tensor, rank) for rank in range(4)]
        group.barrier()
    return found


def test_only_memory_of_this_host_is_mapped(on_hosts: OnHosts) -> None:
    for rank, found in enumerate(on_hosts((0, 0, 1, 1)).run(_mapped, timeout_s=DEADLINE_S)):
        for other, each in enumerate(found):
            is_here = rank // 2 == other // 2
            kind, text = ("ok", f"tensor([{other}., {other}.])") if is_here else ("UnsupportedError", "use put")
            assert each.kind == kind and text in each.text, (rank, other, each)


def _leads_only() -> tuple[list[Outcome], bool]:
    with as_too_many_to_mesh(), world(4):
        group = ps.get_world_group()
        window, near = group.window([1]), group.rank_in_group ^ 1
        far = (group.rank_in_group + 2) % 4
        calls = (lambda: window.put(torch.ones(1), far), lambda: window.signal(far), lambda: window.wait_signal(far))
        found = [attempt(call) for call in calls]
        window.put(torch.ones(1), near)
        window.signal(near)
        window.wait_signal(near)
        window.deregister()
        return found, window.tensor.item() == 1.0


def test_hosts_whose_first_ranks_alone_are_connected(on_hosts: OnHosts) -> None:
    for found, is_right in on_hosts((0, 0, 1, 1)).run(_leads_only, timeout_s=DEADLINE_S):
        assert is_right and all(each.kind == "UnsupportedError" and "first ranks" in each.text for each in found), found


def _idle(folder: str) -> bool:
    with world(2):
        group = ps.get_world_group()
        window = group.window([1000], torch.int64)
        told = Path(folder, "put")
        if group.rank_in_group == 0:
            for number in range(1, 4):
                window.put(torch.full([1000], number), 1)
                window.signal(1)
                time.sleep(0.1)
            told.touch()
            window.wait_signal(1)
            return True
        seen = set()
        while not told.exists() or 3 not in seen:
            seen.add(int(window.tensor[999]))
            time.sleep(0.005)
        for _ in range(3):
            window.wait_signal(0, 0)
        late = attempt(window.wait_signal, 0, 0)
        window.signal(0)
        return seen >= {1, 2, 3} and late.kind == "CollectiveTimeoutError"


def test_the_target_calls_nothing(on_hosts: OnHosts, tmp_path: Path) -> None:
    assert on_hosts((0, 1)).run(_idle, str(tmp_path), timeout_s=DEADLINE_S) == [True, True]


def _both_ways() -> bool:
    with world(2):
        group = ps.get_world_group()
        peer = 1 - group.rank_in_group
        window = group.window([LARGE], torch.uint8)
        sent = group.isend(torch.full([3 << 20], peer, dtype=torch.uint8), peer)
        x = torch.randint(0, 256, [LARGE], dtype=torch.uint8, generator=torch.Generator().manual_seed(peer))
        for together in (False, True):
            window.put(x, peer, signal=together)
        window.signal(peer)
        window.wait_signal(peer)
        window.wait_signal(peer)
        own = torch.Generator().manual_seed(1 - peer)
        right = torch.equal(window.tensor, torch.randint(0, 256, [LARGE], dtype=torch.uint8, generator=own))
        right &= group.recv([3 << 20], torch.uint8, peer).eq(1 - peer).all().item() is True
        sent.wait()
        window.deregister()
        return right


def test_large_puts_cross(on_hosts: OnHosts) -> None:
    assert on_hosts((0, 1)).run(_both_ways, timeout_s=DEADLINE_S) == [True, True]


@pytest.mark.parametrize("placement", [(0, 1), (0, 1, 1)], ids=str)
def test_message_passing(on_hosts: OnHosts, placement: tuple[int, ...]) -> None:
    if len(placement) > 2:
        assert on_hosts(placement).run(_message_passing_to_two, ROUNDS // 4, timeout_s=LITMUS_DEADLINE_S) == [0] * 3
    else:
        assert on_hosts(placement).run(_message_passing, ROUNDS, timeout_s=LITMUS_DEADLINE_S) == [0, 0]


def _message_passing_to_two(rounds: int) -> int:
    with world(3):
        group = ps.get_world_group()
        rank, wrong = group.rank_in_group, 0
        window = group.window([64], torch.int64)
        values = torch.empty(64, dtype=torch.int64)
        for number in range(1, rounds + 1):
            if rank:
                window.wait_signal(rank - 1)
                wrong += bool(window.tensor.ne(number).any())
            if rank < 2:
                window.put(window.tensor if rank else values.fill_(number), rank + 1, signal=number % 2 == 0)
                window.signal(rank + 1) if number % 2 else None
            window.signal(0) if rank == 2 else None
            window.wait_signal(2) if rank == 0 else None
        return wrong


def _late() -> tuple[Outcome, bool]:
    with world(2):
        group = ps.get_world_group()
        peer = 1 - group.rank_in_group
        window = group.window([1])
        late = attempt(window.wait_signal, peer, 0.05)
        group.barrier()
        window.signal(peer)
        window.wait_signal(peer)
        right = group.all_reduce(torch.ones(1)).item() == 2.0
        x = torch.ones(2) if group.rank_in_group == 0 else group.recv([2], torch.float32, 0)
        if group.rank_in_group == 0:
            group.send(x, 1)
        return late, right


def test_a_late_signal_fails_nothing(on_hosts: OnHosts) -> None:
    for rank, (late, right) in enumerate(on_hosts((0, 1)).run(_late, timeout_s=DEADLINE_S)):
        assert late.kind == "CollectiveTimeoutError" and f"global rank {1 - rank} has not signalled" in late.text
        assert right


FRAME = struct.Struct("<4sIi4xQQQ")
"""`Frame` of csrc/streams.h: magic, window, dtype, bytes received so far, bytes, offset."""
HOSTILE = {
    "no such window": (77, 8, 0),
    "window 0": (0, 8, 0),
    "an offset past the end": (1, 1, 4096),
    "bytes past the end": (1, 4096, 1),
    "a sum that overflows": (1, 16, (1 << 64) - 8),
    "a size that overflows": (1, (1 << 64) - 8, 16),
    "a signal outside": (1, 0, 4097),
}


def _hostile(window_number: int, bytes_: int, offset: int) -> tuple[Outcome, Outcome, bool]:
    with world(2):
        group = ps.get_world_group()
        window = group.window([4096], torch.uint8)
        if group.rank_in_group == 1:
            transfer_socket(group, 0).sendall(FRAME.pack(b"PSMW", window_number, 0, 0, bytes_, offset) + b"\xff" * 64)
            found = attempt(window.wait_signal, 0)
            return found, found, True
        first = attempt(window.wait_signal, 1)
        return first, attempt(window.put, torch.ones(1, dtype=torch.uint8), 1), not window.tensor.any().item()


@pytest.mark.parametrize("frame", HOSTILE, ids=str)
def test_hostile_frames_write_nothing(on_hosts: OnHosts, frame: str) -> None:
    (first, then, is_clean), (sender, _, _) = on_hosts((0, 1)).run(_hostile, *HOSTILE[frame], timeout_s=DEADLINE_S)
    assert first.kind == "MessageDecodeError" and first.suspect_ranks == (1,), first
    assert then.kind == "MessageDecodeError", then
    assert sender.kind != "ok" and is_clean


def _over_torch() -> int:
    cases = 0
    with torch_world():
        assert TORCHS._supports_window()
        for count, dtype, is_async, registers in itertools.product(
            (4, 100_000), (torch.float, torch.int8), (True, False), (True, False)
        ):
            _torchs(count, dtype, is_async, registers)
            cases += 1
        window = TORCHS._new_window(torch.ones(2))
        peer = dist.get_world_size() - 1 - dist.get_rank()
        assert window.get_attr(peer).access_type.name == "SEPARATE"
        assert "use put" in attempt(window.map_remote_tensor, peer).text
        works = [window.wait_signal(peer, True) for _ in range(3)]
        assert not works[0].is_completed()
        dist.barrier()
        for _ in works:
            window.signal(peer, False)
        for work in reversed(works):
            work.wait()
        window.tensor_deregister()
    return cases


@needs_torchs_windows
@pytest.mark.parametrize("placement", [(0, 1), (0, 0, 1, 1)], ids=str)
def test_torchs_windows(on_hosts: OnHosts, placement: tuple[int, ...]) -> None:
    assert on_hosts(placement).run(_over_torch, timeout_s=DEADLINE_S) == [16] * len(placement)


def _reconfigured(folder: str) -> bool:
    member = Member(Path(folder))
    everyone: list[Any] = list(range(int(os.environ["WORLD_SIZE"])))
    for uuid, names in enumerate((everyone, everyone[1:], everyone[::-1]), 1):
        if member.name in names:
            member.become(uuid, names)
            assert TORCHS._supports_window()
            _torchs(1000, torch.float, False, True)
        member.meet(f"done-{uuid}", everyone)
    dist.destroy_process_group()
    return True


@needs_torchs_windows
def test_windows_of_reconfigured_groups(on_hosts: OnHosts, tmp_path: Path) -> None:
    assert on_hosts((0, 0, 1)).run(_reconfigured, str(tmp_path), timeout_s=DEADLINE_S) == [True] * 3
