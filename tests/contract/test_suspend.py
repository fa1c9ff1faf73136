"""Suspended groups have no memory for calls; after `resume` calls give the same results."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import parallel_state as ps
from device_communicators.base.torch_internals import backend_of
from device_communicators.cpu.host_memory import HostMemory
from tests.contract.attempts import environment
from tests.contract.test_objects import Pools

MIB = 1 << 20
ROUTES: dict[str, dict[str, str | None]] = {
    "shared memory": {},
    "connections": {"PARALLEL_STATE_SHARED_MEMORY": "off"},
}


def _shared_bytes() -> int:
    """Returns the used bytes of /dev/shm, including deleted files that are open."""
    found = os.statvfs("/dev/shm")
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def _resident_shared_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    line = next(line for line in lines if line.startswith("RssShmem"))
    return int(line.split()[1]) << 10


def _results(group: ps.GroupCoordinator) -> list[object]:
    rank, size = group.rank_in_group, group.world_size
    x = torch.arange(3 * MIB, dtype=torch.float32) % 251 + rank
    found: list[object] = [group.all_reduce(x).double().sum().item(), group.all_reduce(x[:10]).tolist()]
    found.append(group.all_gather(x[:MIB], 0)[::4096].tolist())
    found.append(group.broadcast_object({"x": x[:100_000], "n": 3}, 1)["n"])
    after, before = (rank + 1) % size, (rank - 1) % size
    sent = [group.isend_tensor_dict({"t": x[:200_000]}, after), group.isend(x[:70_000], after)]
    found.append(group.recv_tensor_dict(before)["t"].sum().item())
    found.append(group.recv((70_000,), torch.float32, before).sum().item())
    for each in sent:
        each.wait()
    group.barrier()
    return found


def _calls(group: ps.GroupCoordinator) -> dict[str, Callable[[], object]]:
    x, other = torch.ones(4), 1 - group.rank_in_group
    return {
        "all_reduce": lambda: group.all_reduce(x),
        "all_reduce_async": lambda: group.all_reduce_async(x),
        "barrier": group.barrier,
        "send": lambda: group.send(x, other),
        "recv": lambda: group.recv((4,), torch.float32, other),
        "send_object": lambda: group.send_object(1, other),
        "recv_object": lambda: group.recv_object(other),
        "broadcast_object": lambda: group.broadcast_object(1),
        "broadcast_tensor_dict": lambda: group.broadcast_tensor_dict({"x": x}),
        "send_tensor_dict": lambda: group.send_tensor_dict({"x": x}, other),
        "recv_tensor_dict": lambda: group.recv_tensor_dict(other),
    }


def _refusal(call: Callable[[], object]) -> str:
    try:
        return f"returned {call()}"
    except ps.UsageError as error:
        return str(error)


def _suspended(route: str) -> tuple[int, dict[str, int], dict[str, int], list[int], bool]:
    with environment(**ROUTES[route]):
        ps.init_distributed_environment(timeout=20.0)
        try:
            group = ps.get_world_group()
            kept = group.empty([MIB], torch.float32).fill_(group.rank + 1.0)
            before = _results(group)
            group.all_gather_object(0)
            stats, shared, resident = group.memory_stats(), _shared_bytes(), _resident_shared_bytes()
            group.all_gather_object(0)
            freed = group.suspend()
            assert group.suspend() == 0, "a second suspend does nothing"
            suspended = group.memory_stats()
            group.route.context.gather(b"", "both have suspended")
            changes = [_shared_bytes() - shared, _resident_shared_bytes() - resident]
            group.route.context.gather(b"", "both have looked")
            wrong = {name: said for name, call in _calls(group).items() if "suspended" not in (said := _refusal(call))}
            assert not wrong and group.route.first_failure is None, wrong
            with pytest.MonkeyPatch.context() as patch:
                if group.rank == 0:
                    patch.setattr(HostMemory, "resume", lambda memory: "no room for 4 MiB in /dev/shm")
                with pytest.raises(ps.UsageError, match="global rank 0 has no room"):
                    group.resume()
            group.resume()
            group.resume()
            same = _results(group) == before and kept.eq(group.rank + 1.0).all().item()
            group.suspend()
            group.resume()
            return freed, stats, suspended, changes, same and _results(group) == before
        finally:
            ps.destroy_distributed_environment()


@pytest.mark.parametrize("route", ROUTES)
def test_memory_goes_to_the_system_and_calls_are_equal_after_resume(pools: Pools, route: str) -> None:
    for freed, stats, suspended, changes, same in pools(2).run(_suspended, route, timeout_s=60.0):
        assert same
        if route != "shared memory":
            assert (freed, sum(stats.values())) == (0, 0)
            continue
        assert stats["slots_bytes"] > MIB and stats["queues_bytes"] > 2 * MIB
        assert stats["tensors_bytes"] > 3 * 4 * MIB, "results of large calls are kept for reuse"
        assert suspended["slots_bytes"] == suspended["queues_bytes"] == 0
        assert 4 * MIB <= suspended["tensors_bytes"] < 5 * MIB, "a tensor in use stays"
        assert freed == sum(stats.values()) - sum(suspended.values())
        shared, resident = changes
        assert shared < -1.5 * freed, "both ranks' memory in /dev/shm, unless something else grows there"
        assert resident < -freed / 2


def _busy(kind: str) -> str:
    ps.init_distributed_environment(timeout=20.0)
    try:
        group = ps.get_world_group()
        with contextlib.ExitStack() as stack:
            if kind == "a handle":
                handle = group.irecv((4,), torch.float32, 1) if group.rank == 0 else None
            elif group.rank == 0:
                group.send_object("unread", 1)
            stack.callback(group.barrier)
            with pytest.raises(ps.UsageError) as raised:
                group.suspend()
            if kind == "a handle":
                if group.rank == 1:
                    group.send(torch.ones(4), 0)
                elif handle is not None:
                    assert handle.wait().tolist() == [1.0] * 4
            elif group.rank == 1:
                assert group.recv_object(0) == "unread"
        group.suspend()
        group.resume()
        assert group.all_reduce(torch.ones(1)).item() == 2.0
        return str(raised.value)
    finally:
        ps.destroy_distributed_environment()


@pytest.mark.parametrize(
    ("kind", "said"), [("a handle", "for whose handle nobody"), ("a message", "have not received")]
)
def test_a_suspend_during_a_call_is_refused_on_all_ranks(pools: Pools, kind: str, said: str) -> None:
    for text in pools(2).run(_busy, kind, timeout_s=60.0):
        assert "global rank 0 has" in text and said in text, text


def _over_torch() -> tuple[dict[str, int], dict[str, int]]:
    group = dist.new_group(backend="parallel_state")
    backend = backend_of(group, torch.device("cpu"))
    rank = dist.get_rank()
    x = torch.arange(MIB, dtype=torch.float32) + rank
    expected = 2 * torch.arange(MIB) + 1.0

    def check() -> None:
        y = x.clone()
        dist.all_reduce(y, group=group)
        assert torch.equal(y, expected)
        if rank == 0:
            dist.send(x, 1, group=group)
        else:
            dist.recv(y, 0, group=group)
            assert torch.equal(y + 1, x)

    check()
    if rank == 0:
        started = dist.irecv(torch.empty(4), 1, group=group)
    with pytest.raises(ps.UsageError, match="global rank 0 has a call under way"):
        backend.suspend()
    if rank == 0:
        started.wait()
    else:
        dist.send(torch.ones(4), 0, group=group)
    dist.barrier(group)  # the message has been received
    before = backend.memory_stats()
    backend.suspend()
    suspended = backend.memory_stats()
    with pytest.raises(ps.UsageError, match=r"suspended; call resume\(\)"):
        dist.all_reduce(x, group=group)
    with pytest.raises(ps.UsageError, match=r"suspended; call resume\(\)"):
        dist.send(x, 1 - rank, group=group)
    backend.resume()
    check()
    dist.destroy_process_group(group)
    return before, suspended


def test_a_group_of_the_backend_is_suspended(pools: Pools) -> None:
    for before, suspended in pools(2).run(_over_torch, tp=2, timeout_s=60.0):
        assert before["slots_bytes"] > MIB and before["queues_bytes"] >= 0
        assert suspended["slots_bytes"] == suspended["queues_bytes"] == 0
